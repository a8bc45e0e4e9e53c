// What `bench` and `advise` share: flags and how measuring looks.
#ifndef COSFORMER_CLI_BENCH_FLAGS_H_
#define COSFORMER_CLI_BENCH_FLAGS_H_

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "cli/progress.h"
#include "cosformer/bench.h"

namespace cosformer::cli {

// --window, --num-features, --projected-len. Returns them.
std::vector<CLI::Option*> add_kind_flags(CLI::App* command,
                                         BenchOptions* bench);

// Of a floating type by name.
Result<DType> dtype_of(const std::string& text);

class BenchDisplay {
 public:
  // seconds: what the run aims at.
  explicit BenchDisplay(double seconds) : seconds_(seconds) {}
  void on_progress(const BenchProgress& progress);
  // A line of its own, above the bar.
  void message(const std::string& text) { shown_.message(text); }
  // Ends the bar's line.
  void finish() { shown_.finish(); }

 private:
  Progress shown_;
  double seconds_;
  bool begun_ = false;
};

}  // namespace cosformer::cli

#endif  // COSFORMER_CLI_BENCH_FLAGS_H_
