// One call of the linear engine as a test sees it: a point of the grid, the
// tensors made from it, and what came out.
#ifndef COSFORMER_TESTS_KERNELS_PROBLEM_H_
#define COSFORMER_TESTS_KERNELS_PROBLEM_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cosformer/kernels.h"
#include "tests/kernels/call_problem.h"
#include "tests/kernels/tensor.h"

namespace cosformer::testing {

struct Point : CallPoint {
  FeatureMap feature_map = FeatureMap::kRelu;
  int64_t cosine = 0;  // 0 none, 1 M = the exact reach, 2 M far beyond it
  bool normalized = true;
  int64_t rotary = 0;  // 0 none, 1 half-split pairs, 2 interleaved
  int64_t state = 0;   // 1 in, 2 out, 3 both
};

// "batch=1 q_len=8 ...": the whole point on one line.
std::string describe(const Point& point);
// Reads what describe() wrote; fields that are not named keep their defaults.
std::optional<Point> parse_point(std::string_view text);

struct State {
  Tensor kv_state, k_sum;
  std::vector<int64_t> start, position;

  LinearStateView view();
  ConstLinearStateView view() const;
};
// Room for a call's state (or its gradient), filled with NaN.
State make_state(const LinearAttentionOptions& options,
                 const LinearAttentionInputs& inputs);

struct Problem : CallProblem {
  LinearAttentionOptions options;
  std::optional<State> state, d_state_out;
  bool return_state = false;

  LinearAttentionInputs inputs() const;
};

// Tensors for a point. Whatever nothing may see (masked keys, values, queries
// and their output gradients) holds NaN, infinity and huge numbers.
Problem make_problem(const Point& point);
// The same numbers as float64, contiguous: what the reference is given.
Problem widen(const Problem& problem);

struct Outputs {
  Status status;
  Tensor out, denominator, dq, dk, dv;
  std::optional<State> state, d_state;
};
// The public entry points, forward and backward, into memory full of NaN.
Outputs run(const Problem& problem, Executor& executor, int64_t layout = 0);
Outputs run_forward(const Problem& problem, Executor& executor,
                    int64_t layout = 0);
Outputs run_reference(const Problem& problem);

}  // namespace cosformer::testing

#endif  // COSFORMER_TESTS_KERNELS_PROBLEM_H_
