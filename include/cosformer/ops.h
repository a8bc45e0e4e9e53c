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
  // Performer (kind "performer", feature_map "performer"): the logarithm that
  // scales each feature, [rows, kv_heads, features]; undefined otherwise.
  at::Tensor log_scale{};

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

// Options of performer_attention, as those of linear_attention.
struct PerformerAttentionArgs {
  bool is_causal = false;
  std::optional<at::Tensor> q_start, kv_start;
  std::optional<at::Tensor> key_mask, query_mask;
  std::optional<at::Tensor> cu_seqlens_q, cu_seqlens_k;
  std::optional<LinearState> state;  // kind "performer"
  bool return_state = false;
};

// Positive orthogonal random features (Choromanski et al., ICLR 2021): softmax
// with scale 1/sqrt(head_dim) in expectation over the projection
// [num_features, head_dim], which may have a gradient. As linear_attention
// otherwise.
std::tuple<at::Tensor, std::optional<LinearState>> performer_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& projection, const PerformerAttentionArgs& args = {});
// As linear_attention_decode_step_.
at::Tensor performer_attention_decode_step_(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& projection, LinearState& state,
    const std::optional<at::Tensor>& key_mask = std::nullopt);
// [num_features, head_dim] float32, rows Gaussian, orthogonal within blocks of
// head_dim rows; from the seed alone.
at::Tensor performer_projection(int64_t num_features, int64_t head_dim,
                                bool orthogonal = true, int64_t seed = 0);

// Options of softmax_attention; every field has the Python default. Key j is
// visible to query i when it is real, in the same sequence, not later (causal)
// and, where window, global_mask or block_mask is given, allowed by one of
// them.
struct SoftmaxAttentionArgs {
  bool is_causal = false;
  std::optional<double> scale;  // none = 1 / sqrt(head_dim)
  // (left, right): p_j = p_i + t dilation, -left <= t <= right; -1 unbounded.
  std::optional<std::pair<int64_t, int64_t>> window;
  int64_t dilation = 1;
  // bool [batch, kv_len]: tokens that all see and that see all.
  std::optional<at::Tensor> global_mask;
  // bool [heads or 1, q_blocks, kv_blocks], block = position // block_size.
  std::optional<at::Tensor> block_mask;
  std::optional<int64_t> block_size;
  // [heads, 2 R + 1]: added to the scores, entry clamp(p_j - p_i, -R, R) + R;
  // has a gradient.
  std::optional<at::Tensor> relative_bias;
  double dropout_p = 0.0;               // of a weight, after the normalisation
  std::optional<int64_t> dropout_seed;  // wanted when dropout_p > 0
  std::optional<at::Tensor> q_start, kv_start;
  std::optional<at::Tensor> key_mask, query_mask;
  std::optional<at::Tensor> cu_seqlens_q, cu_seqlens_k;
};

// Exact softmax attention (Vaswani et al. 2017), tiled (Dao et al. 2022): q
// [batch, q_len, heads, head_dim], k [batch, kv_len, kv_heads, head_dim], v
// [batch, kv_len, kv_heads, value_dim] -> [batch, q_len, heads, value_dim].
// Gradients of any order by q, k, v and relative_bias; the second forms every
// weight.
at::Tensor softmax_attention(const at::Tensor& q, const at::Tensor& k,
                             const at::Tensor& v,
                             const SoftmaxAttentionArgs& args = {});

// One token a row over a cache (kernels.h, KvCacheView): writes k and v [rows,
// 1, kv_heads, dim] into keys and values [rows, capacity, kv_heads, dim] at
// each row's position (int64 [rows]), advances it, and returns out [rows, 1,
// heads, value_dim]. args: scale, window, dilation, global_mask [rows,
// capacity] by slot, block_mask, relative_bias and query_mask; the rest must be
// unset. cache_mask: bool [rows, capacity] by slot. No autograd.
at::Tensor softmax_attention_decode_step_(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    at::Tensor& keys, at::Tensor& values, at::Tensor& position,
    const std::optional<at::Tensor>& start,
    const std::optional<at::Tensor>& cache_mask, bool is_ring,
    const SoftmaxAttentionArgs& args = {});

