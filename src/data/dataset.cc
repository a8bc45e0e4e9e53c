#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string>
#include <utility>

#include "cosformer/data.h"
#include "cosformer/format.h"
#include "data/cache.h"
#include "data/sources.h"
#include "text/files.h"
#include "text/sentencepiece.h"
#include "text/strict_json.h"
#include "text/tokenizer_files.h"
#include "text/utf8.h"

namespace cosformer {
namespace {

constexpr int64_t kPieceBytes = int64_t{1} << 20;
// Longest line that a tokenizer of pieces gets whole.
constexpr size_t kMaxLineBytes = size_t{8} << 20;

using Progress = TokenDataset::Progress;

Status check_config(const DataConfig& config, const Tokenizer* tokenizer) {
  if (!(config.train_fraction >= 0 && config.train_fraction <= 1)) {
    return invalid_argument("data.train_fraction: found ",
                            config.train_fraction, ", expected 0 to 1");
  }
  if (config.cache_dir.empty()) {
    return invalid_argument(
        "data.cache_dir is empty, expected a folder for the tokenised text");
  }
  if (tokenizer != nullptr) return {};
  const std::vector<std::string> kinds{"bytes", "characters", "sentencepiece"};
  if (std::find(kinds.begin(), kinds.end(), config.tokenizer) == kinds.end()) {
    const std::string near = nearest_key(config.tokenizer, kinds);
    return invalid_argument(
        "data.tokenizer: found ", quote_text(config.tokenizer),
        ", expected 'bytes', 'characters' or 'sentencepiece'",
        near.empty() ? "" : str_cat("; did you mean '", near, "'?"));
  }
  return {};
}

// Makes one cache: reads, trains, tokenises, writes.
class Builder {
 public:
  Builder(CacheInputs inputs, bool is_folder,
          std::shared_ptr<const Tokenizer> tokenizer, const Progress& progress)
      : inputs_(std::move(inputs)),
        is_folder_(is_folder),
        tokenizer_(std::move(tokenizer)),
        progress_(progress) {}

  Status build(const std::string& stem) {
    const bool trains = tokenizer_ == nullptr;
    const bool scans = inputs_.kind != "bytes";  // to bytes all is data
    for (const Source& source : inputs_.sources) total_ += source.size;
    if (scans) total_ *= 2;
    CharacterCollector characters;
    if (scans) {
      const ScanOptions options{.utf8 = inputs_.kind == "characters",
                                .skip_binary = is_folder_};
      COSFORMER_RETURN_IF_ERROR(
          scan_sources(options, &inputs_.sources, &characters,
                       [this](int64_t n) { advance(n); }));
    }
    SourceText text(inputs_.sources);
    const Result<int64_t> split = text.character_boundary(static_cast<int64_t>(
        inputs_.train_fraction * static_cast<double>(text.size())));
    if (!split.ok()) return split.status();
    if (trains) COSFORMER_RETURN_IF_ERROR(train(&text, *split, characters));

    CacheManifest manifest;
    manifest.trained = trains;
    manifest.token_bytes = tokenizer_->vocab_size() <= 65536 ? 2 : 4;
    Result<TokenWriter> writer =
        TokenWriter::create(stem + ".tokens", manifest.token_bytes);
    if (!writer.ok()) return writer.status();
    COSFORMER_RETURN_IF_ERROR(tokenise(&text, 0, *split, &*writer));
    manifest.train_tokens = writer->count();
    COSFORMER_RETURN_IF_ERROR(tokenise(&text, *split, text.size(), &*writer));
    manifest.validation_tokens = writer->count() - manifest.train_tokens;
    manifest.train_bytes = *split;
    manifest.validation_bytes = text.size() - *split;
    COSFORMER_RETURN_IF_ERROR(check_unchanged(inputs_.sources));
    if (trains) {
      COSFORMER_RETURN_IF_ERROR(tokenizer_->save(stem + ".tokenizer"));
    }
    COSFORMER_RETURN_IF_ERROR(writer->commit());
    manifest.checksum = writer->checksum();
    manifest.inputs = inputs_;
    manifest.inputs.fingerprint = tokenizer_->fingerprint();
    // Last: what it names is there.
    return write_file_atomically(stem + ".json", to_json(manifest));
  }

 private:
  void advance(int64_t bytes) {
    done_ += bytes;
    if (progress_) progress_(done_, total_);
  }

