// What the operators' autograd functions share.
#ifndef COSFORMER_OPS_AUTOGRAD_UTIL_H_
#define COSFORMER_OPS_AUTOGRAD_UTIL_H_

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

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

inline std::optional<at::Tensor> if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

// Undefined where an operator returned "not needed".
inline at::Tensor if_needed(bool needed, const at::Tensor& tensor) {
  return needed ? tensor : at::Tensor();
}

// Tells autograd, also in inference mode, that an operator changes its
// arguments.
inline void bump_versions(std::initializer_list<const at::Tensor*> tensors) {
  for (const at::Tensor* tensor : tensors) {
    // Tensors made in inference mode have no version: nothing can save them.
    if (!tensor->is_inference()) tensor->unsafeGetTensorImpl()->bump_version();
  }
}

// A node of its own in the graph, also where the caller passed one tensor as
// query and key.
inline at::Tensor graph_node(const at::Tensor& tensor) {
  return tensor.requires_grad() ? tensor.alias()
                                : tensor.detach().requires_grad_();
}
inline std::optional<at::Tensor> graph_node(
    const std::optional<at::Tensor>& tensor) {
  return tensor ? std::optional<at::Tensor>(graph_node(*tensor)) : std::nullopt;
}

// The start of a graph of its own.
inline at::Tensor leaf(const at::Tensor& tensor) {
  return tensor.detach().requires_grad_();
}
inline std::optional<at::Tensor> leaf(const std::optional<at::Tensor>& tensor) {
  return tensor ? std::optional<at::Tensor>(leaf(*tensor)) : std::nullopt;
}

// Records gradients although the dispatcher has passed autograd already.
class RecordGradients {
 public:
  RecordGradients() : keys_(with_autograd()), grad_mode_(true) {}

 private:
  static c10::impl::LocalDispatchKeySet with_autograd() {
    c10::impl::LocalDispatchKeySet keys =
        c10::impl::tls_local_dispatch_key_set();
    keys.excluded_ =
        keys.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView;
    return keys;
  }
  c10::impl::ForceDispatchKeyGuard keys_;
  c10::AutoGradMode grad_mode_;
};

}  // namespace cosformer::ops

#endif  // COSFORMER_OPS_AUTOGRAD_UTIL_H_
