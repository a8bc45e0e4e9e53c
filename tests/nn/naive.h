// The layer's formulas spelt out, in float64 with every weight formed: what the
// layers are compared with.
#ifndef COSFORMER_TESTS_NN_NAIVE_H_
#define COSFORMER_TESTS_NN_NAIVE_H_

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>

#include "cosformer/nn.h"

namespace cosformer::testing {

struct NaiveCall {
  torch::Tensor key_mask, query_mask;  // bool, undefined = all
  int64_t q_start = 0, kv_start = 0;
  torch::Tensor global_mask;    // longformer, beside its global_tokens
  torch::Tensor relative_bias;  // [heads, 2 reach + 1]
};

// Output of the layer [batch, q_len, embed_dim], float64.
torch::Tensor naive_layer(const AttentionImpl& layer,
                          const torch::Tensor& query, const torch::Tensor& key,
                          const torch::Tensor& value,
                          const NaiveCall& call = {});

// |a - b| / |b|, both as float64.
double relative_error(const torch::Tensor& a, const torch::Tensor& b);

// The message of the c10::Error that run throws, or "" when it throws none.
template <typename Function>
std::string error_of(const Function& run) {
  try {
    run();
  } catch (const c10::Error& e) {
    return e.what_without_backtrace();
  }
  return "";
}

inline void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos)
      << "found: \"" << text << "\"\nexpected in it: \"" << part << "\"";
}

}  // namespace cosformer::testing

#endif  // COSFORMER_TESTS_NN_NAIVE_H_
