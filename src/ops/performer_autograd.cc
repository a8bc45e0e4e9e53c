// Gradients of Performer, as linear_autograd.cc has those of linear attention:
// the backward is an operator of its own, whose gradient comes from
// differentiating the portable path. A state's log_scale is a constant.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>

#include "ops/autograd_util.h"
#include "ops/errors.h"
#include "ops/performer_call.h"
#include "ops/performer_portable.h"
#include "ops/saved_call.h"
#include "ops/second_order.h"

namespace cosformer::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using SavedPerformerCall = SavedCall<PerformerCall, PerformerTypes>;

class Performer : public torch::autograd::Function<Performer> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const at::Tensor&,
                               const at::Tensor&, const at::Tensor&,
                               const at::Tensor&, const OptionalTensor&,
                               const OptionalTensor&, const PerformerCall& call,
                               const PerformerSpec& spec,
                               ForwardWanted wanted) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [out, log_denominator, kv_state, k_sum, log_scale, start, position] =
        call_performer(call, spec, {wanted.state, true});
    SavedPerformerCall::save(ctx, call, {out, log_denominator});
    ctx->set_materialize_grads(false);
    at::Tensor shown = wanted.denominator
                           ? log_denominator
                           : at::empty({0}, log_denominator.options());
    variable_list outputs = {out,       shown, kv_state, k_sum,
                             log_scale, start, position};
    variable_list constants = {shown, log_scale, start, position};
    if (!wanted.state) constants.insert(constants.end(), {kv_state, k_sum});
    ctx->mark_non_differentiable(constants);
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list result(9);
    if (!grads[0].defined() && !grads[2].defined() && !grads[3].defined())
      return result;
    const variable_list saved = ctx->get_saved_variables();
    const SavedPerformerCall saved_call(ctx, saved, 2);
    const PerformerCall call = saved_call.call();
    const bool with_state = call.kv_state.has_value();
    const std::array<bool, 6> needs = {ctx->needs_input_grad(0),
                                       ctx->needs_input_grad(1),
                                       ctx->needs_input_grad(2),
                                       ctx->needs_input_grad(3),
                                       with_state && ctx->needs_input_grad(4),
                                       with_state && ctx->needs_input_grad(5)};
    const OptionalTensor d_out = if_defined(grads[0]);
    const OptionalTensor d_kv_state = if_defined(grads[2]);
    const OptionalTensor d_k_sum = if_defined(grads[3]);
    const auto [dq, dk, dv, dw, d_kv_in, d_k_sum_in] = call_performer_backward(
        {d_out, d_kv_state, d_k_sum, saved[0], saved[1], needs}, call);
    result[0] = if_needed(needs[0], dq);
    result[1] = if_needed(needs[1], dk);
    result[2] = if_needed(needs[2], dv);
    result[3] = if_needed(needs[3], dw);
    result[4] = if_needed(needs[4], d_kv_in);
    result[5] = if_needed(needs[5], d_k_sum_in);
    return result;
  }
};

