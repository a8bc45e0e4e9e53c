// What a model must beat: counts of single tokens and of pairs.
//
// Smoothing: interpolated absolute discounting (Ney, Essen & Kneser 1994), with
// c counts of the training part, N its tokens, V the vocabulary:
//
//   p(b)     = max(c(b) - D1, 0) / N    + D1 n(.) / N    * 1 / V
//   p(b | a) = max(c(ab) - D2, 0) / c(a.) + D2 n(a.) / c(a.) * p(b)
//
// n(.) and n(a.) count the distinct tokens seen (after a); D = n1 / (n1 + 2 n2)
// from the numbers of tokens (pairs) seen once and twice, kept within
// [0.05, 0.95]. Both sum to 1 and neither is ever 0. Each token of the
// validation part but the first is predicted, as a model does it.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <unordered_map>
#include <vector>

#include "cosformer/data.h"

namespace cosformer {
namespace {

// Enough for any baseline; bounds the time on large texts.
constexpr int64_t kMaxCountedTokens = int64_t{1} << 27;
// Distinct pairs kept; later ones are left out of c(ab) and of c(a.) alike.
constexpr size_t kMaxPairs = size_t{1} << 24;
constexpr int64_t kPiece = int64_t{1} << 18;

double discount(int64_t once, int64_t twice) {
  if (once == 0 || twice == 0) return 0.5;
  const double d =
      static_cast<double>(once) / static_cast<double>(once + 2 * twice);
  return std::clamp(d, 0.05, 0.95);
}

// Calls visit(previous, token) for tokens 1, 2, ... of a part.
template <typename Read, typename Visit>
void for_each_pair(int64_t size, const Read& read, const Visit& visit) {
  int64_t previous = -1;
  for (int64_t at = 0; at < size; at += kPiece) {
    const int64_t n = std::min(kPiece, size - at);
    const at::Tensor tokens = read(at, n);
    const auto* ids = tokens.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < n; ++i) {
      if (previous >= 0) visit(previous, ids[i]);
      previous = ids[i];
    }
  }
}

// Counts of pairs: a table for small vocabularies, a hash map for others.
class PairCounts {
 public:
  explicit PairCounts(int64_t vocab_size) : vocab_size_(vocab_size) {
    constexpr int64_t kMaxTable = 2048;
    if (vocab_size <= kMaxTable) {
      table_.assign(static_cast<size_t>(vocab_size * vocab_size), 0);
    }
  }

  void add(int64_t a, int64_t b) {
    const auto key = static_cast<uint64_t>(a * vocab_size_ + b);
    if (!table_.empty()) {
      ++table_[key];
      return;
    }
    if (const auto found = map_.find(key); found != map_.end()) {
      ++found->second;
    } else if (map_.size() < kMaxPairs) {
      map_.emplace(key, 1);
    }
  }

  uint32_t get(int64_t a, int64_t b) const {
    const auto key = static_cast<uint64_t>(a * vocab_size_ + b);
    if (!table_.empty()) return table_[key];
    const auto found = map_.find(key);
    return found == map_.end() ? 0 : found->second;
  }

  // visit(a, count) for every pair seen.
  template <typename Visit>
  void for_each(const Visit& visit) const {
    for (size_t key = 0; key < table_.size(); ++key) {
      if (table_[key] > 0) {
        visit(static_cast<int64_t>(key) / vocab_size_, table_[key]);
      }
    }
    for (const auto& [key, count] : map_) {
      visit(static_cast<int64_t>(key) / vocab_size_, count);
    }
  }

 private:
  int64_t vocab_size_;
  std::vector<uint32_t> table_;
  std::unordered_map<uint64_t, uint32_t> map_;
};

}  // namespace

Baselines count_baselines(const TokenDataset& data) {
  const int64_t vocab_size = data.tokenizer()->vocab_size();
  const auto at = [](int64_t id) { return static_cast<size_t>(id); };
  std::vector<int64_t> count(at(vocab_size), 0);
  std::vector<int64_t> followed(at(vocab_size), 0), kinds(at(vocab_size), 0);
  PairCounts pairs(vocab_size);
  const int64_t train_size = std::min(data.train_size(), kMaxCountedTokens);
  if (train_size > 0) ++count[at(data.train_tokens(0, 1).item<int64_t>())];
  for_each_pair(
      train_size,
      [&](int64_t begin, int64_t n) { return data.train_tokens(begin, n); },
      [&](int64_t a, int64_t b) {
        ++count[at(b)];
        pairs.add(a, b);
      });

  int64_t seen = 0, once = 0, twice = 0;
  for (const int64_t c : count) {
    seen += c > 0;
    once += c == 1;
    twice += c == 2;
  }
  const double d1 = discount(once, twice);
  const auto total = static_cast<double>(std::max<int64_t>(train_size, 1));
  // With no training token: every token equally likely.
  const double rest =
      train_size > 0 ? d1 * static_cast<double>(seen) / total : 1.0;
  std::vector<double> unigram(at(vocab_size));
  for (size_t b = 0; b < unigram.size(); ++b) {
    unigram[b] = std::max(static_cast<double>(count[b]) - d1, 0.0) / total +
                 rest / static_cast<double>(vocab_size);
  }
  once = twice = 0;
  pairs.for_each([&](int64_t a, uint32_t c) {
    followed[at(a)] += c;
    ++kinds[at(a)];
    once += c == 1;
    twice += c == 2;
  });
  const double d2 = discount(once, twice);

  double unigram_sum = 0, bigram_sum = 0;
  int64_t predictions = 0;
  for_each_pair(
      std::min(data.validation_size(), kMaxCountedTokens),
      [&](int64_t begin, int64_t n) {
        return data.validation_tokens(begin, n);
      },
      [&](int64_t a, int64_t b) {
        ++predictions;
        const double p1 = unigram[at(b)];
        unigram_sum -= std::log(p1);
        double p2 = p1;
        if (followed[at(a)] > 0) {
          const auto of_a = static_cast<double>(followed[at(a)]);
          p2 = std::max(static_cast<double>(pairs.get(a, b)) - d2, 0.0) / of_a +
               d2 * static_cast<double>(kinds[at(a)]) / of_a * p1;
        }
        bigram_sum -= std::log(p2);
      });
  if (predictions == 0) {
    constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
    return {kNone, kNone};
  }
  return {unigram_sum / static_cast<double>(predictions),
          bigram_sum / static_cast<double>(predictions)};
}

}  // namespace cosformer
