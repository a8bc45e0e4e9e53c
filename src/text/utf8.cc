#include "text/utf8.h"

#include <algorithm>
#include <cstdio>

namespace cosformer {

Utf8Char decode_utf8(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) {
    return static_cast<unsigned char>(text[at + i]);
  };
  const size_t left = text.size() - at;
  const unsigned first = byte(0);
  if (first < 0x80) return {first, 1, false};
  // The second byte's range rules out overlong forms, surrogates and code
  // points beyond the last one (RFC 3629, section 4).
  int length = 0;
  unsigned low = 0x80, high = 0xBF;
  if (first >= 0xC2 && first <= 0xDF) {
    length = 2;
  } else if (first >= 0xE0 && first <= 0xEF) {
    length = 3;
    if (first == 0xE0) low = 0xA0;
    if (first == 0xED) high = 0x9F;
  } else if (first >= 0xF0 && first <= 0xF4) {
    length = 4;
    if (first == 0xF0) low = 0x90;
    if (first == 0xF4) high = 0x8F;
  } else {
    return {};
  }
  uint32_t code = first & (0xFFu >> (length + 1));
  for (int i = 1; i < length; ++i) {
    if (static_cast<size_t>(i) >= left) return {0, 0, true};
    const unsigned next = byte(static_cast<size_t>(i));
    if (next < low || next > high) return {};
    low = 0x80;
    high = 0xBF;
    code = code << 6 | (next & 0x3F);
  }
  return {code, length, false};
}

void append_utf8(uint32_t code, std::string* out) {
  const auto put = [out](uint32_t byte) {
    out->push_back(static_cast<char>(byte));
  };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xC0 | code >> 6);
    put(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    put(0xE0 | code >> 12);
    put(0x80 | (code >> 6 & 0x3F));
    put(0x80 | (code & 0x3F));
  } else {
    put(0xF0 | code >> 18);
    put(0x80 | (code >> 12 & 0x3F));
    put(0x80 | (code >> 6 & 0x3F));
    put(0x80 | (code & 0x3F));
  }
}

size_t find_invalid_utf8(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    const Utf8Char c = decode_utf8(text, at);
    if (c.length == 0) return at;
    at += static_cast<size_t>(c.length);
  }
  return at;
}

size_t complete_utf8_prefix(std::string_view text) {
  // A character has at most 4 bytes, so a cut one starts in the last 3.
  const size_t first = text.size() > 3 ? text.size() - 3 : 0;
  for (size_t at = text.size(); at-- > first;) {
    const unsigned char byte = static_cast<unsigned char>(text[at]);
    if ((byte & 0xC0) == 0x80) continue;  // inside a character
    return decode_utf8(text, at).cut ? at : text.size();
  }
  return text.size();
}

std::string describe_char(uint32_t code) {
  std::string shown;
  if (code == '\n') {
    shown = "\\n";
  } else if (code == '\t') {
    shown = "\\t";
  } else if (code == '\r') {
    shown = "\\r";
  } else if (code < 0x20 || (code >= 0x7F && code < 0xA0)) {
    shown.clear();
  } else {
    append_utf8(code, &shown);
  }
  char number[16];
  std::snprintf(number, sizeof number, "U+%04X", static_cast<unsigned>(code));
  if (shown.empty()) return number;
  return "'" + shown + "' (" + number + ")";
}

}  // namespace cosformer
