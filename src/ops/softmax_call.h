// The arguments of the softmax attention operators, as linear_call.h has them
// for the linear ones.
#ifndef COSFORMER_OPS_SOFTMAX_CALL_H_
#define COSFORMER_OPS_SOFTMAX_CALL_H_

#include <array>
#include <tuple>

#include "ops/call.h"

namespace cosformer::ops {

// What the forward and the backward operator take.
struct SoftmaxCall {
  const at::Tensor& q;                 // [batch, q_len, heads, head_dim]
  const at::Tensor& k;                 // [batch, kv_len, kv_heads, head_dim]
  const at::Tensor& v;                 // [batch, kv_len, kv_heads, value_dim]
  const OptionalTensor& q_start;       // int64, 0-dim or [rows]
  const OptionalTensor& kv_start;      // int64, 0-dim or [rows]
  const OptionalTensor& key_mask;      // bool [batch, kv_len]
  const OptionalTensor& query_mask;    // bool [batch, q_len]
  const OptionalTensor& cu_seqlens_q;  // int32 or int64 [sequences + 1]
  const OptionalTensor& cu_seqlens_k;
  const OptionalTensor& global_mask;  // bool [batch, kv_len]
  const OptionalTensor& block_mask;   // bool [heads or 1, q_blocks, kv_blocks]
  const OptionalTensor& relative_bias;  // [heads, 2 reach + 1]
  // int64, 0-dim: a tensor, so that a compiled step serves every seed.
  const OptionalTensor& dropout_seed;
  bool is_causal;
  std::optional<double> scale;         // none = 1 / sqrt(head_dim)
  std::optional<int64_t> window_left;  // both or neither; -1 = unbounded
  std::optional<int64_t> window_right;
  int64_t dilation;
  std::optional<int64_t> block_size;
  double dropout_p;

