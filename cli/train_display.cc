#include "cli/train_display.h"

#include <algorithm>
#include <vector>

#include "cli/output.h"

namespace cosformer::cli {
namespace {

// 940, 12.3k, 1.2M.
std::string rate(double value) {
  if (value < 1e3) return fixed(value, 0);
  if (value < 1e6) return fixed(value / 1e3, value < 1e5 ? 1 : 0) + "k";
  return fixed(value / 1e6, 1) + "M";
}

}  // namespace

void TrainDisplay::on_data(int64_t done, int64_t total) {
  if (!shown_.due()) return;
  const double share =
      total > 0 ? static_cast<double>(done) / static_cast<double>(total) : 0.0;
  shown_.show(
      {str_cat("reading the text: ", fixed(static_cast<double>(done) / 1e6, 1),
               " of ", fixed(static_cast<double>(total) / 1e6, 1), " MB")},
      share);
}

void TrainDisplay::on_step(const TrainProgress& progress) {
  progress_ = progress;
  const bool last = progress.step == progress.steps;
  if (!shown_.due() && !last) return;
  const double share =
      static_cast<double>(progress.step) /
      static_cast<double>(std::max<int64_t>(progress.steps, 1));
  std::vector<std::string> parts = {
      str_cat("step ", progress.step, "/", progress.steps),
      "loss " + fixed(progress.loss, 3)};
  if (validation_loss_) parts.push_back("val " + fixed(*validation_loss_, 3));
  const std::string speed = rate(progress.tokens_per_second) + " tokens/s";
  const std::string left = duration(progress.seconds_left) + " left";
  if (shown_.is_terminal()) {
    parts.insert(parts.end(), {left, speed});
  } else {
    parts.insert(parts.end(), {str_cat("lr ", progress.lr), speed, left});
  }
  shown_.show(parts, share);
}

void TrainDisplay::on_eval(int64_t step, const EvalResult& result,
                           bool is_best) {
  validation_loss_ = result.loss;
  if (shown_.is_terminal()) {
    if (progress_.step > 0) {
      shown_.hurry();
      on_step(progress_);
    }
    return;
  }
  shown_.message(str_cat("step ", step, ": validation loss ",
                         fixed(result.loss, 4), ", ",
                         fixed(result.bits_per_byte, 4), " bits/byte",
                         is_best ? " (best so far)" : ""));
}

}  // namespace cosformer::cli
