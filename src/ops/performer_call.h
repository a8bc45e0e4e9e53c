// The arguments of the Performer operators, as linear_call.h has those of the
// linear ones: order of the schema, structs, glue.
#ifndef COSFORMER_OPS_PERFORMER_CALL_H_
#define COSFORMER_OPS_PERFORMER_CALL_H_

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string_view>
#include <tuple>

#include "ops/call.h"
#include "ops/linear_call.h"

namespace cosformer::ops {

// References: a call lives no longer than the tensors it was made from.
struct PerformerCall {
  const at::Tensor& q;           // [batch, q_len, heads, head_dim]
  const at::Tensor& k;           // [batch, kv_len, kv_heads, head_dim]
  const at::Tensor& v;           // [batch, kv_len, kv_heads, value_dim]
  const at::Tensor& projection;  // [features, head_dim], as states are held
  const OptionalTensor& q_start;
  const OptionalTensor& kv_start;
  const OptionalTensor& key_mask;
  const OptionalTensor& query_mask;
  const OptionalTensor& cu_seqlens_q;
  const OptionalTensor& cu_seqlens_k;
  const OptionalTensor& kv_state;   // [rows, kv_heads, features, value_dim]
  const OptionalTensor& k_sum;      // [rows, kv_heads, features]
  const OptionalTensor& log_scale;  // likewise
  const OptionalTensor& state_start;
  const OptionalTensor& state_position;
  bool is_causal;