// softmax_attention over keys and values that two learned projections shorten
// (Wang et al. 2020): k' = key_len_proj[:kv_len]^T k, v' = value_len_proj[..]^T
// v, along the sequence. key_len_proj, value_len_proj: [max_len,
// projected_len]; kv_len at most max_len (shorter: their first rows). Masked
// keys and values are zeroed before. Never causal: each projected key mixes all
// positions.
struct LinformerAttentionArgs {
  std::optional<double> scale;
  double dropout_p = 0.0;
  std::optional<int64_t> dropout_seed;
  std::optional<at::Tensor> key_mask, query_mask;
};
at::Tensor linformer_attention(const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& v,
                               const at::Tensor& key_len_proj,
                               const at::Tensor& value_len_proj,
                               const LinformerAttentionArgs& args = {});

// A window and global tokens, whose rows use queries, keys and values of their
// own (Beltagy et al. 2020). args.window is the local window; args.global_mask
// says which tokens are global; the row of a global token is softmax_attention
// of q_global over k_global, v_global (all keys, within is_causal); the other
// rows are softmax_attention of q, k, v with args. k_global, v_global: as k, v.
// scale, relative_bias and dropout hold for both. Work for the global rows:
// (global tokens x keys); all rows of their tiles where the call is causal, has
// a bias or dropout, or is compiled. Packed sequences are taken one by one.
at::Tensor longformer_attention(const at::Tensor& q, const at::Tensor& k,
                                const at::Tensor& v, const at::Tensor& q_global,
                                const at::Tensor& k_global,
                                const at::Tensor& v_global,
                                const SoftmaxAttentionArgs& args);

// bool [num_heads, num_blocks, num_blocks] (Zaheer et al. 2020): window_blocks
// around the diagonal (odd), the first and last global_blocks rows and columns,
// and num_random_blocks others a row. Row a of head h is drawn from (seed, h,
// a) alone. Causal: blocks up to a, no trailing global blocks, so that a row
// does not change as a sequence grows.
at::Tensor bigbird_block_mask(int64_t num_heads, int64_t num_blocks,
                              int64_t num_random_blocks,
                              int64_t window_blocks = 3,
                              std::pair<int64_t, int64_t> global_blocks = {1,
                                                                           1},
                              bool is_causal = false, int64_t seed = 0);
// softmax_attention with that mask, of ceil(length / block_size) blocks, length
// being 1 + the last position. Not causal, rows depend on the length: packed
// sequences are taken one by one, and a padded call differs from the sequence
// alone.
struct BigBirdAttentionArgs {
  int64_t block_size = 64;
  int64_t num_random_blocks = 3;
  int64_t window_blocks = 3;
  std::pair<int64_t, int64_t> global_blocks{1, 1};
  int64_t seed = 0;
  SoftmaxAttentionArgs softmax;  // window, global_mask, block_mask unset
};
at::Tensor bigbird_attention(const at::Tensor& q, const at::Tensor& k,
                             const at::Tensor& v,
                             const BigBirdAttentionArgs& args = {});

// The normalised weights w_ij / norm_i, [batch, heads, q_len, kv_len], for
// inspection: they times v are the output. Small inputs only (at most 2^26
// weights, or an error). No dropout, no state, no packing.
at::Tensor attention_matrix(const at::Tensor& q, const at::Tensor& k,
                            const LinearAttentionArgs& args);
at::Tensor attention_matrix(const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& projection,
                            const PerformerAttentionArgs& args);
at::Tensor attention_matrix(const at::Tensor& q, const at::Tensor& k,
                            const SoftmaxAttentionArgs& args);

// T5's bias by distance (Raffel et al. 2020), weight [buckets, heads] ->
// [heads, 2 max_distance + 1], for relative_bias: half of the buckets exact
// distances, the rest logarithmic up to max_distance; bidirectional: half for
// later keys. Differentiable.
at::Tensor t5_relative_bias(const at::Tensor& weight, bool bidirectional,
                            int64_t max_distance = 128);

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
