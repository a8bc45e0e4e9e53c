#include "models/sampling.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cosformer/base.h"

namespace cosformer {
namespace {

struct Candidate {
  double logit;
  int32_t id;
};

bool better(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

// 53 bits in [0, 1).
double uniform(uint64_t seed, uint64_t step) {
  const auto bits = philox(seed, 0, step);
  const uint64_t word = (uint64_t{bits[0]} << 32) | bits[1];
  return static_cast<double>(word >> 11) * 0x1.0p-53;
}

}  // namespace

int32_t sample(std::span<const float> logits, const SamplingOptions& options,
               uint64_t step) {
  std::vector<Candidate> candidates;
  candidates.reserve(logits.size());
  for (size_t i = 0; i < logits.size(); ++i) {
    if (!std::isnan(logits[i])) {
      candidates.push_back({logits[i], static_cast<int32_t>(i)});
    }
  }
  if (candidates.empty()) return 0;
  if (options.temperature == 0.0) {
    return std::min_element(candidates.begin(), candidates.end(), better)->id;
  }
  const auto top_k = static_cast<size_t>(options.top_k);
  if (top_k > 0 && top_k < candidates.size()) {
    std::nth_element(candidates.begin(),
                     candidates.begin() + static_cast<ptrdiff_t>(top_k),
                     candidates.end(), better);
    candidates.resize(top_k);
  }
  if (options.top_p < 1.0 || top_k > 0) {
    std::sort(candidates.begin(), candidates.end(), better);
  }
  double greatest = candidates.front().logit;
  for (const Candidate& c : candidates) {
    greatest = std::max(greatest, c.logit);
  }
  std::vector<double> weights(candidates.size());
  double total = 0.0;
  for (size_t i = 0; i < candidates.size(); ++i) {
    // Equal infinities would give NaN.
    const double below =
        candidates[i].logit == greatest ? 0.0 : candidates[i].logit - greatest;
    weights[i] = std::exp(below / options.temperature);
    total += weights[i];
  }
  if (options.top_p < 1.0) {  // the fewest that reach top_p, at least one
    double kept = 0.0;
    size_t count = 0;
    while (count < weights.size() &&
           (count == 0 || kept < options.top_p * total)) {
      kept += weights[count++];
    }
    weights.resize(count);
    total = kept;
  }
  double left = uniform(options.seed, step) * total;
  size_t chosen = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] == 0.0) continue;
    chosen = i;
    left -= weights[i];
    if (left < 0.0) break;
  }
  return candidates[chosen].id;
}

}  // namespace cosformer