// The backward operator as a function of the outputs' gradients and the inputs.
// out and log_denominator are what the forward makes of the inputs and have no
// gradient of their own.
class PerformerBackward : public torch::autograd::Function<PerformerBackward> {
 public:
  static variable_list forward(AutogradContext* ctx, const OptionalTensor&,
                               const OptionalTensor&, const OptionalTensor&,
                               const at::Tensor&, const at::Tensor&,
                               const at::Tensor&, const at::Tensor&,
                               const OptionalTensor&, const OptionalTensor&,
                               const PerformerGradients& gradients,
                               const PerformerCall& call) {
    at::AutoDispatchBelowADInplaceOrView below;
    const auto [dq, dk, dv, dw, d_kv, d_k_sum] =
        call_performer_backward(gradients, call);
    SavedPerformerCall::save(ctx, call,
                             {gradients.d_out.value_or(at::Tensor()),
                              gradients.d_kv_state.value_or(at::Tensor()),
                              gradients.d_k_sum.value_or(at::Tensor())});
    ctx->set_materialize_grads(false);
    variable_list outputs = {dq, dk, dv, dw, d_kv, d_k_sum};
    variable_list constants;
    const bool state =
        call.kv_state && (gradients.needs[4] || gradients.needs[5]);
    for (size_t i = 0; i < 6; ++i) {
      const bool needed = i < 4 ? gradients.needs[i] : state;
      if (!needed) constants.push_back(outputs[i]);
    }
    ctx->mark_non_differentiable(constants);
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const bool create_graph = c10::GradMode::is_enabled();
    const c10::AutoGradMode grad_mode(true);
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(
        c10::autocast_dispatch_keyset);
    const variable_list saved = ctx->get_saved_variables();
    const SavedPerformerCall saved_call(ctx, saved, 3);
    const PerformerCall call = saved_call.call();
    const OptionalTensor d_out = graph_node(if_defined(saved[0]));
    const OptionalTensor d_kv_state = graph_node(if_defined(saved[1]));
    const OptionalTensor d_k_sum = graph_node(if_defined(saved[2]));
    const at::Tensor q = graph_node(call.q), k = graph_node(call.k),
                     v = graph_node(call.v),
                     projection = graph_node(call.projection);
    const OptionalTensor kv_state = graph_node(call.kv_state);
    const OptionalTensor k_sum = graph_node(call.k_sum);
    const PerformerCall traced = call.on(q, k, v, projection, kv_state, k_sum);
    const variable_list first =
        portable_performer_gradients(traced, d_out, d_kv_state, d_k_sum,
                                     /*create_graph=*/true);
    return second_order(
        ctx, first, grads,
        {d_out, d_kv_state, d_k_sum, q, k, v, projection, kv_state, k_sum},
        /*results=*/11, create_graph);
  }
};

}  // namespace

PerformerOutputs performer_autograd(const PerformerCall& call,
                                    const PerformerSpec& spec,
                                    ForwardWanted wanted) {
  if (!is_differentiated({&call.q, &call.k, &call.v, &call.projection},
                         {&call.kv_state, &call.k_sum})) {
    at::AutoDispatchBelowADInplaceOrView below;
    return call_performer(call, spec, wanted);
  }
  const variable_list outputs =
      Performer::apply(call.q, call.k, call.v, call.projection, call.kv_state,
                       call.k_sum, call, spec, wanted);
  return {outputs[0], outputs[1], outputs[2], outputs[3],
          outputs[4], outputs[5], outputs[6]};
}

PerformerBackwardOutputs performer_backward_autograd(
    const PerformerGradients& gradients, const PerformerCall& call) {
  if (!is_differentiated({&call.q, &call.k, &call.v, &call.projection},
                         {&call.kv_state, &call.k_sum, &gradients.d_out,
                          &gradients.d_kv_state, &gradients.d_k_sum})) {
    at::AutoDispatchBelowADInplaceOrView below;
    return call_performer_backward(gradients, call);
  }
  const variable_list outputs = PerformerBackward::apply(
      gradients.d_out, gradients.d_kv_state, gradients.d_k_sum, call.q, call.k,
      call.v, call.projection, call.kv_state, call.k_sum, gradients, call);
  return {outputs[0], outputs[1], outputs[2],
          outputs[3], outputs[4], outputs[5]};
}

at::Tensor performer_decode_autograd(const PerformerDecodeCall& call,
                                     const PerformerSpec& spec) {
  if (is_differentiated({&call.q, &call.k, &call.v, &call.projection,
                         &call.kv_state, &call.k_sum},
                        {})) {
    fail(
        "performer_attention_decode_step_: updates its state in place and has "
        "no gradient: call it under torch.no_grad(), or use "
        "performer_attention with return_state");
  }
  at::AutoDispatchBelowAutograd below;
  return call_performer_decode_step(call, spec);
}

at::Tensor performer_decode_in_place(const PerformerDecodeCall& call,
                                     const PerformerSpec& spec) {
  bump_versions({&call.kv_state, &call.k_sum, &call.log_scale, &call.position});
  at::AutoDispatchBelowADInplaceOrView below;
  return call_performer_decode_step(call, spec);
}

}  // namespace cosformer::ops
