#include <cmath>
#include <string>

#include "cosformer/format.h"
#include "format/attention_rules.h"
#include "format/config_fields.h"
#include "text/strict_json.h"

namespace cosformer {
namespace {

std::string joined(const Choices& choices) {
  std::string out;
  for (const std::string& choice : choices) {
    if (!out.empty()) out += ", ";
    out += "'" + choice + "'";
  }
  return out;
}

Status check_fields(const ModelConfig& config) {
  Status status;
  std::string prefix;
  const auto check = [&](const char* key, const auto& value, const auto& rule) {
    if (status.ok()) status = check_rule(prefix + key, value, rule);
  };
  visit_model_fields(config, check);
  for (size_t i = 0; i < config.attention.size(); ++i) {
    prefix = attention_key(config, i) + ".";
    visit_attention_fields(config.attention[i], check);
  }
  return status;
}

// Well-formed, but no model of this version can be built from it.
Status check_supported(const ModelConfig& c) {
  const auto refuse = [](const std::string& what) {
    return not_supported(what, " is not supported by this version");
  };
  if (c.cross_attention) return refuse("cross_attention: true");
  if (c.num_decoder_layers > 0) {
    return refuse(str_cat("num_decoder_layers: ", c.num_decoder_layers,
                          " (an encoder-decoder)"));
  }
  if (c.type_vocab_size > 0) {
    return refuse(
        str_cat("type_vocab_size: ", c.type_vocab_size, " (token types)"));
  }
  return {};
}

Status check_heads(const ModelConfig& c) {
  if (c.head_dim == 0 && c.embed_dim % c.num_heads != 0) {
    return invalid_argument("num_heads: ", c.num_heads,
                            " does not divide embed_dim ", c.embed_dim,
                            ": choose a divisor or give head_dim");
  }
  if (c.num_heads % c.kv_heads() != 0) {
    return invalid_argument("num_kv_heads: ", c.num_kv_heads,
                            " does not divide num_heads ", c.num_heads,
                            ": query heads must be a multiple of key heads");
  }
  return {};
}

// Half of a direction's buckets hold one distance each, the rest reach up to
// max_distance.
Status check_buckets(const ModelConfig& c) {
  const int64_t least = c.is_causal ? 2 : 4;
  if (c.relative_buckets < least ||
      (!c.is_causal && c.relative_buckets % 2 != 0)) {
    return invalid_argument(
        "relative_buckets: found ", c.relative_buckets, ", expected ",
        c.is_causal ? "at least 2"
                    : "an even number of at least 4 (half for later keys)");
  }
  const int64_t exact = c.relative_buckets / least;
  if (c.max_distance <= exact) {
    return invalid_argument("max_distance: found ", c.max_distance,
                            ", relative_buckets is ", c.relative_buckets,
                            ": expected more than the ", exact,
                            " distances that have a bucket of their own");
  }
  return {};
}

Status check_positions(const ModelConfig& c) {
  const ModelConfig defaults;
  const auto lacks = [&](const char* key) {
    return invalid_argument(
        key, ": position '", c.position,
        "' has no such option: remove it or choose ",
        key == std::string("position_offset") ? "'learned' or 'sinusoidal'"
        : std::string_view(key).starts_with("rope") ? "'rope'"
                                                    : "'t5'");
  };
  if (c.position != "rope") {
    if (c.rope_base != defaults.rope_base) return lacks("rope_base");
    if (c.rope_dim != 0) return lacks("rope_dim");
    if (c.rope_interleaved) return lacks("rope_interleaved");
  }
  if (c.position != "t5") {
    if (c.relative_buckets != defaults.relative_buckets) {
      return lacks("relative_buckets");
    }
    if (c.max_distance != defaults.max_distance) return lacks("max_distance");
  }
  if (c.position != "learned" && c.position != "sinusoidal" &&
      c.position_offset != 0) {
    return lacks("position_offset");
  }
  if (c.position == "t5") return check_buckets(c);
  if (c.position != "rope") return {};

  if (c.rope_dim == 0 && c.head_size() % 2 != 0) {
    return invalid_argument("position: 'rope' turns pairs, head_dim is ",
                            c.head_size(), ": it must be even");
  }
  if (c.rope_dim % 2 != 0 || c.rope_dim > c.head_size()) {
    return invalid_argument("rope_dim: found ", c.rope_dim,
                            ", expected an even number up to head_dim ",
                            c.head_size());
  }
  if (c.rope_dim == 0 || c.rope_dim == c.head_size()) return {};
  for (size_t i = 0; i < c.attention.size(); ++i) {
    const std::string& kind = c.attention[i].kind;
    if (kind == "cosformer" || kind == "linear") {
      return not_supported("rope_dim: ", c.rope_dim, " below head_dim ",
                           c.head_size(), " for ", attention_key(c, i),
                           ".kind '", kind,
                           "' is not supported by this version");
    }
  }
  return {};
}

}  // namespace

Status check_rule(const std::string& key, int64_t value, const IntRange& rule) {
  if (value >= rule.low && value <= rule.high) return {};
  if (key == "format_version" && value > rule.high) {
    return not_supported("format_version: found ", value,
                         ", this version reads up to ", rule.high,
                         ": the model was written by a newer cosformer");
  }
  return invalid_argument(
      key, ": found ", value, ", expected ", rule.low,
      rule.low == rule.high ? "" : str_cat(" to ", rule.high));
}

Status check_rule(const std::string& key, double value, const RealRange& rule) {
  // Written so that NaN fails.
  const bool above = rule.open_low ? value > rule.low : value >= rule.low;
  if (above && value <= rule.high) return {};
  return invalid_argument(key, ": found ", value, ", expected a number ",
                          rule.open_low ? "above " : "from ", rule.low,
                          " up to ", rule.high);
}

Status check_rule(const std::string& key, const std::string& value,
                  const Choices& rule) {
  for (const std::string& choice : rule) {
    if (value == choice) return {};
  }
  const std::string near = nearest_key(value, rule);
  return invalid_argument(
      key, ": found ", quote_text(value), ", expected one of ", joined(rule),
      near.empty() ? "" : str_cat("; did you mean '", near, "'?"));
}

std::string attention_key(const ModelConfig& config, size_t index) {
  if (config.attention.size() == 1) return "attention";
  return str_cat("attention[", index, "]");
}

Status validate(const ModelConfig& config) {
  COSFORMER_RETURN_IF_ERROR(check_fields(config));
  if (config.vocab_size < 1) {
    return invalid_argument("vocab_size: found 0, expected at least 1");
  }
  if (config.attention.size() != 1 &&
      config.attention.size() != static_cast<size_t>(config.num_layers)) {
    return invalid_argument("attention: found ", config.attention.size(),
                            " entries, expected one for all layers or ",
                            config.num_layers, ", one a layer");
  }
  COSFORMER_RETURN_IF_ERROR(check_supported(config));
  COSFORMER_RETURN_IF_ERROR(check_heads(config));
  COSFORMER_RETURN_IF_ERROR(check_positions(config));
  for (size_t i = 0; i < config.attention.size(); ++i) {
    COSFORMER_RETURN_IF_ERROR(check_attention(config, i));
  }
  return {};
}

}  // namespace cosformer
