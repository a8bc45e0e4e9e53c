// The program `cosformer`.
#include <fcntl.h>
#include <malloc.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <exception>
#include <string>
#include <utility>

#include "cli/commands.h"
#include "cli/output.h"
#include "cosformer/format.h"
#include "cosformer/kernels.h"

namespace cosformer::cli {
namespace {

constexpr const char* kExamples = R"(Examples:
  cosformer train configs/demo.toml --data book.txt --out runs/book
  cosformer train --out runs/book --resume
  cosformer eval runs/book
  cosformer generate runs/book --prompt "Once upon a time" --temperature 0.7
  cosformer info runs/book
  cosformer plot attention runs/book --text "Once upon a time"
  cosformer bench --out runs/bench
  cosformer advise --length 4096)";

// A first word that is no subcommand: CLI11 would only say that one is missing.
Status check_command(const CLI::App& app, int argc, char** argv) {
  if (argc < 2 || argv[1][0] == '-') return {};
  std::vector<std::string> known;
  std::string list;
  for (const CLI::App* command : app.get_subcommands({})) {
    if (command->get_name() == argv[1]) return {};
    known.push_back(command->get_name());
    list += str_cat(list.empty() ? "" : ", ", command->get_name());
  }
  const std::string near = nearest_key(argv[1], known);
  return invalid_argument(
      "unknown command ", argv[1], ": ",
      near.empty() ? "expected one of " + list : "did you mean " + near + "?",
      "; see `cosformer --help`");
}

int run_program(int argc, char** argv) {
  CLI::App app(
      "cosformer: linear-time attention, from a text file to a trained model "
      "that writes.");
  app.name("cosformer");
  app.footer(kExamples);
  app.require_subcommand(1);
  app.set_version_flag(
      "--version",
      [] { return str_cat("cosformer ", version(), " (", active_isa(), ")"); },
      "Print the version and the instruction set, and exit");
  app.get_formatter()->column_width(34);
  // The last of a repeated option holds, so that a command can be extended.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);

  Run run;
#ifdef COSFORMER_WITH_TORCH
  add_train_command(app, &run);
  add_eval_command(app, &run);
  add_generate_command(app, &run);
#endif
  add_info_command(app, &run);
#ifdef COSFORMER_WITH_TORCH
  add_plot_command(app, &run);
  add_bench_command(app, &run);
  add_advise_command(app, &run);
#endif
  // The innermost command that was named, and how it was called.
  const auto named = [&app] {
    std::pair<const CLI::App*, std::string> out{&app, "cosformer"};
    while (!out.first->get_subcommands().empty()) {
      out.first = out.first->get_subcommands()[0];
      out.second += " " + out.first->get_name();
    }
    return out;
  };
  if (const Status status = check_command(app, argc, argv); !status.ok()) {
    return fail(status, kWrongUse);
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    write_out(named().first->help());
    return check_output();
  } catch (const CLI::CallForVersion& error) {
    write_out(str_cat(error.what(), "\n"));
    return check_output();
  } catch (const CLI::ParseError& error) {
    return fail(
        invalid_argument(error.what(), "; see `", named().second, " --help`"),
        kWrongUse);
  }
  return run();
}

}  // namespace
}  // namespace cosformer::cli

int main(int argc, char** argv) {
  // Else the first file opened would get a closed descriptor of the three, and
  // what is meant for stdout or stderr with it. Only for reading: writing to
  // what the caller closed stays an error.
  for (int file = 0; file <= 2; ++file) {
    if (::fcntl(file, F_GETFD) < 0) (void)::open("/dev/null", O_RDONLY);
  }
  // A closed pipe is an error of the write, with its message.
  std::signal(SIGPIPE, SIG_IGN);
  // So is a file that outgrows its limit.
  std::signal(SIGXFSZ, SIG_IGN);
  // Training frees and takes the same large tensors each step: keeping them in
  // the heap saves the system clearing fresh pages.
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 2147483647);
  try {
    return cosformer::cli::run_program(argc, argv);
  } catch (const std::bad_alloc&) {
    return cosformer::cli::fail(
        cosformer::Status(cosformer::StatusCode::kOutOfMemory,
                          "out of memory: use a smaller model, batch or "
                          "context"));
  } catch (const std::exception& error) {
    return cosformer::cli::fail(
        cosformer::invalid_argument("unexpected: ", error.what()));
  }
}
