// BPE by sentencepiece, made lossless: whatever its pieces cannot say is said
// in byte tokens, so any bytes come back as they were.
#include "text/sentencepiece.h"

#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cosformer/text.h"
#include "text/files.h"
#include "text/sentencepiece_model.h"
#include "text/strict_json.h"
#include "text/tokenizer_files.h"
#include "text/utf8.h"

namespace cosformer {
namespace {

constexpr uint32_t kSpaceSymbol = 0x2581;     // stands for a space in pieces
constexpr uint32_t kTrainerUnknown = 0x2585;  // the trainer keeps it to itself
constexpr size_t kMaxModelBytes = size_t{256} << 20;

// Longest text that the library gets at once: its time grows a little faster
// than the length.
constexpr size_t kMaxSegmentBytes = 16 << 10;

// Where to cut text[0, limit), limit < text.size(): before the last space that
// follows another character, where no piece reaches across; else between
// characters.
size_t cut_segment(std::string_view text, size_t limit) {
  for (size_t at = limit; at > limit / 2; --at) {
    if (text[at] == ' ' && text[at - 1] != ' ') return at;
  }
  return complete_utf8_prefix(text.substr(0, limit));
}

class SentencepieceTokenizer : public Tokenizer {
 public:
  SentencepieceTokenizer(
      std::string bytes, SentencepieceModel model,
      std::unique_ptr<sentencepiece::SentencePieceProcessor> processor)
      : bytes_(std::move(bytes)),
        model_(std::move(model)),
        processor_(std::move(processor)) {}

  std::string_view kind() const override { return "sentencepiece"; }
  int64_t vocab_size() const override {
    return static_cast<int64_t>(model_.pieces.size());
  }
  std::string fingerprint() const override {
    return "sentencepiece-" + digest(bytes_);
  }

  Result<std::vector<int32_t>> encode(std::string_view text) const override {
    std::vector<int32_t> ids;
    ids.reserve(text.size() / 3);
    // Runs of characters that the library may see; the rest (line ends, NUL,
    // the symbol that it uses for spaces, bytes that are not UTF-8) as bytes.
    size_t begin = 0;
    for (size_t at = 0; at < text.size();) {
      const Utf8Char c = decode_utf8(text, at);
      const size_t length = c.length == 0 ? 1 : static_cast<size_t>(c.length);
      if (c.length == 0 || c.code == '\n' || c.code == 0 ||
          c.code == kSpaceSymbol) {
        COSFORMER_RETURN_IF_ERROR(
            encode_run(text.substr(begin, at - begin), &ids));
        push_bytes(text.substr(at, length), &ids);
        begin = at + length;
      }
      at += length;
    }
    COSFORMER_RETURN_IF_ERROR(encode_run(text.substr(begin), &ids));
    return ids;
  }

  Result<std::string> decode(const std::vector<int32_t>& ids) const override {
    std::string text;
    for (size_t i = 0; i < ids.size(); ++i) {
      if (!known(ids[i])) {
        return invalid_argument("token ", ids[i], " at place ", i,
                                " is not in the vocabulary of ",
                                model_.pieces.size());
      }
      text += model_.pieces[static_cast<size_t>(ids[i])];
    }
    return text;
  }

  std::string piece(int32_t id) const override {
    return known(id) ? model_.pieces[static_cast<size_t>(id)] : "";
  }

  Status save(const std::string& folder) const override {
    COSFORMER_RETURN_IF_ERROR(files::make_folders(folder));
    COSFORMER_RETURN_IF_ERROR(
        files::write_atomically(folder + "/tokenizer.model", bytes_));
    nlohmann::ordered_json fields;
    fields["vocab_size"] = model_.pieces.size();
    fields["model_bytes"] = bytes_.size();
    fields["model_digest"] = digest(bytes_);
    return save_tokenizer_json(folder, kind(), fields);
  }

 private:
  bool known(int32_t id) const {
    return id >= 0 && static_cast<size_t>(id) < model_.pieces.size();
  }

  void push_bytes(std::string_view bytes, std::vector<int32_t>* ids) const {
    for (const char c : bytes) {
      ids->push_back(model_.byte_ids[static_cast<unsigned char>(c)]);
    }
  }

