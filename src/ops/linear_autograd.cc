// Gradients of linear attention. The forward operator's backward is an operator
// of its own (linear_attention_backward), so that compilers see it; the
// backward operator's gradient comes from differentiating the portable path.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>

#include "ops/autograd_util.h"
#include "ops/linear_call.h"
#include "ops/linear_portable.h"
#include "ops/saved_call.h"
#include "ops/second_order.h"

namespace cosformer::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using SavedLinearCall = SavedCall<LinearCall, LinearTypes>;

class LinearAttention : public torch::autograd::Function<LinearAttention> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const at::Tensor&,
                               const at::Tensor&, const at::Tensor&,
                               const OptionalTensor&, const OptionalTensor&,
                               const LinearCall& call, const StateSpec& spec,
                               ForwardWanted wanted) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [out, denominator, kv_state, k_sum, start, position] =
        call_forward(call, spec, {wanted.state, true});
    SavedLinearCall::save(ctx, call, {out, denominator});
    ctx->set_materialize_grads(false);
    at::Tensor shown = wanted.denominator
                           ? denominator
                           : at::empty({0}, denominator.options());
    variable_list outputs = {out, shown, kv_state, k_sum, start, position};
    variable_list constants = {shown, start, position};
    if (!wanted.state) constants.insert(constants.end(), {kv_state, k_sum});
    ctx->mark_non_differentiable(constants);
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list result(8);
    if (!grads[0].defined() && !grads[2].defined() && !grads[3].defined())
      return result;
    const variable_list saved = ctx->get_saved_variables();
    const SavedLinearCall saved_call(ctx, saved, 2);
    const LinearCall call = saved_call.call();
    const bool with_state = call.kv_state.has_value();
    const std::array<bool, 5> needs = {
        ctx->needs_input_grad(0), ctx->needs_input_grad(1),
        ctx->needs_input_grad(2), with_state && ctx->needs_input_grad(3),
        with_state && ctx->needs_input_grad(4)};
    const OptionalTensor d_out = if_defined(grads[0]);
    const OptionalTensor d_kv_state = if_defined(grads[2]);
    const OptionalTensor d_k_sum = if_defined(grads[3]);
    const auto [dq, dk, dv, d_kv_in, d_k_sum_in] = call_backward(
        {d_out, d_kv_state, d_k_sum, saved[0], saved[1], needs}, call);
    result[0] = if_needed(needs[0], dq);
    result[1] = if_needed(needs[1], dk);
    result[2] = if_needed(needs[2], dv);
    result[3] = if_needed(needs[3], d_kv_in);
    result[4] = if_needed(needs[4], d_k_sum_in);
    return result;
  }
};

