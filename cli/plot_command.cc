// `cosformer plot`: the loss of a run, the attention of a model on a text, and
// the weight against distance, as pictures.
#include <memory>
#include <optional>

#include "cli/commands.h"
#include "cli/model_path.h"
#include "cli/output.h"
#include "cosformer/train.h"

namespace cosformer::cli {
namespace {

int report(const Status& status, const std::string& png) {
  if (!status.ok()) return fail(status);
  write_out(png + "\n");
  return check_output();
}

void add_plot_attention(CLI::App& plot, Run* run) {
  auto* command = plot.add_subcommand(
      "attention", "Draw who looks at whom: a heat map a layer and head");
  struct PlotFlags {
    std::string model, text, text_file, out;
    AttentionPlotOptions plot;
  };
  const auto options = std::make_shared<PlotFlags>();
  command
      ->add_option("MODEL", options->model,
                   "A run's folder, a checkpoint or a model folder")
      ->required();
  auto* text = command->add_option("--text", options->text, "What it reads");
  command->add_option("--text-file", options->text_file, "A file instead")
      ->excludes(text);
  command
      ->add_option("--tokens", options->plot.max_tokens,
                   "Tokens of the text at most")
      ->capture_default_str();
  command->add_option("--layers", options->plot.layers,
                      "Which layers, from 0 (default: all)");
  command->add_option("--heads", options->plot.heads,
                      "Which heads, from 0 (default: all)");
  command->add_option("--out", options->out,
                      "The picture (default: MODEL/attention.png)");
  command->footer(
      "Example:\n  cosformer plot attention runs/book --text \"To be, or not "
      "to be\"");
  command->callback([options, run] {
    *run = [options] {
      if (options->text.empty() && options->text_file.empty()) {
        return fail(invalid_argument(
                        "plot attention: no text: give --text or --text-file"),
                    kWrongUse);
      }
      auto folder = find_model(options->model);
      if (!folder.ok()) return fail(folder.status());
      if (!options->text_file.empty()) {
        auto text = read_file(options->text_file);
        if (!text.ok()) return fail(text.status());
        options->text = std::move(*text);
      }
      const std::string png = options->out.empty()
                                  ? options->model + "/attention.png"
                                  : options->out;
      const auto shown =
          plot_attention(*folder, options->text, options->plot, png);
      if (shown.ok()) note(str_cat("the first ", *shown, " tokens"));
      return report(shown.status(), png);
    };
  });
}

void add_plot_profile(CLI::App& plot, Run* run) {
  auto* command = plot.add_subcommand(
      "profile",
      "Draw the weight against distance: cosine, window, T5 bias, rotary");
  struct PlotFlags {
    std::string model, out = "profile.png";
    std::vector<int64_t> reweight_lens;
    std::optional<int64_t> max_distance, window, dilation;
  };
  const auto options = std::make_shared<PlotFlags>();
  command->add_option("MODEL", options->model,
                      "A model whose M, window, bias and base to show "
                      "(default: usual ones)");
  command->add_option("--distance", options->max_distance,
                      "The longest distance, in tokens");
  command
      ->add_option("--reweight-len", options->reweight_lens,
                   "M of the cosine; several may be given")
      ->expected(1, 8);
  command->add_option("--window", options->window,
                      "Tokens of the window on a side");
  command->add_option("--dilation", options->dilation, "Its dilation");
  command->add_option("--out", options->out, "The picture")
      ->capture_default_str();
  command->footer(
      "Example:\n  cosformer plot profile --reweight-len 512 1024 --distance "
      "2048");
  command->callback([options, run] {
    *run = [options] {
      ProfileOptions profile;
      if (!options->model.empty()) {
        auto folder = find_model(options->model);
        if (!folder.ok()) return fail(folder.status());
        auto of_model = profile_of_model(*folder);
        if (!of_model.ok()) return fail(of_model.status());
        profile = std::move(*of_model);
      }
      if (!options->reweight_lens.empty()) {
        profile.reweight_lens = options->reweight_lens;
      }
      if (options->max_distance) profile.max_distance = *options->max_distance;
      if (options->window) profile.window = *options->window;
      if (options->dilation) profile.dilation = *options->dilation;
      return report(plot_profile(profile, options->out), options->out);
    };
  });
}

}  // namespace

void add_plot_command(CLI::App& app, Run* run) {
  auto* command = app.add_subcommand(
      "plot", "Draw a run's loss, a model's attention, or weight profiles");
  struct PlotFlags {
    std::string run, out;
  };
  const auto options = std::make_shared<PlotFlags>();
  command->add_option("RUN", options->run,
                      "A run's folder: draws its loss curves");
  command->add_option("--out", options->out,
                      "The picture (default: RUN/loss.png)");
  command->footer(
      "Examples:\n  cosformer plot runs/book\n  cosformer plot attention "
      "runs/book --text \"To be, or not to be\"\n  cosformer plot profile");
  command->require_subcommand(0, 1);
  add_plot_attention(*command, run);
  add_plot_profile(*command, run);
  command->callback([command, options, run] {
    if (!command->get_subcommands().empty()) return;
    *run = [options] {
      if (options->run.empty()) {
        return fail(invalid_argument("plot: no RUN: give a run's folder, or "
                                     "`attention` or `profile`; see "
                                     "`cosformer plot --help`"),
                    kWrongUse);
      }
      const std::string png =
          options->out.empty() ? options->run + "/loss.png" : options->out;
      return report(plot_run(options->run, png), png);
    };
  });
}

}  // namespace cosformer::cli
