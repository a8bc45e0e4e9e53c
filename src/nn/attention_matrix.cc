// The weights of a layer, for inspection.
#include "nn/attention_parts.h"

namespace cosformer {

torch::Tensor AttentionImpl::attention_matrix(
    const torch::Tensor& query,
    const std::optional<torch::Tensor>& relative_bias) const {
  TORCH_CHECK(query.dim() == 3 && query.size(2) == options_.embed_dim,
              "attention_matrix: query is ", query.sizes(),
              ", expected [batch, seq, ", options_.embed_dim, "]");
  Heads heads = project(query, query, query);
  AttentionCall call;
  call.relative_bias = relative_bias;
  if (is_linear()) {
    return cosformer::attention_matrix(heads.q, heads.k, linear_args());
  }
  rotate_heads(call, &heads);
  if (options_.kind == "performer") {
    PerformerAttentionArgs args;
    args.is_causal = options_.is_causal;
    return cosformer::attention_matrix(
        heads.q, heads.k, projection.to(heads.q.scalar_type()), args);
  }
  SoftmaxAttentionArgs args = softmax_args(relative_bias);
  if (options_.kind == "linformer") {
    // out = W (F^T v) = (W F^T) v
    const auto shortened = [&](const torch::Tensor& length_projection) {
      TORCH_CHECK(query.size(1) <= options_.max_len,
                  "attention_matrix: ", query.size(1), " tokens, max_len is ",
                  options_.max_len);
      return length_projection.narrow(0, 0, query.size(1));
    };
    const torch::Tensor keys =
        at::einsum("bnhd,np->bphd", {heads.k, shortened(key_len_proj)});
    const torch::Tensor weights =
        cosformer::attention_matrix(heads.q, keys, args);
    return at::matmul(
        weights,
        shortened(options_.share_kv ? key_len_proj : value_len_proj).t());
  }
  if (options_.kind == "bigbird") {
    args.block_mask = blocks_for(query.size(1), query.device());
    args.block_size = options_.block_size;
    return cosformer::attention_matrix(heads.q, heads.k, args);
  }
  if (!has_global_tokens(call)) {
    return cosformer::attention_matrix(heads.q, heads.k, args);
  }
  args.global_mask = global_mask_of(heads, call);
  const torch::Tensor local =
      cosformer::attention_matrix(heads.q, heads.k, args);
  Heads global = project_global(query, query, query);
  rotate_heads(call, &global);
  SoftmaxAttentionArgs full;
  full.is_causal = args.is_causal;
  full.scale = args.scale;
  full.relative_bias = relative_bias;
  return torch::where(args.global_mask->unsqueeze(1).unsqueeze(-1),
                      cosformer::attention_matrix(global.q, global.k, full),
                      local);
}

}  // namespace cosformer
