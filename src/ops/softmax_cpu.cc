// The softmax attention operators on CPU tensors: views and buffers for the
// kernels, nothing else.
#include <ATen/ops/empty.h>

#include "ops/backward_buffers.h"
#include "ops/call_checks.h"
#include "ops/errors.h"
#include "ops/executor.h"
#include "ops/softmax_call.h"
#include "ops/softmax_checks.h"
#include "ops/softmax_inputs.h"

namespace cosformer::ops {

SoftmaxOutputs softmax_cpu(const SoftmaxCall& call, bool return_log_sum_exp) {
  check_softmax_call(call);
  const SoftmaxInputs inputs(call);
  const at::TensorOptions same = call.q.options();
  const at::TensorOptions accumulation = same.dtype(accumulation_dtype(call.q));
  const int64_t batch = call.q.size(0), q_len = call.q.size(1),
                heads = call.q.size(2);
  at::Tensor out = empty({batch, q_len, heads, call.v.size(3)}, same);
  at::Tensor log_sum_exp = return_log_sum_exp
                               ? empty({batch, q_len, heads}, accumulation)
                               : empty({0}, accumulation);
  throw_if_error(softmax_attention_forward(
      kernel_options(call), inputs.inputs(), mutable_view(out),
      return_log_sum_exp ? log_sum_exp.mutable_data_ptr() : nullptr,
      torch_executor()));
  return {out, log_sum_exp};
}

SoftmaxBackwardOutputs softmax_backward_cpu(const SoftmaxGradients& gradients,
                                            const SoftmaxCall& call) {
  check_softmax_call(call);
  check_softmax_gradients(gradients, call);
  const SoftmaxInputs inputs(call);
  at::Tensor out_holder, d_out_holder;
  const at::Tensor& out = dense_rows(gradients.out, out_holder);
  const at::Tensor& d_out = dense_rows(gradients.d_out, d_out_holder);
  const at::Tensor log_sum_exp = gradients.log_sum_exp.contiguous();

  const auto [needs_q, needs_k, needs_v, needs_bias] = gradients.needs;
  const at::Tensor dq = gradient_of(needs_q, call.q);
  const at::Tensor dk = gradient_of(needs_k, call.k);
  const at::Tensor dv = gradient_of(needs_v, call.v);
  at::Tensor d_bias = empty({0}, call.q.options());
  const bool with_bias = needs_bias && call.relative_bias;
  if (with_bias) {
    d_bias = empty(call.relative_bias->sizes(),
                   call.q.options().dtype(accumulation_dtype(call.q)));
  }
  throw_if_error(softmax_attention_backward(
      kernel_options(call), inputs.inputs(), view(out),
      log_sum_exp.const_data_ptr(), view(d_out), target(needs_q, dq),
      target(needs_k, dk), target(needs_v, dv),
      with_bias ? d_bias.mutable_data_ptr() : nullptr, torch_executor()));
  if (call.relative_bias) d_bias = d_bias.to(call.relative_bias->options());
  return {dq, dk, dv, d_bias};
}

}  // namespace cosformer::ops
