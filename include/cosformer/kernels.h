// Attention on raw memory: no torch, no Python. Layout [batch, seq, heads, dim]
// throughout.
//
// The linear engine: w_ij = phi(q_i).phi(k_j) [cos(pi/2 (i - j) / M)], out_i =
// sum_j w_ij v_j / max(sum_j w_ij, eps), i and j the positions of query and
// key. cosFormer (Qin et al., ICLR 2022) is relu with the cosine, the linear
// transformer (Katharopoulos et al., ICML 2020) is elu + 1 without it.
#ifndef COSFORMER_KERNELS_H_
#define COSFORMER_KERNELS_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "cosformer/base.h"

namespace cosformer {

enum class FeatureMap {
  kRelu,
  kElu1,
  kIdentity
};  // kIdentity expects non-negative q and k
enum class Normalizer { kSum, kNone };  // kNone: out_i = sum_j w_ij v_j

// What a linear attention computes; a constant of the layer.
struct LinearAttentionOptions {
  FeatureMap feature_map = FeatureMap::kRelu;
  int64_t reweight_len = 0;  // M, positions; 0 = no cosine
  bool is_causal = false;
  Normalizer normalizer = Normalizer::kSum;
  double eps = 1e-6;
  double rotary_base = 0.0;  // 0 = no rotary; otherwise the numerator's
                             // features are rotated (Su et al. 2021)
  bool rotary_interleaved =
      false;  // pairs (2c, 2c + 1) instead of (c, c + dim / 2)
};

// What a causal linear attention carries between calls, a row of the batch (or
// a packed sequence) each. features = 2 head_dim with the cosine ([phi cos, phi
// sin] at absolute positions), head_dim without. kv_state: [rows, kv_heads,
// features, value_dim]; k_sum: [rows, kv_heads, features]; contiguous; float64
// for float64 inputs, else float32. With rotary, kv_state holds rotated
// features and k_sum unrotated ones.
struct LinearStateView {
  void* kv_state = nullptr;
  void* k_sum = nullptr;
  int64_t* start = nullptr;     // [rows] position of the first key
  int64_t* position = nullptr;  // [rows] 1 + the position of the last real key
};
struct ConstLinearStateView {
  const void* kv_state = nullptr;  // nullptr = no state: nothing seen yet
  const void* k_sum = nullptr;
  const int64_t* start = nullptr;
  const int64_t* position = nullptr;
};

// The inputs of a call. heads of q must be a multiple of the heads of k; query
// head h reads kv head h / (heads / kv_heads). Without cu_seqlens a "row" is a
// batch row; with them batch is 1 and a row is a packed sequence.
struct LinearAttentionInputs {
  ConstView4 q;  // [batch, q_len, heads, head_dim]
  ConstView4 k;  // [batch, kv_len, kv_heads, head_dim], dtype of q
  ConstView4 v;  // [batch, kv_len, kv_heads, value_dim], dtype of q
  const int64_t* q_start =
      nullptr;  // [rows] position of a row's first query; nullptr = 0
  const int64_t* kv_start =
      nullptr;  // [rows] position of a row's first key; nullptr = 0
  const uint8_t* key_mask = nullptr;    // [batch, kv_len], nonzero = takes part
  int64_t key_mask_stride = 0;          // elements between batch rows
  const uint8_t* query_mask = nullptr;  // [batch, q_len]
  int64_t query_mask_stride = 0;
  const int64_t* cu_seqlens_q = nullptr;  // [rows + 1]
  const int64_t* cu_seqlens_k = nullptr;
  int64_t num_sequences = 0;  // rows, when packed
  ConstLinearStateView state;
};

int64_t num_rows(const LinearAttentionInputs& inputs);

// Checks everything that a kernel relies on: shapes, dtypes, options, offsets,
// starts against the state, and that no query is more than reweight_len from a
// key that it can see at nominal positions (padding included). The kernels
// below call it first.
Status check_linear_attention(const LinearAttentionOptions& options,
                              const LinearAttentionInputs& inputs);

// out: [batch, q_len, heads, value_dim], dtype of q, any strides, every element
// written. denominator: [batch, q_len, heads] contiguous, float32 (float64 for
// float64 inputs), the unclamped sum_j w_ij (0 for masked
//   queries); the backward wants it; nullptr = not wanted. Normalizer kNone
//   leaves it untouched.
// state_out: filled where its kv_state is not nullptr; must not overlap
// inputs.state. Takes every key of the call. Extra memory O(threads x (chunk x
// dim + state)).
Status linear_attention_forward(const LinearAttentionOptions& options,
                                const LinearAttentionInputs& inputs,
                                const View4& out, void* denominator,
                                const LinearStateView& state_out,
                                Executor& executor);

// Gradients. out and denominator: what the forward gave. d_state_out: gradient
// of the state that the forward returned (its start and position are not read;
// kv_state nullptr = none). dq, dk, dv, d_state_in: written where their data is
// not nullptr.
Status linear_attention_backward(
    const LinearAttentionOptions& options, const LinearAttentionInputs& inputs,
    const ConstView4& out, const void* denominator, const ConstView4& d_out,
    const ConstLinearStateView& d_state_out, const View4& dq, const View4& dk,
    const View4& dv, const LinearStateView& d_state_in, Executor& executor);

// One token a row, in place: adds the key and value at each row's
// state.position, answers the query at the same position, advances position. A
// masked key is skipped, and the position of its row stays: it follows the last
// real key. Always causal: inputs.state, starts and packing must be empty.
// q_len = kv_len = 1.
Status linear_attention_decode_step(const LinearAttentionOptions& options,
                                    const LinearAttentionInputs& inputs,
                                    const LinearStateView& state,
                                    const View4& out, Executor& executor);

// The definition itself, every weight formed one by one in double: the oracle
// of the tests. Quadratic. Same contract as above.
namespace reference {
Status linear_attention_forward(const LinearAttentionOptions& options,
                                const LinearAttentionInputs& inputs,
                                const View4& out, void* denominator,
                                const LinearStateView& state_out);
Status linear_attention_backward(const LinearAttentionOptions& options,
                                 const LinearAttentionInputs& inputs,
                                 const ConstView4& d_out,
                                 const ConstLinearStateView& d_state_out,
                                 const View4& dq, const View4& dk,
                                 const View4& dv,
                                 const LinearStateView& d_state_in);
}  // namespace reference

// ---------------------------------------------------------------------------
// Performer (Choromanski et al., ICLR 2021) on the linear engine: w_ij =
// phi(q_i).phi(k_j), phi(x) = exp(W x' - |x'|^2 / 2) / sqrt(num_features), x' =
// x / head_dim^(1/4), out_i = sum_j w_ij v_j / sum_j w_ij. The features of keys
// are kept as logarithms with a running maximum a feature, so that any scale of
// q and k is as exact in float32 as the logarithms themselves; the maxima
// cancel.

struct PerformerAttentionOptions {
  bool is_causal = false;
};

// As LinearStateView with features = num_features, scaled: the true feature
// sums are kv_state x exp(log_scale) (and k_sum likewise), up to the constant
// 1/sqrt(num_features). log_scale: [rows, kv_heads, num_features], -infinity
// where no key was seen yet; dtype of kv_state.
struct PerformerStateView {
  LinearStateView sums;
  void* log_scale = nullptr;
};
struct ConstPerformerStateView {
  ConstLinearStateView sums;
  const void* log_scale = nullptr;
};

// call: as for linear attention, its state unused (the state below stands
// instead). projection: W [num_features, head_dim] contiguous, float32 (float64
// for float64 inputs).
struct PerformerAttentionInputs {
  LinearAttentionInputs call;
  const void* projection = nullptr;
  int64_t num_features = 0;
  ConstPerformerStateView state;
};

Status check_performer_attention(const PerformerAttentionOptions& options,
                                 const PerformerAttentionInputs& inputs);

// As linear_attention_forward. log_denominator: [batch, q_len, heads]
// contiguous, log sum_j w_ij (-infinity for rows without a visible key); the
// backward wants it; nullptr = not wanted. float64 for all inputs: it may be in
// the hundreds, where an error of float32 would be one of the gradients too.
Status performer_attention_forward(const PerformerAttentionOptions& options,
                                   const PerformerAttentionInputs& inputs,
                                   const View4& out, double* log_denominator,
                                   const PerformerStateView& state_out,
                                   Executor& executor);

// As linear_attention_backward. The maxima are constants: d_state_out and
// d_state_in hold gradients of kv_state and k_sum as scaled by the log_scale
// of the state that they belong to (their log_scale is not read or written).
// d_projection: [num_features, head_dim] as projection, or nullptr.
Status performer_attention_backward(
    const PerformerAttentionOptions& options,
    const PerformerAttentionInputs& inputs, const ConstView4& out,
    const double* log_denominator, const ConstView4& d_out,
    const ConstLinearStateView& d_state_out, const View4& dq, const View4& dk,
    const View4& dv, void* d_projection, const LinearStateView& d_state_in,
    Executor& executor);

// As linear_attention_decode_step: one token a row, in place.
Status performer_attention_decode_step(const PerformerAttentionInputs& inputs,
                                       const PerformerStateView& state,
                                       const View4& out, Executor& executor);

// W: [num_features, head_dim] contiguous float64, rows N(0, I) each; orthogonal
// within blocks of head_dim rows (Gram-Schmidt of Gaussian rows, whose norms
// are drawn anew: chi with head_dim degrees of freedom), which lowers the
// variance. From Philox of seed alone: the same on every machine.
void performer_projection(int64_t num_features, int64_t head_dim,
                          bool orthogonal, uint64_t seed, double* projection);

// ---------------------------------------------------------------------------
// The softmax engine: w_ij = exp(scale q_i.k_j + bias_ij) over the visible
// keys, out_i = sum_j w_ij v_j / sum_j w_ij (Vaswani et al. 2017), tiled with
// online normalisation (Dao et al. 2022): no seq x seq matrix is ever stored,
// and work is proportional to what is visible.
//
// Key j is visible to query i when it is real (key_mask), in the same sequence
// (packing), not later (is_causal), and, where the call has a pattern, allowed
// by one of its parts: window, global tokens, blocks. p_i = q_start + i and p_j
// = kv_start + j are positions.

struct SoftmaxAttentionOptions {
  bool is_causal = false;
  double scale = 0.0;  // 0 = 1 / sqrt(head_dim)
  // A key in the window: p_j = p_i + t dilation, -window_left <= t <=
  // window_right; -1 = unbounded on that side.
  bool has_window = false;
  int64_t window_left = -1;
  int64_t window_right = -1;
  int64_t dilation = 1;
  // A weight is dropped with this probability after the normalisation, and the
  // rest divided by 1 - dropout_p; decided by softmax_dropout_keeps.
  double dropout_p = 0.0;  // in [0, 1)
  uint64_t dropout_seed = 0;
};

// As LinearAttentionInputs; no state.
struct SoftmaxAttentionInputs {
  ConstView4 q;  // [batch, q_len, heads, head_dim]
  ConstView4 k;  // [batch, kv_len, kv_heads, head_dim], dtype of q
  ConstView4 v;  // [batch, kv_len, kv_heads, value_dim], dtype of q
  const int64_t* q_start = nullptr;     // [rows]
  const int64_t* kv_start = nullptr;    // [rows]
  const uint8_t* key_mask = nullptr;    // [batch, kv_len], nonzero = takes part
  int64_t key_mask_stride = 0;          // elements between batch rows
  const uint8_t* query_mask = nullptr;  // [batch, q_len]
  int64_t query_mask_stride = 0;
  const int64_t* cu_seqlens_q = nullptr;  // [rows + 1]
  const int64_t* cu_seqlens_k = nullptr;
  int64_t num_sequences = 0;  // rows, when packed
  // [batch, kv_len], nonzero = a global token: visible to every query, and the
  // query at its position sees every key (both within is_causal). As a key it
  // is hidden by key_mask like any other; as a query only query_mask hides it.
  const uint8_t* global_mask = nullptr;
  int64_t global_mask_stride = 0;
  // [block_mask_heads, q_blocks, kv_blocks] contiguous: whether queries of
  // block p_i / block_size see keys of block p_j / block_size. Positions beyond
  // its blocks, negative ones included, see nothing and are not seen through
  // it.
  const uint8_t* block_mask = nullptr;
  int64_t block_mask_heads = 0;  // 1 (all heads alike) or heads
  int64_t q_blocks = 0, kv_blocks = 0;
  int64_t block_size = 0;
  // [heads, 2 reach + 1] contiguous, float32 (float64 for float64 inputs):
  // bias_ij = entry clamp(p_j - p_i, -reach, reach) + reach of the head (Raffel
  // et al. 2020, Press et al. 2022).
  const void* relative_bias = nullptr;
  int64_t relative_reach = 0;
};

int64_t num_rows(const SoftmaxAttentionInputs& inputs);

// Everything that a kernel below relies on; they call it first.
Status check_softmax_attention(const SoftmaxAttentionOptions& options,
                               const SoftmaxAttentionInputs& inputs);

// Whether the weight of (query position, key position) stays: from Philox of
// (seed; row, query head; query position, key position), so that tiles,
// threads and splits do not matter. row: batch row or packed sequence.
bool softmax_dropout_keeps(double dropout_p, uint64_t seed, int64_t row,
                           int64_t head, int64_t query_position,
                           int64_t key_position);

// out: [batch, q_len, heads, value_dim], dtype of q, any strides, every element
// written; a row without a visible key is 0. log_sum_exp: [batch, q_len, heads]
// contiguous, float32 (float64 for float64 inputs), log sum_j w_ij (-infinity
// where nothing is visible); the backward wants it; nullptr = not wanted. Extra
// memory O(threads x tile x dim + seq), of which up to 4 MB a thread are packed
// keys and values; patterns of scattered keys (dilation, global tokens, blocks)
// add a list of kv_len int32 a thread. Results that are no normal numbers
// (below 1.2e-38 in float32) come out as 0, here, in the backward and in
// decoding.
Status softmax_attention_forward(const SoftmaxAttentionOptions& options,
                                 const SoftmaxAttentionInputs& inputs,
                                 const View4& out, void* log_sum_exp,
                                 Executor& executor);

// Gradients; the weights are formed again from log_sum_exp. dq, dk, dv: written
// where their data is not nullptr. d_relative_bias: as relative_bias, or
// nullptr. Few heads are cut along the keys too: then up to 8 float32 copies of
// dq are summed in a fixed order, which is extra memory linear in q_len.
Status softmax_attention_backward(const SoftmaxAttentionOptions& options,
                                  const SoftmaxAttentionInputs& inputs,
                                  const ConstView4& out,
                                  const void* log_sum_exp,
                                  const ConstView4& d_out, const View4& dq,
                                  const View4& dk, const View4& dv,
                                  void* d_relative_bias, Executor& executor);

// Keys and values kept for decoding. A row's token of position p lies in slot p
// - start (ring: (p - start) mod capacity, so only the last capacity tokens
// are there).
struct KvCacheView {
  View4 keys;    // [rows, capacity, kv_heads, head_dim]
  View4 values;  // [rows, capacity, kv_heads, value_dim], dtype of keys
  const int64_t* start = nullptr;     // [rows], nullptr = 0
  int64_t* position = nullptr;        // [rows], of the next token
  const uint8_t* key_mask = nullptr;  // [rows, capacity] by slot; nullptr = all
                                      // are real
  int64_t key_mask_stride = 0;
  bool is_ring = false;
};

// One token a row, in place: writes the key and value at each row's position,
// answers the query at the same position over the visible keys of the cache,
// advances position. inputs: q, k, v [rows, 1, ...]; block_mask, relative_bias
// and query_mask as above; global_mask is by slot, [rows, capacity]; starts,
// packing and key_mask (the cache has its own) must be empty. Causal by nature:
// nothing later is in the cache. A cache without room is an error.
Status softmax_attention_decode_step(const SoftmaxAttentionOptions& options,
                                     const SoftmaxAttentionInputs& inputs,
                                     const KvCacheView& cache, const View4& out,
                                     Executor& executor);

// The definitions of the two, in double, every weight formed one by one. Same
// contracts.
namespace reference {
Status performer_attention_forward(const PerformerAttentionOptions& options,
                                   const PerformerAttentionInputs& inputs,
                                   const View4& out, double* log_denominator,
                                   const PerformerStateView& state_out);
Status performer_attention_backward(const PerformerAttentionOptions& options,
                                    const PerformerAttentionInputs& inputs,
                                    const ConstView4& d_out,
                                    const ConstLinearStateView& d_state_out,
                                    const View4& dq, const View4& dk,
                                    const View4& dv, void* d_projection,
                                    const LinearStateView& d_state_in);
Status softmax_attention_forward(const SoftmaxAttentionOptions& options,
                                 const SoftmaxAttentionInputs& inputs,
                                 const View4& out, void* log_sum_exp);
Status softmax_attention_backward(const SoftmaxAttentionOptions& options,
                                  const SoftmaxAttentionInputs& inputs,
                                  const ConstView4& d_out, const View4& dq,
                                  const View4& dk, const View4& dv,
                                  void* d_relative_bias);
// The weights w_ij / sum_j w_ij themselves (dropout excluded): [batch, heads,
// q_len, kv_len] contiguous, double.
Status softmax_attention_weights(const SoftmaxAttentionOptions& options,
                                 const SoftmaxAttentionInputs& inputs,
                                 double* weights);
}  // namespace reference

// Rotary positions (Su et al. 2021): pair c of dim/2 turns by position x
// base^(-2c/dim). Angles in double, rounded once. x, out: [batch, seq, heads,
// dim], dim even; out may equal x. positions: [batch, seq], or nullptr = start
// + index. inverse: turns back, which is the gradient.
Status apply_rotary(const ConstView4& x, const View4& out,
                    const int64_t* positions, int64_t start, double base,
                    bool interleaved, bool inverse, Executor& executor);

// table[p][2c] = sin(p / 10000^(2c/dim)), [2c + 1] = cos of it (Vaswani et al.
// 2017). table: [max_len, dim] contiguous float32.
void sinusoidal_positions(int64_t max_len, int64_t dim, float* table);

// The instruction set that the kernels use: "amx" (AVX-512, and tiles of
// bfloat16 where they are faster: softmax attention's forward), "avx512",
// "avx2" or "generic". COSFORMER_ISA forces one; one that the machine or the
// build lacks makes every kernel return kNotSupported with a message that names
// both.
std::string_view active_isa();
// Those that this machine can run, best first.
std::vector<std::string_view> supported_isas();
// For tests and benchmarks: the same as COSFORMER_ISA from here on; "" = choose
// again.
Status force_isa(std::string_view isa);

}  // namespace cosformer

#endif  // COSFORMER_KERNELS_H_
