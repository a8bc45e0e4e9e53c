// Which points of the softmax engine's option space the grid test visits.
#ifndef COSFORMER_TESTS_KERNELS_SOFTMAX_GRID_H_
#define COSFORMER_TESTS_KERNELS_SOFTMAX_GRID_H_

#include <cstdint>
#include <vector>

#include "tests/kernels/cover.h"
#include "tests/kernels/softmax_problem.h"

namespace cosformer::testing {

std::vector<SoftmaxPoint> softmax_pairwise_points();
// Drawn at random; the same ones in every run.
std::vector<SoftmaxPoint> softmax_random_points(int64_t count, uint64_t seed);

}  // namespace cosformer::testing

#endif  // COSFORMER_TESTS_KERNELS_SOFTMAX_GRID_H_
