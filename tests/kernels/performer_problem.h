// One call of Performer as a test sees it: a point of the grid, the tensors
// made from it, and what came out.
#ifndef COSFORMER_TESTS_KERNELS_PERFORMER_PROBLEM_H_
#define COSFORMER_TESTS_KERNELS_PERFORMER_PROBLEM_H_

#include <optional>
#include <string>
#include <vector>

#include "cosformer/kernels.h"
#include "tests/kernels/problem.h"
#include "tests/kernels/tokens.h"

namespace cosformer::testing {

struct PerformerState {
  Tensor kv_state, k_sum, log_scale;
  std::vector<int64_t> start, position;

  PerformerStateView view();
  ConstPerformerStateView view() const;
  // The sums times exp(log_scale), which two states of the same keys share, as
  // logarithms of k_sum and the means kv_state / k_sum.
  std::vector<double> means() const;
  std::vector<double> log_sums() const;
};

struct PerformerProblem {
  // Tensors, masks, packing and starts; its own state is not used.
  Problem base;
  int64_t num_features = 0;
  Tensor projection;
  std::optional<PerformerState> state, d_state_out;
  bool return_state = false;

  PerformerAttentionOptions options() const { return {base.options.is_causal}; }
  PerformerAttentionInputs inputs() const;
  PerformerState make_state() const;  // filled with NaN
};

// scale: of q and k. The point's feature map, cosine and normaliser do not
// matter.
PerformerProblem make_performer_problem(const std::string& point,
                                        int64_t num_features, double scale = 1);
PerformerProblem widen(const PerformerProblem& problem);
// The same tokens [from, to) of every row, without starts.
PerformerProblem slice(const PerformerProblem& problem, int64_t from,
                       int64_t to);
// A state that holds nothing.
PerformerState empty_state(const PerformerProblem& problem, int64_t position);

struct PerformerOutputs {
  Status status;
  Tensor out, dq, dk, dv, d_projection;
  std::vector<double> log_denominator;
  std::optional<PerformerState> state, d_state;
};
PerformerOutputs run_forward(const PerformerProblem& problem,
                             Executor& executor);
PerformerOutputs run(const PerformerProblem& problem, Executor& executor);
PerformerOutputs run_reference(const PerformerProblem& problem);

// Empty where `got` agrees with `want`; limits are relative norms.
std::string compare(const PerformerProblem& problem,
                    const PerformerOutputs& got, const PerformerOutputs& want,
                    double out_limit, double gradient_limit);

}  // namespace cosformer::testing

#endif  // COSFORMER_TESTS_KERNELS_PERFORMER_PROBLEM_H_
