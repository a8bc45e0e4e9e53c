// Gradients of linear attention. The forward operator's backward is an operator
// of its own (linear_attention_backward), so that compilers see it; the
// backward operator's gradient comes from differentiating the portable path.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>

#include "ops/autograd_util.h"
#include "ops/linear_call.h"

namespace cosformer::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Options and tensors of a call, for the backward: references would dangle.
class SavedCall {
 public:
  static constexpr size_t kTensors = 13;

  // Appends the tensors to saved, the rest to the context.
  static void save(AutogradContext* ctx, const LinearCall& call,
                   variable_list saved) {
    saved.insert(saved.end(), {call.q, call.k, call.v});
    for (const OptionalTensor* tensor :
         {&call.q_start, &call.kv_start, &call.key_mask, &call.query_mask,
          &call.cu_seqlens_q, &call.cu_seqlens_k, &call.kv_state, &call.k_sum,
          &call.state_start, &call.state_position}) {
      saved.push_back(tensor->has_value() ? **tensor : at::Tensor());
    }
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["options"] = c10::ivalue::Tuple::create(
        {std::string(call.feature_map), call.reweight_len, call.is_causal,
         std::string(call.normalizer), call.eps, call.rotary_base,
         call.rotary_interleaved});
  }

  // saved: what get_saved_variables gave, the call's tensors from `first` on.
  SavedCall(AutogradContext* ctx, const variable_list& saved, size_t first) {
    for (size_t i = 0; i < kTensors; ++i) {
      if (saved[first + i].defined()) tensors_[i] = saved[first + i];
    }
    options_ = ctx->saved_data["options"].toTuple();
  }

  LinearCall call() const {
    const auto option = options_->elements().asArrayRef();
    return {*tensors_[0],
            *tensors_[1],
            *tensors_[2],
            tensors_[3],
            tensors_[4],
            tensors_[5],
            tensors_[6],
            tensors_[7],
            tensors_[8],
            tensors_[9],
            tensors_[10],
            tensors_[11],
            tensors_[12],
            option[0].toStringView(),
            option[1].toInt(),
            option[2].toBool(),
            option[3].toStringView(),
            option[4].toDouble(),
            option[5].toDouble(),
            option[6].toBool()};
  }

 private:
  std::array<OptionalTensor, kTensors> tensors_;
  c10::intrusive_ptr<c10::ivalue::Tuple> options_;
};

OptionalTensor if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

// Undefined where an operator returned "not needed".
at::Tensor if_needed(bool needed, const at::Tensor& tensor) {
  return needed ? tensor : at::Tensor();
}

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
    SavedCall::save(ctx, call, {out, denominator});
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
    const SavedCall saved_call(ctx, saved, 2);
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
  at::AutoDispatchBelowADInplaceOrView below;
  return call_backward(gradients, call);
}

}  // namespace cosformer::ops
