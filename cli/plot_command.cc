// `cosformer plot RUN`: the loss of a run as a picture.
#include <memory>

#include "cli/commands.h"
#include "cli/output.h"
#include "cosformer/train.h"

namespace cosformer::cli {

void add_plot_command(CLI::App& app, Run* run) {
  auto* command = app.add_subcommand("plot", "Draw a run's loss");
  struct Options {
    std::string run, out;
  };
  const auto options = std::make_shared<Options>();
  command->add_option("RUN", options->run, "A run's folder")->required();
  command->add_option("--out", options->out,
                      "The picture (default: RUN/loss.png)");
  command->footer("Example:\n  cosformer plot runs/book");
  command->callback([options, run] {
    *run = [options] {
      const std::string png =
          options->out.empty() ? options->run + "/loss.png" : options->out;
      const Status status = plot_run(options->run, png);
      if (!status.ok()) return fail(status);
      write_out(png + "\n");
      return check_output();
    };
  });
}

}  // namespace cosformer::cli
