// Tokenizer files as hostile input: always a Status.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "cosformer/text.h"
#include "tests/text/corpus.h"
#include "tests/text/temp_folder.h"
#include "text/sentencepiece_model.h"
#include "text/strict_json.h"
#include "text/tokenizer_files.h"

namespace cosformer {
namespace {

using testing::get;
using testing::make_corpus;
using testing::put;
using testing::TempFolder;

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(HostileTokenizer, Json) {
  const TempFolder folder;
  const std::string head = R"({"format_version":1,"kind":)";
  const struct {
    std::string json;
    const char* part;
  } kCases[] = {
      {"", "empty"},
      {"{", "not JSON"},
      {"[]", "expected an object"},
      {"{}", "format_version: found nothing"},
      {R"({"format_version":"1"})", "format_version: found the string"},
      {R"({"format_version":-1})", "format_version: found the number -1"},
      {R"({"format_version":2,"kind":"bytes"})", "newer"},
      {R"({"format_version":1})", "kind: found nothing"},
      {head + "3}", "kind: found the number 3"},
      {head + R"("wordpiece"})", "kind: found 'wordpiece'"},
      {head + R"("bytes","x":1})", "unknown key 'x'"},
      {head + R"("bytes","kind":"bytes"})", "'kind' twice"},
      {head + R"("characters"})", "characters: found nothing"},
      {head + R"("characters","characters":[]})", "characters: found an array"},
      {head + R"("characters","characters":""})", "empty text"},
      {head + R"("characters","characters":"ba"})", "out of order"},
      {head + R"("characters","characters":"aa"})", "out of order"},
      {head + R"("characters","characters":"\ud800"})", "not JSON"},
      {head + "\"characters\",\"characters\":\"\xff\"}", "not JSON"},
      {head + R"("sentencepiece"})", "vocab_size: found nothing"},
      {head + R"("sentencepiece","vocab_size":300})", "model_bytes"},
      {head + R"("sentencepiece","vocab_size":300,"model_bytes":1})",
       "model_digest"},
      {head +
           R"("sentencepiece","vocab_size":3,"model_bytes":1,"model_digest":"0"})",
       "tokenizer.model"},
  };
  for (const auto& test : kCases) {
    put(folder / "tokenizer.json", test.json);
    const auto loaded = load_tokenizer(folder.path());
    ASSERT_FALSE(loaded.ok()) << test.json;
    EXPECT_TRUE(has(loaded.status().message(), test.part))
        << test.json << " -> " << loaded.status().message();
  }
}

TEST(HostileTokenizer, DamagedModelIsNoticed) {
  const TempFolder folder;
  const auto made =
      train_sentencepiece_tokenizer(make_corpus(20'000, 1), 300, 1);
  ASSERT_TRUE(made.ok());
  ASSERT_TRUE((*made)->save(folder.path()).ok());
  const std::string good = get(folder / "tokenizer.model");
  std::string bad = good;
  bad[good.size() / 2] ^= 1;
  put(folder / "tokenizer.model", bad);
  EXPECT_TRUE(has(load_tokenizer(folder.path()).status().message(), "digest"));
  put(folder / "tokenizer.model", good.substr(0, good.size() - 1));
  EXPECT_TRUE(has(load_tokenizer(folder.path()).status().message(), "bytes"));
  put(folder / "tokenizer.model", good);
  EXPECT_TRUE(load_tokenizer(folder.path()).ok());
}

// Pieces of a protocol buffer.
std::string varint(uint64_t value) {
  std::string out;
  while (value >= 0x80) {
    out += static_cast<char>(0x80 | (value & 0x7F));
    value >>= 7;
  }
  return out + static_cast<char>(value);
}
std::string number_field(uint32_t number, uint64_t value) {
  return varint(number << 3) + varint(value);
}
std::string bytes_field(uint32_t number, const std::string& bytes) {
  return varint(number << 3 | 2) + varint(bytes.size()) + bytes;
}
std::string piece(const std::string& text, uint64_t type, float score = 0) {
  std::string bits(reinterpret_cast<const char*>(&score), 4);
  return bytes_field(1, bytes_field(1, text) + varint(2 << 3 | 5) + bits +
                            number_field(3, type));
}
std::string all_bytes() {
  std::string out;
  for (int i = 0; i < 256; ++i) {
    char text[8];
    std::snprintf(text, sizeof text, "<0x%02X>", i);
    out += piece(text, 6);
  }
  return out;
}
const std::string kTrainer =
    bytes_field(2, number_field(3, 2) + number_field(35, 1));
const std::string kNormalizer =
    bytes_field(3, number_field(3, 0) + number_field(4, 0));

TEST(HostileTokenizer, SentencepieceModels) {
  const std::string unknown = piece("<unk>", 2);
  const std::string good =
      unknown + all_bytes() + piece("a", 1) + kTrainer + kNormalizer;
  const auto parsed = parse_sentencepiece_model(good, "model");
  ASSERT_TRUE(parsed.ok()) << parsed.status().message();
  EXPECT_EQ(parsed->pieces.size(), 258u);

  const float nan = std::strtof("nan", nullptr);
  const std::string tail = kTrainer + kNormalizer;
  const struct {
    std::string bytes;
    const char* part;
  } kCases[] = {
      {"", "not a sentencepiece model"},
      {"hello", "model"},
      {std::string(100, '\xff'), "malformed"},
      {"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "malformed"},
      {all_bytes() + tail, "no unknown token"},
      {unknown + piece("<u>", 2) + all_bytes() + tail, "two unknown"},
      {unknown + tail, "lacks some of the 256"},
      {unknown + all_bytes() + piece("<0x00>", 6) + tail, "twice"},
      {unknown + piece("<0xGG>", 6) + tail, "byte token"},
      {unknown + piece("a", 1) + piece("a", 1) + all_bytes() + tail, "twice"},
      {unknown + piece("", 1) + all_bytes() + tail, "token 1"},
      {unknown + piece("\xff", 1) + all_bytes() + tail, "token 1"},
      {unknown + piece(std::string(1, '\0'), 1) + all_bytes() + tail,
       "token 1"},
      {unknown + piece(std::string(9000, 'a'), 1) + all_bytes() + tail,
       "token 1"},
      {unknown + piece("a", 1, nan) + all_bytes() + tail, "token 1"},
      {unknown + piece("a", 4) + all_bytes() + tail, "type 4"},
      {unknown + piece("a", 99) + all_bytes() + tail, "type 99"},
      {unknown + all_bytes() + kNormalizer, "not a sentencepiece model"},
      {unknown + all_bytes() + kTrainer, "not a sentencepiece model"},
      {good + kTrainer, "options are malformed"},
      {unknown + all_bytes() + bytes_field(2, number_field(3, 1)) + kNormalizer,
       "no BPE model"},
      {unknown + all_bytes() + bytes_field(2, "") + kNormalizer,
       "no BPE model"},
      {unknown + all_bytes() + kTrainer + bytes_field(3, ""),
       "changes the text"},
      {unknown + all_bytes() + kTrainer +
           bytes_field(3, number_field(3, 0) + number_field(4, 0) +
                              bytes_field(2, "\x10\x00\x00\x00junk")),
       "changes the text"},
      {good + bytes_field(5, bytes_field(2, "junk")), "changes the text"},
  };
  for (const auto& test : kCases) {
    const auto bad = parse_sentencepiece_model(test.bytes, "model");
    ASSERT_FALSE(bad.ok()) << test.part;
    EXPECT_TRUE(has(bad.status().message(), test.part))
        << bad.status().message() << "\nexpected: " << test.part;
  }
}

// Damage that keeps the digest right, as an attacker would: whatever is loaded
// must still encode and decode without loss.
TEST(HostileTokenizer, DamagedModelsStayHarmless) {
  const TempFolder folder;
  const auto made =
      train_sentencepiece_tokenizer(make_corpus(20'000, 1), 300, 1);
  ASSERT_TRUE(made.ok());
  ASSERT_TRUE((*made)->save(folder.path()).ok());
  const std::string good = get(folder / "tokenizer.model");
  const auto load = [&](const std::string& bytes, int64_t vocab_size) {
    put(folder / "tokenizer.model", bytes);
    put(folder / "tokenizer.json",
        str_cat("{\"format_version\":1,\"kind\":\"sentencepiece\",",
                "\"vocab_size\":", vocab_size, ",\"model_bytes\":",
                bytes.size(), ",\"model_digest\":\"", digest(bytes), "\"}"));
    return load_tokenizer(folder.path());
  };
  ASSERT_TRUE(load(good, 300).ok());
  EXPECT_FALSE(load(good, 301).ok());
  const std::string text = make_corpus(2000, 9);
  int loaded = 0;
  const auto try_one = [&](const std::string& bytes) {
    const auto tokenizer = load(bytes, 300);
    if (!tokenizer.ok()) return;
    ++loaded;
    const auto ids = (*tokenizer)->encode(text);
    ASSERT_TRUE(ids.ok());
    ASSERT_EQ(*(*tokenizer)->decode(*ids), text);
  };
  for (size_t n = 0; n < good.size(); n += 97) {
    EXPECT_FALSE(load(good.substr(0, n), 300).ok()) << n;
  }
  for (uint64_t i = 0; i < 600; ++i) {
    const auto r = philox(0xF0, 3, i);
    std::string bad = good;
    for (uint32_t k = 0; k <= r[0] % 3; ++k) {
      const auto n = philox(0xF0, 4 + k, i);
      const size_t at = n[0] % bad.size();
      if (n[1] % 4 == 0) {
        bad.erase(at, 1 + n[2] % 3);
      } else {
        bad[at] = static_cast<char>(bad[at] ^ (1 << n[2] % 8));
      }
    }
    try_one(bad);
  }
  // The damage reaches the encoder, or the test would show little.
  EXPECT_GT(loaded, 20);
}

}  // namespace
}  // namespace cosformer
