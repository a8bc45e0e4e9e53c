// `cosformer train`: from a config and text to a run's folder.
#include <cmath>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <numbers>

#include "cli/commands.h"
#include "cli/output.h"
#include "cli/signals.h"
#include "cli/train_display.h"
#include "cosformer/train.h"

namespace cosformer::cli {
namespace {

using Json = nlohmann::ordered_json;

struct TrainFlags {
  std::string config;
  std::vector<std::string> settings;
  std::string data, out;
  bool resume = false;
  bool json = false;
};

Json json_of(const EvalResult& result) {
  return {{"loss", result.loss},
          {"bits_per_byte", result.bits_per_byte},
          {"perplexity", result.perplexity},
          {"tokens", result.tokens}};
}

std::string report_json(const TrainReport& report, const std::string& out) {
  const Json json = {{"run", out},
                     {"step", report.step},
                     {"last", json_of(report.last)},
                     {"best", json_of(report.best)},
                     {"best_step", report.best_step},
                     {"unigram_loss", report.baselines.unigram_loss},
                     {"bigram_loss", report.baselines.bigram_loss},
                     {"min_denominator", report.min_denominator},
                     {"clamped_share", report.clamped_share},
                     {"seconds", report.seconds},
                     {"interrupted", report.interrupted},
                     {"stopped_early", report.stopped_early},
                     {"last_path", report.last_path},
                     {"best_path", report.best_path}};
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string report_text(const TrainReport& report, const RunConfig& config,
                        const std::string& out) {
  // Tokens a byte of text, for the baselines' bits.
  const double bits =
      report.last.loss > 0 ? report.last.bits_per_byte / report.last.loss : 0.0;
  const auto row = [&](const std::string& name, double loss) {
    return std::vector<std::string>{name, fixed(loss, 4), fixed(loss * bits, 4),
                                    fixed(std::exp(loss), 2)};
  };
  std::vector<std::vector<std::string>> table = {
      {"validation", "nats/token", "bits/byte", "perplexity"},
      row("unigram baseline", report.baselines.unigram_loss),
      row("bigram baseline", report.baselines.bigram_loss),
      row(str_cat(config.model.attention[0].kind, ", step ", report.step),
          report.last.loss)};
  if (report.best_step != report.step) {
    table.push_back(
        row(str_cat("best, step ", report.best_step), report.best.loss));
  }
  std::string text = "\n" + format_table(table) + "\n";
  if (!std::isnan(report.min_denominator)) {
    text += str_cat("smallest denominator ", report.min_denominator, ", ",
                    fixed(100.0 * report.clamped_share, 2),
                    "% of rows below eps at the end\n");
  }
  text += str_cat("time         ", duration(report.seconds), "\n");
  text += str_cat("model        ", out, "/checkpoints/best\n");
  text +=
      str_cat("write text   cosformer generate ", out, " --prompt \"...\"\n");
  return text;
}

// The config file, or with --resume alone the one that the run stored.
std::string config_path(const TrainFlags& options) {
  return options.config.empty() ? options.out + "/config.toml" : options.config;
}

// runs/NAME of configs/NAME.toml.
std::string default_out(const std::string& config) {
  return "runs/" + std::filesystem::path(config).stem().string();
}

void show_start(const TrainStart& start, const RunConfig& config,
                const std::string& out, TrainDisplay& display) {
  const ModelConfig& model = config.model;
  display.message(str_cat("cosformer ", version(), " on ",
                          machine(start.threads), ", ",
                          config.train.precision));
  display.message(str_cat("model: ", model.attention[0].kind, ", ",
                          model.num_layers, " layers x ", model.embed_dim,
                          " wide, ", model.num_heads, " heads, ",
                          with_commas(start.parameters), " parameters"));
  display.message(str_cat(
      "text:  ", with_commas(start.train_tokens), " tokens to train on, ",
      with_commas(start.validation_tokens), " to validate on, vocabulary of ",
      with_commas(start.vocab_size), " (", config.data.tokenizer, ")"));
  display.message(str_cat("run:   ", out, ", ", with_commas(config.train.steps),
                          " steps of ", config.train.batch_size, " x ",
                          config.train.context, " tokens; bigram baseline ",
                          fixed(start.baselines.bigram_loss, 3),
                          " nats/token"));
}

int train_command(TrainFlags options) {
  if (options.config.empty() && (!options.resume || options.out.empty())) {
    return fail(
        invalid_argument("train: CONFIG.toml is missing, expected a config "
                         "(or --resume with --out DIR); see `cosformer train "
                         "--help`"),
        kWrongUse);
  }
  if (options.out.empty()) options.out = default_out(options.config);
  auto config = read_run_config(config_path(options), options.settings);
  if (!config.ok()) {
    const bool usage = config.status().code() == StatusCode::kInvalidArgument;
    return fail(config.status(), usage ? kWrongUse : kFailed);
  }
  if (!options.data.empty()) {
    config->data.path = options.data;
    config->overridden.push_back("data.path");
  }

  TrainDisplay display;
  const std::atomic<bool>& stop = catch_stop_signals(
      "\nstopping after this step, saving (again to stop at once)\n");
  TrainCallbacks callbacks;
  callbacks.on_data = [&](int64_t done, int64_t total) {
    display.on_data(done, total);
  };
  callbacks.on_start = [&](const TrainStart& start) {
    show_start(start, *config, options.out, display);
  };
  callbacks.on_step = [&](const TrainProgress& p) { display.on_step(p); };
  callbacks.on_eval = [&](int64_t step, const EvalResult& result, bool best) {
    display.on_eval(step, result, best);
  };
  callbacks.on_message = [&](const std::string& text) {
    display.message(text);
  };
  auto report = train(*config, options.out, options.resume, callbacks, stop);
  display.finish();
  if (!report.ok()) return fail(report.status());
  if (report->interrupted) {
    if (options.json) write_out(report_json(*report, options.out));
    note(str_cat("stopped and saved at step ", report->step, " of ",
                 config->train.steps, "; go on with: cosformer train --out ",
                 options.out, " --resume"));
    return 128 + caught_signal();
  }
  // The run is complete without its plot: say why there is none, no more.
  const Status plotted = plot_run(options.out, options.out + "/loss.png");
  if (!plotted.ok()) note(plotted.message());
  if (options.json) {
    write_out(report_json(*report, options.out));
  } else {
    write_out(report_text(*report, *config, options.out));
    if (plotted.ok()) {
      write_out(str_cat("plot         ", options.out, "/loss.png\n"));
    }
  }
  return check_output();
}

}  // namespace

void add_train_command(CLI::App& app, Run* run) {
  auto* command = app.add_subcommand("train", "Train a model on text");
  const auto options = std::make_shared<TrainFlags>();
  command->add_option("CONFIG", options->config,
                      "A run's config, such as configs/demo.toml; with "
                      "--resume by default the one that the run stored");
  command
      ->add_option("--set", options->settings,
                   "Override a key, such as --set train.lr=3e-4; repeatable")
      ->type_name("KEY=VALUE")
      ->expected(1)
      ->take_all();
  command->add_option("--data", options->data,
                      "A file or folder of text; overrides data.path");
  command->add_option("--out", options->out,
                      "The run's folder (default: runs/NAME of the config)");
  command->add_flag("--resume", options->resume,
                    "Go on from the last checkpoint in --out");
  command->add_flag("--json", options->json,
                    "Print the report as one JSON object");
  command->footer(
      "Example:\n  cosformer train configs/demo.toml --data book.txt --out "
      "runs/book --set train.steps=500\n"
      "The run's folder holds config.toml, metrics.jsonl, loss.png and "
      "checkpoints/{best,last}. Ctrl-C saves and stops.");
  command->callback(
      [options, run] { *run = [options] { return train_command(*options); }; });
}

}  // namespace cosformer::cli
