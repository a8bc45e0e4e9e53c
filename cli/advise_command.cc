// `cosformer advise`: which attention to use at a length, measured here or read
// from a saved bench.
#include <filesystem>
#include <memory>
#include <optional>

#include "cli/bench_flags.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "cli/signals.h"
#include "cosformer/bench.h"

namespace cosformer::cli {
namespace {

struct AdviseFlags {
  AdviseOptions advise;
  BenchOptions kinds;  // of these, the options of kinds
  bool no_causal = false;
  std::string dtype, bench;
  double seconds = 20;
  bool has_bench = false;  // --bench, even if empty
  bool json = false;
};

Result<BenchReport> read_bench(const std::string& path) {
  const std::string file =
      std::filesystem::is_directory(path) ? path + "/bench.json" : path;
  auto text = read_file(file);
  if (!text.ok()) return text.status();
  return bench_report_from_json(*text, file);
}

Result<BenchReport> measure(const AdviseFlags& flags, DType dtype) {
  COSFORMER_RETURN_IF_ERROR(check_advise_bench(flags.advise));
  BenchOptions bench = advise_bench(flags.advise, flags.seconds);
  bench.dtype = dtype;
  bench.window = flags.kinds.window;
  bench.num_features = flags.kinds.num_features;
  bench.projected_len = flags.kinds.projected_len;
  COSFORMER_RETURN_IF_ERROR(validate(bench));
  const std::atomic<bool>& stop = catch_stop_signals("\nstopping\n");
  BenchDisplay display(bench.seconds);
  display.message(
      "measuring this machine; nothing of it is kept (`cosformer bench --out` "
      "keeps it, --bench reads that)");
  BenchCallbacks callbacks;
  callbacks.on_progress = [&](const BenchProgress& progress) {
    display.on_progress(progress);
  };
  auto report = run_bench(bench, callbacks, stop);
  display.finish();
  return report;
}

int advise_command(AdviseFlags flags) {
  const auto wrong = [](const Status& status) {
    return fail(Status(status.code(), "advise: " + status.message()),
                kWrongUse);
  };
  flags.advise.is_causal = !flags.no_causal;
  if (const Status status = validate(flags.advise); !status.ok()) {
    return wrong(status);
  }
  if (flags.has_bench && flags.bench.empty()) {
    return wrong(invalid_argument(
        "bench: found \"\", expected a bench.json or its folder"));
  }
  std::optional<DType> dtype;
  if (!flags.dtype.empty()) {
    auto read = dtype_of(flags.dtype);
    if (!read.ok()) return wrong(read.status());
    dtype = *read;
  }
  auto report = flags.has_bench
                    ? read_bench(flags.bench)
                    : measure(flags, dtype.value_or(DType::kFloat32));
  if (!report.ok()) {
    const bool usage = report.status().code() == StatusCode::kInvalidArgument;
    return usage ? wrong(report.status()) : fail(report.status());
  }
  if (caught_signal() != 0) return 128 + caught_signal();
  if (dtype && report->options.dtype != *dtype) {
    return wrong(invalid_argument("dtype: found ", name(*dtype),
                                  ", expected that of ", flags.bench, ", ",
                                  name(report->options.dtype)));
  }
  auto advice = advise(flags.advise, *report);
  if (!advice.ok()) return wrong(advice.status());
  write_out(flags.json ? advice_json(*advice, flags.advise, *report)
                       : advice_text(*advice, flags.advise, *report));
  return check_output();
}

}  // namespace

void add_advise_command(CLI::App& app, Run* run) {
  auto* command = app.add_subcommand(
      "advise", "Say which kind of attention to use at a length, and why");
  const auto flags = std::make_shared<AdviseFlags>();
  AdviseOptions& advise = flags->advise;
  const auto number = [&](const char* option, int64_t& value,
                          const char* text) {
    return command->add_option(option, value, text);
  };
  number("--length", advise.length, "Tokens of a sequence")->required();
  auto* no_causal = command->add_flag("--no-causal", flags->no_causal,
                                      "An encoder: all see all");
  command->add_flag("--causal")
      ->description("Only what came before (the default)")
      ->excludes(no_causal);
  command->add_flag("--decode", advise.is_decoding,
                    "Weigh decoding token by token, not training");
  number("--head-dim", advise.head_dim, "Width of a head")
      ->capture_default_str();
  number("--heads", advise.heads, "Heads")->capture_default_str();
  number("--layers", advise.layers, "Layers")->capture_default_str();
  number("--batch", advise.batch, "Rows of the batch")->capture_default_str();
  number("--memory", advise.memory,
         "What attention may take over all layers, in bytes or as 500M, 8G")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false));
  number("--threads", advise.threads, "Threads (default: torch's)");
  command->add_option("--dtype", flags->dtype,
                      "float32 (the default), float64, bfloat16, float16");
  auto measuring = add_kind_flags(command, &flags->kinds);
  measuring.push_back(command
                          ->add_option("--seconds", flags->seconds,
                                       "What measuring may take, about")
                          ->capture_default_str());
  auto* saved = command->add_option(
      "--bench", flags->bench,
      "A saved bench.json, or its folder, instead of measuring");
  // A saved bench has these settled.
  for (CLI::Option* option : measuring) option->excludes(saved);
  command->add_flag("--json", flags->json, "Print one JSON object");
  command->footer(
      "Examples:\n"
      "  cosformer advise --length 4096\n"
      "  cosformer advise --length 32768 --decode --layers 24 --memory 2G\n"
      "  cosformer advise --length 4096 --bench runs/bench\n"
      "Speed is not quality: docs/choosing.md says how to read the answer.");
  command->callback([flags, run, saved] {
    flags->has_bench = saved->count() > 0;
    *run = [flags] { return advise_command(*flags); };
  });
}

}  // namespace cosformer::cli
