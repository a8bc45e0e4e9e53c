#include <gtest/gtest.h>
#include <time.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "cosformer/text.h"
#include "tests/text/child_process.h"
#include "tests/text/corpus.h"
#include "tests/text/temp_folder.h"

namespace cosformer {
namespace {

using testing::make_corpus;
using testing::put;
using testing::run_in_child;
using testing::TempFolder;

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

const std::string kAwkward =
    "  leading,\ttabs\t\t, runs    of spaces \r\n\n\n trailing  "
    "caf\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80\xF0\x9F\x8F\xBD "
    "e\xCC\x81 \xEF\xBB\xBF \xC2\xA0 \xE2\x80\xA8 \xEF\xBF\xBD "
    "<unk><s></s><0x41> \xE2\x96\x81 \xE2\x96\x81\xE2\x96\x81word "
    "\xE2\x96\x85 \xE2\x81\x87 \xE6\x97\xA5\xE6\x9C\xAC\xE8\xAA\x9E\n";

// One trained tokenizer for all tests.
const Tokenizer& sentencepiece() {
  static const std::unique_ptr<Tokenizer> tokenizer = [] {
    auto made = train_sentencepiece_tokenizer(make_corpus(200'000, 1), 400, 1);
    EXPECT_TRUE(made.ok()) << made.status().message();
    return std::move(*made);
  }();
  return *tokenizer;
}

void expect_lossless(const Tokenizer& tokenizer, const std::string& text) {
  const auto ids = tokenizer.encode(text);
  ASSERT_TRUE(ids.ok()) << ids.status().message();
  const auto back = tokenizer.decode(*ids);
  ASSERT_TRUE(back.ok()) << back.status().message();
  EXPECT_EQ(*back, text);
  std::string streamed;
  for (const int32_t id : *ids) {
    ASSERT_GE(id, 0);
    ASSERT_LT(id, tokenizer.vocab_size());
    ASSERT_FALSE(tokenizer.piece(id).empty());
    streamed += tokenizer.piece(id);
  }
  EXPECT_EQ(streamed, text);
}

std::string random_bytes(uint64_t seed, size_t n) {
  std::string bytes(n, '\0');
  for (size_t i = 0; i < n; ++i) {
    bytes[i] = static_cast<char>(philox(seed, 7, i)[0]);
  }
  return bytes;
}

// Characters from all over Unicode, often ones that tokenizers treat specially.
std::string random_text(uint64_t seed, size_t n) {
  static const std::string kSpecial[] = {
      " ",      "  ",      "\n",           "\t",           "\r\n",
      "the",    "king",    "\xE2\x96\x81", "\xE2\x96\x85", "\xF0\x9F\x98\x80",
      "<0x0A>", "<unk>",   "\xC3\xA9",     "\xEF\xBF\xBD", std::string(1, '\0'),
      " the",   "\xC2\xA0"};
  std::string text;
  for (size_t i = 0; i < n; ++i) {
    const auto r = philox(seed, 8, i);
    text += kSpecial[r[0] % std::size(kSpecial)];
  }
  return text;
}

TEST(Bytes, Lossless) {
  const auto tokenizer = make_byte_tokenizer();
  EXPECT_EQ(tokenizer->vocab_size(), 256);
  EXPECT_EQ(tokenizer->kind(), "bytes");
  expect_lossless(*tokenizer, kAwkward);
  expect_lossless(*tokenizer, random_bytes(1, 3000));
  expect_lossless(*tokenizer, "");
  EXPECT_EQ(*tokenizer->encode("\xff"), std::vector<int32_t>{255});
  EXPECT_FALSE(tokenizer->decode({256}).ok());
  EXPECT_FALSE(tokenizer->decode({-1}).ok());
  EXPECT_EQ(tokenizer->piece(256), "");
}

TEST(Characters, Lossless) {
  const auto made = train_character_tokenizer(kAwkward);
  ASSERT_TRUE(made.ok()) << made.status().message();
  expect_lossless(**made, kAwkward);
  expect_lossless(**made, "");
  const std::string random = random_text(3, 2000);
  const auto wide = train_character_tokenizer(random);
  ASSERT_TRUE(wide.ok());
  expect_lossless(**wide, random);
}

TEST(Characters, InCodePointOrder) {
  const auto made = train_character_tokenizer("b\xC3\xA9\na b");
  ASSERT_TRUE(made.ok());
  const Tokenizer& tokenizer = **made;
  ASSERT_EQ(tokenizer.vocab_size(), 5);
  const char* expected[] = {"\n", " ", "a", "b", "\xC3\xA9"};
  for (int32_t i = 0; i < 5; ++i) EXPECT_EQ(tokenizer.piece(i), expected[i]);
}

TEST(Characters, Errors) {
  const auto made = train_character_tokenizer("abc \xC3\xA9");
  const auto unknown = (*made)->encode("ab\xC3\xA9\xE2\x82\xAC");
  ASSERT_FALSE(unknown.ok());
  EXPECT_TRUE(has(unknown.status().message(),
                  "character '\xE2\x82\xAC' (U+20AC) at byte 4"))
      << unknown.status().message();
  const auto line = (*made)->encode("a\nb");
  EXPECT_TRUE(has(line.status().message(), "'\\n' (U+000A) at byte 1"));
  for (const auto& bad : {(*made)->encode("ab\xff").status(),
                          train_character_tokenizer("ab\xff").status()}) {
    EXPECT_EQ(bad.code(), StatusCode::kInvalidArgument);
    EXPECT_TRUE(has(bad.message(), "byte 0xFF at offset 2")) << bad.message();
  }
  EXPECT_FALSE((*made)->decode({0, 5}).ok());
  EXPECT_TRUE(has((*made)->decode({0, 5}).status().message(), "token 5"));
  EXPECT_FALSE((*made)->decode({-1}).ok());
  EXPECT_FALSE(train_character_tokenizer("").ok());
}

TEST(Sentencepiece, LearnsWords) {
  const Tokenizer& tokenizer = sentencepiece();
  EXPECT_EQ(tokenizer.vocab_size(), 400);
  const std::string text = make_corpus(10'000, 2);
  const auto ids = tokenizer.encode(text);
  ASSERT_TRUE(ids.ok());
  EXPECT_LT(ids->size(), text.size() / 2);
  const auto known = tokenizer.encode("will follow");
  EXPECT_LE(known->size(), 4u);
}

TEST(Sentencepiece, LosslessForAnyBytes) {
  const Tokenizer& tokenizer = sentencepiece();
  expect_lossless(tokenizer, kAwkward);
  expect_lossless(tokenizer, "");
  expect_lossless(tokenizer, " ");
  expect_lossless(tokenizer, "\n");
  expect_lossless(tokenizer, "\xE2\x96\x81");
  expect_lossless(tokenizer, std::string("a\0b", 3));
  expect_lossless(tokenizer, "cut \xF0\x9F\x98");
  expect_lossless(tokenizer, std::string(100'000, ' '));
  for (uint64_t seed = 0; seed < 20; ++seed) {
    expect_lossless(tokenizer, random_text(seed, 400));
    expect_lossless(tokenizer, random_bytes(seed, 500));
  }
}

// What only bytes can say costs the words around it nothing.
TEST(Sentencepiece, WordsStayWordsBesideOddCharacters) {
  const size_t words = sentencepiece().encode("the old king")->size();
  for (const std::string odd :
       {"\xE2\x96\x81", "\n", "\xFF", "\xF0\x9F\x98\x80"}) {
    EXPECT_EQ(
        sentencepiece().encode("the old king" + odd + "the old king")->size(),
        2 * words + odd.size());
  }
}

TEST(Sentencepiece, TrainingIsDeterministicAndTakesAnyBytes) {
  const std::string text = make_corpus(50'000, 5) + kAwkward +
                           random_bytes(5, 2000) + std::string(9000, 'x');
  const auto a = train_sentencepiece_tokenizer(text, 470, 1);
  const auto b = train_sentencepiece_tokenizer(text, 470, 1);
  ASSERT_TRUE(a.ok()) << a.status().message();
  EXPECT_EQ((*a)->fingerprint(), (*b)->fingerprint());
  expect_lossless(**a, text);
}

TEST(Sentencepiece, ErrorsNameThePossibleSize) {
  const auto large =
      train_sentencepiece_tokenizer("the king the king", 5000, 1);
  ASSERT_FALSE(large.ok());
  const std::string& message = large.status().message();
  EXPECT_TRUE(has(message, "vocab_size: found 5000")) << message;
  const size_t at = message.find("enough for ");
  ASSERT_NE(at, std::string::npos) << message;
  // The size that it names works.
  const int64_t most = std::stoll(message.substr(at + 11));
  EXPECT_TRUE(train_sentencepiece_tokenizer("the king the king", most, 1).ok());
  EXPECT_FALSE(
      train_sentencepiece_tokenizer("the king the king", most + 1, 1).ok());

  const auto small =
      train_sentencepiece_tokenizer(make_corpus(9000, 1), 258, 1);
  ASSERT_FALSE(small.ok());
  EXPECT_TRUE(has(small.status().message(), "vocab_size: found 258"))
      << small.status().message();
  EXPECT_TRUE(has(small.status().message(), "choose more"));
  EXPECT_FALSE(train_sentencepiece_tokenizer("abc", 100, 1).ok());
  EXPECT_FALSE(train_sentencepiece_tokenizer("abc", -1, 1).ok());
  EXPECT_FALSE(train_sentencepiece_tokenizer("", 300, 1).ok());
  EXPECT_FALSE(train_sentencepiece_tokenizer("\n\n", 300, 1).ok());
  EXPECT_FALSE(sentencepiece().decode({400}).ok());
  EXPECT_FALSE(sentencepiece().decode({-1}).ok());
}

TEST(Sentencepiece, PrintsNothing) {
  const TempFolder folder;
  const std::string log = folder / "log";
  const auto child = run_in_child([&] {
    if (!std::freopen(log.c_str(), "w", stdout) ||
        !std::freopen(log.c_str(), "a", stderr)) {
      return std::string("no log");
    }
    const bool good =
        train_sentencepiece_tokenizer(make_corpus(20'000, 1), 300, 1).ok();
    const bool bad = train_sentencepiece_tokenizer("ab", 5000, 1).ok();
    std::fflush(nullptr);
    return std::string(good && !bad ? "ok" : "failed");
  });
  EXPECT_EQ(child.text, "ok");
  EXPECT_EQ(testing::get(log), "");
}

double encode_seconds(const Tokenizer& tokenizer, const std::string& text) {
  double best = 1e9;
  for (int i = 0; i < 3; ++i) {
    timespec a{}, b{};
    ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &a);
    EXPECT_TRUE(tokenizer.encode(text).ok());
    ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &b);
    best =
        std::min(best, static_cast<double>(b.tv_sec - a.tv_sec) +
                           1e-9 * static_cast<double>(b.tv_nsec - a.tv_nsec));
  }
  return best;
}

// Eight times the text takes about eight times the time; twice that allows for
// a busy machine, quadratic time would be 64.
TEST(Sentencepiece, LongTextsTakeLinearTime) {
  const Tokenizer& tokenizer = sentencepiece();
  std::string short_text = make_corpus(100'000, 3);
  std::replace(short_text.begin(), short_text.end(), '\n', ' ');
  std::string long_text;
  for (int i = 0; i < 8; ++i) long_text += short_text;
  EXPECT_LT(encode_seconds(tokenizer, long_text),
            16 * encode_seconds(tokenizer, short_text));
  const std::string solid(100'000, 'x'), long_solid(800'000, 'x');
  EXPECT_LT(encode_seconds(tokenizer, long_solid),
            16 * encode_seconds(tokenizer, solid));
}

void expect_same(const Tokenizer& a, const Tokenizer& b) {
  EXPECT_EQ(a.kind(), b.kind());
  EXPECT_EQ(a.vocab_size(), b.vocab_size());
  EXPECT_EQ(a.fingerprint(), b.fingerprint());
  for (int32_t id = 0; id < a.vocab_size(); ++id) {
    ASSERT_EQ(a.piece(id), b.piece(id));
  }
}

TEST(TokenizerFiles, SaveAndLoad) {
  const TempFolder folder;
  const auto characters = train_character_tokenizer(kAwkward);
  const std::string path = folder / "models/deep";
  const auto bytes = make_byte_tokenizer();
  const std::vector<const Tokenizer*> all{bytes.get(), characters->get(),
                                          &sentencepiece()};
  for (const Tokenizer* tokenizer : all) {
    const Status saved = tokenizer->save(path);
    ASSERT_TRUE(saved.ok()) << saved.message();
    const auto loaded = load_tokenizer(path);
    ASSERT_TRUE(loaded.ok()) << loaded.status().message();
    expect_same(*tokenizer, **loaded);
  }
}

TEST(TokenizerFiles, FingerprintsDiffer) {
  const auto a = train_character_tokenizer("abc");
  const auto b = train_character_tokenizer("abd");
  EXPECT_NE((*a)->fingerprint(), (*b)->fingerprint());
  EXPECT_NE((*a)->fingerprint(), make_byte_tokenizer()->fingerprint());
  EXPECT_NE((*a)->fingerprint(), sentencepiece().fingerprint());
}

TEST(TokenizerFiles, Missing) {
  const TempFolder folder;
  const auto none = load_tokenizer(folder.path());
  EXPECT_EQ(none.status().code(), StatusCode::kNotFound);
  EXPECT_TRUE(has(none.status().message(), "tokenizer.json"));
  ASSERT_TRUE(sentencepiece().save(folder.path()).ok());
  std::filesystem::remove(folder / "tokenizer.model");
  const auto half = load_tokenizer(folder.path());
  EXPECT_EQ(half.status().code(), StatusCode::kNotFound);
  EXPECT_TRUE(has(half.status().message(), "tokenizer.model"));
  put(folder / "file", "x");
  EXPECT_FALSE(make_byte_tokenizer()->save(folder / "file/sub").ok());
}

}  // namespace
}  // namespace cosformer
