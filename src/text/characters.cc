// Token = one Unicode character of those that the training text had.
#include "text/characters.h"

#include <bit>
#include <cstdio>
#include <string>
#include <utility>

#include "text/strict_json.h"
#include "text/tokenizer_files.h"
#include "text/utf8.h"

namespace cosformer {
namespace {

constexpr size_t kCodePoints = 0x110000;

Status not_utf8(std::string_view text, size_t at, int64_t base_offset) {
  char byte[8];
  std::snprintf(byte, sizeof byte, "0x%02X",
                static_cast<unsigned char>(text[at]));
  return invalid_argument("byte ", byte, " at offset ",
                          base_offset + static_cast<int64_t>(at),
                          " is not UTF-8 text: use the tokenizer 'bytes' for "
                          "such data");
}

class CharacterTokenizer : public Tokenizer {
 public:
  explicit CharacterTokenizer(std::vector<uint32_t> characters)
      : characters_(std::move(characters)), pages_(kCodePoints >> 8) {
    for (size_t i = 0; i < characters_.size(); ++i) {
      std::vector<int32_t>& page = pages_[characters_[i] >> 8];
      if (page.empty()) page.assign(256, -1);
      page[characters_[i] & 0xFF] = static_cast<int32_t>(i);
    }
  }

  std::string_view kind() const override { return "characters"; }
  int64_t vocab_size() const override {
    return static_cast<int64_t>(characters_.size());
  }
  std::string fingerprint() const override {
    return "characters-" + digest(all());
  }

  Result<std::vector<int32_t>> encode(std::string_view text) const override {
    std::vector<int32_t> ids;
    ids.reserve(text.size());
    for (size_t at = 0; at < text.size();) {
      const Utf8Char c = decode_utf8(text, at);
      if (c.length == 0) return not_utf8(text, at, 0);
      const std::vector<int32_t>& page = pages_[c.code >> 8];
      const int32_t id = page.empty() ? -1 : page[c.code & 0xFF];
      if (id < 0) {
        return invalid_argument(
            "character ", describe_char(c.code), " at byte ", at,
            " is not among the ", characters_.size(),
            " characters that the tokenizer was trained on");
      }
      ids.push_back(id);
      at += static_cast<size_t>(c.length);
    }
    return ids;
  }

  Result<std::string> decode(const std::vector<int32_t>& ids) const override {
    std::string text;
    text.reserve(ids.size());
    for (size_t i = 0; i < ids.size(); ++i) {
      if (!known(ids[i])) {
        return invalid_argument("token ", ids[i], " at place ", i,
                                " is not in the vocabulary of ",
                                characters_.size());
      }
      append_utf8(characters_[static_cast<size_t>(ids[i])], &text);
    }
    return text;
  }

  std::string piece(int32_t id) const override {
    std::string text;
    if (known(id)) append_utf8(characters_[static_cast<size_t>(id)], &text);
    return text;
  }

  Status save(const std::string& folder) const override {
    nlohmann::ordered_json fields;
    fields["characters"] = all();
    return save_tokenizer_json(folder, kind(), fields);
  }

 private:
  bool known(int32_t id) const {
    return id >= 0 && static_cast<size_t>(id) < characters_.size();
  }
  std::string all() const {
    std::string text;
    for (const uint32_t c : characters_) append_utf8(c, &text);
    return text;
  }

  std::vector<uint32_t> characters_;
  // id of a code point, by its upper bits; no page = none of its characters.
  std::vector<std::vector<int32_t>> pages_;
};

}  // namespace

CharacterCollector::CharacterCollector() : seen_(kCodePoints / 64, 0) {}

void CharacterCollector::merge(const CharacterCollector& other) {
  for (size_t i = 0; i < seen_.size(); ++i) seen_[i] |= other.seen_[i];
}

void CharacterCollector::clear() { seen_.assign(seen_.size(), 0); }

Status CharacterCollector::add(std::string_view text, int64_t base_offset) {
  for (size_t at = 0; at < text.size();) {
    const Utf8Char c = decode_utf8(text, at);
    if (c.length == 0) return not_utf8(text, at, base_offset);
    seen_[c.code / 64] |= uint64_t{1} << c.code % 64;
    at += static_cast<size_t>(c.length);
  }
  return {};
}

std::vector<uint32_t> CharacterCollector::characters() const {
  std::vector<uint32_t> out;
  for (uint32_t word = 0; word < seen_.size(); ++word) {
    for (uint64_t bits = seen_[word]; bits != 0; bits &= bits - 1) {
      out.push_back(word * 64 + static_cast<uint32_t>(std::countr_zero(bits)));
    }
  }
  return out;
}

Result<std::unique_ptr<Tokenizer>> make_character_tokenizer(
    const std::vector<uint32_t>& characters) {
  if (characters.empty()) {
    return invalid_argument(
        "the character tokenizer got an empty text, expected at least one "
        "character");
  }
  for (size_t i = 0; i < characters.size(); ++i) {
    const uint32_t code = characters[i];
    if (code >= kCodePoints || (code >= 0xD800 && code < 0xE000)) {
      return invalid_argument("code point ", code, " is not a character");
    }
    if (i > 0 && characters[i - 1] >= code) {
      return invalid_argument(
          "characters ", describe_char(characters[i - 1]), " and ",
          describe_char(code),
          " are out of order: expected each once, by code point");
    }
  }
  return std::unique_ptr<Tokenizer>(
      std::make_unique<CharacterTokenizer>(characters));
}

Result<std::unique_ptr<Tokenizer>> train_character_tokenizer(
    std::string_view text) {
  CharacterCollector collector;
  COSFORMER_RETURN_IF_ERROR(collector.add(text));
  return make_character_tokenizer(collector.characters());
}

Result<std::unique_ptr<Tokenizer>> load_character_tokenizer(
    const nlohmann::json& object, const std::string& where) {
  const auto field = object.find("characters");
  if (field == object.end() || !field->is_string()) {
    return data_loss(where, ": characters: found ",
                     field == object.end() ? "nothing" : describe(*field),
                     ", expected a string of them");
  }
  const std::string& text = field->get_ref<const std::string&>();
  std::vector<uint32_t> characters;
  for (size_t at = 0; at < text.size();) {
    const Utf8Char c = decode_utf8(text, at);
    if (c.length == 0) return data_loss(where, ": characters: not UTF-8");
    characters.push_back(c.code);
    at += static_cast<size_t>(c.length);
  }
  Result<std::unique_ptr<Tokenizer>> made =
      make_character_tokenizer(characters);
  if (!made.ok()) return data_loss(where, ": ", made.status().message());
  return made;
}

}  // namespace cosformer