  Status train(SourceText* text, int64_t split,
               const CharacterCollector& characters) {
    Result<std::unique_ptr<Tokenizer>> made = make_byte_tokenizer();
    if (inputs_.kind == "characters") {
      made = make_character_tokenizer(characters.characters());
    } else if (inputs_.kind == "sentencepiece") {
      // On the training part; all of it when that is empty.
      const int64_t size = split > 0 ? split : text->size();
      Result<std::string> sample = sample_of(text, size);
      if (!sample.ok()) return sample.status();
      made = train_sentencepiece_tokenizer(*sample, inputs_.vocab_size,
                                           inputs_.seed);
    }
    if (!made.ok()) return made.status();
    tokenizer_ = std::move(*made);
    return {};
  }

  // At most kMaxSampleBytes of the first `size` bytes, in seeded blocks.
  Result<std::string> sample_of(SourceText* text, int64_t size) {
    std::string sample, block;
    const auto block_bytes = static_cast<int64_t>(kSampleBlockBytes);
    if (size <= static_cast<int64_t>(kMaxSampleBytes)) {
      COSFORMER_RETURN_IF_ERROR(text->read(0, size, &sample));
      return sample;
    }
    const auto blocks = static_cast<uint64_t>(size / block_bytes);
    uint64_t left = kMaxSampleBytes / kSampleBlockBytes;
    // Selection sampling (Knuth, TAOCP 2, algorithm S). A line end for each
    // block keeps the whole below the size at which the trainer samples again.
    for (uint64_t b = 0; b < blocks && left > 0; ++b) {
      const uint64_t draw = philox(inputs_.seed, 0xDA7A, b)[0];
      if (draw * (blocks - b) >> 32 >= left) continue;
      --left;
      COSFORMER_RETURN_IF_ERROR(text->read(
          static_cast<int64_t>(b) * block_bytes, block_bytes - 1, &block));
      sample += block;
      sample += '\n';
    }
    return sample;
  }

  // How much of a text that goes on can be tokenised already: what follows
  // must not change the tokens.
  size_t ready(const std::string& text) const {
    if (inputs_.kind == "bytes") return text.size();
    if (inputs_.kind == "characters") return complete_utf8_prefix(text);
    // No piece reaches across a line end.
    const size_t line = text.rfind('\n');
    if (line != std::string::npos) return line + 1;
    return text.size() < kMaxLineBytes ? 0 : complete_utf8_prefix(text);
  }

  Status tokenise(SourceText* text, int64_t begin, int64_t end,
                  TokenWriter* writer) {
    std::string piece, rest;
    for (int64_t at = begin; at < end;) {
      const int64_t count = std::min(end - at, kPieceBytes);
      COSFORMER_RETURN_IF_ERROR(text->read(at, count, &piece));
      rest += piece;
      at += count;
      const size_t n = at == end ? rest.size() : ready(rest);
      if (n > 0) {
        const std::string_view now = std::string_view(rest).substr(0, n);
        const Result<std::vector<int32_t>> ids = tokenizer_->encode(now);
        if (!ids.ok()) {
          return explain(*text, at - static_cast<int64_t>(rest.size()), now,
                         ids.status());
        }
        COSFORMER_RETURN_IF_ERROR(writer->add(*ids));
        rest.erase(0, n);
      }
      advance(count);
    }
    return {};
  }

  // Which character of which file a tokenizer does not know.
  Status explain(const SourceText& text, int64_t begin, std::string_view piece,
                 const Status& status) const {
    for (size_t at = 0; at < piece.size();) {
      const Utf8Char c = decode_utf8(piece, at);
      const size_t length = c.length == 0 ? 1 : static_cast<size_t>(c.length);
      if (!tokenizer_->encode(piece.substr(at, length)).ok()) {
        const SourceText::Place place =
            text.place(begin + static_cast<int64_t>(at));
        return invalid_argument(
            "cannot tokenise '", place.path, "': ",
            c.length == 0 ? std::string("a byte that is not UTF-8")
                          : "character " + describe_char(c.code),
            " at byte ", place.offset, " is not among the ",
            tokenizer_->vocab_size(), " tokens of the ", tokenizer_->kind(),
            " tokenizer: use text like that which it was trained on");
      }
      at += length;
    }
    return Status(status.code(), "cannot tokenise '" + text.place(begin).path +
                                     "': " + status.message());
  }

