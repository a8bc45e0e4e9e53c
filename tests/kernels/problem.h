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
#include "tests/kernels/tensor.h"

namespace cosformer::testing {

// Everything that a point of the grid may vary. Each field is a small number;
// describe() and parse_point() print and read them.
struct Point {
  int64_t batch = 1, q_len = 8, kv_len = 8, kv_heads = 1, group = 1;
  int64_t head_dim = 8, value_dim = 8;
  DType dtype = DType::kFloat32;
  FeatureMap feature_map = FeatureMap::kRelu;
  int64_t cosine = 0;  // 0 none, 1 M = the exact reach, 2 M far beyond it
  bool causal = false;
  bool normalized = true;
  int64_t rotary = 0;   // 0 none, 1 half-split pairs, 2 interleaved
  int64_t starts = 0;   // see kStartsNames
  int64_t mask = 0;     // see kMaskNames
  int64_t packing = 0;  // see kPackingNames
  int64_t state = 0;    // 1 in, 2 out, 3 both
  int64_t layout = 0;   // Layout, or kNumLayouts: another for each tensor
  int64_t threads = 1;
  int64_t seed = 1;
};

// "batch=1 q_len=8 ...": the whole point on one line.
std::string describe(const Point& point);
// Reads what describe() wrote; fields that are not named keep their defaults.
std::optional<Point> parse_point(std::string_view text);

inline constexpr std::string_view kStartsNames[] = {
    "none", "equal", "bottom-right", "rows", "large", "negative"};
inline constexpr std::string_view kMaskNames[] = {
    "none",        "right-padding", "left-padding",   "holes",
    "masked-rows", "query-only",    "nothing-visible"};
inline constexpr std::string_view kPackingNames[] = {"none", "one", "0-5-0-1",
                                                     "many"};

struct State {
  Tensor kv_state, k_sum;
  std::vector<int64_t> start, position;

  LinearStateView view();
  ConstLinearStateView view() const;
};
// Room for a call's state (or its gradient), filled with NaN.
State make_state(const LinearAttentionOptions& options,
                 const LinearAttentionInputs& inputs);

struct Problem {
  LinearAttentionOptions options;
  Tensor q, k, v, d_out;
  std::vector<int64_t> q_start, kv_start;           // empty = not given
  std::vector<uint8_t> key_mask, query_mask;        // empty = not given
  std::vector<int64_t> cu_seqlens_q, cu_seqlens_k;  // empty = not packed
  std::optional<State> state, d_state_out;
  bool return_state = false;
  std::string text;  // the point it was made from

  LinearAttentionInputs inputs() const;
  int64_t rows() const;
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

// Which layout the n-th tensor of a point has.
Layout layout_of(int64_t layout, int64_t n);

}  // namespace cosformer::testing

#endif  // COSFORMER_TESTS_KERNELS_PROBLEM_H_
