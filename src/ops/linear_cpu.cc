// The linear attention operators on CPU tensors: views and buffers for the
// kernels, nothing else.
#include <ATen/ops/zeros.h>

#include "ops/backward_buffers.h"
#include "ops/cpu_inputs.h"
#include "ops/errors.h"
#include "ops/executor.h"
#include "ops/linear_call.h"
#include "ops/linear_checks.h"

namespace cosformer::ops {
namespace {

bool is_normalized(const LinearCall& call) { return call.normalizer == "sum"; }

}  // namespace

ForwardOutputs forward_cpu(const LinearCall& call, const StateSpec& spec,
                           ForwardWanted wanted) {
  check_state_spec(call, spec);
  check_linear_call(call);
  const CpuInputs inputs(call);
  const at::TensorOptions same = call.q.options();
  const at::TensorOptions accumulation = same.dtype(accumulation_dtype(call));
  const at::TensorOptions integers = same.dtype(at::kLong);

  at::Tensor out = empty(
      {call.q.size(0), call.q.size(1), call.q.size(2), call.v.size(3)}, same);
  const bool with_denominator = wanted.denominator && is_normalized(call);
  at::Tensor denominator =
      with_denominator ? empty({call.q.size(0), call.q.size(1), call.q.size(2)},
                               accumulation)
                       : empty({0}, accumulation);
  at::Tensor kv_state, k_sum, start, position;
  LinearStateView state_out;
  if (wanted.state) {
    const int64_t rows = inputs.rows(), kv_heads = call.k.size(2);
    const int64_t features = call.k.size(3) * (call.reweight_len ? 2 : 1);
    kv_state = empty({rows, kv_heads, features, call.v.size(3)}, accumulation);
    k_sum = empty({rows, kv_heads, features}, accumulation);
    start = empty({rows}, integers);
    position = empty({rows}, integers);
    state_out = {kv_state.mutable_data_ptr(), k_sum.mutable_data_ptr(),
                 start.mutable_data_ptr<int64_t>(),
                 position.mutable_data_ptr<int64_t>()};
  } else {
    kv_state = empty({0}, accumulation);
    k_sum = empty({0}, accumulation);
    start = empty({0}, integers);
    position = empty({0}, integers);
  }
  throw_if_error(linear_attention_forward(
      kernel_options(call), inputs.inputs(), mutable_view(out),
      with_denominator ? denominator.mutable_data_ptr() : nullptr, state_out,
      torch_executor()));
  return {out, denominator, kv_state, k_sum, start, position};
}

BackwardOutputs backward_cpu(const LinearGradients& gradients,
                             const LinearCall& call) {
  check_linear_call(call);
  check_gradients(gradients, call);
  const CpuInputs inputs(call);
  const at::TensorOptions same = call.q.options();
  const at::TensorOptions accumulation = same.dtype(accumulation_dtype(call));

  at::Tensor out_holder, d_out_holder;
  const at::Tensor d_out = gradients.d_out
                               ? dense_rows(*gradients.d_out, d_out_holder)
                               : at::zeros(gradients.out.sizes(), same);
  const at::Tensor& out = dense_rows(gradients.out, out_holder);
  at::Tensor denominator;
  if (is_normalized(call)) denominator = gradients.denominator.contiguous();
  const int64_t features = call.k.size(3) * (call.reweight_len ? 2 : 1);
  StateGradients state(
      gradients.d_kv_state, gradients.d_k_sum,
      {inputs.rows(), call.k.size(2), features, call.v.size(3)}, accumulation);
  if (call.kv_state && (gradients.needs[3] || gradients.needs[4]))
    state.want(*call.kv_state, *call.k_sum);
  at::Tensor dq = gradient_of(gradients.needs[0], call.q);
  at::Tensor dk = gradient_of(gradients.needs[1], call.k);
  at::Tensor dv = gradient_of(gradients.needs[2], call.v);
  throw_if_error(linear_attention_backward(
      kernel_options(call), inputs.inputs(), view(out),
      is_normalized(call) ? denominator.const_data_ptr() : nullptr, view(d_out),
      state.out(), target(gradients.needs[0], dq),
      target(gradients.needs[1], dk), target(gradients.needs[2], dv),
      state.in(), torch_executor()));
  return {dq, dk, dv, state.d_kv_in(), state.d_k_sum_in()};
}

}  // namespace cosformer::ops