  CacheInputs inputs_;
  bool is_folder_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  const Progress& progress_;
  int64_t done_ = 0, total_ = 0;
};

// One cache folder may serve several data sets and options.
std::string stem_of(const DataConfig& config, const CacheInputs& inputs,
                    const std::string& path, bool with_fingerprint) {
  std::string key = str_cat(path, '\n', inputs.kind, '\n', inputs.vocab_size,
                            '\n', inputs.seed, '\n', inputs.train_fraction);
  for (const std::string& e : inputs.extensions) key += "\n" + e;
  if (with_fingerprint) key += "\n:" + inputs.fingerprint;
  return config.cache_dir + "/" + digest(key);
}

std::vector<std::string> messages_about(const CacheManifest& manifest) {
  int64_t skipped = 0;
  std::string first;
  for (const Source& source : manifest.inputs.sources) {
    if (!source.skipped) continue;
    if (skipped == 0) first = source.path;
    ++skipped;
  }
  if (skipped == 0) return {};
  return {str_cat("skipped ", skipped, " of ", manifest.inputs.sources.size(),
                  " files that are not text, e.g. '", first, "'")};
}

}  // namespace

struct TokenDataset::Impl {
  std::shared_ptr<const Tokenizer> tokenizer;
  OpenCache cache;
  bool reused = false;
  std::vector<std::string> messages;

  int64_t token(int64_t at) const {
    const char* from = cache.tokens.bytes().data();
    if (cache.manifest.token_bytes == 2) {
      return reinterpret_cast<const uint16_t*>(from)[at];
    }
    return reinterpret_cast<const int32_t*>(from)[at];
  }

  void copy(int64_t begin, int64_t count, int64_t* to) const {
    for (int64_t i = 0; i < count; ++i) to[i] = token(begin + i);
  }

  at::Tensor part(const char* name, int64_t first, int64_t size, int64_t begin,
                  int64_t count) const {
    TORCH_CHECK_INDEX(
        begin >= 0 && count >= 0 && begin <= size && count <= size - begin,
        name, ": tokens [", begin, ", ", begin, " + ", count,
        ") asked for, the part has ", size);
    at::Tensor out = at::empty({count}, at::kLong);
    copy(first + begin, count, out.mutable_data_ptr<int64_t>());
    return out;
  }
};

TokenDataset::TokenDataset(std::unique_ptr<Impl> impl)
    : impl_(std::move(impl)) {}
TokenDataset::TokenDataset(TokenDataset&&) noexcept = default;
TokenDataset& TokenDataset::operator=(TokenDataset&&) noexcept = default;
TokenDataset::~TokenDataset() = default;

Result<TokenDataset> TokenDataset::prepare(
    const DataConfig& config, std::shared_ptr<const Tokenizer> tokenizer,
    const Progress& progress) {
  COSFORMER_RETURN_IF_ERROR(check_config(config, tokenizer.get()));
  std::error_code error;
  const std::filesystem::path absolute =
      config.path.empty() ? std::filesystem::path()
                          : std::filesystem::absolute(config.path, error);
  const std::string path = absolute.lexically_normal().string();

  CacheInputs wanted;
  Result<std::vector<Source>> sources = find_sources(path, config.extensions);
  if (!sources.ok()) return sources.status();
  wanted.sources = std::move(*sources);
  wanted.extensions = config.extensions;
  wanted.kind = tokenizer ? std::string(tokenizer->kind()) : config.tokenizer;
  if (wanted.kind == "sentencepiece") {
    wanted.vocab_size = config.vocab_size;
    wanted.seed = config.seed;
  }
  wanted.train_fraction = config.train_fraction;
  if (tokenizer) wanted.fingerprint = tokenizer->fingerprint();
  const bool is_folder =
      wanted.sources.size() != 1 || wanted.sources[0].path != path;

  const auto open = [&](const std::string& stem,
                        bool reused) -> std::unique_ptr<Impl> {
    std::optional<OpenCache> cache = open_cache(stem, wanted);
    if (!cache) return nullptr;
    std::shared_ptr<const Tokenizer> own = tokenizer;
    if (!own) {
      auto loaded = load_tokenizer(stem + ".tokenizer");
      if (!loaded.ok()) return nullptr;
      own = std::move(*loaded);
      if (own->fingerprint() != cache->manifest.inputs.fingerprint) {
        return nullptr;
      }
    }
    auto impl = std::make_unique<Impl>(
        Impl{std::move(own), std::move(*cache), reused, {}});
    impl->messages = messages_about(impl->cache.manifest);
    if (!is_folder && !config.extensions.empty()) {
      impl->messages.push_back(
          str_cat("data.extensions is not used: '", path, "' is one file"));
    }
    return impl;
  };

  // A run's own cache serves an evaluation with the run's tokenizer too; other
  // tokenizers have caches of their own.
  const std::string stem = stem_of(config, wanted, path, false);
  if (auto impl = open(stem, true)) return TokenDataset(std::move(impl));
  const std::string own_stem =
      tokenizer ? stem_of(config, wanted, path, true) : stem;
  if (tokenizer) {
    if (auto impl = open(own_stem, true)) return TokenDataset(std::move(impl));
  }
  COSFORMER_RETURN_IF_ERROR(files::make_folders(config.cache_dir));
  // Another process may put a cache of other sources in between, or clear the
  // folder: try again.
  constexpr int kAttempts = 8;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    Builder builder(wanted, is_folder, tokenizer, progress);
    COSFORMER_RETURN_IF_ERROR(builder.build(own_stem));
    if (auto impl = open(own_stem, false)) return TokenDataset(std::move(impl));
  }
  return data_loss("the cache '", own_stem,
                   ".tokens' was damaged right after it was written, ",
                   kAttempts,
                   " times: another process writes there, or the disk fails");
}

