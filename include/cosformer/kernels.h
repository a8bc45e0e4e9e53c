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

// The instruction set that the kernels use: "avx512", "avx2" or "generic".
// COSFORMER_ISA forces one; one that the machine or the build lacks makes every
// kernel return kNotSupported with a message that names both.
std::string_view active_isa();
// Those that this machine can run, best first.
std::vector<std::string_view> supported_isas();
// For tests and benchmarks: the same as COSFORMER_ISA from here on; "" = choose
// again.
Status force_isa(std::string_view isa);

}  // namespace cosformer

#endif  // COSFORMER_KERNELS_H_
