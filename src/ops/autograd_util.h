// Whether a call needs an autograd function at all.
#ifndef COSFORMER_OPS_AUTOGRAD_UTIL_H_
#define COSFORMER_OPS_AUTOGRAD_UTIL_H_

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <initializer_list>
#include <optional>

namespace cosformer::ops {

// Reverse mode is on and a tensor requires a gradient, or a tensor carries a
// forward-mode tangent (which the autograd function then refuses by name).
inline bool is_differentiated(
    std::initializer_list<const at::Tensor*> tensors,
    std::initializer_list<const std::optional<at::Tensor>*> optional_tensors) {
  const bool reverse = c10::GradMode::is_enabled();
  const auto differentiated = [reverse](const at::Tensor& tensor) {
    return (reverse && tensor.requires_grad()) ||
           tensor._fw_grad(/*level=*/0).defined();
  };
  for (const at::Tensor* tensor : tensors)
    if (differentiated(*tensor)) return true;
  for (const std::optional<at::Tensor>* tensor : optional_tensors)
    if (tensor->has_value() && differentiated(**tensor)) return true;
  return false;
}

}  // namespace cosformer::ops

#endif  // COSFORMER_OPS_AUTOGRAD_UTIL_H_
