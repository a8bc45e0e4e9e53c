#include "tests/kernels/grid.h"

#include <algorithm>
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

// Parameters by number, so that pairs of them can be counted.
enum Parameter {
  kBatch,
  kQLen,
  kKvLen,
  kHeads,
  kGroup,
  kHeadDim,
  kValueDim,
  kType,
  kMap,
  kCosine,
  kCausal,
  kNormalized,
  kRotary,
  kStarts,
  kMask,
  kPacking,
  kState,
  kLayout,
  kThreadCount,
  kNumParameters
};
constexpr std::array<int, kNumParameters> kValues = {
    3, 9, 9, 3, 3, 7, 7, 4, 3, 3, 2, 2, 3, 6, 7, 4, 4, 5, 3};
using Choice = std::array<int, kNumParameters>;

Point to_point(const Choice& c, int64_t seed) {
  Point p;
  p.batch = kBatches[c[kBatch]];
  p.q_len = kLengths[c[kQLen]];
  p.kv_len = kLengths[c[kKvLen]];
  p.kv_heads = kKvHeads[c[kHeads]];
  p.group = kGroups[c[kGroup]];
  p.head_dim = kDims[c[kHeadDim]];
  p.value_dim = kDims[c[kValueDim]];
  p.dtype = kDTypes[c[kType]];
  p.feature_map = static_cast<FeatureMap>(c[kMap]);
  p.cosine = c[kCosine];
  p.causal = c[kCausal] != 0;
  p.normalized = c[kNormalized] == 0;
  p.rotary = c[kRotary];
  p.starts = c[kStarts];
  p.mask = c[kMask];
  p.packing = c[kPacking];
  p.state = c[kState];
  p.layout = c[kLayout];
  p.threads = kThreads[c[kThreadCount]];
  p.seed = seed;
  return p;
}

// Options that exclude each other.
bool sensible(const Point& p) {
  if (p.rotary != 0 && p.head_dim % 2 != 0) return false;
  if (p.packing != 0 && (p.mask != 0 || p.batch != 1)) return false;
  return true;
}

// Multiply-adds of the reference, which is quadratic, forward and backward.
int64_t cost(const Point& p) {
  const int64_t pairs = p.q_len * p.kv_len / (p.causal ? 2 : 1);
  const int64_t state = p.state == 0 ? 0 : p.head_dim * 2;
  return p.batch * p.kv_heads * p.group * (p.head_dim + p.value_dim) *
         (4 * pairs + (p.q_len + p.kv_len) * state);
}
constexpr int64_t kMaxCost = kSanitized ? 12'000'000 : 100'000'000;

// The size of a point is brought below the bound by fewer rows and heads, then
// by smaller sizes.
void make_affordable(Choice& choice, Random& random) {
  for (const Parameter parameter :
       {kGroup, kHeads, kBatch, kValueDim, kHeadDim, kQLen, kKvLen}) {
    while (cost(to_point(choice, 0)) > kMaxCost && choice[parameter] > 0)
      choice[parameter] -=
          1 + static_cast<int>(random() % 2 == 0 && choice[parameter] > 1);
  }
}

Choice draw(Random& random) {
  Choice choice;
  for (size_t i = 0; i < choice.size(); ++i)
    choice[i] = static_cast<int>(random() % static_cast<uint64_t>(kValues[i]));
  return choice;
}

// Makes exclusive options agree by dropping one of them.
void make_sensible(Choice& choice, Random& random) {
  if (choice[kPacking] != 0) {
    if (random() % 2 == 0) {
      choice[kMask] = choice[kBatch] = 0;
    } else {
      choice[kPacking] = 0;
    }
  }
  if (!sensible(to_point(choice, 0))) choice[kRotary] = 0;
}

using Pair = std::array<int, 4>;  // parameter, value, parameter, value

int count_new(const Choice& choice, const std::set<Pair>& missing) {
  int count = 0;
  for (int a = 0; a < kNumParameters; ++a)
    for (int b = a + 1; b < kNumParameters; ++b)
      count += missing.count({a, choice[static_cast<size_t>(a)], b,
                              choice[static_cast<size_t>(b)]}) > 0;
  return count;
}

}  // namespace

std::vector<Point> pairwise_points() {
  Random random(20221207);
  std::set<Pair> missing;
  for (int a = 0; a < kNumParameters; ++a)
    for (int b = a + 1; b < kNumParameters; ++b)
      for (int x = 0; x < kValues[static_cast<size_t>(a)]; ++x)
        for (int y = 0; y < kValues[static_cast<size_t>(b)]; ++y)
          missing.insert({a, x, b, y});
  std::vector<Point> points;
  // Each new point is the best of a few random ones that hold one missing
  // pair; a pair that no sensible, affordable point can hold is given up.
  while (!missing.empty()) {
    const Pair wanted = *missing.begin();
    Choice best{};
    int most = 0;
    for (int attempt = 0; attempt < 40; ++attempt) {
      Choice choice = draw(random);
      const auto put = [&] {
        choice[static_cast<size_t>(wanted[0])] = wanted[1];
        choice[static_cast<size_t>(wanted[2])] = wanted[3];
      };
      put();
      make_sensible(choice, random);
      put();
      make_affordable(choice, random);
      if (!sensible(to_point(choice, 0)) ||
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
    for (int a = 0; a < kNumParameters; ++a)
      for (int b = a + 1; b < kNumParameters; ++b)
        missing.erase(
            {a, best[static_cast<size_t>(a)], b, best[static_cast<size_t>(b)]});
    points.push_back(to_point(best, static_cast<int64_t>(points.size()) + 1));
  }
  return points;
}

std::vector<Point> random_points(int64_t count, uint64_t seed) {
  Random random(seed);
  std::vector<Point> points;
  while (static_cast<int64_t>(points.size()) < count) {
    Choice choice = draw(random);
    make_sensible(choice, random);
    make_affordable(choice, random);
    Point point = to_point(choice, static_cast<int64_t>(random() % 1000000));
    // Sizes between the named ones, too.
    if (random() % 4 == 0) point.q_len = static_cast<int64_t>(random() % 140);
    if (random() % 4 == 0) point.kv_len = static_cast<int64_t>(random() % 140);
    if (random() % 2 == 0) point.kv_len = point.q_len;
    if (random() % 4 == 0 && point.rotary == 0)
      point.head_dim = 1 + static_cast<int64_t>(random() % 100);
    if (random() % 4 == 0)
      point.value_dim = 1 + static_cast<int64_t>(random() % 100);
    if (sensible(point) && cost(point) <= kMaxCost) points.push_back(point);
  }
  return points;
}

}  // namespace cosformer::testing
