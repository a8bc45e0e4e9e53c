#include "ops/backward_buffers.h"

#include <ATen/ops/zeros.h>

namespace cosformer::ops {

StateGradients::StateGradients(const OptionalTensor& d_kv_state,
                               const OptionalTensor& d_k_sum,
                               at::IntArrayRef kv_state,
                               const at::TensorOptions& options)
    : d_kv_in_(empty({0}, options)), d_k_sum_in_(empty({0}, options)) {
  if (!d_kv_state && !d_k_sum) return;
  d_kv_out_ =
      d_kv_state ? d_kv_state->contiguous() : at::zeros(kv_state, options);
  d_k_sum_out_ = d_k_sum ? d_k_sum->contiguous()
                         : at::zeros(kv_state.slice(0, 3), options);
}

void StateGradients::want(const at::Tensor& kv_state, const at::Tensor& k_sum) {
  d_kv_in_ = empty(kv_state.sizes(), d_kv_in_.options());
  d_k_sum_in_ = empty(k_sum.sizes(), d_k_sum_in_.options());
}

ConstLinearStateView StateGradients::out() const {
  ConstLinearStateView result;
  if (!d_kv_out_.defined()) return result;
  result.kv_state = d_kv_out_.const_data_ptr();
  result.k_sum = d_k_sum_out_.const_data_ptr();
  return result;
}

LinearStateView StateGradients::in() const {
  LinearStateView result;
  if (d_kv_in_.dim() == 1) return result;
  result.kv_state = d_kv_in_.mutable_data_ptr();
  result.k_sum = d_k_sum_in_.mutable_data_ptr();
  return result;
}

}  // namespace cosformer::ops
