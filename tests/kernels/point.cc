// Points of the grid as text, so that a failing one can be run again.
#include "tests/kernels/problem.h"

namespace cosformer::testing {
namespace {

constexpr std::string_view kFeatureMaps[] = {"relu", "elu1", "identity"};
constexpr std::string_view kCosines[] = {"none", "exact", "far"};
constexpr std::string_view kRotaries[] = {"none", "half", "interleaved"};
constexpr std::string_view kStates[] = {"none", "in", "out", "both"};

bool set_field(Point& p, std::string_view key, std::string_view text) {
  if (key == "normalized") {
    p.normalized = text != "0";
    return true;
  }
  if (key == "feature_map") {
    int64_t index = 0;
    if (!find_name(kFeatureMaps, text, &index)) return false;
    p.feature_map = static_cast<FeatureMap>(index);
    return true;
  }
  if (key == "cosine") return find_name(kCosines, text, &p.cosine);
  if (key == "rotary") return find_name(kRotaries, text, &p.rotary);
  if (key == "state") return find_name(kStates, text, &p.state);
  return set_call_field(p, key, text);
}

}  // namespace

std::string describe(const Point& p) {
  return str_cat(describe_call(p), " feature_map=",
                 kFeatureMaps[static_cast<size_t>(p.feature_map)],
                 " cosine=", kCosines[p.cosine], " normalized=", p.normalized,
                 " rotary=", kRotaries[p.rotary], " state=", kStates[p.state]);
}

std::optional<Point> parse_point(std::string_view text) {
  Point point;
  if (!for_fields(text, [&](std::string_view key, std::string_view value) {
        return set_field(point, key, value);
      })) {
    return std::nullopt;
  }
  return point;
}

}  // namespace cosformer::testing
