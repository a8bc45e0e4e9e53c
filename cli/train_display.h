// How training looks.
#ifndef COSFORMER_CLI_TRAIN_DISPLAY_H_
#define COSFORMER_CLI_TRAIN_DISPLAY_H_

#include <optional>
#include <string>

#include "cli/progress.h"
#include "cosformer/train.h"

namespace cosformer::cli {

class TrainDisplay {
 public:
  void on_data(int64_t done, int64_t total);
  void on_step(const TrainProgress& progress);
  void on_eval(int64_t step, const EvalResult& result, bool is_best);
  // A line of its own, above the bar.
  void message(const std::string& text) { shown_.message(text); }
  // Ends the bar's line.
  void finish() { shown_.finish(); }

 private:
  Progress shown_;
  TrainProgress progress_;
  std::optional<double> validation_loss_;
};

}  // namespace cosformer::cli

#endif  // COSFORMER_CLI_TRAIN_DISPLAY_H_
