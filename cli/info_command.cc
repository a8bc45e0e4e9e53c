// `cosformer info MODEL`: what a model folder holds; needs no torch.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "cli/commands.h"
#include "cli/model_path.h"
#include "cli/output.h"
#include "cosformer/format.h"
#include "cosformer/kernels.h"
#include "cosformer/text.h"

namespace cosformer::cli {
namespace {

using Json = nlohmann::ordered_json;

struct Info {
  std::string folder;
  ModelConfig config;
  int64_t parameters = 0;
  int64_t bytes = 0;
  std::set<std::string> dtypes;
  std::string tokenizer;  // empty: none
  int64_t tokenizer_size = 0;
  // What one sequence carries from token to token.
  int64_t state_bytes = 0;        // constant: linear kinds
  int64_t cache_bytes_token = 0;  // a token seen: softmax
};

void add_state(const ModelConfig& config, Info* info) {
  if (!config.is_causal) return;
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    const StateSize size = state_size(config.layer_attention(layer),
                                      config.kv_heads(), config.head_size());
    const bool grows = size.bytes_per_token > 0 && size.max_tokens == 0;
    info->state_bytes +=
        grows ? size.constant_bytes : size.bytes_at(size.max_tokens);
    if (grows) info->cache_bytes_token += size.bytes_per_token;
  }
}

Result<Info> read_info(const std::string& path) {
  Info info;
  auto folder = find_model(path);
  if (!folder.ok()) return folder.status();
  info.folder = *folder;
  const std::string config_path = info.folder + "/config.json";
  auto text = read_file(config_path);
  if (!text.ok()) return text.status();
  auto config = model_config_from_json(*text);
  Status status = config.ok() ? validate(*config) : config.status();
  if (!status.ok()) {
    return Status(status.code(), str_cat(config_path, ": ", status.message()));
  }
  info.config = std::move(*config);
  auto tensors = SafetensorsFile::open(info.folder + "/model.safetensors");
  if (!tensors.ok()) return tensors.status();
  for (const auto& [name, entry] : tensors->tensors()) {
    int64_t count = 1;
    for (const int64_t size : entry.shape) count *= size;
    info.parameters += count;
    info.bytes += static_cast<int64_t>(entry.bytes);
    info.dtypes.insert(std::string(cosformer::name(entry.dtype)));
  }
  auto tokenizer = load_tokenizer(info.folder);
  if (tokenizer.ok()) {
    info.tokenizer = std::string((*tokenizer)->kind());
    info.tokenizer_size = (*tokenizer)->vocab_size();
  } else if (tokenizer.status().code() != StatusCode::kNotFound) {
    return tokenizer.status();
  }
  add_state(info.config, &info);
  return info;
}

std::string join(const std::set<std::string>& names) {
  std::string out;
  for (const auto& each : names) out += (out.empty() ? "" : ", ") + each;
  return out;
}

// Cores that this process may use.
int threads_of_machine() {
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

std::string as_json(const Info& info) {
  Json json;
  json["path"] = info.folder;
  json["config"] = Json::parse(to_json(info.config));
  json["parameters"] = info.parameters;
  json["bytes"] = info.bytes;
  json["dtypes"] = info.dtypes;
  json["tokenizer"] = info.tokenizer.empty() ? Json() : Json(info.tokenizer);
  json["vocab_size"] = info.config.vocab_size;
  json["state_bytes"] = info.state_bytes;
  json["cache_bytes_per_token"] = info.cache_bytes_token;
  json["isa"] = std::string(active_isa());
  json["threads"] = threads_of_machine();
  json["version"] = std::string(version());
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

// A layer's kind with the options that it was given, and those that decide what
// it sees.
std::string layer_attention_of(const ModelConfig& config, int64_t layer) {
  const AttentionConfig& a = config.layer_attention(layer);
  const AttentionConfig usual;
  std::string out = a.kind;
  const auto add = [&](bool given, const auto&... parts) {
    if (given) out += " " + str_cat(parts...);
  };
  add(!a.feature_map.empty(), a.feature_map);
  if (a.reweight_len > 0 || a.kind == "cosformer") {
    add(true, "M=", a.reweight_len > 0 ? a.reweight_len : config.max_len);
  }
  add(a.normalizer != usual.normalizer, "normalizer=", a.normalizer);
  add(a.scale > 0, "scale=", a.scale);
  add(a.dropout > 0, "dropout=", a.dropout);
  add(a.window > 0, "window=", a.window);
  add(a.dilation != 1, "dilation=", a.dilation);
  add(a.global_tokens > 0, "global_tokens=", a.global_tokens);
  if (a.kind == "performer") {
    add(true, "features=",
        a.num_features > 0 ? a.num_features : 4 * config.head_size());
    add(!a.orthogonal, "independent");
    add(a.trainable_projection, "trainable");
  }
  if (a.kind == "linformer") {
    add(true, "projected_len=",
        a.projected_len > 0 ? a.projected_len
                            : std::max<int64_t>(config.max_len / 4, 1));
    add(a.share_kv, "share_kv");
    add(a.one_kv_head, "one_kv_head");
  }
  if (a.kind == "bigbird") {
    add(true, "blocks of ", a.block_size, ": window ", a.window_blocks,
        ", global ", a.first_global_blocks, "+",
        config.is_causal ? 0 : a.last_global_blocks, ", random ",
        a.num_random_blocks);
  }
  return out;
}

std::string attention_of(const ModelConfig& config) {
  std::vector<std::string> kinds;
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    kinds.push_back(layer_attention_of(config, layer));
  }
  if (std::equal(kinds.begin() + 1, kinds.end(), kinds.begin())) {
    return kinds[0];
  }
  std::string all;
  for (const auto& kind : kinds) all += (all.empty() ? "" : "; ") + kind;
  return all;
}

std::string as_text(const Info& info) {
  const ModelConfig& config = info.config;
  std::string state;
  if (info.state_bytes > 0) {
    state = byte_size(info.state_bytes) + " a sequence, at any length";
  }
  if (info.cache_bytes_token > 0) {
    if (!state.empty()) state += ", and ";
    state += byte_size(info.cache_bytes_token) + " a token (" +
             byte_size(info.cache_bytes_token * config.max_len) + " at " +
             with_commas(config.max_len) + " tokens)";
  }
  const std::vector<std::pair<std::string, std::string>> rows = {
      {"model", info.folder},
      {"attention", attention_of(config)},
      {"layers", str_cat(config.num_layers, " x ", config.embed_dim, " wide, ",
                         config.num_heads, " heads of ", config.head_size(),
                         config.kv_heads() != config.num_heads
                             ? str_cat(" (", config.kv_heads(), " kv heads)")
                             : std::string(),
                         ", feed-forward ", config.ffn_size(), " ",
                         config.gated ? "gated " : "", config.activation)},
      {"norm", str_cat(config.norm_placement, " ", config.norm)},
      {"positions",
       str_cat(config.position, ", up to ", with_commas(config.max_len))},
      {"parameters",
       str_cat(with_commas(info.parameters), " (", join(info.dtypes), ", ",
               byte_size(info.bytes), ")")},
      {"tokenizer", info.tokenizer.empty()
                        ? std::string("none")
                        : str_cat(info.tokenizer, ", ",
                                  with_commas(info.tokenizer_size), " tokens")},
      {"state", state},
      {"machine", machine(threads_of_machine())}};
  std::string out;
  for (const auto& [name, value] : rows) {
    out += name + std::string(12 - name.size(), ' ') + value + "\n";
  }
  return out;
}

}  // namespace

void add_info_command(CLI::App& app, Run* run) {
  auto* command =
      app.add_subcommand("info", "Show what a model is: config, size, state");
  struct InfoFlags {
    std::string model;
    bool json = false;
  };
  const auto options = std::make_shared<InfoFlags>();
  command
      ->add_option("MODEL", options->model,
                   "A run's folder, a checkpoint or a model folder")
      ->required();
  command->add_flag("--json", options->json, "Print one JSON object");
  command->footer(
      "Example:\n  cosformer info runs/book\n  cosformer info runs/book "
      "--json");
  command->callback([options, run] {
    *run = [options] {
      auto info = read_info(options->model);
      if (!info.ok()) return fail(info.status());
      write_out(options->json ? as_json(*info) : as_text(*info));
      return check_output();
    };
  });
}

}  // namespace cosformer::cli
