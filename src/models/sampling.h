// From logits to a token.
#ifndef COSFORMER_SRC_MODELS_SAMPLING_H_
#define COSFORMER_SRC_MODELS_SAMPLING_H_

#include <cstdint>
#include <span>

namespace cosformer {

struct SamplingOptions {
  double temperature = 1.0;  // 0 = greedy
  int64_t top_k = 0;         // 0 = all
  double top_p = 1.0;
  uint64_t seed = 1;
};

// The token for `step`: drawn by Philox keyed by the seed at counter step. Ties
// go to the lower id. logits must not be empty; NaN is never chosen unless all
// are NaN (then 0).
int32_t sample(std::span<const float> logits, const SamplingOptions& options,
               uint64_t step);

}  // namespace cosformer

#endif  // COSFORMER_SRC_MODELS_SAMPLING_H_
