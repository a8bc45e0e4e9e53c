// Which points of the engine's option space the grid test visits.
#ifndef COSFORMER_TESTS_KERNELS_GRID_H_
#define COSFORMER_TESTS_KERNELS_GRID_H_

#include <cstdint>
#include <vector>

#include "tests/kernels/problem.h"

namespace cosformer::testing {

// Sanitizers make everything ten to fifty times slower: they take a tenth.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// Points in which each value of each parameter meets each value of each other
// one (where the two make sense together), of bounded cost.
std::vector<Point> pairwise_points();
// Drawn at random; the same ones in every run.
std::vector<Point> random_points(int64_t count, uint64_t seed);

}  // namespace cosformer::testing

#endif  // COSFORMER_TESTS_KERNELS_GRID_H_
