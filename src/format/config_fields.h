// The keys of config.json in one table: reading, writing, ranges and
// suggestions go through it.
#ifndef COSFORMER_SRC_FORMAT_CONFIG_FIELDS_H_
#define COSFORMER_SRC_FORMAT_CONFIG_FIELDS_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cosformer/format.h"

namespace cosformer {

// The newest version that this library writes and reads.
inline constexpr int64_t kConfigFormatVersion = 1;

// Sizes above these are mistakes or attacks: products of any three stay far
// inside int64.
inline constexpr int64_t kMaxDim = int64_t{1} << 20;
inline constexpr int64_t kMaxCount = int64_t{1} << 31;
inline constexpr int64_t kMaxLayers = int64_t{1} << 14;
inline constexpr int64_t kMaxSeed = int64_t{1} << 62;

struct IntRange {
  int64_t low, high;
};
struct RealRange {
  double low, high;
  bool open_low;  // low itself is outside
};
using Choices = std::vector<std::string>;

// Calls visit(key, value, rule) for each key but `attention`; the rule is an
// IntRange, a RealRange, Choices, or bool for a flag.
template <typename Config, typename Visitor>
void visit_model_fields(Config& c, Visitor&& visit) {
  constexpr double kHuge = 1e30;
  const IntRange count{0, kMaxCount}, dim{0, kMaxDim}, layers{0, kMaxLayers};
  visit("format_version", c.format_version, IntRange{1, kConfigFormatVersion});
  visit("vocab_size", c.vocab_size, count);
  visit("type_vocab_size", c.type_vocab_size, count);
  visit("embed_dim", c.embed_dim, IntRange{1, kMaxDim});
  visit("embed_norm", c.embed_norm, true);
  visit("embed_scale", c.embed_scale, RealRange{0, kHuge, true});
  visit("num_layers", c.num_layers, IntRange{1, kMaxLayers});
  visit("num_decoder_layers", c.num_decoder_layers, layers);
  visit("cross_attention", c.cross_attention, true);
  visit("num_heads", c.num_heads, IntRange{1, kMaxDim});
  visit("num_kv_heads", c.num_kv_heads, dim);
  visit("head_dim", c.head_dim, dim);
  visit("ffn_dim", c.ffn_dim, IntRange{0, 8 * kMaxDim});
  visit("max_len", c.max_len, IntRange{1, kMaxCount});
  visit("is_causal", c.is_causal, true);
  visit("norm", c.norm, Choices{"layernorm", "rmsnorm"});
  visit("norm_eps", c.norm_eps, RealRange{0, 1, false});
  visit("norm_placement", c.norm_placement, Choices{"pre", "post"});
  visit("activation", c.activation,
        Choices{"gelu", "gelu_tanh", "relu", "silu"});
  visit("gated", c.gated, true);
  visit("position", c.position,
        Choices{"none", "learned", "sinusoidal", "rope", "t5"});
  visit("position_offset", c.position_offset, count);
  visit("rope_base", c.rope_base, RealRange{1, kHuge, true});
  visit("rope_dim", c.rope_dim, dim);
  visit("rope_interleaved", c.rope_interleaved, true);
  visit("relative_buckets", c.relative_buckets, IntRange{2, kMaxDim});
  visit("max_distance", c.max_distance, IntRange{1, kMaxCount});
  visit("dropout", c.dropout, RealRange{0, 0.999, false});
  visit("qkv_bias", c.qkv_bias, true);
  visit("out_bias", c.out_bias, true);
  visit("mlp_bias", c.mlp_bias, true);
  visit("norm_bias", c.norm_bias, true);
  visit("tie_embeddings", c.tie_embeddings, true);
  visit("logit_scale", c.logit_scale, RealRange{0, kHuge, true});
  visit("init_std", c.init_std, RealRange{0, kHuge, false});
}

template <typename Config, typename Visitor>
void visit_attention_fields(Config& c, Visitor&& visit) {
  visit("kind", c.kind,
        Choices{"softmax", "linear", "cosformer", "performer", "linformer",
                "longformer", "bigbird"});
  visit("feature_map", c.feature_map, Choices{"", "relu", "elu1", "identity"});
  visit("reweight_len", c.reweight_len, IntRange{0, kMaxCount});
  visit("normalizer", c.normalizer, Choices{"sum", "none"});
  visit("eps", c.eps, RealRange{0, 1, true});
  visit("scale", c.scale, RealRange{0, 1e30, false});
  visit("dropout", c.dropout, RealRange{0, 0.999, false});
  visit("window", c.window, IntRange{0, kMaxCount});
  visit("dilation", c.dilation, IntRange{1, kMaxCount});
  visit("global_tokens", c.global_tokens, IntRange{0, kMaxCount});
  visit("num_features", c.num_features, IntRange{0, kMaxDim});
  visit("orthogonal", c.orthogonal, true);
  visit("trainable_projection", c.trainable_projection, true);
  visit("projection_seed", c.projection_seed, IntRange{0, kMaxSeed});
  visit("projected_len", c.projected_len, IntRange{0, kMaxCount});
  visit("share_kv", c.share_kv, true);
  visit("one_kv_head", c.one_kv_head, true);
  visit("block_size", c.block_size, IntRange{1, kMaxCount});
  visit("num_random_blocks", c.num_random_blocks, IntRange{0, kMaxDim});
  visit("window_blocks", c.window_blocks, IntRange{1, kMaxDim});
  visit("first_global_blocks", c.first_global_blocks, IntRange{0, kMaxDim});
  visit("last_global_blocks", c.last_global_blocks, IntRange{0, kMaxDim});
  visit("block_seed", c.block_seed, IntRange{0, kMaxSeed});
}

// Whether a value keeps its rule; the message has key, found and expected.
Status check_rule(const std::string& key, int64_t value, const IntRange& rule);
Status check_rule(const std::string& key, double value, const RealRange& rule);
Status check_rule(const std::string& key, const std::string& value,
                  const Choices& rule);
inline Status check_rule(const std::string&, bool, bool) { return {}; }

// "attention", or "attention[3]" where there are several.
std::string attention_key(const ModelConfig& config, size_t index);

}  // namespace cosformer

#endif  // COSFORMER_SRC_FORMAT_CONFIG_FIELDS_H_
