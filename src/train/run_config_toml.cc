// Reading a run's config: TOML onto the JSON of the defaults, key by key, so
// that every error knows its line, and --set overrides through the same checks.
#include <toml++/toml.h>

#include <cmath>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "train/run_config.h"

namespace cosformer {
namespace train_internal {
namespace {

std::string expected_of(const Json& like) {
  switch (like.type()) {
    case Json::value_t::boolean:
      return "true or false";
    case Json::value_t::number_integer:
      return "an integer";
    case Json::value_t::number_unsigned:
      return "an integer of 0 or more";
    case Json::value_t::number_float:
      return "a number";
    case Json::value_t::string:
      return "a string";
    case Json::value_t::array:
      return "an array of strings";
    default:
      return "a table";
  }
}

std::string found_of(const toml::node& node) {
  std::ostringstream text;
  node.visit([&](const auto& value) {
    if constexpr (toml::is_value<decltype(value)>) {
      text << toml::node_view<const toml::node>(node);
    }
  });
  switch (node.type()) {
    case toml::node_type::string:
      return str_cat("the string \"", node.ref<std::string>(), "\"");
    case toml::node_type::table:
      return "a table";
    case toml::node_type::array:
      return "an array";
    default:
      return text.str();
  }
}

// node as JSON of the type of `like`; an integer is taken for a float.
Result<Json> convert(const std::string& key, const toml::node& node,
                     const Json& like) {
  const Status wrong = invalid_argument(key, " is ", found_of(node),
                                        ", expected ", expected_of(like));
  switch (like.type()) {
    case Json::value_t::boolean:
      if (auto value = node.value_exact<bool>()) return Json(*value);
      return wrong;
    case Json::value_t::number_integer:
      if (auto value = node.value_exact<int64_t>()) return Json(*value);
      return wrong;
    case Json::value_t::number_unsigned:
      if (auto value = node.value_exact<int64_t>(); value && *value >= 0) {
        return Json(static_cast<uint64_t>(*value));
      }
      return wrong;
    case Json::value_t::number_float: {
      const auto real = node.value_exact<double>();
      const auto integer = node.value_exact<int64_t>();
      if (real && std::isfinite(*real)) return Json(*real);
      if (integer) return Json(static_cast<double>(*integer));
      return wrong;
    }
    case Json::value_t::string:
      if (auto value = node.value_exact<std::string>()) return Json(*value);
      return wrong;
    case Json::value_t::array: {
      const toml::array* values = node.as_array();
      if (values == nullptr) return wrong;
      Json out = Json::array();
      for (const toml::node& value : *values) {
        const auto text = value.value_exact<std::string>();
        if (!text) {
          return invalid_argument(key, " holds ", found_of(value),
                                  ", expected ", expected_of(like));
        }
        out.push_back(*text);
      }
      return out;
    }
    default:
      return wrong;
  }
}

std::vector<std::string> keys_of(const Json& table, const std::string& prefix) {
  std::vector<std::string> keys;
  for (const auto& item : table.items()) keys.push_back(prefix + item.key());
  return keys;
}

Status unknown_key(const std::string& prefix, const std::string& key,
                   const Json& table) {
  if (prefix == "model." && key == "vocab_size") {
    return invalid_argument(
        "model.vocab_size is not set in a run's config: it comes from the "
        "tokenizer (see data.tokenizer and data.vocab_size)");
  }
  const std::string near = nearest_key(key, keys_of(table, ""));
  std::string hint;
  if (!near.empty()) {
    hint = str_cat("did you mean ", prefix, near, "?");
  } else {
    for (const auto& known : keys_of(table, "")) {
      hint += str_cat(hint.empty() ? "known here: " : ", ", known);
    }
  }
  return invalid_argument("unknown key ", prefix, key, ": ", hint);
}

std::string at_line(const std::string& name, const toml::node& node) {
  return str_cat(name, ":", node.source().begin.line, ": ");
}

Status prefixed(const std::string& where, const Status& status) {
  return Status(status.code(), where + status.message());
}

Status merge_attention(const std::string& name, const toml::node& node,
                       Json& layers);

// Sets the keys of a TOML table in `out`, whose present content is the schema.
Status merge_table(const std::string& name, const std::string& prefix,
                   const toml::table& table, Json& out) {
  for (const auto& [toml_key, node] : table) {
    const std::string key(toml_key.str());
    if (prefix + key == "model.attention") {
      COSFORMER_RETURN_IF_ERROR(merge_attention(name, node, out[key]));
      continue;
    }
    if (!out.contains(key)) {
      return prefixed(at_line(name, node), unknown_key(prefix, key, out));
    }
    auto value = convert(prefix + key, node, out[key]);
    if (!value.ok()) return prefixed(at_line(name, node), value.status());
    out[key] = std::move(*value);
  }
  return {};
}

// [model.attention], or one [[model.attention]] a layer.
Status merge_attention(const std::string& name, const toml::node& node,
                       Json& layers) {
  const std::string prefix = "model.attention.";
  const Json defaults = run_config_to_json(RunConfig{})["model"]["attention"];
  std::vector<const toml::table*> tables;
  if (const toml::table* table = node.as_table()) {
    tables.push_back(table);
  } else if (const toml::array* array = node.as_array()) {
    for (const toml::node& element : *array) {
      if (!element.is_table()) {
        return invalid_argument(at_line(name, element),
                                "model.attention holds ", found_of(element),
                                ", expected a table for each layer");
      }
      tables.push_back(element.as_table());
    }
  }
  if (tables.empty()) {
    return invalid_argument(at_line(name, node), "model.attention is ",
                            found_of(node),
                            ", expected a table, or an array of tables, one a "
                            "layer");
  }
  layers = Json::array();
  for (const toml::table* table : tables) {
    layers.push_back(defaults[0]);
    COSFORMER_RETURN_IF_ERROR(merge_table(name, prefix, *table, layers.back()));
  }
  return {};
}

Status merge_file(const std::string& name, const toml::table& root,
                  Json& config) {
  for (const auto& [toml_key, node] : root) {
    const std::string section(toml_key.str());
    if (!config.contains(section)) {
      const std::string near = nearest_key(section, keys_of(config, ""));
      return invalid_argument(
          at_line(name, node), "unknown section [", section, "]: ",
          near.empty() ? "expected [model], [model.attention], [data], [train]"
                       : "did you mean [" + near + "]?");
    }
    const toml::table* table = node.as_table();
    if (table == nullptr) {
      return invalid_argument(at_line(name, node), section, " is ",
                              found_of(node), ", expected a table [", section,
                              "]");
    }
    COSFORMER_RETURN_IF_ERROR(
        merge_table(name, section + ".", *table, config[section]));
  }
  return {};
}

// An override's value: TOML, or a bare string where a string is wanted.
Result<Json> override_value(const std::string& key, const std::string& text,
                            const Json& like) {
  try {
    const toml::table table = toml::parse("value = " + text);
    const toml::node* node = table.get("value");
    if (table.size() == 1 && (!like.is_string() || node->is_string())) {
      return convert(key, *node, like);
    }
  } catch (const toml::parse_error&) {
    // Not TOML: a bare string, or wrong.
  }
  if (like.is_string()) return Json(text);
  return invalid_argument(key, " is \"", text, "\", expected ",
                          expected_of(like));
}

Status set_in_table(const std::string& prefix, const std::string& key,
                    const std::string& text, Json& table) {
  if (!table.contains(key)) return unknown_key(prefix, key, table);
  auto value = override_value(prefix + key, text, table[key]);
  if (!value.ok()) return value.status();
  table[key] = std::move(*value);
  return {};
}

// model.attention, model.attention.KEY (every layer), model.attention.N.KEY.
Status override_attention(const std::string& rest, const std::string& text,
                          Json& layers) {
  const std::string prefix = "model.attention.";
  if (rest.empty()) {
    try {
      const toml::table table = toml::parse("value = " + text);
      if (table.size() == 1) {
        return merge_attention("value", *table.get("value"), layers);
      }
    } catch (const toml::parse_error&) {
      // Reported below.
    }
    return invalid_argument("model.attention is \"", text,
                            "\", expected a table such as {kind=\"softmax\"}, "
                            "or an array of them, one a layer");
  }
  const size_t dot = rest.find('.');
  if (dot == std::string::npos) {
    for (Json& layer : layers) {
      COSFORMER_RETURN_IF_ERROR(set_in_table(prefix, rest, text, layer));
    }
    return {};
  }
  const std::string index = rest.substr(0, dot);
  size_t layer = layers.size();
  if (!index.empty() && index.size() < 10 &&
      index.find_first_not_of("0123456789") == std::string::npos) {
    layer = std::stoul(index);
  }
  if (layer >= layers.size()) {
    return invalid_argument("unknown layer ", prefix, index,
                            ": the config has ", layers.size(),
                            " attention table(s), counted from 0");
  }
  return set_in_table(str_cat(prefix, index, "."), rest.substr(dot + 1), text,
                      layers[layer]);
}

Status apply_override(const std::string& setting, Json& config) {
  const size_t equals = setting.find('=');
  if (equals == std::string::npos || equals == 0) {
    return invalid_argument("expected key=value, such as train.lr=3e-4");
  }
  const std::string key = setting.substr(0, equals);
  const std::string text = setting.substr(equals + 1);
  const std::string attention = "model.attention";
  if (key == attention || key.rfind(attention + ".", 0) == 0) {
    return override_attention(
        key == attention ? "" : key.substr(attention.size() + 1), text,
        config["model"]["attention"]);
  }
  const size_t dot = key.find('.');
  const std::string section = key.substr(0, dot);
  if (dot != std::string::npos && config.contains(section)) {
    return set_in_table(section + ".", key.substr(dot + 1), text,
                        config[section]);
  }
  // Without a known section: the full name of the key, or the nearest.
  std::vector<std::string> known;
  const std::string bare = dot == std::string::npos ? key : key.substr(dot + 1);
  for (const auto& [name, table] : config.items()) {
    for (const auto& full : keys_of(table, name + ".")) {
      if (full == str_cat(name, ".", bare)) {
        return invalid_argument("unknown key ", key, ": did you mean ", full,
                                "?");
      }
      known.push_back(full);
    }
  }
  const std::string near = nearest_key(key, known);
  return invalid_argument(
      "unknown key ", key, ": ",
      near.empty() ? "keys begin with model., model.attention., data. or train."
                   : "did you mean " + near + "?");
}

}  // namespace
}  // namespace train_internal

Result<RunConfig> parse_run_config(std::string_view text,
                                   const std::string& name,
                                   const std::vector<std::string>& overrides) {
  using namespace train_internal;  // NOLINT: this file's own helpers
  Json json = run_config_to_json(RunConfig{});
  try {
    const toml::table root = toml::parse(text, name);
    COSFORMER_RETURN_IF_ERROR(merge_file(name, root, json));
  } catch (const toml::parse_error& error) {
    return invalid_argument(name, ":", error.source().begin.line,
                            ": not valid TOML: ", error.description());
  }
  for (const std::string& setting : overrides) {
    const Status status = apply_override(setting, json);
    if (!status.ok()) {
      return prefixed(str_cat("--set ", setting, ": "), status);
    }
  }
  auto config = run_config_from_json(json);
  if (!config.ok()) return prefixed(name + ": ", config.status());
  for (const std::string& setting : overrides) {
    config->overridden.push_back(setting.substr(0, setting.find('=')));
  }
  const Status valid = validate(*config);
  if (!valid.ok()) return prefixed(name + ": ", valid);
  return config;
}

Result<RunConfig> read_run_config(const std::string& toml_path,
                                  const std::vector<std::string>& overrides) {
  auto text = read_file(toml_path, size_t{1} << 24);
  if (!text.ok()) return text.status();
  return parse_run_config(*text, toml_path, overrides);
}

}  // namespace cosformer
