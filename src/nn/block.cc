#include "cosformer/nn.h"

namespace cosformer {

BlockImpl::BlockImpl(const BlockOptions& options, bool initialize)
    : pre_norm_(options.pre_norm), dropout_(options.dropout) {
  const auto norm = [&] {
    return Norm(options.norm, options.attention.embed_dim, options.norm_eps,
                options.norm_bias);
  };
  attention_norm = register_module("attention_norm", norm());
  attention =
      register_module("attention", Attention(options.attention, initialize));
  ffn_norm = register_module("ffn_norm", norm());
  ffn = register_module("ffn", FeedForward(options.ffn, initialize));
}

torch::Tensor BlockImpl::feed_forward(const torch::Tensor& x) const {
  const auto added = [&](const torch::Tensor& y) {
    return dropout_ > 0.0 ? at::dropout(y, dropout_, is_training()) : y;
  };
  if (pre_norm_) return x + added(ffn->forward(ffn_norm->forward(x)));
  return ffn_norm->forward(x + added(ffn->forward(x)));
}

AttentionResult BlockImpl::forward(const torch::Tensor& x,
                                   const AttentionCall& call) {
  AttentionResult result = attention->forward(
      pre_norm_ ? attention_norm->forward(x) : x, {}, {}, call);
  if (dropout_ > 0.0) {
    result.out = at::dropout(result.out, dropout_, is_training());
  }
  torch::Tensor y = x + result.out;
  if (!pre_norm_) y = attention_norm->forward(y);
  result.out = feed_forward(y);
  return result;
}

torch::Tensor BlockImpl::attention_matrix(
    const torch::Tensor& x,
    const std::optional<torch::Tensor>& relative_bias) const {
  return attention->attention_matrix(pre_norm_ ? attention_norm->forward(x) : x,
                                     relative_bias);
}

torch::Tensor BlockImpl::decode_step(
    const torch::Tensor& x, AttentionState& state,
    const std::optional<torch::Tensor>& relative_bias) {
  torch::Tensor y =
      x + attention->decode_step(pre_norm_ ? attention_norm->forward(x) : x,
                                 state, relative_bias);
  if (!pre_norm_) y = attention_norm->forward(y);
  return feed_forward(y);
}

}  // namespace cosformer
