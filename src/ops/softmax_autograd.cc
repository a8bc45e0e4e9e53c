// Gradients of softmax attention. The forward operator's backward is an
// operator of its own (softmax_attention_backward), so that compilers see it;
// the backward operator's gradient comes from differentiating the portable
// path.
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>

#include "ops/autograd_util.h"
#include "ops/errors.h"
#include "ops/saved_call.h"
#include "ops/second_order.h"
#include "ops/softmax_call.h"
#include "ops/softmax_portable.h"

namespace cosformer::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using SavedSoftmaxCall = SavedCall<SoftmaxCall, SoftmaxTypes>;

class SoftmaxAttention : public torch::autograd::Function<SoftmaxAttention> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const at::Tensor&,
                               const at::Tensor&, const at::Tensor&,
                               const OptionalTensor&, const SoftmaxCall& call,
                               bool return_log_sum_exp) {
    at::AutoDispatchBelowADInplaceOrView below;
    const auto [out, log_sum_exp] = call_softmax(call, true);
    SavedSoftmaxCall::save(ctx, call, {out, log_sum_exp});
    ctx->set_materialize_grads(false);
    const at::Tensor shown =
        return_log_sum_exp ? log_sum_exp : log_sum_exp.new_empty({0});
    ctx->mark_non_differentiable({shown});
    return {out, shown};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list result(6);
    if (!grads[0].defined()) return result;
    const variable_list saved = ctx->get_saved_variables();
    const SavedSoftmaxCall saved_call(ctx, saved, 2);
    const SoftmaxCall call = saved_call.call();
    const std::array<bool, 4> needs = {
        ctx->needs_input_grad(0), ctx->needs_input_grad(1),
        ctx->needs_input_grad(2),
        call.relative_bias && ctx->needs_input_grad(3)};
    const auto [dq, dk, dv, d_bias] =
        call_softmax_backward({grads[0], saved[0], saved[1], needs}, call);
    result[0] = if_needed(needs[0], dq);
    result[1] = if_needed(needs[1], dk);
    result[2] = if_needed(needs[2], dv);
    result[3] = if_needed(needs[3], d_bias);
    return result;
  }
};

// The backward operator as a function of the output's gradient and the inputs.
// out and log_sum_exp are what the forward makes of the inputs and have no
// gradient of their own.
class SoftmaxAttentionBackward
    : public torch::autograd::Function<SoftmaxAttentionBackward> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor&,
                               const at::Tensor&, const at::Tensor&,
                               const at::Tensor&, const OptionalTensor&,
                               const SoftmaxGradients& gradients,
                               const SoftmaxCall& call) {
    at::AutoDispatchBelowADInplaceOrView below;
    const auto [dq, dk, dv, d_bias] = call_softmax_backward(gradients, call);
    SavedSoftmaxCall::save(ctx, call, {gradients.d_out});
    ctx->set_materialize_grads(false);
    const variable_list outputs = {dq, dk, dv, d_bias};
    variable_list constants;
    for (size_t i = 0; i < 4; ++i) {
      if (!gradients.needs[i] || (i == 3 && !call.relative_bias))
        constants.push_back(outputs[i]);
    }
    ctx->mark_non_differentiable(constants);
    return outputs;
  }

  // Differentiates the portable path once to have the gradients as functions,
  // and these once more.
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const bool create_graph = c10::GradMode::is_enabled();
    const c10::AutoGradMode grad_mode(true);
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(
        c10::autocast_dispatch_keyset);
    const variable_list saved = ctx->get_saved_variables();
    const SavedSoftmaxCall saved_call(ctx, saved, 1);
    const SoftmaxCall call = saved_call.call();
    const at::Tensor d_out = graph_node(saved[0]), q = graph_node(call.q),
                     k = graph_node(call.k), v = graph_node(call.v);
    const OptionalTensor bias = graph_node(call.relative_bias);
    variable_list inputs = {q, k, v};
    if (bias) inputs.push_back(*bias);
    const at::Tensor out =
        std::get<0>(portable_softmax_attention(call.on(q, k, v, bias), d_out));
    const variable_list first = torch::autograd::grad(
        {out}, inputs, {d_out}, /*retain_graph=*/true, /*create_graph=*/true,
        /*allow_unused=*/true);
    return second_order(ctx, first, grads, {d_out, q, k, v, bias},
                        /*results=*/7, create_graph);
  }
};

}  // namespace

SoftmaxOutputs softmax_autograd(const SoftmaxCall& call,
                                bool return_log_sum_exp) {
  if (!is_differentiated({&call.q, &call.k, &call.v}, {&call.relative_bias})) {
    at::AutoDispatchBelowADInplaceOrView below;
    return call_softmax(call, return_log_sum_exp);
  }
  const variable_list outputs = SoftmaxAttention::apply(
      call.q, call.k, call.v, call.relative_bias, call, return_log_sum_exp);
  return {outputs[0], outputs[1]};
}

SoftmaxBackwardOutputs softmax_backward_autograd(
    const SoftmaxGradients& gradients, const SoftmaxCall& call) {
  if (!is_differentiated({&gradients.d_out, &call.q, &call.k, &call.v},
                         {&call.relative_bias})) {
    at::AutoDispatchBelowADInplaceOrView below;
    return call_softmax_backward(gradients, call);
  }
  const variable_list outputs =
      SoftmaxAttentionBackward::apply(gradients.d_out, call.q, call.k, call.v,
                                      call.relative_bias, gradients, call);
  return {outputs[0], outputs[1], outputs[2], outputs[3]};
}

at::Tensor softmax_decode_autograd(const SoftmaxDecodeCall& call) {
  if (is_differentiated({&call.q, &call.k, &call.v, &call.keys, &call.values},
                        {&call.relative_bias})) {
    fail(
        "softmax_attention_decode_step_: updates its cache in place and has no "
        "gradient: call it under torch.no_grad(), or use softmax_attention");
  }
  at::AutoDispatchBelowAutograd below;
  return call_softmax_decode(call);
}

at::Tensor softmax_decode_in_place(const SoftmaxDecodeCall& call) {
  bump_versions({&call.keys, &call.values, &call.position});
  at::AutoDispatchBelowADInplaceOrView below;
  return call_softmax_decode(call);
}

}  // namespace cosformer::ops
