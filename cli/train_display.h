// How training looks: a bar on a terminal, plain lines elsewhere; both on
// stderr.
#ifndef COSFORMER_CLI_TRAIN_DISPLAY_H_
#define COSFORMER_CLI_TRAIN_DISPLAY_H_

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "cosformer/train.h"

namespace cosformer::cli {

class TrainDisplay {
 public:
  TrainDisplay();

  void on_data(int64_t done, int64_t total);
  void on_step(const TrainProgress& progress);
  void on_eval(int64_t step, const EvalResult& result, bool is_best);
  // A line of its own, above the bar.
  void message(const std::string& text);
  // Ends the bar's line.
  void finish();

 private:
  using Clock = std::chrono::steady_clock;
  void draw(const std::string& line);
  // Draws those parts that the terminal has room for, the first ones before
  // the later, and a bar if there is room left.
  void draw_parts(const std::vector<std::string>& parts, double share);
  void clear();
  std::string bar(double share, int64_t width) const;
  bool due(double seconds);

  bool terminal_ = false;
  bool utf8_ = false;
  bool drawn_ = false;
  std::optional<Clock::time_point> last_drawn_;
  TrainProgress progress_;
  std::optional<double> validation_loss_;
};

}  // namespace cosformer::cli

#endif  // COSFORMER_CLI_TRAIN_DISPLAY_H_
