#include "cosformer/nn.h"

namespace cosformer {

FeedForwardImpl::FeedForwardImpl(const FeedForwardOptions& options,
                                 bool initialize) {
  if (options.activation == "gelu") {
    activation_ = Activation::kGelu;
  } else if (options.activation == "gelu_tanh") {
    activation_ = Activation::kGeluTanh;
  } else if (options.activation == "relu") {
    activation_ = Activation::kRelu;
  } else if (options.activation == "silu") {
    activation_ = Activation::kSilu;
  } else {
    TORCH_CHECK(false, "feed_forward: activation is \"", options.activation,
                "\", expected \"gelu\", \"gelu_tanh\", \"relu\" or \"silu\"");
  }
  const auto wide = [&](const char* name) {
    return register_module(
        name, Projection(options.embed_dim, options.ffn_dim, options.bias));
  };
  if (options.gated) gate_proj = wide("gate_proj");
  up_proj = wide("up_proj");
  down_proj = register_module(
      "down_proj",
      Projection(options.ffn_dim, options.embed_dim, options.bias));
  if (initialize) {
    if (gate_proj) gate_proj->reset_parameters();
    up_proj->reset_parameters();
    down_proj->reset_parameters();
  }
}

torch::Tensor FeedForwardImpl::forward(const torch::Tensor& x) const {
  const auto activate = [this](const torch::Tensor& y) {
    switch (activation_) {
      case Activation::kGelu:
        return at::gelu(y);
      case Activation::kGeluTanh:
        return at::gelu(y, "tanh");
      case Activation::kRelu:
        return at::relu(y);
      case Activation::kSilu:
        return at::silu(y);
    }
    return y;
  };
  const torch::Tensor hidden =
      gate_proj ? activate(gate_proj->forward(x)) * up_proj->forward(x)
                : activate(up_proj->forward(x));
  return down_proj->forward(hidden);
}

}  // namespace cosformer
