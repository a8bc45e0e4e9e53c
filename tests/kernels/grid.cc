#include "tests/kernels/grid.h"

namespace cosformer::testing {
namespace {

enum Parameter {
  kMap = kNumCallParameters,
  kCosine,
  kNormalized,
  kRotary,
  kState,
};

Point to_point(const Choice& c, int64_t seed) {
  Point p;
  set_call(c, p);
  p.feature_map = static_cast<FeatureMap>(c[kMap]);
  p.cosine = c[kCosine];
  p.normalized = c[kNormalized] == 0;
  p.rotary = c[kRotary];
  p.state = c[kState];
  p.seed = seed;
  return p;
}

// Options that exclude each other.
bool sensible(const Point& p) {
  if (p.rotary != 0 && p.head_dim % 2 != 0) return false;
  return p.packing == 0 || (p.mask == 0 && p.batch == 1);
}

int64_t cost(const Point& p) {
  const int64_t pairs = p.q_len * p.kv_len / (p.causal ? 2 : 1);
  const int64_t state = p.state == 0 ? 0 : p.head_dim * 2;
  return p.batch * p.kv_heads * p.group * (p.head_dim + p.value_dim) *
         (4 * pairs + (p.q_len + p.kv_len) * state);
}

Space space() {
  Space s({3, 3, 2, 3, 4});
  // So that the random points stay those that they were when the parameters
  // had this order.
  s.draw_order = {kBatch,   kQLen,       kKvLen,  kHeads,      kGroup,
                  kHeadDim, kValueDim,   kType,   kMap,        kCosine,
                  kCausal,  kNormalized, kRotary, kStarts,     kMask,
                  kPacking, kState,      kLayout, kThreadCount};
  s.sensible = [](const Choice& c) { return sensible(to_point(c, 0)); };
  s.cost = [](const Choice& c) { return cost(to_point(c, 0)); };
  s.make_sensible = [](Choice& c, Random& random) {
    if (c[kPacking] != 0) {
      if (random() % 2 == 0) {
        c[kMask] = c[kBatch] = 0;
      } else {
        c[kPacking] = 0;
      }
    }
    if (!sensible(to_point(c, 0))) c[kRotary] = 0;
  };
  return s;
}

}  // namespace

std::vector<Point> pairwise_points() {
  Random random(20221207);
  std::vector<Point> points;
  for (const Choice& choice : pairwise_cover(space(), random))
    points.push_back(to_point(choice, static_cast<int64_t>(points.size()) + 1));
  return points;
}

std::vector<Point> random_points(int64_t count, uint64_t seed) {
  Random random(seed);
  const Space of = space();
  std::vector<Point> points;
  while (static_cast<int64_t>(points.size()) < count) {
    Choice choice = of.draw(random);
    of.make_sensible(choice, random);
    of.make_affordable(choice, random);
    Point point = to_point(choice, static_cast<int64_t>(random() % 1000000));
    vary_sizes(point, random, point.rotary == 0);
    if (sensible(point) && cost(point) <= kMaxCost) points.push_back(point);
  }
  return points;
}

}  // namespace cosformer::testing
