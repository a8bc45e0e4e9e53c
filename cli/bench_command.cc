// `cosformer bench`: every kind of attention measured on this machine.
#include <filesystem>
#include <memory>

#include "cli/bench_flags.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "cli/progress.h"
#include "cli/signals.h"
#include "cosformer/bench.h"

namespace cosformer::cli {
namespace {

struct BenchFlags {
  BenchOptions bench;
  std::vector<std::string> passes;
  std::string dtype = "float32";
  bool causal = false, no_causal = false;
  std::string out;
  bool json = false;
};

Status read_flags(BenchFlags* flags) {
  BenchOptions& bench = flags->bench;
  if (!flags->passes.empty()) bench.passes.clear();
  for (const std::string& text : flags->passes) {
    const size_t before = bench.passes.size();
    for (const BenchPass pass :
         {BenchPass::kForward, BenchPass::kBackward, BenchPass::kDecode}) {
      if (name(pass) == text) bench.passes.push_back(pass);
    }
    if (bench.passes.size() == before) {
      return invalid_argument("passes: found \"", text,
                              "\", expected some of forward, backward "
                              "(forward + backward), decode");
    }
  }
  if (flags->causal != flags->no_causal) bench.causal = {flags->causal};
  auto dtype = dtype_of(flags->dtype);
  if (!dtype.ok()) return dtype.status();
  bench.dtype = *dtype;
  return validate(bench);
}

// The folder, made where it is not there.
Status make_folder(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error || !std::filesystem::is_directory(path)) {
    return io_error("out: ", path, ": cannot make this folder: ",
                    error ? error.message() : "a file is in its place");
  }
  return {};
}

Status write_results(const BenchReport& report, const std::string& out,
                     std::vector<std::string>* paths) {
  const std::pair<const char*, std::string> files[] = {
      {"/bench.json", to_json(report)}, {"/bench.md", bench_markdown(report)}};
  for (const auto& [file, text] : files) {
    COSFORMER_RETURN_IF_ERROR(write_file_atomically(out + file, text));
    paths->push_back(out + file);
  }
  // The figures are complete without their plots: say why there are none, no
  // more.
  auto plots = plot_bench(report, out);
  if (!plots.ok()) {
    note(plots.status().message());
    return {};
  }
  paths->insert(paths->end(), plots->begin(), plots->end());
  return {};
}

int bench_command(BenchFlags flags) {
  if (const Status status = read_flags(&flags); !status.ok()) {
    return fail(Status(status.code(), "bench: " + status.message()), kWrongUse);
  }
  if (!flags.out.empty()) {
    const Status made = make_folder(flags.out);
    if (!made.ok()) {
      return fail(Status(made.code(), "bench: " + made.message()));
    }
  }
  const std::atomic<bool>& stop = catch_stop_signals(
      "\nstopping after this run, keeping what was measured (again to stop at "
      "once)\n");
  BenchDisplay display(flags.bench.seconds);
  BenchCallbacks callbacks;
  callbacks.on_progress = [&](const BenchProgress& progress) {
    display.on_progress(progress);
  };
  // After each length, so that not even a power cut takes all.
  Status kept;
  callbacks.on_partial = [&](const BenchReport& part) {
    if (flags.out.empty() || !kept.ok()) return;
    kept = write_file_atomically(flags.out + "/bench.json", to_json(part));
    if (!kept.ok()) display.message(kept.message());
  };
  auto report = run_bench(flags.bench, callbacks, stop);
  display.finish();
  if (!report.ok()) return fail(report.status());
  std::vector<std::string> paths;
  if (!flags.out.empty()) {
    const Status written = write_results(*report, flags.out, &paths);
    if (!written.ok()) return fail(written);
  }
  write_out(flags.json ? to_json(*report) : bench_text(*report));
  if (!flags.json && !paths.empty()) {
    write_out("\n");
    for (const std::string& path : paths) write_out(path + "\n");
  }
  if (!report->is_complete) {
    note("stopped: this is what was measured until then");
    return 128 + caught_signal();
  }
  return check_output();
}

}  // namespace

void add_bench_command(CLI::App& app, Run* run) {
  auto* command = app.add_subcommand(
      "bench", "Measure every kind of attention against torch's own, here");
  const auto flags = std::make_shared<BenchFlags>();
  BenchOptions& bench = flags->bench;
  const auto list = [&](const std::string& option, auto& values,
                        const std::string& text) {
    return command->add_option(option, values, text)
        ->delimiter(',')
        ->take_all();
  };
  list("--kinds", bench.kinds,
       "Which, by name (default: all); sdpa joins them");
  list("--lengths", bench.lengths, "Tokens (default: 64, 128, ... 16384)");
  list("--head-dims", bench.head_dims, "Widths of a head (default: 64)");
  list("--threads", bench.threads, "Numbers of threads (default: torch's)");
  list("--passes", flags->passes,
       "forward, backward (forward + backward), decode (default: all)");
  auto* causal =
      command->add_flag("--causal", flags->causal, "Only causal attention");
  command
      ->add_flag("--no-causal", flags->no_causal,
                 "Only the other (default: both)")
      ->excludes(causal);
  command->add_option("--heads", bench.heads, "Heads")->capture_default_str();
  command->add_option("--batch", bench.batch, "Rows of the batch")
      ->capture_default_str();
  command
      ->add_option("--dtype", flags->dtype,
                   "float32, float64, bfloat16, float16")
      ->capture_default_str();
  add_kind_flags(command, &bench);
  command->add_option("--repeats", bench.repeats, "Rounds of a point at most")
      ->capture_default_str();
  command
      ->add_option("--seconds", bench.seconds,
                   "What the whole run aims at; points that would take too "
                   "much of it are left out")
      ->capture_default_str();
  command->add_option(
      "--out", flags->out,
      "A folder for bench.json, bench.md, time.png, memory.png");
  command->add_flag("--json", flags->json,
                    "Print bench.json instead of tables");
  command->footer(
      "Examples:\n"
      "  cosformer bench --out runs/bench\n"
      "  cosformer bench --kinds softmax,cosformer --lengths 256,1024,4096 "
      "--causal --threads 1,2\n"
      "A run takes about --seconds (by default 4 minutes). Ctrl-C keeps what "
      "was measured. `cosformer advise --bench runs/bench` reads it.");
  command->callback(
      [flags, run] { *run = [flags] { return bench_command(*flags); }; });
}

}  // namespace cosformer::cli
