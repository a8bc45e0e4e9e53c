// The character tokenizer's vocabulary, collected piece by piece.
#ifndef COSFORMER_SRC_TEXT_CHARACTERS_H_
#define COSFORMER_SRC_TEXT_CHARACTERS_H_

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "cosformer/text.h"

namespace cosformer {

class CharacterCollector {
 public:
  CharacterCollector();
  // Takes the characters of a text that ends at a character boundary. An error
  // names base_offset + the offset of the first byte that is not UTF-8;
  // characters before it count.
  Status add(std::string_view text, int64_t base_offset = 0);
  void merge(const CharacterCollector& other);
  void clear();
  // Distinct characters so far, in code point order.
  std::vector<uint32_t> characters() const;

 private:
  std::vector<uint64_t> seen_;  // one bit a code point
};

// characters: at least one, valid code points, strictly increasing.
Result<std::unique_ptr<Tokenizer>> make_character_tokenizer(
    const std::vector<uint32_t>& characters);

}  // namespace cosformer

#endif  // COSFORMER_SRC_TEXT_CHARACTERS_H_
