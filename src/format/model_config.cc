// config.json: ModelConfig as JSON text and back.
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "cosformer/format.h"
#include "format/config_fields.h"
#include "text/strict_json.h"

namespace cosformer {
namespace {

using nlohmann::json;

Status wrong_type(const std::string& key, const json& found,
                  const char* expected) {
  return invalid_argument(key, ": found ", describe(found), ", expected ",
                          expected);
}

Status read_value(const std::string& key, const json& value, int64_t* out) {
  if (!value.is_number_integer()) {
    return wrong_type(key, value, "an integer");
  }
  if (value.is_number_unsigned() &&
      value.get<uint64_t>() >
          static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    return wrong_type(key, value, "an integer of 64 bits");
  }
  *out = value.get<int64_t>();
  return {};
}

Status read_value(const std::string& key, const json& value, double* out) {
  if (!value.is_number()) return wrong_type(key, value, "a number");
  *out = value.get<double>();
  return {};
}

Status read_value(const std::string& key, const json& value, bool* out) {
  if (!value.is_boolean()) return wrong_type(key, value, "true or false");
  *out = value.get<bool>();
  return {};
}

Status read_value(const std::string& key, const json& value, std::string* out) {
  if (!value.is_string()) return wrong_type(key, value, "a string");
  *out = value.get<std::string>();
  return {};
}

Status unknown_key(const std::string& prefix, const std::string& key,
                   const std::vector<std::string>& known) {
  const std::string near = nearest_key(key, known);
  return invalid_argument(
      "unknown key ", quote_text(prefix + key),
      near.empty() ? "" : str_cat("; did you mean '", prefix, near, "'?"));
}

// Reads an object's values into fields, each checked against its rule.
class Reader {
 public:
  Reader(const json& object, std::string prefix)
      : object_(object), prefix_(std::move(prefix)) {}

  template <typename T, typename Rule>
  void operator()(const char* key, T& value, const Rule& rule) {
    const auto found = object_.find(key);
    if (found == object_.end() || !status.ok()) return;
    status = read_value(prefix_ + key, *found, &value);
    if (status.ok()) status = check_rule(prefix_ + key, value, rule);
  }

  Status status;

 private:
  const json& object_;
  std::string prefix_;
};

Status check_keys(const json& object, const std::string& prefix,
                  const std::vector<std::string>& known) {
  for (const auto& [key, value] : object.items()) {
    if (std::find(known.begin(), known.end(), key) == known.end()) {
      return unknown_key(prefix, key, known);
    }
  }
  return {};
}

Status read_attention(const json& object, const std::string& key,
                      AttentionConfig* out) {
  if (!object.is_object()) return wrong_type(key, object, "an object");
  COSFORMER_RETURN_IF_ERROR(
      check_keys(object, key + ".", attention_config_keys()));
  Reader reader(object, key + ".");
  visit_attention_fields(*out, reader);
  return reader.status;
}

template <typename Json>
struct Writer {
  Json* object;
  template <typename T, typename Rule>
  void operator()(const char* key, const T& value, const Rule&) {
    (*object)[key] = value;
  }
};

}  // namespace

const std::vector<std::string>& model_config_keys() {
  static const std::vector<std::string> keys = [] {
    std::vector<std::string> all{"attention"};
    ModelConfig config;
    visit_model_fields(config, [&](const char* key, const auto&, const auto&) {
      all.emplace_back(key);
    });
    return all;
  }();
  return keys;
}

const std::vector<std::string>& attention_config_keys() {
  static const std::vector<std::string> keys = [] {
    std::vector<std::string> all;
    AttentionConfig config;
    visit_attention_fields(config, [&](const char* key, const auto&,
                                       const auto&) { all.emplace_back(key); });
    return all;
  }();
  return keys;
}

std::string to_json(const ModelConfig& config) {
  using Ordered = nlohmann::ordered_json;
  Ordered object = Ordered::object();
  Writer<Ordered> write{&object};
  visit_model_fields(config, write);
  Ordered attention = Ordered::array();
  for (const AttentionConfig& entry : config.attention) {
    Ordered one = Ordered::object();
    Writer<Ordered> write_one{&one};
    visit_attention_fields(entry, write_one);
    attention.push_back(std::move(one));
  }
  object["attention"] =
      attention.size() == 1 ? std::move(attention[0]) : std::move(attention);
  // Strings that are not UTF-8 (no valid config has one) must not throw.
  return object.dump(2, ' ', false, Ordered::error_handler_t::replace) + "\n";
}

Result<ModelConfig> model_config_from_json(std::string_view text) {
  // Larger than any config by far; keeps what a hostile file can ask for small.
  constexpr size_t kMaxBytes = size_t{16} << 20;
  if (text.size() > kMaxBytes) {
    return data_loss("config.json: has ", text.size(),
                     " bytes, expected at most ", kMaxBytes);
  }
  Result<json> parsed = parse_json(text, "config.json");
  if (!parsed.ok()) return parsed.status();
  const json& object = *parsed;
  if (!object.is_object()) {
    return data_loss("config.json: found ", describe(object),
                     ", expected an object");
  }
  ModelConfig config;
  // Before the keys: a newer version may have keys that this one lacks.
  if (const auto version = object.find("format_version");
      version != object.end()) {
    COSFORMER_RETURN_IF_ERROR(
        read_value("format_version", *version, &config.format_version));
    COSFORMER_RETURN_IF_ERROR(check_rule("format_version",
                                         config.format_version,
                                         IntRange{1, kConfigFormatVersion}));
  }
  COSFORMER_RETURN_IF_ERROR(check_keys(object, "", model_config_keys()));
  Reader reader(object, "");
  visit_model_fields(config, reader);
  if (!reader.status.ok()) return reader.status;
  const auto attention = object.find("attention");
  if (attention == object.end()) return config;
  if (!attention->is_array()) {
    COSFORMER_RETURN_IF_ERROR(
        read_attention(*attention, "attention", &config.attention[0]));
    return config;
  }
  if (attention->empty() || attention->size() > size_t{kMaxLayers}) {
    return invalid_argument("attention: found ", describe(*attention),
                            ", expected an object or one object a layer");
  }
  config.attention.assign(attention->size(), AttentionConfig{});
  for (size_t i = 0; i < attention->size(); ++i) {
    COSFORMER_RETURN_IF_ERROR(read_attention(
        (*attention)[i], str_cat("attention[", i, "]"), &config.attention[i]));
  }
  return config;
}

}  // namespace cosformer
