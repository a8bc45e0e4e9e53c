// Sizes and dtypes of what the softmax attention operators return, for meta and
// fake tensors (torch.compile, export).
#include <ATen/ops/empty.h>

#include "ops/call_checks.h"
#include "ops/softmax_call.h"
#include "ops/softmax_checks.h"

namespace cosformer::ops {

SoftmaxOutputs softmax_meta(const SoftmaxCall& call, bool return_log_sum_exp) {
  check_softmax_call(call);
  const at::TensorOptions same = call.q.options();
  const at::TensorOptions accumulation = same.dtype(accumulation_dtype(call.q));
  const auto q = call.q.sym_sizes();
  return {at::empty_symint({q[0], q[1], q[2], call.v.sym_size(3)}, same),
          return_log_sum_exp
              ? at::empty_symint({q[0], q[1], q[2]}, accumulation)
              : at::empty({0}, accumulation)};
}

SoftmaxBackwardOutputs softmax_backward_meta(const SoftmaxGradients& gradients,
                                             const SoftmaxCall& call) {
  check_softmax_call(call);
  check_softmax_gradients(gradients, call);
  const auto gradient_of = [](bool needed, const at::Tensor& tensor) {
    return needed ? at::empty_symint(tensor.sym_sizes(), tensor.options())
                  : at::empty({0}, tensor.options());
  };
  return {gradient_of(gradients.needs[0], call.q),
          gradient_of(gradients.needs[1], call.k),
          gradient_of(gradients.needs[2], call.v),
          call.relative_bias
              ? gradient_of(gradients.needs[3], *call.relative_bias)
              : at::empty({0}, call.q.options())};
}

at::Tensor softmax_decode_meta(const SoftmaxDecodeCall& call) {
  check_softmax_decode(call);
  return at::empty_symint(
      {call.q.sym_size(0), 1, call.q.sym_size(2), call.v.sym_size(3)},
      call.q.options());
}

}  // namespace cosformer::ops
