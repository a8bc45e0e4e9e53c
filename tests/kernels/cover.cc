#include "tests/kernels/cover.h"

#include <array>
#include <set>

namespace cosformer::testing {
namespace {

constexpr int64_t kLengths[] = {0, 1, 2, 63, 64, 65, 255, 257, 913};
constexpr int64_t kDims[] = {1, 3, 40, 63, 64, 128, 192};
constexpr int64_t kBatches[] = {1, 2, 3};
constexpr int64_t kKvHeads[] = {1, 2, 3};
constexpr int64_t kGroups[] = {1, 2, 4};
constexpr int64_t kThreads[] = {1, 2, 3};
constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat64, DType::kBFloat16,
                             DType::kFloat16};
constexpr std::array<int, kNumCallParameters> kCallValues = {
    3, 9, 9, 3, 3, 7, 7, 4, 2, 6, 7, 4, 5, 3};

using Pair = std::array<int, 4>;  // parameter, value, parameter, value

template <typename Use>
void for_pairs(const Choice& choice, const Use& use) {
  const int n = static_cast<int>(choice.size());
  for (int a = 0; a < n; ++a)
    for (int b = a + 1; b < n; ++b)
      use(Pair{a, choice[static_cast<size_t>(a)], b,
               choice[static_cast<size_t>(b)]});
}

int count_new(const Choice& choice, const std::set<Pair>& missing) {
  int count = 0;
  for_pairs(choice,
            [&](const Pair& pair) { count += missing.count(pair) > 0; });
  return count;
}

}  // namespace

void set_call(const Choice& c, CallPoint& p) {
  p.batch = kBatches[c[kBatch]];
  p.q_len = kLengths[c[kQLen]];
  p.kv_len = kLengths[c[kKvLen]];
  p.kv_heads = kKvHeads[c[kHeads]];
  p.group = kGroups[c[kGroup]];
  p.head_dim = kDims[c[kHeadDim]];
  p.value_dim = kDims[c[kValueDim]];
  p.dtype = kDTypes[c[kType]];
  p.causal = c[kCausal] != 0;
  p.starts = c[kStarts];
  p.mask = c[kMask];
  p.packing = c[kPacking];
  p.layout = c[kLayout];
  p.threads = kThreads[c[kThreadCount]];
}

void vary_sizes(CallPoint& p, Random& random, bool vary_head_dim) {
  if (random() % 4 == 0) p.q_len = static_cast<int64_t>(random() % 140);
  if (random() % 4 == 0) p.kv_len = static_cast<int64_t>(random() % 140);
  if (random() % 2 == 0) p.kv_len = p.q_len;
  if (random() % 4 == 0 && vary_head_dim)
    p.head_dim = 1 + static_cast<int64_t>(random() % 100);
  if (random() % 4 == 0) p.value_dim = 1 + static_cast<int64_t>(random() % 100);
}

Space::Space(std::vector<int> of)
    : num_values(kCallValues.begin(), kCallValues.end()) {
  num_values.insert(num_values.end(), of.begin(), of.end());
}

Choice Space::draw(Random& random) const {
  Choice choice(num_values.size());
  for (size_t n = 0; n < choice.size(); ++n) {
    const size_t at =
        draw_order.empty() ? n : static_cast<size_t>(draw_order[n]);
    choice[at] =
        static_cast<int>(random() % static_cast<uint64_t>(num_values[at]));
  }
  return choice;
}

void Space::make_affordable(Choice& choice, Random& random) const {
  for (const CallParameter parameter :
       {kGroup, kHeads, kBatch, kValueDim, kHeadDim, kQLen, kKvLen}) {
    while (cost(choice) > kMaxCost && choice[parameter] > 0)
      choice[parameter] -=
          1 + static_cast<int>(random() % 2 == 0 && choice[parameter] > 1);
  }
}

std::vector<Choice> pairwise_cover(const Space& space, Random& random) {
  const int n = static_cast<int>(space.num_values.size());
  std::set<Pair> missing;
  for (int a = 0; a < n; ++a)
    for (int b = a + 1; b < n; ++b)
      for (int x = 0; x < space.num_values[static_cast<size_t>(a)]; ++x)
        for (int y = 0; y < space.num_values[static_cast<size_t>(b)]; ++y)
          missing.insert({a, x, b, y});
  std::vector<Choice> cover;
  // Each new choice is the best of a few random ones that hold one missing
  // pair; a pair that no sensible, affordable choice can hold is given up.
  while (!missing.empty()) {
    const Pair wanted = *missing.begin();
    Choice best;
    int most = 0;
    for (int attempt = 0; attempt < 40; ++attempt) {
      Choice choice = space.draw(random);
      const auto put = [&] {
        choice[static_cast<size_t>(wanted[0])] = wanted[1];
        choice[static_cast<size_t>(wanted[2])] = wanted[3];
      };
      put();
      space.make_sensible(choice, random);
      put();
      space.make_affordable(choice, random);
      if (!space.sensible(choice) ||
          choice[static_cast<size_t>(wanted[0])] != wanted[1] ||
          choice[static_cast<size_t>(wanted[2])] != wanted[3]) {
        continue;
      }
      const int found = count_new(choice, missing);
      if (found > most) {
        most = found;
        best = choice;
      }
    }
    if (most == 0) {
      missing.erase(wanted);
      continue;
    }
    for_pairs(best, [&](const Pair& pair) { missing.erase(pair); });
    cover.push_back(best);
  }
  return cover;
}

}  // namespace cosformer::testing
