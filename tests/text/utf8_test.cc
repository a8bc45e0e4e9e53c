#include "text/utf8.h"

#include <gtest/gtest.h>

#include <string>

namespace cosformer {
namespace {

TEST(Utf8, EveryCodePointComesBack) {
  for (uint32_t code = 0; code < 0x110000; ++code) {
    if (code >= 0xD800 && code < 0xE000) continue;
    std::string text;
    append_utf8(code, &text);
    const Utf8Char c = decode_utf8(text, 0);
    ASSERT_EQ(c.code, code);
    ASSERT_EQ(static_cast<size_t>(c.length), text.size());
  }
}

TEST(Utf8, RefusesWhatIsNot) {
  for (const std::string bad :
       {"\x80", "\xBF", "\xC0\x80", "\xC1\xBF", "\xE0\x80\x80", "\xE0\x9F\xBF",
        "\xED\xA0\x80", "\xED\xBF\xBF", "\xF0\x80\x80\x80", "\xF4\x90\x80\x80",
        "\xF5\x80\x80\x80", "\xFF", "\xC3(", "\xE2\x82(", "\xF0\x9F\x98("}) {
    EXPECT_EQ(decode_utf8(bad, 0).length, 0) << bad;
    EXPECT_FALSE(decode_utf8(bad, 0).cut) << bad;
    EXPECT_EQ(find_invalid_utf8("ab" + bad), 2u) << bad;
  }
  EXPECT_EQ(find_invalid_utf8("a\xC3\xA9\xF0\x9F\x98\x80z"), 8u);
}

TEST(Utf8, CompletePrefix) {
  const std::string text = "a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80z";
  const size_t expected[] = {0, 1, 1, 3, 3, 3, 6, 6, 6, 6, 10, 11};
  for (size_t n = 0; n <= text.size(); ++n) {
    EXPECT_EQ(complete_utf8_prefix(text.substr(0, n)), expected[n]) << n;
  }
  // Bytes that no further bytes would mend are not waited for.
  EXPECT_EQ(complete_utf8_prefix("a\xFF"), 2u);
  EXPECT_EQ(complete_utf8_prefix("a\x80\x80\x80\x80"), 5u);
  EXPECT_EQ(complete_utf8_prefix("\xE2("), 2u);
}

TEST(Utf8, DescribesCharacters) {
  EXPECT_EQ(describe_char('a'), "'a' (U+0061)");
  EXPECT_EQ(describe_char('\n'), "'\\n' (U+000A)");
  EXPECT_EQ(describe_char(0), "U+0000");
  EXPECT_EQ(describe_char(0xE9), "'\xC3\xA9' (U+00E9)");
}

}  // namespace
}  // namespace cosformer
