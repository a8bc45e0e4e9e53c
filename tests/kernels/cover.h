// Which points of an engine's option space its grid visits: a cover of all
// pairs of values, and random draws. A choice gives a value's number for each
// parameter; the first ones are those that all engines have.
#ifndef COSFORMER_TESTS_KERNELS_COVER_H_
#define COSFORMER_TESTS_KERNELS_COVER_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "tests/kernels/call_problem.h"

namespace cosformer::testing {

// Sanitizers make everything ten to fifty times slower: they take a tenth.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// One in ten, spread evenly, where everything is slow.
template <typename Point>
std::vector<Point> thinned(const std::vector<Point>& points) {
  if (!kSanitized) return points;
  std::vector<Point> few;
  for (size_t i = 0; i < points.size(); i += 10) few.push_back(points[i]);
  return few;
}

// Multiply-adds of the reference, which is quadratic, forward and backward.
inline constexpr int64_t kMaxCost = kSanitized ? 12'000'000 : 100'000'000;

using Choice = std::vector<int>;

// Parameters that all engines have, in front of a choice.
enum CallParameter {
  kBatch,
  kQLen,
  kKvLen,
  kHeads,
  kGroup,
  kHeadDim,
  kValueDim,
  kType,
  kCausal,
  kStarts,
  kMask,
  kPacking,
  kLayout,
  kThreadCount,
  kNumCallParameters
};
void set_call(const Choice& choice, CallPoint& point);
// Sizes between the named ones, too.
void vary_sizes(CallPoint& point, Random& random, bool vary_head_dim);

struct Space {
  // of is the number of values of each parameter of the engine alone.
  explicit Space(std::vector<int> of);

  std::vector<int> num_values;
  // Whether options that exclude each other are apart, and what makes them so
  // by dropping some.
  std::function<bool(const Choice&)> sensible;
  std::function<void(Choice&, Random&)> make_sensible;
  std::function<int64_t(const Choice&)> cost;
  std::vector<int> draw_order;  // of parameters; empty = as numbered

  Choice draw(Random& random) const;
  // The size of a point is brought below kMaxCost by fewer rows and heads, then
  // by smaller sizes.
  void make_affordable(Choice& choice, Random& random) const;
};

// Choices in which each value of each parameter meets each value of each other
// one (where the two make sense together), of bounded cost.
std::vector<Choice> pairwise_cover(const Space& space, Random& random);

}  // namespace cosformer::testing

#endif  // COSFORMER_TESTS_KERNELS_COVER_H_