// The backward operator as a function of the outputs' gradients and the inputs.
// out and denominator are what the forward makes of the inputs and have no
// gradient of their own.
class LinearAttentionBackward
    : public torch::autograd::Function<LinearAttentionBackward> {
 public:
  static variable_list forward(AutogradContext* ctx, const OptionalTensor&,
                               const OptionalTensor&, const OptionalTensor&,
                               const at::Tensor&, const at::Tensor&,
                               const at::Tensor&, const OptionalTensor&,
                               const OptionalTensor&,
                               const LinearGradients& gradients,
                               const LinearCall& call) {
    at::AutoDispatchBelowADInplaceOrView below;
    const auto [dq, dk, dv, d_kv, d_k_sum] = call_backward(gradients, call);
    SavedLinearCall::save(ctx, call,
                          {gradients.d_out.value_or(at::Tensor()),
                           gradients.d_kv_state.value_or(at::Tensor()),
                           gradients.d_k_sum.value_or(at::Tensor())});
    ctx->set_materialize_grads(false);
    variable_list outputs = {dq, dk, dv, d_kv, d_k_sum};
    variable_list constants;
    const bool state =
        call.kv_state && (gradients.needs[3] || gradients.needs[4]);
    for (size_t i = 0; i < 5; ++i) {
      const bool needed = i < 3 ? gradients.needs[i] : state;
      if (!needed) constants.push_back(outputs[i]);
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
    const SavedLinearCall saved_call(ctx, saved, 3);
    const LinearCall call = saved_call.call();
    const OptionalTensor d_out = graph_node(if_defined(saved[0]));
    const OptionalTensor d_kv_state = graph_node(if_defined(saved[1]));
    const OptionalTensor d_k_sum = graph_node(if_defined(saved[2]));
    const at::Tensor q = graph_node(call.q), k = graph_node(call.k),
                     v = graph_node(call.v);
    const OptionalTensor kv_state = graph_node(call.kv_state);
    const OptionalTensor k_sum = graph_node(call.k_sum);
    const LinearCall traced = call.on(q, k, v, kv_state, k_sum);
    const variable_list first =
        gradients_of(traced, d_out, d_kv_state, d_k_sum);
    return second_order(ctx, first, grads,
                        {d_out, d_kv_state, d_k_sum, q, k, v, kv_state, k_sum},
                        /*results=*/10, create_graph);
  }

 private:
  // dq, dk, dv, d_kv_state, d_k_sum with their graph; undefined where nothing
  // depends on the input.
  static variable_list gradients_of(const LinearCall& call,
                                    const OptionalTensor& d_out,
                                    const OptionalTensor& d_kv_state,
                                    const OptionalTensor& d_k_sum) {
    const ForwardOutputs outputs =
        portable_linear_attention(call, d_kv_state || d_k_sum, d_out);
    variable_list roots, root_gradients;
    const auto root = [&](const at::Tensor& output, const OptionalTensor& d) {
      if (!d || !output.requires_grad()) return;
      roots.push_back(output);
      root_gradients.push_back(*d);
    };
    root(std::get<0>(outputs), d_out);
    root(std::get<2>(outputs), d_kv_state);
    root(std::get<3>(outputs), d_k_sum);
    variable_list inputs = {call.q, call.k, call.v};
    if (call.kv_state)
      inputs.insert(inputs.end(), {*call.kv_state, *call.k_sum});
    variable_list result(5);
    if (roots.empty()) return result;
    const variable_list found = torch::autograd::grad(
        roots, inputs, root_gradients, /*retain_graph=*/true,
        /*create_graph=*/true, /*allow_unused=*/true);
    std::copy(found.begin(), found.end(), result.begin());
    return result;
  }
};

}  // namespace

ForwardOutputs forward_autograd(const LinearCall& call, const StateSpec& spec,
                                ForwardWanted wanted) {
  if (!is_differentiated({&call.q, &call.k, &call.v},
                         {&call.kv_state, &call.k_sum})) {
    at::AutoDispatchBelowADInplaceOrView below;
    return call_forward(call, spec, wanted);
  }
  const variable_list outputs = LinearAttention::apply(
      call.q, call.k, call.v, call.kv_state, call.k_sum, call, spec, wanted);
  return {outputs[0], outputs[1], outputs[2],
          outputs[3], outputs[4], outputs[5]};
}

BackwardOutputs backward_autograd(const LinearGradients& gradients,
                                  const LinearCall& call) {
  if (!is_differentiated({&call.q, &call.k, &call.v},
                         {&call.kv_state, &call.k_sum, &gradients.d_out,
                          &gradients.d_kv_state, &gradients.d_k_sum})) {
    at::AutoDispatchBelowADInplaceOrView below;
    return call_backward(gradients, call);
  }
  const variable_list outputs = LinearAttentionBackward::apply(
      gradients.d_out, gradients.d_kv_state, gradients.d_k_sum, call.q, call.k,
      call.v, call.kv_state, call.k_sum, gradients, call);
  return {outputs[0], outputs[1], outputs[2], outputs[3], outputs[4]};
}

}  // namespace cosformer::ops
