#include "tests/kernels/softmax_grid.h"

namespace cosformer::testing {
namespace {

constexpr int64_t kDilations[] = {1, 2, 5};
constexpr int64_t kBlockSizes[] = {0, 8, 16, 64};
constexpr int64_t kReaches[] = {-1, 0, 5, 128, 2000};
constexpr int64_t kDropouts[] = {0, 10, 50, 90};

enum Parameter {
  kScale = kNumCallParameters,
  kWindow,
  kDilation,
  kGlobals,
  kBlocks,
  kBlockHeads,
  kReach,
  kDropout,
};

SoftmaxPoint to_point(const Choice& c, int64_t seed) {
  SoftmaxPoint p;
  set_call(c, p);
  p.scale = c[kScale];
  p.window = c[kWindow];
  p.dilation = kDilations[c[kDilation]];
  p.globals = c[kGlobals];
  p.block_size = kBlockSizes[c[kBlocks]];
  p.block_heads = c[kBlockHeads];
  p.reach = kReaches[c[kReach]];
  p.dropout = kDropouts[c[kDropout]];
  p.seed = seed;
  return p;
}

// Options that exclude each other.
bool sensible(const Choice& c) {
  if (c[kDilation] != 0 && c[kWindow] == 0) return false;
  return c[kPacking] == 0 || (c[kMask] == 0 && c[kBatch] == 0);
}

int64_t cost(const SoftmaxPoint& p) {
  const int64_t pairs = p.q_len * p.kv_len / (p.causal ? 2 : 1);
  return p.batch * p.kv_heads * p.group * (p.head_dim + p.value_dim) * 4 *
         pairs;
}

Space space() {
  Space s({2, static_cast<int>(std::size(kWindows)), 3, 6, 4, 2, 5, 4});
  s.sensible = sensible;
  s.cost = [](const Choice& c) { return cost(to_point(c, 0)); };
  s.make_sensible = [](Choice& c, Random& random) {
    if (c[kWindow] == 0) c[kDilation] = 0;
    if (c[kPacking] == 0) return;
    if (random() % 2 == 0) {
      c[kMask] = c[kBatch] = 0;
    } else {
      c[kPacking] = 0;
    }
  };
  return s;
}

}  // namespace

std::vector<SoftmaxPoint> softmax_pairwise_points() {
  Random random(20221207);
  std::vector<SoftmaxPoint> points;
  for (const Choice& choice : pairwise_cover(space(), random))
    points.push_back(to_point(choice, static_cast<int64_t>(points.size()) + 1));
  return points;
}

std::vector<SoftmaxPoint> softmax_random_points(int64_t count, uint64_t seed) {
  Random random(seed);
  const Space of = space();
  std::vector<SoftmaxPoint> points;
  while (static_cast<int64_t>(points.size()) < count) {
    Choice choice = of.draw(random);
    // One part of the pattern alone, or none, as often as a union of them.
    const uint64_t only = random() % 8;
    if (only < 4) {
      if (only != 0) choice[kWindow] = 0;
      if (only != 1) choice[kGlobals] = 0;
      if (only != 2) choice[kBlocks] = 0;
    }
    of.make_sensible(choice, random);
    of.make_affordable(choice, random);
    SoftmaxPoint point =
        to_point(choice, static_cast<int64_t>(random() % 1000000));
    vary_sizes(point, random, true);
    if (cost(point) <= kMaxCost) points.push_back(point);
  }
  return points;
}

}  // namespace cosformer::testing