  Status encode_run(std::string_view run, std::vector<int32_t>* ids) const {
    while (!run.empty()) {
      const size_t length = run.size() <= kMaxSegmentBytes
                                ? run.size()
                                : cut_segment(run, kMaxSegmentBytes);
      const std::string_view segment = run.substr(0, length);
      run.remove_prefix(length);
      std::vector<int> found;
      const auto status = processor_->Encode(segment, &found);
      if (!status.ok()) {
        return invalid_argument("sentencepiece: ", status.message());
      }
      // Bytes where the library's answer would not come back as the segment:
      // no version of it and no model may lose text.
      if (matches(segment, found)) {
        ids->insert(ids->end(), found.begin(), found.end());
      } else {
        push_bytes(segment, ids);
      }
    }
    return {};
  }

  bool matches(std::string_view text, const std::vector<int>& ids) const {
    for (const int id : ids) {
      if (!known(id)) return false;
      const std::string& piece = model_.pieces[static_cast<size_t>(id)];
      if (piece.empty() || !text.starts_with(piece)) return false;
      text.remove_prefix(piece.size());
    }
    return text.empty();
  }

  std::string bytes_;
  SentencepieceModel model_;
  std::unique_ptr<sentencepiece::SentencePieceProcessor> processor_;
};

Result<std::unique_ptr<Tokenizer>> from_bytes(std::string bytes,
                                              const std::string& where) {
  Result<SentencepieceModel> model = parse_sentencepiece_model(bytes, where);
  if (!model.ok()) return model.status();
  auto processor = std::make_unique<sentencepiece::SentencePieceProcessor>();
  const auto status = processor->LoadFromSerializedProto(bytes);
  if (!status.ok()) return data_loss(where, ": ", status.message());
  if (processor->GetPieceSize() != static_cast<int>(model->pieces.size())) {
    return data_loss(where, ": has ", processor->GetPieceSize(),
                     " tokens, expected ", model->pieces.size());
  }
  return std::unique_ptr<Tokenizer>(std::make_unique<SentencepieceTokenizer>(
      std::move(bytes), std::move(*model), std::move(processor)));
}

// Hands the trainer lines short enough for it, without what it would stumble
// over.
class Sentences : public sentencepiece::SentenceIterator {
 public:
  explicit Sentences(std::string_view text) : text_(text) { Next(); }

  bool done() const override { return done_; }
  const std::string& value() const override { return value_; }
  sentencepiece::util::Status status() const override { return {}; }

  void Next() override {
    // The trainer drops longer ones.
    constexpr size_t kLongest = 4000;
    value_.clear();
    while (at_ < text_.size()) {
      const Utf8Char c = decode_utf8(text_, at_);
      if (c.length > 0 && c.code != '\n' && c.code != 0 &&
          c.code != kSpaceSymbol && c.code != kTrainerUnknown) {
        const auto length = static_cast<size_t>(c.length);
        const bool word_start = c.code == ' ' && value_.size() > kLongest / 2 &&
                                value_.back() != ' ';
        if (word_start || value_.size() + length > kLongest) return;
        value_.append(text_, at_, length);
        at_ += length;
        continue;
      }
      at_ += c.length == 0 ? 1 : static_cast<size_t>(c.length);
      if (!value_.empty()) return;
    }
    done_ = value_.empty();
  }

