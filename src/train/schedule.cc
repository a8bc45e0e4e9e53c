#include <algorithm>
#include <cmath>
#include <numbers>

#include "cosformer/train.h"

namespace cosformer {

double learning_rate(const TrainConfig& config, int64_t step) {
  const auto now = static_cast<double>(step);
  const auto warmup = static_cast<double>(config.warmup_steps);
  if (now < warmup) return config.lr * now / warmup;
  if (config.schedule == "inverse_sqrt") {
    return std::max(config.min_lr,
                    config.lr * std::sqrt(std::max(warmup, 1.0) / now));
  }
  if (config.schedule == "cosine") {
    const double span = static_cast<double>(config.steps) - warmup;
    const double part = span > 0 ? std::min(1.0, (now - warmup) / span) : 1.0;
    return config.min_lr + 0.5 * (config.lr - config.min_lr) *
                               (1.0 + std::cos(std::numbers::pi * part));
  }
  return config.lr;
}

}  // namespace cosformer