  bool has_pattern() const { return window_left || global_mask || block_mask; }
  auto members() const {
    return std::tie(q, k, v, q_start, kv_start, key_mask, query_mask,
                    cu_seqlens_q, cu_seqlens_k, global_mask, block_mask,
                    relative_bias, dropout_seed, is_causal, scale, window_left,
                    window_right, dilation, block_size, dropout_p);
  }
  // The same call on other floating tensors.
  SoftmaxCall on(const at::Tensor& q_, const at::Tensor& k_,
                 const at::Tensor& v_, const OptionalTensor& bias) const {
    return {q_,          k_,           v_,           q_start,      kv_start,
            key_mask,    query_mask,   cu_seqlens_q, cu_seqlens_k, global_mask,
            block_mask,  bias,         dropout_seed, is_causal,    scale,
            window_left, window_right, dilation,     block_size,   dropout_p};
  }
};

// What only the backward takes.
struct SoftmaxGradients {
  const at::Tensor& d_out;        // [batch, q_len, heads, value_dim]
  const at::Tensor& out;          // what the forward gave
  const at::Tensor& log_sum_exp;  // [batch, q_len, heads]
  std::array<bool, 4> needs;      // q, k, v, relative_bias
};

// out, log_sum_exp; empty when not asked.
using SoftmaxOutputs = std::tuple<at::Tensor, at::Tensor>;
// dq, dk, dv, d_relative_bias; empty when not needed.
using SoftmaxBackwardOutputs =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// The one-token step over a cache.
struct SoftmaxDecodeCall {
  const at::Tensor& q;   // [rows, 1, heads, head_dim]
  const at::Tensor& k;   // [rows, 1, kv_heads, head_dim]
  const at::Tensor& v;   // [rows, 1, kv_heads, value_dim]
  at::Tensor& keys;      // [rows, capacity, kv_heads, head_dim]; updated in
  at::Tensor& values;    // place, as are values [.., value_dim]
  at::Tensor& position;  // and position, int64 [rows]
  const OptionalTensor& start;        // int64 [rows]
  const OptionalTensor& cache_mask;   // bool [rows, capacity], by slot
  const OptionalTensor& query_mask;   // bool [rows, 1]
  const OptionalTensor& global_mask;  // bool [rows, capacity], by slot
  const OptionalTensor& block_mask;   // as in SoftmaxCall
  const OptionalTensor& relative_bias;
  bool is_ring;
  std::optional<double> scale;
  std::optional<int64_t> window_left;
  std::optional<int64_t> window_right;
  int64_t dilation;
  std::optional<int64_t> block_size;
};

// The members in order.
using SoftmaxTypes = TypeList<
    const at::Tensor&, const at::Tensor&, const at::Tensor&,
    const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
    const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
    const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
    const OptionalTensor&, bool, std::optional<double>, std::optional<int64_t>,
    std::optional<int64_t>, int64_t, std::optional<int64_t>, double>;
using SoftmaxGradientTypes = TypeList<const at::Tensor&, const at::Tensor&,
                                      const at::Tensor&, std::array<bool, 4>>;
using SoftmaxDecodeTypes = TypeList<
    const at::Tensor&, const at::Tensor&, const at::Tensor&, at::Tensor&,
    at::Tensor&, at::Tensor&, const OptionalTensor&, const OptionalTensor&,
    const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
    const OptionalTensor&, bool, std::optional<double>, std::optional<int64_t>,
    std::optional<int64_t>, int64_t, std::optional<int64_t>>;

using SoftmaxForwardImpl = SoftmaxOutputs (*)(const SoftmaxCall&,
                                              bool return_log_sum_exp);
using SoftmaxBackwardImpl = SoftmaxBackwardOutputs (*)(const SoftmaxGradients&,
                                                       const SoftmaxCall&);
using SoftmaxDecodeImpl = at::Tensor (*)(const SoftmaxDecodeCall&);

// Makes a kernel with the operator's flat signature out of an implementation.
template <SoftmaxForwardImpl impl, typename = SoftmaxTypes>
struct SoftmaxForwardKernel;
template <SoftmaxForwardImpl impl, typename... S>
struct SoftmaxForwardKernel<impl, TypeList<S...>> {
  using Signature = SoftmaxOutputs(S..., bool);
  static SoftmaxOutputs call(S... softmax, bool return_log_sum_exp) {
    return impl(SoftmaxCall{softmax...}, return_log_sum_exp);
  }
};

template <SoftmaxBackwardImpl impl, typename = SoftmaxGradientTypes,
          typename = SoftmaxTypes>
struct SoftmaxBackwardKernel;
template <SoftmaxBackwardImpl impl, typename... G, typename... S>
struct SoftmaxBackwardKernel<impl, TypeList<G...>, TypeList<S...>> {
  using Signature = SoftmaxBackwardOutputs(G..., S...);
  static SoftmaxBackwardOutputs call(G... gradients, S... softmax) {
    return impl(SoftmaxGradients{gradients...}, SoftmaxCall{softmax...});
  }
};

template <SoftmaxDecodeImpl impl, typename = SoftmaxDecodeTypes>
struct SoftmaxDecodeKernel;
template <SoftmaxDecodeImpl impl, typename... D>
struct SoftmaxDecodeKernel<impl, TypeList<D...>> {
  using Signature = at::Tensor(D...);
  static at::Tensor call(D... decode) {
    return impl(SoftmaxDecodeCall{decode...});
  }
};

// Calls the operators through the dispatcher.
SoftmaxOutputs call_softmax(const SoftmaxCall& call, bool return_log_sum_exp);
SoftmaxBackwardOutputs call_softmax_backward(const SoftmaxGradients& gradients,
                                             const SoftmaxCall& call);
at::Tensor call_softmax_decode(const SoftmaxDecodeCall& call);

// The implementations, one file each.
SoftmaxOutputs softmax_cpu(const SoftmaxCall&, bool);
SoftmaxBackwardOutputs softmax_backward_cpu(const SoftmaxGradients&,
                                            const SoftmaxCall&);
SoftmaxOutputs softmax_meta(const SoftmaxCall&, bool);
SoftmaxBackwardOutputs softmax_backward_meta(const SoftmaxGradients&,
                                             const SoftmaxCall&);
SoftmaxOutputs softmax_portable(const SoftmaxCall&, bool);
SoftmaxBackwardOutputs softmax_backward_portable(const SoftmaxGradients&,
                                                 const SoftmaxCall&);
SoftmaxOutputs softmax_autograd(const SoftmaxCall&, bool);
SoftmaxBackwardOutputs softmax_backward_autograd(const SoftmaxGradients&,
                                                 const SoftmaxCall&);
SoftmaxOutputs softmax_autocast(const SoftmaxCall&, bool);

at::Tensor softmax_decode_cpu(const SoftmaxDecodeCall&);
at::Tensor softmax_decode_meta(const SoftmaxDecodeCall&);
at::Tensor softmax_decode_portable(const SoftmaxDecodeCall&);
at::Tensor softmax_decode_autograd(const SoftmaxDecodeCall&);
// Tells autograd, also in inference mode, that the cache changes.
at::Tensor softmax_decode_in_place(const SoftmaxDecodeCall&);
at::Tensor softmax_decode_autocast(const SoftmaxDecodeCall&);

}  // namespace cosformer::ops

#endif  // COSFORMER_OPS_SOFTMAX_CALL_H_
