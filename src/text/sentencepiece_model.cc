#include "text/sentencepiece_model.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <optional>
#include <unordered_set>

#include "text/strict_json.h"
#include "text/utf8.h"

namespace cosformer {
namespace {

constexpr std::string_view kSpace = "\xE2\x96\x81";  // U+2581

// One field of the protocol-buffers wire format.
struct Field {
  uint32_t number = 0;
  uint32_t wire = 0;      // 0 varint, 1 and 5 fixed, 2 bytes
  uint64_t value = 0;     // wire 0, 1 and 5
  std::string_view text;  // wire 2
};

class Fields {
 public:
  explicit Fields(std::string_view bytes) : bytes_(bytes) {}

  bool done() const { return at_ == bytes_.size(); }
  // Nothing when the bytes are malformed here.
  std::optional<Field> next() {
    const std::optional<uint64_t> tag = varint();
    if (!tag || *tag >> 3 == 0 || *tag >> 32 != 0) return std::nullopt;
    Field field;
    field.number = static_cast<uint32_t>(*tag >> 3);
    field.wire = static_cast<uint32_t>(*tag & 7);
    if (field.wire == 0) {
      const std::optional<uint64_t> value = varint();
      if (!value) return std::nullopt;
      field.value = *value;
    } else if (field.wire == 2) {
      const std::optional<uint64_t> length = varint();
      if (!length || *length > bytes_.size() - at_) return std::nullopt;
      field.text = bytes_.substr(at_, static_cast<size_t>(*length));
      at_ += static_cast<size_t>(*length);
    } else if (field.wire == 1 || field.wire == 5) {
      const size_t length = field.wire == 1 ? 8 : 4;
      if (length > bytes_.size() - at_) return std::nullopt;
      std::memcpy(&field.value, bytes_.data() + at_, length);
      at_ += length;
    } else {
      return std::nullopt;
    }
    return field;
  }

 private:
  std::optional<uint64_t> varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 70; shift += 7) {
      if (at_ == bytes_.size()) return std::nullopt;
      const auto byte = static_cast<unsigned char>(bytes_[at_++]);
      if (shift == 63 && byte > 1) return std::nullopt;
      value |= uint64_t{byte & 0x7Fu} << shift;
      if (byte < 0x80) return value;
    }
    return std::nullopt;
  }

  std::string_view bytes_;
  size_t at_ = 0;
};

// Numbers of the fields, from sentencepiece's published schema.
namespace model_field {
constexpr uint32_t kPieces = 1, kTrainerSpec = 2, kNormalizerSpec = 3,
                   kDenormalizerSpec = 5;
}
namespace piece_field {
constexpr uint32_t kPiece = 1, kScore = 2, kType = 3;
}
namespace trainer_field {
constexpr uint32_t kModelType = 3, kWhitespaceAsSuffix = 24, kByteFallback = 35;
}
namespace normalizer_field {
constexpr uint32_t kCharsMap = 2, kDummyPrefix = 3, kRemoveWhitespace = 4,
                   kEscapeWhitespace = 5;
}
enum PieceType : uint64_t {
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,
  kByte = 6
};
constexpr uint64_t kBpe = 2;

struct Piece {
  std::string_view text;
  float score = 0;
  uint64_t type = kNormal;
};

bool parse_piece(std::string_view bytes, Piece* piece) {
  Fields fields(bytes);
  while (!fields.done()) {
    const std::optional<Field> field = fields.next();
    if (!field) return false;
    if (field->number == piece_field::kPiece) {
      if (field->wire != 2) return false;
      piece->text = field->text;
    } else if (field->number == piece_field::kScore) {
      if (field->wire != 5) return false;
      const auto bits = static_cast<uint32_t>(field->value);
      std::memcpy(&piece->score, &bits, 4);
    } else if (field->number == piece_field::kType) {
      if (field->wire != 0) return false;
      piece->type = field->value;
    }
  }
  return true;
}

// "<0x41>" -> 0x41, or -1.
int byte_of(std::string_view text) {
  if (text.size() != 6 || !text.starts_with("<0x") || text[5] != '>') return -1;
  int value = 0;
  for (const char c : text.substr(3, 2)) {
    const std::string_view digits = "0123456789ABCDEF";
    const size_t digit = digits.find(c);
    if (digit == std::string_view::npos) return -1;
    value = value * 16 + static_cast<int>(digit);
  }
  return value;
}

std::string with_spaces(std::string_view piece) {
  std::string out;
  while (!piece.empty()) {
    if (piece.starts_with(kSpace)) {
      out += ' ';
      piece.remove_prefix(kSpace.size());
    } else {
      out += piece[0];
      piece.remove_prefix(1);
    }
  }
  return out;
}

// The options of a message that must have these values (protobuf defaults are
// given where the field is missing).
struct Options {
  uint64_t model_type = 1;
  bool byte_fallback = false, whitespace_as_suffix = false;
  bool dummy_prefix = true, remove_whitespace = true, escape_whitespace = true;
  bool chars_map = false;
};

