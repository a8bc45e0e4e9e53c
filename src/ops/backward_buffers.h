// What the backward operators of the kinds allocate alike on the CPU.
#ifndef COSFORMER_OPS_BACKWARD_BUFFERS_H_
#define COSFORMER_OPS_BACKWARD_BUFFERS_H_

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>

#include "cosformer/kernels.h"
#include "ops/call.h"
#include "ops/views.h"

namespace cosformer::ops {

// Without the dispatcher, whose share of a short call would show.
inline at::Tensor empty(at::IntArrayRef size,
                        const at::TensorOptions& options) {
  return at::detail::empty_cpu(size, options);
}

// Room for a gradient; [0] where nobody asked.
inline at::Tensor gradient_of(bool needed, const at::Tensor& tensor) {
  return needed ? empty(tensor.sizes(), tensor.options())
                : empty({0}, tensor.options());
}
// The kernels skip a gradient without an address.
inline View4 target(bool needed, const at::Tensor& tensor) {
  return needed ? mutable_view(tensor) : View4{};
}

// The gradients of the state that a linear kind's call returned and of the one
// that it was given.
class StateGradients {
 public:
  // kv_state [rows, kv_heads, features, value_dim] says sizes and dtype where
  // one of the two gradients is absent; both absent: nothing comes back.
  StateGradients(const OptionalTensor& d_kv_state,
                 const OptionalTensor& d_k_sum, at::IntArrayRef kv_state,
                 const at::TensorOptions& options);
  // Makes room for the gradients of a given state.
  void want(const at::Tensor& kv_state, const at::Tensor& k_sum);

  ConstLinearStateView out() const;
  LinearStateView in() const;
  const at::Tensor& d_kv_in() const { return d_kv_in_; }  // [0]: not wanted
  const at::Tensor& d_k_sum_in() const { return d_k_sum_in_; }

 private:
  at::Tensor d_kv_out_, d_k_sum_out_, d_kv_in_, d_k_sum_in_;
};

}  // namespace cosformer::ops

#endif  // COSFORMER_OPS_BACKWARD_BUFFERS_H_
