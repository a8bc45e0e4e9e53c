#include "format/attention_rules.h"

#include <algorithm>
#include <iomanip>
#include <map>
#include <sstream>
#include <string>
#include <string_view>

#include "format/config_fields.h"

namespace cosformer {
namespace {

// The kinds that read a key; `kind` itself is everybody's.
const std::map<std::string_view, Choices>& readers() {
  static const Choices linear{"cosformer", "linear"};
  static const Choices softmax{"softmax", "linformer", "longformer", "bigbird"};
  static const Choices window{"softmax", "longformer"};
  static const Choices longformer{"longformer"}, performer{"performer"},
      linformer{"linformer"}, bigbird{"bigbird"};
  static const std::map<std::string_view, Choices> table{
      {"feature_map", linear},
      {"reweight_len", linear},
      {"normalizer", linear},
      {"eps", linear},
      {"scale", softmax},
      {"dropout", softmax},
      {"window", window},
      {"dilation", window},
      {"global_tokens", longformer},
      {"num_features", performer},
      {"orthogonal", performer},
      {"trainable_projection", performer},
      {"projection_seed", performer},
      {"projected_len", linformer},
      {"share_kv", linformer},
      {"one_kv_head", linformer},
      {"block_size", bigbird},
      {"num_random_blocks", bigbird},
      {"window_blocks", bigbird},
      {"first_global_blocks", bigbird},
      {"last_global_blocks", bigbird},
      {"block_seed", bigbird},
  };
  return table;
}

// "'a'", "'a' and 'b'", "'a', 'b' and 'c'".
std::string listed(const Choices& kinds) {
  std::string out;
  for (size_t i = 0; i < kinds.size(); ++i) {
    if (i > 0) out += i + 1 == kinds.size() ? " and " : ", ";
    out += "'" + kinds[i] + "'";
  }
  return out;
}

template <typename T>
std::string exact_text(const T& value) {
  return str_cat(value);
}
std::string exact_text(double value) {
  std::ostringstream out;
  out << std::setprecision(17) << value;
  return out.str();
}

// Options of other kinds must keep their defaults.
Status check_options(const AttentionConfig& a, const std::string& where) {
  const AttentionConfig defaults;
  // The table's values as text: which differ from their defaults.
  std::map<std::string_view, std::string> usual, found;
  const auto note = [](auto* texts) {
    return [texts](const char* key, const auto& value, const auto&) {
      (*texts)[key] = exact_text(value);
    };
  };
  visit_attention_fields(defaults, note(&usual));
  visit_attention_fields(a, note(&found));
  for (const auto& [key, kinds] : readers()) {
    if (found[key] == usual[key] ||
        std::find(kinds.begin(), kinds.end(), a.kind) != kinds.end()) {
      continue;
    }
    const char* why =
        key == "dropout" ? ": its weights are never formed one by one" : "";
    return invalid_argument(where, ".", key, ": kind '", a.kind,
                            "' has no such option", why, " (kind",
                            kinds.size() > 1 ? "s " : " ", listed(kinds),
                            kinds.size() > 1 ? " do" : " does", "): remove it");
  }
  return {};
}

Status check_linear(const ModelConfig& c, const AttentionConfig& a,
                    const std::string& where) {
  // Distances reach max_len - 1; beyond M the weight would turn negative.
  if (a.reweight_len != 0 && a.reweight_len < c.max_len - 1) {
    return invalid_argument(
        where, ".reweight_len: found ", a.reweight_len, ", max_len is ",
        c.max_len, ": tokens ", c.max_len - 1,
        " apart would get negative weights; expected at least ", c.max_len - 1);
  }
  if (a.feature_map == "identity" && a.normalizer == "sum") {
    return invalid_argument(
        where,
        ".feature_map: 'identity' features may be negative, so their "
        "sum is no denominator: use normalizer 'none', or 'relu' or "
        "'elu1'");
  }
  return {};
}

Status check_linformer(const ModelConfig& c, const AttentionConfig& a,
                       const std::string& where) {
  if (c.is_causal) {
    return invalid_argument(
        where,
        ".kind: 'linformer' has no causal form, is_causal is true: each "
        "projected key mixes all positions, later ones too; set is_causal to "
        "false or choose another kind");
  }
  if (a.projected_len > c.max_len) {
    return invalid_argument(where, ".projected_len: found ", a.projected_len,
                            ", max_len is ", c.max_len,
                            ": the projection shortens max_len tokens");
  }
  if (a.one_kv_head && c.num_kv_heads > 1) {
    return invalid_argument(where, ".one_kv_head: true, num_kv_heads is ",
                            c.num_kv_heads, ": expected 1, or leave it out");
  }
  return {};
}

Status check_window(const AttentionConfig& a, const std::string& where) {
  if (a.kind == "longformer" && a.window == 0) {
    return invalid_argument(where,
                            ".window: found 0, expected at least 1 for kind "
                            "'longformer': tokens on each side");
  }
  if (a.window == 0 && a.dilation != 1) {
    return invalid_argument(where, ".dilation: found ", a.dilation,
                            " without a window: give .window too, or remove "
                            "it");
  }
  return {};
}

}  // namespace

Status check_attention(const ModelConfig& c, size_t index) {
  const AttentionConfig& a = c.attention[index];
  const std::string where = attention_key(c, index);
  COSFORMER_RETURN_IF_ERROR(check_options(a, where));
  if (c.position == "t5" && a.kind != "softmax" && a.kind != "longformer" &&
      a.kind != "bigbird") {
    return invalid_argument(
        where, ".kind: '", a.kind, "' cannot take position 't5': ",
        a.kind == "linformer"
            ? "a projected key has no position of its own"
            : "a bias is added to scores, which it never forms",
        "; choose 'softmax', 'longformer' or 'bigbird', or another position");
  }
  if (c.position == "rope" && a.kind == "linformer") {
    return invalid_argument(
        where,
        ".kind: 'linformer' cannot take position 'rope': a projected key has "
        "no position of its own; choose 'none', 'learned' or 'sinusoidal'");
  }
  if (a.kind == "cosformer" || a.kind == "linear") {
    return check_linear(c, a, where);
  }
  if (a.kind == "linformer") return check_linformer(c, a, where);
  if (a.kind == "softmax" || a.kind == "longformer") {
    return check_window(a, where);
  }
  if (a.kind == "bigbird" && a.window_blocks % 2 == 0) {
    return invalid_argument(where, ".window_blocks: found ", a.window_blocks,
                            ", expected an odd number: the diagonal and as "
                            "many on each side");
  }
  return {};
}

}  // namespace cosformer
