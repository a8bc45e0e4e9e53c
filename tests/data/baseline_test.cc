#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "cosformer/data.h"
#include "tests/text/corpus.h"
#include "tests/text/temp_folder.h"

namespace cosformer {
namespace {

using testing::make_corpus;
using testing::put;
using testing::TempFolder;

TokenDataset data_of(const TempFolder& folder, const std::string& text,
                     double train_fraction = 0.9) {
  put(folder / "text", text);
  DataConfig config;
  config.path = folder / "text";
  config.cache_dir = folder / "cache";
  config.train_fraction = train_fraction;
  auto data = TokenDataset::prepare(config, nullptr);
  EXPECT_TRUE(data.ok()) << data.status().message();
  return std::move(*data);
}

// The formulas of baseline.cc, slowly and from maps.
struct Reference {
  std::map<int64_t, double> count;
  std::map<std::pair<int64_t, int64_t>, double> pairs;
  double total = 0, vocab = 0, d1 = 0.5, d2 = 0.5;

  explicit Reference(const TokenDataset& data) {
    vocab = static_cast<double>(data.tokenizer()->vocab_size());
    const auto tokens = data.train_tokens(0, data.train_size());
    const int64_t* id = tokens.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < tokens.numel(); ++i) {
      count[id[i]] += 1;
      if (i > 0) pairs[{id[i - 1], id[i]}] += 1;
      total += 1;
    }
    d1 = discount(count);
    d2 = discount(pairs);
  }
  template <typename Map>
  static double discount(const Map& map) {
    double once = 0, twice = 0;
    for (const auto& [key, n] : map) {
      once += n == 1;
      twice += n == 2;
    }
    if (once == 0 || twice == 0) return 0.5;
    return std::clamp(once / (once + 2 * twice), 0.05, 0.95);
  }
  double unigram(int64_t b) const {
    const auto found = count.find(b);
    const double c = found == count.end() ? 0 : found->second;
    return std::max(c - d1, 0.0) / total +
           d1 * static_cast<double>(count.size()) / total / vocab;
  }
  double bigram(int64_t a, int64_t b) const {
    double of_a = 0, kinds = 0, c = 0;
    for (auto it = pairs.lower_bound({a, 0});
         it != pairs.end() && it->first.first == a; ++it) {
      of_a += it->second;
      kinds += 1;
      if (it->first.second == b) c = it->second;
    }
    if (of_a == 0) return unigram(b);
    return std::max(c - d2, 0.0) / of_a + d2 * kinds / of_a * unigram(b);
  }
};

void expect_reference(const TokenDataset& data) {
  const Reference reference(data);
  const auto tokens = data.validation_tokens(0, data.validation_size());
  const int64_t* id = tokens.const_data_ptr<int64_t>();
  double unigram = 0, bigram = 0;
  for (int64_t i = 1; i < tokens.numel(); ++i) {
    unigram -= std::log(reference.unigram(id[i]));
    bigram -= std::log(reference.bigram(id[i - 1], id[i]));
  }
  const auto n = static_cast<double>(tokens.numel() - 1);
  const Baselines found = count_baselines(data);
  EXPECT_NEAR(found.unigram_loss, unigram / n, 1e-9);
  EXPECT_NEAR(found.bigram_loss, bigram / n, 1e-9);
  // Probabilities of a vocabulary sum to 1, after any token.
  for (const int64_t a : {id[0], id[tokens.numel() / 2]}) {
    double ones = 0, twos = 0;
    for (int64_t b = 0; b < data.tokenizer()->vocab_size(); ++b) {
      EXPECT_GT(reference.unigram(b), 0);
      EXPECT_GT(reference.bigram(a, b), 0);
      ones += reference.unigram(b);
      twos += reference.bigram(a, b);
    }
    EXPECT_NEAR(ones, 1, 1e-9);
    EXPECT_NEAR(twos, 1, 1e-9);
  }
}

TEST(Baselines, FollowTheirFormulas) {
  const TempFolder folder;
  const TokenDataset data = data_of(folder, make_corpus(40'000, 1));
  expect_reference(data);
  const Baselines found = count_baselines(data);
  EXPECT_LT(found.bigram_loss, found.unigram_loss - 0.3);
  EXPECT_LT(found.unigram_loss, std::log(data.tokenizer()->vocab_size()));
}

// Characters by the thousand: the sparse counts.
TEST(Baselines, LargeVocabularies) {
  const TempFolder folder;
  std::string text;
  for (uint64_t i = 0; i < 30'000; ++i) {
    const auto r = philox(3, 3, i);
    const uint32_t code = 0x4E00 + (r[0] % 64) * (r[1] % 64);
    const char c[3] = {static_cast<char>(0xE0 | code >> 12),
                       static_cast<char>(0x80 | (code >> 6 & 63)),
                       static_cast<char>(0x80 | (code & 63))};
    text.append(c, 3);
  }
  for (uint32_t code = 0x3400; code < 0x3400 + 2000; ++code) {
    const char c[3] = {static_cast<char>(0xE0 | code >> 12),
                       static_cast<char>(0x80 | (code >> 6 & 63)),
                       static_cast<char>(0x80 | (code & 63))};
    text.append(c, 3);
  }
  const TokenDataset data = data_of(folder, text);
  ASSERT_GT(data.tokenizer()->vocab_size(), 2048);
  expect_reference(data);
}

TEST(Baselines, UnseenTokensAndSmallTexts) {
  const TempFolder folder;
  // The validation part has nothing that the training part has.
  const Baselines unseen =
      count_baselines(data_of(folder, "aaaaaaaaaabcbcbcbcbcxyzxyz", 0.75));
  EXPECT_TRUE(std::isfinite(unseen.unigram_loss));
  EXPECT_TRUE(std::isfinite(unseen.bigram_loss));
  EXPECT_GT(unseen.unigram_loss, std::log(6.0));
  // Nothing to learn from: every character equally likely.
  const Baselines none = count_baselines(data_of(folder, "abcdabcd", 0.0));
  EXPECT_NEAR(none.unigram_loss, std::log(4.0), 1e-12);
  EXPECT_NEAR(none.bigram_loss, std::log(4.0), 1e-12);
  // Nothing to predict.
  EXPECT_TRUE(
      std::isnan(count_baselines(data_of(folder, "abcd", 1.0)).unigram_loss));
  EXPECT_TRUE(
      std::isnan(count_baselines(data_of(folder, "abcd", 0.75)).bigram_loss));
}

}  // namespace
}  // namespace cosformer