std::shared_ptr<const Tokenizer> TokenDataset::tokenizer() const {
  return impl_->tokenizer;
}
int64_t TokenDataset::train_size() const {
  return impl_->cache.manifest.train_tokens;
}
int64_t TokenDataset::validation_size() const {
  return impl_->cache.manifest.validation_tokens;
}
int64_t TokenDataset::train_bytes() const {
  return impl_->cache.manifest.train_bytes;
}
int64_t TokenDataset::validation_bytes() const {
  return impl_->cache.manifest.validation_bytes;
}
bool TokenDataset::reused_cache() const { return impl_->reused; }
const std::vector<std::string>& TokenDataset::messages() const {
  return impl_->messages;
}

at::Tensor TokenDataset::train_tokens(int64_t begin, int64_t count) const {
  return impl_->part("train_tokens", 0, train_size(), begin, count);
}

at::Tensor TokenDataset::validation_tokens(int64_t begin, int64_t count) const {
  return impl_->part("validation_tokens", train_size(), validation_size(),
                     begin, count);
}

std::pair<at::Tensor, at::Tensor> TokenDataset::train_batch(
    uint64_t seed, int64_t index, int64_t batch_size, int64_t context) const {
  TORCH_CHECK_VALUE(index >= 0 && batch_size >= 0 && context >= 1,
                    "train_batch: found index ", index, ", batch_size ",
                    batch_size, ", context ", context,
                    ", expected 0, 0 and 1 or more");
  TORCH_CHECK_VALUE(train_size() > context, "train_batch: context ", context,
                    " needs ", context + 1, " tokens, the training part has ",
                    train_size());
  // Draws of their own, whatever else is drawn with the same seed.
  constexpr uint64_t kStream = 0x73616D706C657221u;
  const auto starts = static_cast<uint64_t>(train_size() - context);
  at::Tensor inputs = at::empty({batch_size, context}, at::kLong);
  at::Tensor targets = at::empty({batch_size, context}, at::kLong);
  auto* in = inputs.mutable_data_ptr<int64_t>();
  auto* out = targets.mutable_data_ptr<int64_t>();
  for (int64_t row = 0; row < batch_size; ++row) {
    const auto r = philox(seed ^ kStream, static_cast<uint64_t>(index),
                          static_cast<uint64_t>(row));
    // The upper half of a 64 x 64 bit product: a fraction of `starts`, off from
    // uniform by less than starts / 2^64.
    const uint64_t draw = uint64_t{r[1]} << 32 | r[0];
    const uint64_t low = (draw & 0xFFFFFFFFu) * (starts & 0xFFFFFFFFu);
    const uint64_t cross1 = (draw >> 32) * (starts & 0xFFFFFFFFu) + (low >> 32);
    const uint64_t cross2 =
        (draw & 0xFFFFFFFFu) * (starts >> 32) + (cross1 & 0xFFFFFFFFu);
    const auto start = static_cast<int64_t>((draw >> 32) * (starts >> 32) +
                                            (cross1 >> 32) + (cross2 >> 32));
    impl_->copy(start, context, in + row * context);
    impl_->copy(start + 1, context, out + row * context);
  }
  return {inputs, targets};
}

}  // namespace cosformer
