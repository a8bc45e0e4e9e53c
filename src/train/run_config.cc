#include "train/run_config.h"

#include <cmath>
#include <initializer_list>
#include <limits>
#include <string>
#include <string_view>
#include <utility>

namespace cosformer {
namespace train_internal {
namespace {

// Keys that belong to the file format of a model, not to a run's config.
constexpr const char* kNotInRunConfig[] = {"format_version", "vocab_size"};

template <typename Config, typename Visit>
void visit_data(Config& config, const Visit& visit) {
  visit("path", config.path);
  visit("extensions", config.extensions);
  visit("tokenizer", config.tokenizer);
  visit("vocab_size", config.vocab_size);
  visit("train_fraction", config.train_fraction);
  visit("cache_dir", config.cache_dir);
  visit("seed", config.seed);
}

template <typename Config, typename Visit>
void visit_train(Config& config, const Visit& visit) {
  visit("context", config.context);
  visit("batch_size", config.batch_size);
  visit("accumulation", config.accumulation);
  visit("steps", config.steps);
  visit("lr", config.lr);
  visit("min_lr", config.min_lr);
  visit("warmup_steps", config.warmup_steps);
  visit("schedule", config.schedule);
  visit("beta1", config.beta1);
  visit("beta2", config.beta2);
  visit("adam_eps", config.adam_eps);
  visit("weight_decay", config.weight_decay);
  visit("grad_clip", config.grad_clip);
  visit("precision", config.precision);
  visit("activation_checkpointing", config.activation_checkpointing);
  visit("seed", config.seed);
  visit("eval_every", config.eval_every);
  visit("checkpoint_every", config.checkpoint_every);
  visit("keep_checkpoints", config.keep_checkpoints);
  visit("early_stop", config.early_stop);
  visit("log_every", config.log_every);
  visit("threads", config.threads);
}

// TOML's basic strings escape as JSON's do. Bytes that are not UTF-8 (a path
// may hold them) must not throw.
std::string toml_value(const Json& value) {
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

void append_table(const Json& table, std::string& out) {
  for (const auto& [key, value] : table.items()) {
    if (key == "attention") continue;
    out += str_cat(key, " = ", toml_value(value), "\n");
  }
}

// Bounds of one number; both ends belong to it unless open.
template <typename T>
Status check_range(const char* key, T value, T low, T high,
                   bool low_open = false, bool high_open = false) {
  const bool ok = (low_open ? value > low : value >= low) &&
                  (high_open ? value < high : value <= high);
  if (ok) return {};
  const std::string lower = str_cat(low_open ? "above " : "at least ", low);
  const std::string upper = str_cat(high_open ? "below " : "at most ", high);
  const bool bounded = high < std::numeric_limits<T>::max();
  return invalid_argument(key, " is ", value, ", expected ", lower,
                          bounded ? " and " + upper : std::string());
}

Status check_choice(const char* key, const std::string& value,
                    std::initializer_list<std::string_view> choices) {
  std::string list;
  for (const auto& choice : choices) {
    if (value == choice) return {};
    list += str_cat(list.empty() ? "" : ", ", "\"", choice, "\"");
  }
  return invalid_argument(key, " is \"", value, "\", expected one of ", list);
}

Status check_train(const TrainConfig& train) {
  constexpr auto kMany = std::numeric_limits<int64_t>::max();
  constexpr auto kLarge = std::numeric_limits<double>::max();
  const std::pair<const char*, int64_t> at_least_one[] = {
      {"train.context", train.context},
      {"train.batch_size", train.batch_size},
      {"train.accumulation", train.accumulation},
      {"train.steps", train.steps},
      {"train.keep_checkpoints", train.keep_checkpoints},
      {"train.log_every", train.log_every}};
  for (const auto& [key, value] : at_least_one) {
    COSFORMER_RETURN_IF_ERROR(check_range<int64_t>(key, value, 1, kMany));
  }
  const std::pair<const char*, int64_t> at_least_zero[] = {
      {"train.warmup_steps", train.warmup_steps},
      {"train.eval_every", train.eval_every},
      {"train.checkpoint_every", train.checkpoint_every},
      {"train.early_stop", train.early_stop}};
  for (const auto& [key, value] : at_least_zero) {
    COSFORMER_RETURN_IF_ERROR(check_range<int64_t>(key, value, 0, kMany));
  }
  COSFORMER_RETURN_IF_ERROR(
      check_range<int64_t>("train.threads", train.threads, 0, 4096));
  COSFORMER_RETURN_IF_ERROR(
      check_range("train.lr", train.lr, 0.0, kLarge, true));
  COSFORMER_RETURN_IF_ERROR(
      check_range("train.min_lr", train.min_lr, 0.0, train.lr));
  COSFORMER_RETURN_IF_ERROR(
      check_range("train.beta1", train.beta1, 0.0, 1.0, false, true));
  COSFORMER_RETURN_IF_ERROR(
      check_range("train.beta2", train.beta2, 0.0, 1.0, false, true));
  COSFORMER_RETURN_IF_ERROR(
      check_range("train.adam_eps", train.adam_eps, 0.0, kLarge, true));
  COSFORMER_RETURN_IF_ERROR(
      check_range("train.weight_decay", train.weight_decay, 0.0, kLarge));
  COSFORMER_RETURN_IF_ERROR(
      check_range("train.grad_clip", train.grad_clip, 0.0, kLarge));
  COSFORMER_RETURN_IF_ERROR(
      check_choice("train.schedule", train.schedule,
                   {"cosine", "inverse_sqrt", "constant"}));
  COSFORMER_RETURN_IF_ERROR(check_choice("train.precision", train.precision,
                                         {"float32", "bfloat16"}));
  if (train.batch_size % train.accumulation != 0) {
    return invalid_argument("train.accumulation is ", train.accumulation,
                            ", train.batch_size is ", train.batch_size,
                            ": accumulation must divide the batch size");
  }
  return {};
}

}  // namespace

Json run_config_to_json(const RunConfig& config) {
  Json json;
  json["model"] = Json::parse(to_json(config.model));
  Json& model = json["model"];
  for (const char* key : kNotInRunConfig) model.erase(key);
  if (model.at("attention").is_object()) {
    model["attention"] = Json::array({model.at("attention")});
  }
  Json& data = json["data"];
  visit_data(config.data,
             [&](const char* key, const auto& value) { data[key] = value; });
  Json& train = json["train"];
  visit_train(config.train,
              [&](const char* key, const auto& value) { train[key] = value; });
  return json;
}

Result<RunConfig> run_config_from_json(const Json& json) {
  RunConfig config;
  Json model = json.at("model");
  model["format_version"] = ModelConfig{}.format_version;
  model["vocab_size"] = 1;  // a placeholder: the tokenizer brings it
  auto parsed = model_config_from_json(
      model.dump(-1, ' ', false, Json::error_handler_t::replace));
  if (!parsed.ok()) return parsed.status();
  config.model = std::move(*parsed);
  config.model.vocab_size = 0;
  try {
    const Json& data = json.at("data");
    visit_data(config.data, [&](const char* key, auto& value) {
      data.at(key).get_to(value);
    });
    const Json& train = json.at("train");
    visit_train(config.train, [&](const char* key, auto& value) {
      train.at(key).get_to(value);
    });
  } catch (const nlohmann::json::exception& error) {
    return invalid_argument("run config: ", error.what());
  }
  return config;
}

}  // namespace train_internal

std::string to_toml(const RunConfig& config) {
  const auto json = train_internal::run_config_to_json(config);
  std::string out = "[model]\n";
  train_internal::append_table(json.at("model"), out);
  const auto& attention = json.at("model").at("attention");
  for (const auto& layer : attention) {
    out += attention.size() == 1 ? "\n[model.attention]\n"
                                 : "\n[[model.attention]]\n";
    train_internal::append_table(layer, out);
  }
  out += "\n[data]\n";
  train_internal::append_table(json.at("data"), out);
  out += "\n[train]\n";
  train_internal::append_table(json.at("train"), out);
  return out;
}

Status validate(const RunConfig& config) {
  using train_internal::check_choice;
  using train_internal::check_range;
  ModelConfig model = config.model;
  if (model.vocab_size == 0) model.vocab_size = 1;
  COSFORMER_RETURN_IF_ERROR(validate(model));
  if (!model.is_causal) {
    return invalid_argument(
        "model.is_causal is false: the trainer predicts the next token, which "
        "wants a causal model");
  }
  COSFORMER_RETURN_IF_ERROR(
      check_choice("data.tokenizer", config.data.tokenizer,
                   {"bytes", "characters", "sentencepiece"}));
  COSFORMER_RETURN_IF_ERROR(check_range(
      "data.train_fraction", config.data.train_fraction, 0.0, 1.0, true, true));
  COSFORMER_RETURN_IF_ERROR(check_range<int64_t>(
      "data.vocab_size", config.data.vocab_size, 1, int64_t{1} << 24));
  COSFORMER_RETURN_IF_ERROR(train_internal::check_train(config.train));
  if (config.train.context > model.max_len) {
    return invalid_argument(
        "train.context is ", config.train.context, ", model.max_len is ",
        model.max_len,
        ": the context must not be longer than the positions that the model "
        "knows; raise model.max_len or lower train.context");
  }
  return {};
}

}  // namespace cosformer
