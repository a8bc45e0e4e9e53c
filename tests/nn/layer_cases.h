// Attention layers of every kind in every form that it has, for the tests that
// hold for all.
#ifndef COSFORMER_TESTS_NN_LAYER_CASES_H_
#define COSFORMER_TESTS_NN_LAYER_CASES_H_

#include <ostream>
#include <string>
#include <vector>

#include "cosformer/nn.h"

namespace cosformer::testing {

inline const char* const kKinds[] = {"softmax",   "linear",    "cosformer",
                                     "performer", "linformer", "longformer",
                                     "bigbird"};

// 24 wide, 4 heads, with what the kind must be given: M 64, a window of 3 and 2
// global tokens, blocks of 4, max_len 48.
AttentionOptions options_of(const std::string& kind, bool is_causal);

struct LayerCase {
  std::string name;
  AttentionOptions options;
  int64_t bias_reach = 0;  // a relative_bias of this reach; 0 = none

  bool is(const char* kind) const { return options.kind == kind; }
  // Random, or undefined.
  torch::Tensor relative_bias() const;
  AttentionCall call(const torch::Tensor& bias) const;
  // Of float32 against the formula in double.
  double out_tolerance() const { return is("performer") ? 5e-6 : 2e-6; }
  double grad_tolerance() const { return is("performer") ? 2e-5 : 1e-5; }
};
inline void PrintTo(const LayerCase& value, std::ostream* out) {
  *out << value.name;
}

// Every kind, plain, grouped-query and rotary, causal and not, with its
// options.
std::vector<LayerCase> layer_cases();
// Those of them with a state.
std::vector<LayerCase> stateful_cases();

}  // namespace cosformer::testing

#endif  // COSFORMER_TESTS_NN_LAYER_CASES_H_
