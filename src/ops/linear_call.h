// The arguments of the linear attention operators, in one place: the order of
// the schema, the structs that the implementations see, and the glue between
// the two.
#ifndef COSFORMER_OPS_LINEAR_CALL_H_
#define COSFORMER_OPS_LINEAR_CALL_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <optional>
#include <string_view>
#include <tuple>

#include "ops/call.h"

namespace cosformer::ops {

// What every linear attention operator takes. References: a call lives no
// longer than the tensors it was made from.
struct LinearCall {
  const at::Tensor& q;                 // [batch, q_len, heads, head_dim]
  const at::Tensor& k;                 // [batch, kv_len, kv_heads, head_dim]
  const at::Tensor& v;                 // [batch, kv_len, kv_heads, value_dim]
  const OptionalTensor& q_start;       // int64, 0-dim or [rows]
  const OptionalTensor& kv_start;      // int64, 0-dim or [rows]
  const OptionalTensor& key_mask;      // bool [batch, kv_len]
  const OptionalTensor& query_mask;    // bool [batch, q_len]
  const OptionalTensor& cu_seqlens_q;  // int32 or int64 [sequences + 1]
  const OptionalTensor& cu_seqlens_k;
  const OptionalTensor& kv_state;     // [rows, kv_heads, features, value_dim]
  const OptionalTensor& k_sum;        // [rows, kv_heads, features]
  const OptionalTensor& state_start;  // int64 [rows]
  const OptionalTensor& state_position;  // int64 [rows]
  std::string_view feature_map;
  std::optional<int64_t> reweight_len;  // none = no cosine
  bool is_causal;
  std::string_view normalizer;
  double eps;
  std::optional<double> rotary_base;  // none = no rotary
  bool rotary_interleaved;

  // As the kernels have them: 0 = none.
  int64_t cosine() const { return reweight_len.value_or(0); }
  double rotary() const { return rotary_base.value_or(0.0); }
  auto members() const {
    return std::tie(q, k, v, q_start, kv_start, key_mask, query_mask,
                    cu_seqlens_q, cu_seqlens_k, kv_state, k_sum, state_start,
                    state_position, feature_map, reweight_len, is_causal,
                    normalizer, eps, rotary_base, rotary_interleaved);
  }
  // The same call on other floating tensors.
  LinearCall on(const at::Tensor& q_, const at::Tensor& k_,
                const at::Tensor& v_, const OptionalTensor& kv_state_,
                const OptionalTensor& k_sum_) const {
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
            feature_map,
            reweight_len,
            is_causal,
            normalizer,
            eps,
            rotary_base,
            rotary_interleaved};
  }
};

// What the incoming state says it was made by; 0 = none.
struct StateSpec {
  std::string_view kind;
  std::string_view feature_map;
  int64_t reweight_len;
  double rotary_base;
  bool rotary_interleaved;
};

struct ForwardWanted {
  bool state;
  bool denominator;
};

// What only the backward takes.
struct LinearGradients {
  const OptionalTensor& d_out;       // [batch, q_len, heads, value_dim]
  const OptionalTensor& d_kv_state;  // of the outgoing state
  const OptionalTensor& d_k_sum;
  const at::Tensor& out;          // what the forward gave
  const at::Tensor& denominator;  // empty for normalizer "none"
  std::array<bool, 5> needs;      // q, k, v, kv_state, k_sum
};

// out, denominator, kv_state, k_sum, start, position; empty when not asked.
using ForwardOutputs = std::tuple<at::Tensor, at::Tensor, at::Tensor,
                                  at::Tensor, at::Tensor, at::Tensor>;
// dq, dk, dv, d_kv_state, d_k_sum; empty when not needed.
using BackwardOutputs =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// The members of LinearCall, StateSpec and LinearGradients in order.
using LinearTypes = TypeList<
    const at::Tensor&, const at::Tensor&, const at::Tensor&,
    const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
    const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
    const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
    const OptionalTensor&, std::string_view, std::optional<int64_t>, bool,
    std::string_view, double, std::optional<double>, bool>;
using SpecTypes =
    TypeList<std::string_view, std::string_view, int64_t, double, bool>;
using GradientTypes = TypeList<const OptionalTensor&, const OptionalTensor&,
                               const OptionalTensor&, const at::Tensor&,
                               const at::Tensor&, std::array<bool, 5>>;

using ForwardImpl = ForwardOutputs (*)(const LinearCall&, const StateSpec&,
                                       ForwardWanted);
using BackwardImpl = BackwardOutputs (*)(const LinearGradients&,
                                         const LinearCall&);

// Makes a kernel with the operator's flat signature out of an implementation.
template <ForwardImpl impl, typename = LinearTypes, typename = SpecTypes>
struct ForwardKernel;
template <ForwardImpl impl, typename... L, typename... S>
struct ForwardKernel<impl, TypeList<L...>, TypeList<S...>> {
  using Signature = ForwardOutputs(L..., S..., bool, bool);
  static ForwardOutputs call(L... linear, S... spec, bool return_state,
                             bool return_denominator) {
    return impl(LinearCall{linear...}, StateSpec{spec...},
                {return_state, return_denominator});
  }
};

template <BackwardImpl impl, typename = GradientTypes, typename = LinearTypes>
struct BackwardKernel;
template <BackwardImpl impl, typename... G, typename... L>
struct BackwardKernel<impl, TypeList<G...>, TypeList<L...>> {
  using Signature = BackwardOutputs(G..., L...);
  static BackwardOutputs call(G... gradients, L... linear) {
    return impl(LinearGradients{gradients...}, LinearCall{linear...});
  }
};

// Calls the operators through the dispatcher.
ForwardOutputs call_forward(const LinearCall& call, const StateSpec& spec,
                            ForwardWanted wanted);
BackwardOutputs call_backward(const LinearGradients& gradients,
                              const LinearCall& call);

// The implementations, one file each.
ForwardOutputs forward_cpu(const LinearCall&, const StateSpec&, ForwardWanted);
BackwardOutputs backward_cpu(const LinearGradients&, const LinearCall&);
ForwardOutputs forward_meta(const LinearCall&, const StateSpec&, ForwardWanted);
BackwardOutputs backward_meta(const LinearGradients&, const LinearCall&);
ForwardOutputs forward_portable(const LinearCall&, const StateSpec&,
                                ForwardWanted);
BackwardOutputs backward_portable(const LinearGradients&, const LinearCall&);
ForwardOutputs forward_autograd(const LinearCall&, const StateSpec&,
                                ForwardWanted);
BackwardOutputs backward_autograd(const LinearGradients&, const LinearCall&);
ForwardOutputs forward_autocast(const LinearCall&, const StateSpec&,
                                ForwardWanted);

}  // namespace cosformer::ops

#endif  // COSFORMER_OPS_LINEAR_CALL_H_
