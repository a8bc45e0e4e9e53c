#include "models/parameter_shapes.h"

#include <algorithm>

namespace cosformer {

Status for_each_parameter(
    const ModelConfig& c,
    const std::function<Status(const std::string& name,
                               const std::vector<int64_t>& shape)>& visit) {
  Status status;
  const auto tensor = [&](const std::string& name,
                          const std::vector<int64_t>& shape) {
    if (status.ok()) status = visit(name, shape);
  };
  const auto norm = [&](const std::string& name) {
    tensor(name + ".weight", {c.embed_dim});
    if (c.norm == "layernorm" && c.norm_bias) {
      tensor(name + ".bias", {c.embed_dim});
    }
  };
  const auto linear = [&](const std::string& name, int64_t out, int64_t in,
                          bool bias) {
    tensor(name + ".weight", {out, in});
    if (bias) tensor(name + ".bias", {out});
  };
  const int64_t q_width = c.num_heads * c.head_size();
  const auto attention = [&](const std::string& name,
                             const AttentionConfig& a) {
    const int64_t kv_width = (a.one_kv_head ? 1 : c.kv_heads()) * c.head_size();
    linear(name + "q_proj", q_width, c.embed_dim, c.qkv_bias);
    linear(name + "k_proj", kv_width, c.embed_dim, c.qkv_bias);
    if (!a.share_kv) {
      linear(name + "v_proj", kv_width, c.embed_dim, c.qkv_bias);
    }
    linear(name + "out_proj", c.embed_dim, q_width, c.out_bias);
    if (a.kind == "longformer") {
      linear(name + "q_global_proj", q_width, c.embed_dim, c.qkv_bias);
      linear(name + "k_global_proj", kv_width, c.embed_dim, c.qkv_bias);
      linear(name + "v_global_proj", kv_width, c.embed_dim, c.qkv_bias);
    } else if (a.kind == "linformer") {
      const int64_t projected = a.projected_len > 0
                                    ? a.projected_len
                                    : std::max<int64_t>(c.max_len / 4, 1);
      tensor(name + "key_len_proj", {c.max_len, projected});
      if (!a.share_kv) tensor(name + "value_len_proj", {c.max_len, projected});
    } else if (a.kind == "performer") {
      const int64_t features =
          a.num_features > 0 ? a.num_features : 4 * c.head_size();
      tensor(name + "projection", {features, c.head_size()});
    }
  };

  tensor("embed.weight", {c.vocab_size, c.embed_dim});
  if (c.position == "learned") {
    tensor("position.weight", {c.position_offset + c.max_len, c.embed_dim});
  }
  if (c.position == "t5") {
    tensor("relative_bias.weight", {c.relative_buckets, c.num_heads});
  }
  if (c.embed_norm) norm("embed_norm");
  for (int64_t i = 0; i < c.num_layers && status.ok(); ++i) {
    const std::string layer = str_cat("layers.", i, ".");
    norm(layer + "attention_norm");
    attention(layer + "attention.", c.layer_attention(i));
    norm(layer + "ffn_norm");
    if (c.gated) {
      linear(layer + "ffn.gate_proj", c.ffn_size(), c.embed_dim, c.mlp_bias);
    }
    linear(layer + "ffn.up_proj", c.ffn_size(), c.embed_dim, c.mlp_bias);
    linear(layer + "ffn.down_proj", c.embed_dim, c.ffn_size(), c.mlp_bias);
  }
  if (c.norm_placement == "pre") norm("final_norm");
  if (!c.tie_embeddings) tensor("head.weight", {c.vocab_size, c.embed_dim});
  return status;
}

}  // namespace cosformer
