// One call of the softmax engine as a test sees it: a point of the grid, the
// tensors and patterns made from it, and what came out.
#ifndef COSFORMER_TESTS_KERNELS_SOFTMAX_PROBLEM_H_
#define COSFORMER_TESTS_KERNELS_SOFTMAX_PROBLEM_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cosformer/kernels.h"
#include "tests/kernels/call_problem.h"
#include "tests/kernels/comparison.h"
#include "tests/kernels/tensor.h"

namespace cosformer::testing {

struct SoftmaxPoint : CallPoint {
  int64_t scale = 0;   // 0 the default, 1 one of its own
  int64_t window = 0;  // of kWindows
  int64_t dilation = 1;
  int64_t globals = 0;      // see kGlobalNames
  int64_t block_size = 0;   // 0 = no block mask
  int64_t block_heads = 0;  // 0 one mask, 1 one for each head
  int64_t reach = -1;       // of the relative bias; -1 = none
  int64_t dropout = 0;      // percent
};

struct Window {
  std::string_view name;
  int64_t left, right;
};
inline constexpr Window kWindows[] = {
    {"none", 0, 0},        {"self", 0, 0},       {"left", 3, 0},
    {"both", 9, 9},        {"left-open", -1, 4}, {"right-open", 4, -1},
    {"ahead", 0, 20},      {"wide", 300, 300},   {"beyond", 10000, 10000},
    {"unbounded", -1, -1},
};
inline constexpr std::string_view kGlobalNames[] = {
    "none", "first", "last", "scattered", "padding", "all"};

std::string describe(const SoftmaxPoint& point);
std::optional<SoftmaxPoint> parse_softmax_point(std::string_view text);

struct SoftmaxProblem : CallProblem {
  SoftmaxAttentionOptions options;
  std::vector<uint8_t> global_mask, block_mask;  // empty = not given
  int64_t block_mask_heads = 0, q_blocks = 0, kv_blocks = 0, block_size = 0;
  Tensor relative_bias;  // [1, 1, heads, 2 reach + 1]; no elements = none
  int64_t relative_reach = 0;

  SoftmaxAttentionInputs inputs() const;
  AttentionRow row(int64_t r) const;
  bool has_bias() const { return relative_bias.numel() > 0; }
  double scale() const;
  // Whether query i of a row sees key j, by the words of kernels.h.
  bool sees(const AttentionRow& row, int64_t head, int64_t i, int64_t j) const;
};

// Tensors for a point. Whatever nothing may see holds NaN, infinity and huge
// numbers: masked keys, values, queries and their output gradients; queries
// that see nothing, and keys that nothing sees.
SoftmaxProblem make_problem(const SoftmaxPoint& point);
// on_query(row, head, i) for each query that sees nothing, on_key(row, kv head,
// j) for each key that no real query of its heads sees.
void for_unseen(
    const SoftmaxProblem& problem,
    const std::function<void(const AttentionRow&, int64_t, int64_t)>& on_query,
    const std::function<void(const AttentionRow&, int64_t, int64_t)>& on_key);
// From a point's text.
SoftmaxProblem softmax_problem(const std::string& text);
// The same numbers as float64, contiguous: what the reference is given.
SoftmaxProblem widen(const SoftmaxProblem& problem);
// Row b of a batch, its first q_len queries and kv_len keys, alone.
SoftmaxProblem row_alone(const SoftmaxProblem& batch, int64_t b, int64_t q_len,
                         int64_t kv_len);

struct SoftmaxOutputs {
  Status status;
  Tensor out, log_sum_exp, dq, dk, dv, d_bias;
};
// The public entry points, forward and backward, into memory full of NaN.
SoftmaxOutputs run(const SoftmaxProblem& problem, Executor& executor,
                   int64_t layout = 0);
SoftmaxOutputs run_forward(const SoftmaxProblem& problem, Executor& executor,
                           int64_t layout = 0);
SoftmaxOutputs run_reference(const SoftmaxProblem& problem);

// Empty where `got` agrees with `want` (from run_reference); otherwise one line
// for each tensor that does not, naming the worst element.
std::string compare(const SoftmaxProblem& problem, const SoftmaxOutputs& got,
                    const SoftmaxOutputs& want, Margins* margins = nullptr);

}  // namespace cosformer::testing

#endif  // COSFORMER_TESTS_KERNELS_SOFTMAX_PROBLEM_H_
