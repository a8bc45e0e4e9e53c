// The subcommands of the program. Each registers its options and leaves in *run
// what to do when it is the chosen one; that returns the exit status: 0 done, 1
// failed, 2 wrongly used, 128 + N stopped by signal N.
#ifndef COSFORMER_CLI_COMMANDS_H_
#define COSFORMER_CLI_COMMANDS_H_

#include <CLI/CLI.hpp>
#include <functional>

namespace cosformer::cli {

using Run = std::function<int()>;

void add_info_command(CLI::App& app, Run* run);
#ifdef COSFORMER_WITH_TORCH
void add_train_command(CLI::App& app, Run* run);
void add_eval_command(CLI::App& app, Run* run);
void add_generate_command(CLI::App& app, Run* run);
void add_plot_command(CLI::App& app, Run* run);
void add_bench_command(CLI::App& app, Run* run);
void add_advise_command(CLI::App& app, Run* run);
#endif

}  // namespace cosformer::cli

#endif  // COSFORMER_CLI_COMMANDS_H_