 private:
  std::string_view text_;
  size_t at_ = 0;
  std::string value_;
  bool done_ = false;
};

// A sample of blocks, cut at line ends where there are some, in text order.
std::string sample_of(std::string_view text, uint64_t seed) {
  const size_t blocks =
      (text.size() + kSampleBlockBytes - 1) / kSampleBlockBytes;
  const size_t wanted = kMaxSampleBytes / kSampleBlockBytes;
  std::string sample;
  sample.reserve(kMaxSampleBytes);
  size_t left = wanted;
  // Selection sampling (Knuth, TAOCP 2, algorithm S): each set of blocks is
  // equally likely, one pass, in order.
  for (size_t b = 0; b < blocks && left > 0; ++b) {
    const uint64_t draw = philox(seed, 0x5A3B1E, b)[0];
    if (draw * (blocks - b) >> 32 >= left) continue;
    --left;
    sample += text.substr(b * kSampleBlockBytes, kSampleBlockBytes);
    sample += '\n';
  }
  return sample;
}

// The number after `before` in a message of the library, or -1.
int64_t number_after(std::string_view message, std::string_view before) {
  const size_t found = message.find(before);
  if (found == std::string_view::npos) return -1;
  int64_t value = -1;
  for (size_t at = found + before.size();
       at < message.size() && value < (int64_t{1} << 40) &&
       std::isdigit(static_cast<unsigned char>(message[at]));
       ++at) {
    value = std::max<int64_t>(value, 0) * 10 + (message[at] - '0');
  }
  return value;
}

}  // namespace

Result<std::unique_ptr<Tokenizer>> train_sentencepiece_tokenizer(
    std::string_view text, int64_t vocab_size, uint64_t seed) {
  // The unknown token, 256 bytes, and one piece.
  constexpr int64_t kSmallest = 258, kLargest = 1 << 20;
  if (vocab_size < kSmallest || vocab_size > kLargest) {
    return invalid_argument("vocab_size: found ", vocab_size, ", expected ",
                            kSmallest, " to ", kLargest,
                            " for the sentencepiece tokenizer");
  }
  std::string sample;
  if (text.size() > kMaxSampleBytes) {
    sample = sample_of(text, seed);
    text = sample;
  }
  Sentences sentences(text);
  if (sentences.done()) {
    return invalid_argument(
        "the sentencepiece tokenizer found no text to learn from");
  }
  const std::unordered_map<std::string, std::string> options{
      {"model_type", "bpe"},
      {"vocab_size", std::to_string(vocab_size)},
      {"byte_fallback", "true"},
      {"character_coverage", "0.9995"},
      {"normalization_rule_name", "identity"},
      {"add_dummy_prefix", "false"},
      {"remove_extra_whitespaces", "false"},
      {"allow_whitespace_only_pieces", "true"},
      {"max_sentence_length", "4096"},
      {"unk_id", "0"},
      {"bos_id", "-1"},
      {"eos_id", "-1"},
      {"pad_id", "-1"},
      // One thread: the result must not depend on the machine.
      {"num_threads", "1"},
      // Nothing is printed; errors come back as a status.
      {"minloglevel", "3"},
  };
  std::string bytes;
  const auto status =
      sentencepiece::SentencePieceTrainer::Train(options, &sentences, &bytes);
  if (!status.ok()) {
    const std::string message = status.ToString();
    const int64_t most = number_after(message, "to a value <= ");
    if (most > 0) {
      return invalid_argument("vocab_size: found ", vocab_size,
                              ", this text has enough for ", most,
                              ": choose at most that");
    }
    const int64_t least =
        number_after(message, str_cat("required_chars. ", vocab_size, " vs "));
    if (least > 0) {
      return invalid_argument("vocab_size: found ", vocab_size,
                              ", the bytes and characters of this text alone "
                              "need ",
                              least, ": choose more");
    }
    return invalid_argument("sentencepiece could not be trained: ", message);
  }
  return from_bytes(std::move(bytes), "the trained tokenizer");
}

Result<std::unique_ptr<Tokenizer>> load_sentencepiece_tokenizer(
    const nlohmann::json& object, const std::string& where,
    const std::string& folder) {
  const auto number = [&](const char* key) -> Result<uint64_t> {
    const auto found = object.find(key);
    if (found == object.end() || !found->is_number_unsigned()) {
      return data_loss(where, ": ", key, ": found ",
                       found == object.end() ? "nothing" : describe(*found),
                       ", expected a number");
    }
    return found->get<uint64_t>();
  };
  const Result<uint64_t> vocab_size = number("vocab_size");
  if (!vocab_size.ok()) return vocab_size.status();
  const Result<uint64_t> model_bytes = number("model_bytes");
  if (!model_bytes.ok()) return model_bytes.status();
  const auto expected = object.find("model_digest");
  if (expected == object.end() || !expected->is_string()) {
    return data_loss(where, ": model_digest: expected a string");
  }
  const std::string path = folder + "/tokenizer.model";
  Result<std::string> bytes = files::read(path, kMaxModelBytes);
  if (!bytes.ok()) return bytes.status();
  if (bytes->size() != *model_bytes) {
    return data_loss(path, ": has ", bytes->size(), " bytes, ", where,
                     " expects ", *model_bytes);
  }
  if (digest(*bytes) != expected->get_ref<const std::string&>()) {
    return data_loss(path, ": is damaged or of another tokenizer: its digest ",
                     digest(*bytes), " differs from that in ", where);
  }
  Result<std::unique_ptr<Tokenizer>> made = from_bytes(std::move(*bytes), path);
  if (made.ok() &&
      static_cast<uint64_t>((*made)->vocab_size()) != *vocab_size) {
    return data_loss(path, ": has ", (*made)->vocab_size(), " tokens, ", where,
                     " expects ", *vocab_size);
  }
  return made;
}

}  // namespace cosformer
