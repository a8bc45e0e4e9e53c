// UTF-8, by RFC 3629: no overlong forms, no surrogates, nothing above U+10FFFF.
#ifndef COSFORMER_SRC_TEXT_UTF8_H_
#define COSFORMER_SRC_TEXT_UTF8_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace cosformer {

// The character that starts at text[at] (at < text.size()).
struct Utf8Char {
  uint32_t code = 0;
  int length = 0;  // bytes; 0 = not UTF-8 here
  // The text ends inside a character that is right so far (only with length
  // 0): more bytes could complete it.
  bool cut = false;
};
Utf8Char decode_utf8(std::string_view text, size_t at);

// Appends the UTF-8 form of a code point (a valid one).
void append_utf8(uint32_t code, std::string* out);

// The offset of the first byte that is not UTF-8, or text.size().
size_t find_invalid_utf8(std::string_view text);

// The largest n <= text.size() such that text[0, n) does not end inside a
// character. Bytes that are not UTF-8 count as characters of their own.
size_t complete_utf8_prefix(std::string_view text);

// 'é' (U+00E9), '\n' (U+000A): how messages name a character.
std::string describe_char(uint32_t code);

}  // namespace cosformer

#endif  // COSFORMER_SRC_TEXT_UTF8_H_
