#include "train/training_state.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

namespace cosformer::train_internal {
namespace {

constexpr int64_t kStateVersion = 1;

std::string to_hex(const torch::Tensor& bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  const auto* data = bytes.const_data_ptr<uint8_t>();
  std::string out;
  for (int64_t i = 0; i < bytes.numel(); ++i) {
    out += kDigits[data[i] >> 4];
    out += kDigits[data[i] & 15];
  }
  return out;
}

// An undefined tensor where the text is not hexadecimal.
torch::Tensor from_hex(const std::string& text) {
  if (text.size() % 2 != 0 ||
      text.find_first_not_of("0123456789abcdef") != std::string::npos) {
    return {};
  }
  const auto digit = [](char c) { return c <= '9' ? c - '0' : c - 'a' + 10; };
  torch::Tensor bytes =
      torch::empty({static_cast<int64_t>(text.size() / 2)}, torch::kUInt8);
  auto* out = bytes.mutable_data_ptr<uint8_t>();
  for (size_t i = 0; i < text.size(); i += 2) {
    out[i / 2] = static_cast<uint8_t>(digit(text[i]) * 16 + digit(text[i + 1]));
  }
  return bytes;
}

Json to_json(const EvalResult& result) {
  return {{"tokens", result.tokens},
          {"loss", result.loss},
          {"bits_per_byte", result.bits_per_byte},
          {"perplexity", result.perplexity}};
}

EvalResult eval_from_json(const Json& json) {
  EvalResult result;
  json.at("tokens").get_to(result.tokens);
  json.at("loss").get_to(result.loss);
  json.at("bits_per_byte").get_to(result.bits_per_byte);
  // JSON has no infinity: a perplexity beyond double is null.
  const Json& perplexity = json.at("perplexity");
  result.perplexity = perplexity.is_null()
                          ? std::numeric_limits<double>::infinity()
                          : perplexity.get<double>();
  return result;
}

// The state of torch's CPU generator: dropout draws from it.
torch::Tensor generator_state() {
  return at::globalContext().defaultGenerator(at::kCPU).get_state();
}

}  // namespace

Status save_training(const std::string& folder, const RunConfig& config,
                     const TrainingState& state, const Transformer& model,
                     const Tokenizer& tokenizer, const AdamW& optimizer) {
  COSFORMER_RETURN_IF_ERROR(save_model(folder, model, &tokenizer));
  COSFORMER_RETURN_IF_ERROR(optimizer.save(folder + "/optimizer.safetensors"));
  COSFORMER_RETURN_IF_ERROR(
      write_file_atomically(folder + "/run.toml", to_toml(config)));
  const Json json = {
      {"format_version", kStateVersion},
      {"step", state.step},
      {"evaluated_step", state.evaluated_step},
      {"best_step", state.best_step},
      {"best", to_json(state.best)},
      {"last", to_json(state.last)},
      {"without_improvement", state.without_improvement},
      {"stopped_early", state.stopped_early},
      {"seconds", state.seconds},
      {"baselines",
       {{"unigram_loss", state.baselines.unigram_loss},
        {"bigram_loss", state.baselines.bigram_loss}}},
      {"min_denominator", state.min_denominator},  // null: no linear kind
      {"clamped_share", state.clamped_share},
      {"sampler", {{"seed", config.train.seed}, {"next_batch", state.step}}},
      {"torch_generator", to_hex(generator_state())}};
  return write_file_atomically(folder + "/training_state.json",
                               json.dump(2) + "\n");
}

Result<TrainingState> load_training_state(const std::string& folder,
                                          bool restore_generator) {
  const std::string path = folder + "/training_state.json";
  auto text = read_file(path, size_t{1} << 22);
  if (!text.ok()) return text.status();
  TrainingState state;
  try {
    const Json json = Json::parse(*text);
    if (const auto version = json.at("format_version").get<int64_t>();
        version != kStateVersion) {
      return not_supported(path, ": format_version is ", version, ", expected ",
                           kStateVersion);
    }
    json.at("step").get_to(state.step);
    json.at("evaluated_step").get_to(state.evaluated_step);
    json.at("best_step").get_to(state.best_step);
    state.best = eval_from_json(json.at("best"));
    state.last = eval_from_json(json.at("last"));
    json.at("without_improvement").get_to(state.without_improvement);
    json.at("stopped_early").get_to(state.stopped_early);
    json.at("seconds").get_to(state.seconds);
    json.at("baselines")
        .at("unigram_loss")
        .get_to(state.baselines.unigram_loss);
    json.at("baselines").at("bigram_loss").get_to(state.baselines.bigram_loss);
    if (!json.at("min_denominator").is_null()) {
      json.at("min_denominator").get_to(state.min_denominator);
    }
    json.at("clamped_share").get_to(state.clamped_share);
    if (restore_generator) {
      const torch::Tensor generator =
          from_hex(json.at("torch_generator").get<std::string>());
      if (!generator.defined() ||
          generator.numel() != generator_state().numel()) {
        return data_loss(path,
                         ": torch_generator is not a state of this torch's "
                         "generator: the run was begun with another version");
      }
      torch::Generator own = at::globalContext().defaultGenerator(at::kCPU);
      own.set_state(generator);
    }
  } catch (const nlohmann::json::exception& error) {
    return data_loss(path, ": ", error.what());
  }
  return state;
}

Status check_resumable(const RunConfig& begun, const RunConfig& config,
                       std::vector<std::string>* changes) {
  const Json before = run_config_to_json(begun);
  const Json now = run_config_to_json(config);
  for (const auto& [section, table] : now.items()) {
    for (const auto& [key, value] : table.items()) {
      const Json& old = before.at(section).at(key);
      if (old == value) continue;
      const std::string name = str_cat(section, ".", key);
      const bool fixed = section == "model" || name == "data.tokenizer" ||
                         name == "data.vocab_size" ||
                         name == "data.train_fraction";
      // What makes the batches: never changed by a config that only differs.
      const bool batches = name == "data.path" || name == "data.extensions" ||
                           name == "train.seed";
      const auto& chosen = config.overridden;
      const bool wanted =
          std::find(chosen.begin(), chosen.end(), name) != chosen.end();
      const std::string change = str_cat(
          name, " is ", value.dump(), ", the run was begun with ", old.dump());
      if (fixed) {
        return invalid_argument(
            "resume: ", change,
            ": a run keeps its model and tokenizer; take the old value, or "
            "choose another --out");
      }
      if (batches && !wanted) {
        return invalid_argument(
            "resume: ", change,
            ": go on without the config (cosformer train --out DIR --resume), "
            "or ask for the new value by ",
            name == "data.path" ? "--data PATH" : "--set " + name + "=VALUE");
      }
      if (name != "data.cache_dir") changes->push_back(change);
    }
  }
  return {};
}

}  // namespace cosformer::train_internal
