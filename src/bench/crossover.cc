#include <algorithm>
#include <cmath>
#include <string>

#include "base/format_text.h"
#include "cosformer/bench.h"

namespace cosformer {

Crossover find_crossover(const LengthCurve& curve,
                         const LengthCurve& reference) {
  // log(length), log(time / time of the reference), of what both have.
  LengthCurve lead;
  for (const auto& [length, seconds] : curve) {
    const auto other =
        std::find_if(reference.begin(), reference.end(),
                     [&](const auto& point) { return point.first == length; });
    if (other == reference.end() || !(seconds > 0 && other->second > 0)) {
      continue;
    }
    lead.emplace_back(std::log(length), std::log(seconds / other->second));
  }
  using Where = Crossover::Where;
  if (lead.empty()) return {};
  if (lead.back().second >= 0) {
    return {Where::kAlwaysBehind, std::exp(lead.back().first)};
  }
  // Back from the end to the last length at which it is not ahead.
  for (size_t i = lead.size() - 1; i > 0; --i) {
    const auto& [x0, y0] = lead[i - 1];
    const auto& [x1, y1] = lead[i];
    if (y0 >= 0) {
      return {Where::kAt, std::exp(x0 + (x1 - x0) * y0 / (y0 - y1))};
    }
  }
  return {Where::kAlwaysAhead, std::exp(lead.front().first)};
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
