// `cosformer eval MODEL`: its loss on text.
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/model_path.h"
#include "cli/output.h"
#include "cli/run_data.h"
#include "cosformer/train.h"

namespace cosformer::cli {
namespace {

using Json = nlohmann::ordered_json;

struct EvalFlags {
  std::string model, data, part;
  int64_t context = 0, batch_size = 0;
  bool json = false;
};

int eval_command(const EvalFlags& options) {
  auto folder = find_model(options.model);
  if (!folder.ok()) return fail(folder.status());
  DataConfig data;
  int64_t context = options.context;
  bool whole_text = true;
  auto run = run_of_model(*folder);
  if (run.ok()) {
    data = run->data;
    if (context == 0) context = run->train.context;
    std::error_code error;
    whole_text = !options.data.empty() &&
                 !std::filesystem::equivalent(options.data, data.path, error);
  } else if (run.status().code() != StatusCode::kNotFound) {
    return fail(run.status());
  } else if (options.data.empty()) {
    return fail(invalid_argument(*folder,
                                 ": the model records no data of its own, "
                                 "expected --data PATH"),
                kWrongUse);
  }
  if (whole_text) {
    data.path = options.data;
    data.cache_dir.clear();
  }
  if (!options.part.empty()) whole_text = options.part == "all";
  auto result =
      evaluate(*folder, data, context, options.batch_size, whole_text);
  if (!result.ok()) return fail(result.status());
  const std::string part = whole_text ? "all" : "validation";
  if (options.json) {
    const Json json = {{"model", *folder},
                       {"data", data.path},
                       {"part", part},
                       {"context", context},
                       {"tokens", result->tokens},
                       {"loss", result->loss},
                       {"bits_per_byte", result->bits_per_byte},
                       {"perplexity", result->perplexity}};
    write_out(json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
  } else {
    write_out(format_table(
        {{"data", data.path},
         {"part", whole_text ? "the whole text" : "the validation part"},
         {"tokens", with_commas(result->tokens)},
         {"nats/token", fixed(result->loss, 4)},
         {"bits/byte", fixed(result->bits_per_byte, 4)},
         {"perplexity", fixed(result->perplexity, 3)}}));
  }
  return check_output();
}

}  // namespace

void add_eval_command(CLI::App& app, Run* run) {
  auto* command = app.add_subcommand("eval", "Measure a model's loss on text");
  const auto options = std::make_shared<EvalFlags>();
  command
      ->add_option("MODEL", options->model,
                   "A run's folder (its best checkpoint), a checkpoint or a "
                   "model folder")
      ->required();
  command->add_option("--data", options->data,
                      "A file or folder of text (default: what the model was "
                      "trained on)");
  command
      ->add_option("--part", options->part,
                   "Of the text: validation (default for the model's own "
                   "data) or all (default for other data)")
      ->check(CLI::IsMember({"validation", "all"}));
  command
      ->add_option("--context", options->context,
                   "Tokens a window (default: as in training)")
      ->check(CLI::PositiveNumber);
  command->add_option("--batch", options->batch_size, "Windows at a time")
      ->check(CLI::PositiveNumber);
  command->add_flag("--json", options->json, "Print one JSON object");
  command->footer(
      "Example:\n  cosformer eval runs/book\n  cosformer eval runs/book "
      "--data other.txt --json");
  command->callback(
      [options, run] { *run = [options] { return eval_command(*options); }; });
}

}  // namespace cosformer::cli
