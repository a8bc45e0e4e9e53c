// Softmax attention through torch's scaled_dot_product_attention.
#ifndef COSFORMER_SRC_NN_SOFTMAX_H_
#define COSFORMER_SRC_NN_SOFTMAX_H_

#include <torch/torch.h>

#include <cstdint>
#include <optional>

namespace cosformer {

struct SoftmaxArgs {
  bool is_causal = false;
  double scale = 0.0;  // 0 = 1 / sqrt(head_dim)
  // Query i sees key j when j <= i + offset (causal).
  int64_t offset = 0;
  std::optional<torch::Tensor> row_offset;  // int64 [batch]: instead of offset
  std::optional<torch::Tensor> key_mask;    // bool [batch, kv_len]
  std::optional<torch::Tensor> cu_seqlens_q, cu_seqlens_k;
};

// q [batch, q_len, heads, head_dim], k, v [batch, kv_len, kv_heads, dim] ->
// [batch, q_len, heads, value_dim]. A row without a visible key is 0, with no
// gradient.
torch::Tensor softmax_over_keys(const torch::Tensor& q, const torch::Tensor& k,
                                const torch::Tensor& v,
                                const SoftmaxArgs& args);

// Positions of packed tokens, [1, total]: they restart in each sequence, at 0
// or at its start (int64 [sequences] or one number).
torch::Tensor packed_positions(const torch::Tensor& cu_seqlens,
                               const std::optional<torch::Tensor>& starts);

}  // namespace cosformer

#endif  // COSFORMER_SRC_NN_SOFTMAX_H_
