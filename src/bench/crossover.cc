#include <algorithm>
#include <cmath>
#include <string>

#include "base/format_text.h"
#include "cosformer/bench.h"

namespace cosformer {

namespace {

// Of the same speed: no measurement tells less apart.
constexpr double kNoise = 0.03;

}  // namespace

Crossover find_crossover(const LengthCurve& curve,
                         const LengthCurve& reference) {
  // (length, log(time / time of the reference)) of what both have.
  LengthCurve lead;
  for (const auto& [length, seconds] : curve) {
    const auto other =
        std::find_if(reference.begin(), reference.end(),
                     [&](const auto& point) { return point.first == length; });
    if (other == reference.end() || !(seconds > 0 && other->second > 0)) {
      continue;
    }
    lead.emplace_back(length, std::log(seconds / other->second));
  }
  using Where = Crossover::Where;
  if (lead.empty()) return {};
  const double ahead = -std::log1p(kNoise);
  if (lead.back().second > ahead) {
    return {Where::kAlwaysBehind, lead.back().first};
  }
  // Back from the end to the last length at which it is not ahead.
  for (size_t i = lead.size() - 1; i > 0; --i) {
    const auto& [n0, y0] = lead[i - 1];
    const auto& [n1, y1] = lead[i];
    if (y0 > ahead) {
      // Where both are as fast as each other, at that length itself.
      const double part = std::max(y0, 0.0) / (std::max(y0, 0.0) - y1);
      return {Where::kAt, n0 * std::pow(n1 / n0, part)};
    }
  }
  return {Where::kAlwaysAhead, lead.front().first};
}

std::string to_text(const Crossover& crossover) {
  const double length = crossover.length;
  switch (crossover.where) {
    case Crossover::Where::kAlwaysAhead:
      return "<= " + with_commas(std::llround(length));
    case Crossover::Where::kAt: {
      // More than two digits would be more than the measurement holds.
      const double unit =
          length < 10 ? 1 : std::pow(10, std::floor(std::log10(length)) - 1);
      return with_commas(std::llround(std::round(length / unit) * unit));
    }
    case Crossover::Where::kAlwaysBehind:
      return "> " + with_commas(std::llround(length));
    case Crossover::Where::kUnknown:
      break;
  }
  return "-";
}

}  // namespace cosformer
