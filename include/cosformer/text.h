// Text to token ids and back, torch-free: bytes, characters, sentencepiece BPE.
#ifndef COSFORMER_TEXT_H_
#define COSFORMER_TEXT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cosformer/base.h"

namespace cosformer {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual std::string_view kind()
      const = 0;  // "bytes", "characters", "sentencepiece"
  virtual int64_t vocab_size() const = 0;
  // An unknown character is an error that names it and its byte offset
  // (characters); bytes and sentencepiece (byte fallback) take any text.
  virtual Result<std::vector<int32_t>> encode(std::string_view text) const = 0;
  // decode(encode(text)) == text, byte for byte. An id outside the vocabulary
  // is an error.
  virtual Result<std::string> decode(const std::vector<int32_t>& ids) const = 0;
  // The bytes of one token, for streaming; may be part of a UTF-8 character.
  // "" outside the vocabulary, and for sentencepiece's unknown token, which
  // encode never gives.
  virtual std::string piece(int32_t id) const = 0;
  // A short text that differs between tokenizers that encode differently.
  virtual std::string fingerprint() const = 0;
  // Writes the tokenizer's file(s) into a model folder (made when missing):
  // tokenizer.json, for sentencepiece tokenizer.model too. load_tokenizer reads
  // them back.
  virtual Status save(const std::string& folder) const = 0;
};

std::unique_ptr<Tokenizer> make_byte_tokenizer();
// Every distinct UTF-8 character of text, in code point order. Invalid UTF-8 is
// an error that names the offset.
Result<std::unique_ptr<Tokenizer>> train_character_tokenizer(
    std::string_view text);
// BPE with byte fallback; lossless for any bytes, UTF-8 or not (no
// normalisation; line ends, and what the pieces cannot say, as byte tokens).
// Trained on the text, above 4 MiB on a sample of it drawn by the seed. A
// vocab_size that the text cannot fill, or that its characters do not fit, is
// an error that names the possible size.
Result<std::unique_ptr<Tokenizer>> train_sentencepiece_tokenizer(
    std::string_view text, int64_t vocab_size, uint64_t seed);
// kNotFound when the folder has no tokenizer.json; kDataLoss, with the file and
// what is wrong with it, for a damaged or hostile one.
Result<std::unique_ptr<Tokenizer>> load_tokenizer(const std::string& folder);

}  // namespace cosformer

#endif  // COSFORMER_TEXT_H_