bool parse_options(uint32_t message, std::string_view bytes, Options* options) {
  Fields fields(bytes);
  while (!fields.done()) {
    const std::optional<Field> field = fields.next();
    if (!field) return false;
    const bool on = field->value != 0;
    if (message == model_field::kTrainerSpec) {
      if (field->number == trainer_field::kModelType) {
        options->model_type = field->value;
      } else if (field->number == trainer_field::kByteFallback) {
        options->byte_fallback = on;
      } else if (field->number == trainer_field::kWhitespaceAsSuffix) {
        options->whitespace_as_suffix = on;
      }
    } else if (field->number == normalizer_field::kCharsMap) {
      options->chars_map = options->chars_map || !field->text.empty();
    } else if (message == model_field::kNormalizerSpec) {
      if (field->number == normalizer_field::kDummyPrefix) {
        options->dummy_prefix = on;
      } else if (field->number == normalizer_field::kRemoveWhitespace) {
        options->remove_whitespace = on;
      } else if (field->number == normalizer_field::kEscapeWhitespace) {
        options->escape_whitespace = on;
      }
    }
  }
  return true;
}

}  // namespace

Result<SentencepieceModel> parse_sentencepiece_model(std::string_view bytes,
                                                     const std::string& where) {
  const auto malformed = [&](const auto&... what) {
    return data_loss(where, ": ", what...);
  };
  SentencepieceModel model;
  model.byte_ids.assign(256, -1);
  Options options;
  std::unordered_set<std::string_view> seen;
  bool has_unknown = false, has_trainer = false, has_normalizer = false;
  Fields fields(bytes);
  while (!fields.done()) {
    const std::optional<Field> field = fields.next();
    if (!field) {
      return malformed(
          "is not a sentencepiece model: it is truncated or "
          "malformed");
    }
    if (field->number == model_field::kTrainerSpec ||
        field->number == model_field::kNormalizerSpec ||
        field->number == model_field::kDenormalizerSpec) {
      // A message given twice would be merged: more than any writer does.
      bool unused = false;
      bool& seen_before =
          field->number == model_field::kTrainerSpec      ? has_trainer
          : field->number == model_field::kNormalizerSpec ? has_normalizer
                                                          : unused;
      if (field->wire != 2 || seen_before ||
          !parse_options(field->number, field->text, &options)) {
        return malformed("its options are malformed");
      }
      seen_before = true;
      continue;
    }
    if (field->number != model_field::kPieces) continue;
    const size_t id = model.pieces.size();
    Piece piece;
    if (field->wire != 2 || !parse_piece(field->text, &piece)) {
      return malformed("token ", id, " is malformed");
    }
    constexpr size_t kLongestPiece = 4096;
    if (piece.text.empty() || piece.text.size() > kLongestPiece ||
        find_invalid_utf8(piece.text) != piece.text.size() ||
        piece.text.find('\0') != std::string_view::npos ||
        !std::isfinite(piece.score) || !seen.insert(piece.text).second) {
      return malformed("token ", id, " (", quote_text(piece.text),
                       ") is malformed or there twice");
    }
    switch (piece.type) {
      case kNormal:
        model.pieces.push_back(with_spaces(piece.text));
        break;
      case kUnknown:
        if (has_unknown) return malformed("has two unknown tokens");
        has_unknown = true;
        model.pieces.emplace_back();
        break;
      case kControl:
        model.pieces.emplace_back();
        break;
      case kByte: {
        const int byte = byte_of(piece.text);
        if (byte < 0 || model.byte_ids[static_cast<size_t>(byte)] >= 0) {
          return malformed("byte token ", quote_text(piece.text),
                           " is malformed");
        }
        model.byte_ids[static_cast<size_t>(byte)] = static_cast<int32_t>(id);
        model.pieces.emplace_back(1, static_cast<char>(byte));
        break;
      }
      default:
        return not_supported(where, ": token ", id, " has the type ",
                             piece.type, ", which this version does not read");
    }
  }
  if (!has_trainer || !has_normalizer || model.pieces.empty()) {
    return malformed(
        "is not a sentencepiece model: it is truncated or of "
        "another format");
  }
  if (!has_unknown) return malformed("has no unknown token");
  if (options.model_type != kBpe || !options.byte_fallback) {
    return not_supported(where,
                         ": is no BPE model with byte fallback, which this "
                         "version needs to keep every text");
  }
  if (options.chars_map || options.dummy_prefix || options.remove_whitespace ||
      !options.escape_whitespace || options.whitespace_as_suffix) {
    return not_supported(where,
                         ": changes the text before it tokenises it "
                         "(normalisation, a dummy prefix or removed white "
                         "space), which this version does not read");
  }
  for (const int32_t id : model.byte_ids) {
    if (id < 0) return malformed("lacks some of the 256 byte tokens");
  }
  return model;
}

}  // namespace cosformer