  auto members() const {
    return std::tie(q, k, v, projection, q_start, kv_start, key_mask,
                    query_mask, cu_seqlens_q, cu_seqlens_k, kv_state, k_sum,
                    log_scale, state_start, state_position, is_causal);
  }
  // The same call on other floating tensors.
  PerformerCall on(const at::Tensor& q_, const at::Tensor& k_,
                   const at::Tensor& v_, const at::Tensor& projection_,
                   const OptionalTensor& kv_state_,
                   const OptionalTensor& k_sum_) const {
    return {q_,        k_,       v_,         projection_,  q_start,
            kv_start,  key_mask, query_mask, cu_seqlens_q, cu_seqlens_k,
            kv_state_, k_sum_,   log_scale,  state_start,  state_position,
            is_causal};
  }
  // The linear engine's call that it is once q and k are features.
  LinearCall linear(const at::Tensor& q_, const at::Tensor& k_,
                    const at::Tensor& v_, const OptionalTensor& kv_state_,
                    const OptionalTensor& k_sum_, double eps) const {
    return {q_,
            k_,
            v_,
            q_start,
            kv_start,
            key_mask,
            query_mask,
            cu_seqlens_q,
            cu_seqlens_k,
            kv_state_,
            k_sum_,
            state_start,
            state_position,
            "identity",
            std::nullopt,
            is_causal,
            "sum",
            eps,
            std::nullopt,
            false};
  }
};

// What the incoming state says it was made by.
struct PerformerSpec {
  std::string_view kind, feature_map;
};

// What only the backward takes.
struct PerformerGradients {
  const OptionalTensor& d_out;       // [batch, q_len, heads, value_dim]
  const OptionalTensor& d_kv_state;  // of the outgoing state
  const OptionalTensor& d_k_sum;
  const at::Tensor& out;              // what the forward gave
  const at::Tensor& log_denominator;  // float64
  std::array<bool, 6> needs;          // q, k, v, projection, kv_state, k_sum
};

// out, log_denominator, kv_state, k_sum, log_scale, start, position; empty when
// not asked.
using PerformerOutputs =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor,
               at::Tensor, at::Tensor>;
// dq, dk, dv, d_projection, d_kv_state, d_k_sum; empty when not needed.
using PerformerBackwardOutputs = std::tuple<at::Tensor, at::Tensor, at::Tensor,
                                            at::Tensor, at::Tensor, at::Tensor>;

// One token a row, in place.
struct PerformerDecodeCall {
  const at::Tensor& q;           // [rows, 1, heads, head_dim]
  const at::Tensor& k;           // [rows, 1, kv_heads, head_dim]
  const at::Tensor& v;           // [rows, 1, kv_heads, value_dim]
  const at::Tensor& projection;  // [features, head_dim]
  at::Tensor& kv_state;          // updated in place, as the three that follow
  at::Tensor& k_sum;
  at::Tensor& log_scale;
  at::Tensor& position;
  const at::Tensor& start;
  const OptionalTensor& key_mask;
};

using PerformerTypes = TypeList<
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
    const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
    const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
    const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
    const OptionalTensor&, const OptionalTensor&, bool>;
using PerformerGradientTypes =
    TypeList<const OptionalTensor&, const OptionalTensor&,
             const OptionalTensor&, const at::Tensor&, const at::Tensor&,
             std::array<bool, 6>>;
using PerformerDecodeTypes =
    TypeList<const at::Tensor&, const at::Tensor&, const at::Tensor&,
             const at::Tensor&, at::Tensor&, at::Tensor&, at::Tensor&,
             at::Tensor&, const at::Tensor&, const OptionalTensor&>;

using PerformerForwardImpl = PerformerOutputs (*)(const PerformerCall&,
                                                  const PerformerSpec&,
                                                  ForwardWanted);
using PerformerBackwardImpl = PerformerBackwardOutputs (*)(
    const PerformerGradients&, const PerformerCall&);
using PerformerDecodeImpl = at::Tensor (*)(const PerformerDecodeCall&,
                                           const PerformerSpec&);

// Kernels with the operators' flat signatures out of implementations.
template <PerformerForwardImpl impl, typename = PerformerTypes>
struct PerformerForwardKernel;
template <PerformerForwardImpl impl, typename... P>
struct PerformerForwardKernel<impl, TypeList<P...>> {
  using Signature = PerformerOutputs(P..., std::string_view, std::string_view,
                                     bool, bool);
  static PerformerOutputs call(P... performer, std::string_view state_kind,
                               std::string_view state_feature_map,
                               bool return_state, bool return_denominator) {
    return impl(PerformerCall{performer...}, {state_kind, state_feature_map},
                {return_state, return_denominator});
  }
};
template <PerformerBackwardImpl impl, typename = PerformerGradientTypes,
          typename = PerformerTypes>
struct PerformerBackwardKernel;
template <PerformerBackwardImpl impl, typename... G, typename... P>
struct PerformerBackwardKernel<impl, TypeList<G...>, TypeList<P...>> {
  using Signature = PerformerBackwardOutputs(G..., P...);
  static PerformerBackwardOutputs call(G... gradients, P... performer) {
    return impl(PerformerGradients{gradients...}, PerformerCall{performer...});
  }
};
template <PerformerDecodeImpl impl, typename = PerformerDecodeTypes>
struct PerformerDecodeKernel;
template <PerformerDecodeImpl impl, typename... D>
struct PerformerDecodeKernel<impl, TypeList<D...>> {
  using Signature = at::Tensor(D..., std::string_view, std::string_view);
  static at::Tensor call(D... decode, std::string_view state_kind,
                         std::string_view state_feature_map) {
    return impl(PerformerDecodeCall{decode...},
                {state_kind, state_feature_map});
  }
};

// Through the dispatcher.
PerformerOutputs call_performer(const PerformerCall& call,
                                const PerformerSpec& spec,
                                ForwardWanted wanted);
PerformerBackwardOutputs call_performer_backward(
    const PerformerGradients& gradients, const PerformerCall& call);
at::Tensor call_performer_decode_step(const PerformerDecodeCall& call,
                                      const PerformerSpec& spec);

PerformerOutputs performer_cpu(const PerformerCall&, const PerformerSpec&,
                               ForwardWanted);
PerformerBackwardOutputs performer_backward_cpu(const PerformerGradients&,
                                                const PerformerCall&);
at::Tensor performer_decode_cpu(const PerformerDecodeCall&,
                                const PerformerSpec&);
PerformerOutputs performer_meta(const PerformerCall&, const PerformerSpec&,
                                ForwardWanted);
PerformerBackwardOutputs performer_backward_meta(const PerformerGradients&,
                                                 const PerformerCall&);
at::Tensor performer_decode_meta(const PerformerDecodeCall&,
                                 const PerformerSpec&);
// Devices without kernels.
PerformerOutputs performer_fallback(const PerformerCall&, const PerformerSpec&,
                                    ForwardWanted);
PerformerBackwardOutputs performer_backward_fallback(const PerformerGradients&,
                                                     const PerformerCall&);
at::Tensor performer_decode_fallback(const PerformerDecodeCall&,
                                     const PerformerSpec&);
PerformerOutputs performer_autograd(const PerformerCall&, const PerformerSpec&,
                                    ForwardWanted);
PerformerBackwardOutputs performer_backward_autograd(const PerformerGradients&,
                                                     const PerformerCall&);
at::Tensor performer_decode_autograd(const PerformerDecodeCall&,
                                     const PerformerSpec&);
at::Tensor performer_decode_in_place(const PerformerDecodeCall&,
                                     const PerformerSpec&);
PerformerOutputs performer_autocast(const PerformerCall&, const PerformerSpec&,
                                    ForwardWanted);
at::Tensor performer_decode_autocast(const PerformerDecodeCall&,
                                     const PerformerSpec&);

// [num_features, head_dim], float32.
using ProjectionSignature = at::Tensor(int64_t num_features, int64_t head_dim,
                                       bool orthogonal, int64_t seed,
                                       std::optional<at::Device> device);
ProjectionSignature projection_cpu;
ProjectionSignature projection_meta;
// Made on the CPU and moved.
ProjectionSignature projection_select;

}  // namespace cosformer::ops

#endif  // COSFORMER_OPS_PERFORMER_CALL_H_
