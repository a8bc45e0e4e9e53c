#include "nn/attention_options.h"

#include <algorithm>
#include <initializer_list>
#include <string_view>

namespace cosformer {
namespace {

void set_default(int64_t& option, int64_t value) {
  if (option == 0) option = value;
}

void at_least(int64_t least, int64_t value, const char* name) {
  TORCH_CHECK(value >= least, "attention: ", name, " is ", value, ", expected ",
              least == 1 ? "a positive number" : "0 or more");
}

// One group of options and the kinds that read it.
struct Group {
  const char* names;
  bool is_default;
  std::initializer_list<std::string_view> kinds;
  const char* of;
};

void check_owners(const AttentionOptions& o) {
  const AttentionOptions d(o.embed_dim, o.num_heads);
  const Group groups[] = {
      {"feature_map, reweight_len and normalizer",
       o.feature_map.empty() && o.reweight_len == 0 && o.normalizer == "sum",
       {"cosformer", "linear"},
       "the linear kinds"},
      {"scale",
       o.scale == 0.0,
       {"softmax", "linformer", "longformer", "bigbird"},
       "kind \"softmax\", \"linformer\", \"longformer\" and \"bigbird\""},
      {"dropout",
       o.dropout == 0.0,
       {"softmax", "linformer", "longformer", "bigbird"},
       "kinds that form each weight (softmax, linformer, longformer, bigbird)"},
      {"window and dilation",
       o.window == 0 && o.dilation == 1,
       {"softmax", "longformer"},
       "kind \"softmax\" and \"longformer\""},
      {"global_tokens",
       o.global_tokens == 0,
       {"longformer"},
       "kind \"longformer\""},
      {"num_features, orthogonal, trainable_projection and projection_seed",
       o.num_features == 0 && o.orthogonal && !o.trainable_projection &&
           o.projection_seed == 0,
       {"performer"},
       "kind \"performer\""},
      {"max_len, projected_len, share_kv and one_kv_head",
       o.max_len == 0 && o.projected_len == 0 && !o.share_kv && !o.one_kv_head,
       {"linformer"},
       "kind \"linformer\""},
      {"block_size, num_random_blocks, window_blocks, first_global_blocks, "
       "last_global_blocks and block_seed",
       o.block_size == d.block_size &&
           o.num_random_blocks == d.num_random_blocks &&
           o.window_blocks == d.window_blocks &&
           o.first_global_blocks == d.first_global_blocks &&
           o.last_global_blocks == d.last_global_blocks && o.block_seed == 0,
       {"bigbird"},
       "kind \"bigbird\""},
  };
  for (const Group& group : groups) {
    const bool reads = std::find(group.kinds.begin(), group.kinds.end(),
                                 o.kind) != group.kinds.end();
    TORCH_CHECK(
        reads || group.is_default, "attention: ", group.names,
        std::string_view(group.names).find(" and ") == std::string_view::npos
            ? " belongs to "
            : " belong to ",
        group.of, ", found with kind \"", o.kind, "\"");
  }
}

void check_rotary(const AttentionOptions& o) {
  if (o.rotary_base == 0.0) return;
  TORCH_CHECK(o.rotary_base > 0.0, "attention: rotary_base is ", o.rotary_base,
              ", expected a positive number");
  TORCH_CHECK(o.kind != "linformer",
              "attention: kind \"linformer\" has no rotary positions: a "
              "projected key mixes all positions");
  TORCH_CHECK(
      o.rotary_dim > 0 && o.rotary_dim <= o.head_dim && o.rotary_dim % 2 == 0,
      "attention: rotary_dim is ", o.rotary_dim,
      ", expected an even number up to head_dim (", o.head_dim, ")");
  const bool is_linear = o.kind == "cosformer" || o.kind == "linear";
  TORCH_CHECK(!is_linear || o.rotary_dim == o.head_dim,
              "attention: rotary_dim is ", o.rotary_dim,
              ", expected head_dim (", o.head_dim, "): kind \"", o.kind,
              "\" rotates whole heads");
}

void check_linformer(const AttentionOptions& o) {
  TORCH_CHECK(!o.is_causal,
              "attention: kind \"linformer\" has no causal form: each "
              "projected key mixes all positions, later ones too");
  TORCH_CHECK(o.max_len > 0, "attention: max_len is ", o.max_len,
              ", expected the greatest number of keys for kind \"linformer\"");
  TORCH_CHECK(o.projected_len > 0 && o.projected_len <= o.max_len,
              "attention: projected_len is ", o.projected_len,
              ", expected 1 to max_len (", o.max_len, ")");
  TORCH_CHECK(!o.one_kv_head || o.num_kv_heads == 1,
              "attention: one_kv_head with num_kv_heads ", o.num_kv_heads,
              ", expected 1 or none given");
  TORCH_CHECK(!o.share_kv || (o.value_dim == o.head_dim && o.vdim == o.kdim),
              "attention: share_kv makes keys and values one, found head_dim ",
              o.head_dim, " and value_dim ", o.value_dim, ", kdim ", o.kdim,
              " and vdim ", o.vdim, ": expected equal ones");
}

void check_kind(const AttentionOptions& o) {
  const std::initializer_list<std::string_view> kinds{
      "softmax",   "linear",     "cosformer", "performer",
      "linformer", "longformer", "bigbird"};
  TORCH_CHECK(std::find(kinds.begin(), kinds.end(), o.kind) != kinds.end(),
              "attention: kind is \"", o.kind,
              "\", expected \"softmax\", \"linear\", \"cosformer\", "
              "\"performer\", \"linformer\", \"longformer\" or \"bigbird\"");
}

void check(const AttentionOptions& o) {
  at_least(1, o.embed_dim, "embed_dim");
  at_least(1, o.num_heads, "num_heads");
  at_least(1, o.num_kv_heads, "num_kv_heads");
  at_least(1, o.head_dim, "head_dim");
  at_least(1, o.value_dim, "value_dim");
  at_least(1, o.kdim, "kdim");
  at_least(1, o.vdim, "vdim");
  TORCH_CHECK(o.num_heads % o.num_kv_heads == 0, "attention: num_heads is ",
              o.num_heads, ", expected a multiple of num_kv_heads (",
              o.num_kv_heads, ")");
  TORCH_CHECK(o.normalizer == "sum" || o.normalizer == "none",
              "attention: normalizer is \"", o.normalizer,
              "\", expected \"sum\" or \"none\"");
  TORCH_CHECK(o.kind != "cosformer" || o.reweight_len > 0,
              "attention: reweight_len is ", o.reweight_len,
              ", expected M > 0 for kind \"cosformer\" (usually the greatest "
              "length)");
  TORCH_CHECK(o.dropout >= 0.0 && o.dropout < 1.0, "attention: dropout is ",
              o.dropout, ", expected 0 or more, below 1");
  at_least(0, o.window, "window");
  at_least(1, o.dilation, "dilation");
  at_least(0, o.global_tokens, "global_tokens");
  TORCH_CHECK(o.kind != "longformer" || o.window > 0, "attention: window is ",
              o.window,
              ", expected at least 1 for kind \"longformer\": tokens on each "
              "side");
  TORCH_CHECK(o.window > 0 || o.dilation == 1, "attention: dilation is ",
              o.dilation, " without a window");
  at_least(0, o.projection_seed, "projection_seed");
  at_least(1, o.block_size, "block_size");
  at_least(0, o.num_random_blocks, "num_random_blocks");
  at_least(0, o.first_global_blocks, "first_global_blocks");
  at_least(0, o.last_global_blocks, "last_global_blocks");
  at_least(0, o.block_seed, "block_seed");
  TORCH_CHECK(o.window_blocks > 0 && o.window_blocks % 2 == 1,
              "attention: window_blocks is ", o.window_blocks,
              ", expected an odd number: the diagonal and as many on each "
              "side");
  if (o.kind == "performer") at_least(1, o.num_features, "num_features");
  check_rotary(o);
  if (o.kind == "linformer") check_linformer(o);
}

}  // namespace

AttentionOptions complete_options(AttentionOptions o) {
  check_kind(o);
  check_owners(o);
  set_default(o.kdim, o.embed_dim);
  set_default(o.vdim, o.kdim);
  if (o.one_kv_head) set_default(o.num_kv_heads, 1);
  set_default(o.num_kv_heads, o.num_heads);
  if (o.head_dim == 0 && o.num_heads > 0) {
    TORCH_CHECK(o.embed_dim % o.num_heads == 0, "attention: embed_dim is ",
                o.embed_dim, ", expected a multiple of num_heads (",
                o.num_heads, "), or head_dim given");
    o.head_dim = o.embed_dim / o.num_heads;
  }
  set_default(o.value_dim, o.head_dim);
  set_default(o.rotary_dim, o.head_dim);
  if (o.kind == "performer") set_default(o.num_features, 4 * o.head_dim);
  if (o.kind == "linformer") {
    set_default(o.projected_len, std::max<int64_t>(o.max_len / 4, 1));
  }
  check(o);
  if (o.feature_map.empty()) {
    if (o.kind == "cosformer") o.feature_map = "relu";
    if (o.kind == "linear") o.feature_map = "elu1";
  }
  return o;
}

}  // namespace cosformer
