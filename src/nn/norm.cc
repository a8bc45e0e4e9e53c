#include "cosformer/nn.h"

namespace cosformer {

NormImpl::NormImpl(std::string kind, int64_t dim, double eps, bool with_bias)
    : is_rms_(kind == "rmsnorm"), eps_(eps) {
  TORCH_CHECK(is_rms_ || kind == "layernorm", "norm: found \"", kind,
              "\", expected \"layernorm\" or \"rmsnorm\"");
  weight = register_parameter("weight", torch::ones({dim}));
  if (with_bias && !is_rms_) {
    bias = register_parameter("bias", torch::zeros({dim}));
  }
}

torch::Tensor NormImpl::forward(const torch::Tensor& x) const {
  if (is_rms_) return at::rms_norm(x, weight.sizes(), weight, eps_);
  return at::layer_norm(x, weight.sizes(), weight, bias, eps_);
}

}  // namespace cosformer
