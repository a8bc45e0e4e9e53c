// Attention as PyTorch functions: schema, CPU kernels, autograd, meta,
// autocast, and a portable path of tensor operations for any device, dtype and
// double backward. All functions throw c10::Error on bad input, with what was
// found and what was expected. torch.func transforms and forward-mode
// differentiation are refused (C++ autograd functions do not have them).
#ifndef COSFORMER_OPS_H_
#define COSFORMER_OPS_H_

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>

namespace cosformer {

// What a causal linear kind carries between calls; see the design's "State".
// float32, or float64 for float64 inputs.
struct LinearState {
  at::Tensor kv_state;  // [rows, kv_heads, features, value_dim]
  at::Tensor k_sum;     // [rows, kv_heads, features]
  at::Tensor start;     // int64 [rows], position of the first key
  at::Tensor position;  // int64 [rows], 1 + the position of the last real key
  std::string kind = "linear";
  std::string feature_map = "relu";
  int64_t reweight_len = 0;  // 0 = none
  double rotary_base = 0.0;
  bool rotary_interleaved = false;

  LinearState clone() const;
  LinearState detach() const;
  // Rows by index, for beam search and batching.
  LinearState select(const at::Tensor& rows) const;
  // Device and/or dtype of the float tensors.
  LinearState to(const at::TensorOptions& options) const;
  // One safetensors file, metadata included. load checks everything.
  void save(const std::string& path) const;
  static LinearState load(const std::string& path);
};

// Options of linear_attention; every field has the Python default.
struct LinearAttentionArgs {
  std::string feature_map = "relu";     // "relu", "elu1", "identity" (identity
                                        // wants non-negative features)
  std::optional<int64_t> reweight_len;  // M of the cosine; none = no cosine
  bool is_causal = false;
  std::optional<at::Tensor>
      q_start;  // int64 scalar or [rows]; none = 0, or the state's position
  std::optional<at::Tensor> kv_start;  // likewise
  std::optional<at::Tensor>
      key_mask;  // bool [batch, kv_len], true = takes part
  std::optional<at::Tensor> query_mask;    // bool [batch, q_len]
  std::optional<at::Tensor> cu_seqlens_q;  // int32 or int64 [sequences + 1]
  std::optional<at::Tensor> cu_seqlens_k;  // none = cu_seqlens_q
  std::optional<LinearState> state;
  bool return_state = false;
  std::string normalizer = "sum";  // "sum", "none"
  std::optional<double> rotary_base;
  bool rotary_interleaved = false;
  double eps = 1e-6;
};

// q [batch, q_len, heads, head_dim], k [batch, kv_len, kv_heads, head_dim], v
// [batch, kv_len, kv_heads, value_dim] -> out [batch, q_len, heads, value_dim],
// and the state when args.return_state.
std::tuple<at::Tensor, std::optional<LinearState>> linear_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const LinearAttentionArgs& args = {});

// As linear_attention, also returns the unclamped denominators [batch, q_len,
// heads] (detached), for monitoring; empty for normalizer "none".
std::tuple<at::Tensor, std::optional<LinearState>, at::Tensor>
linear_attention_with_denominator(const at::Tensor& q, const at::Tensor& k,
                                  const at::Tensor& v,
                                  const LinearAttentionArgs& args = {});

// linear_attention with relu and the cosine (Qin et al., ICLR 2022).
// args.reweight_len must be set.
std::tuple<at::Tensor, std::optional<LinearState>> cosformer_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const LinearAttentionArgs& args);

// One token a row: q [rows, 1, heads, dim], ... ; updates state in place (no
// autograd) and returns out [rows, 1, heads, value_dim]. A key that
// args.key_mask hides is skipped, and the position of its row stays.
at::Tensor linear_attention_decode_step_(const at::Tensor& q,
                                         const at::Tensor& k,
                                         const at::Tensor& v,
                                         LinearState& state,
                                         const LinearAttentionArgs& args);

// Rotary positions on [batch, seq, heads, dim]; position of token t is start +
// t, or positions[b, t] (int64 [batch, seq]).
at::Tensor apply_rotary(
    const at::Tensor& x, int64_t start = 0,
    const std::optional<at::Tensor>& positions = std::nullopt,
    double base = 10000.0, bool interleaved = false);

// [max_len, dim], sin on even, cos on odd dims, computed in double.
at::Tensor sinusoidal_positions(int64_t max_len, int64_t dim);

}  // namespace cosformer

#endif  // COSFORMER_OPS_H_
