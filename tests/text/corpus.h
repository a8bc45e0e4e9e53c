// Text of the tests' own: sentences from a seeded grammar, so that a tokenizer
// has words to learn.
#ifndef COSFORMER_TESTS_TEXT_CORPUS_H_
#define COSFORMER_TESTS_TEXT_CORPUS_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "cosformer/base.h"

namespace cosformer::testing {

inline std::string make_corpus(size_t bytes, uint64_t seed) {
  static constexpr const char* kSubjects[] = {"the old king", "a young queen",
                                              "every sailor", "no merchant"};
  static constexpr const char* kVerbs[] = {"remembers", "will follow",
                                           "has forgotten", "sings of"};
  static constexpr const char* kObjects[] = {
      "the winter storm", "caf\xC3\xA9 tables", "a hundred ships",
      "what was promised"};
  static constexpr const char* kEnds[] = {".\n", "!\n", ";\r\n\t", ",    and "};
  std::string text;
  for (uint64_t i = 0; text.size() < bytes; ++i) {
    const auto r = philox(seed, 0xC0, i);
    const auto s = philox(seed, 0xC1, i);
    text += kSubjects[r[0] % 4];
    text += ' ';
    text += kVerbs[r[1] % 4];
    text += ' ';
    text += kObjects[r[2] % 4];
    // A word of its own now and then, so that the counts vary.
    if (r[3] % 3 == 0) {
      text += ' ';
      for (size_t k = 0; k < 2 + s[0] % 6; ++k) {
        text += static_cast<char>('a' + (s[1] >> (4 * k)) % 16);
      }
    }
    text += kEnds[s[2] % 4];
  }
  text.resize(bytes);
  // The end may have cut a character of two bytes.
  if ((text.back() & 0x80) != 0) text.back() = '.';
  return text;
}

}  // namespace cosformer::testing

#endif  // COSFORMER_TESTS_TEXT_CORPUS_H_
