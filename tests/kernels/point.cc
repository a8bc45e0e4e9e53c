// Points of the grid as text, so that a failing one can be run again.
#include <cstdlib>
#include <iterator>
#include <sstream>

#include "tests/kernels/problem.h"

namespace cosformer::testing {
namespace {

constexpr std::string_view kDTypes[] = {"float32", "float64", "bfloat16",
                                        "float16"};
constexpr DType kDTypeValues[] = {DType::kFloat32, DType::kFloat64,
                                  DType::kBFloat16, DType::kFloat16};
constexpr std::string_view kFeatureMaps[] = {"relu", "elu1", "identity"};
constexpr std::string_view kCosines[] = {"none", "exact", "far"};
constexpr std::string_view kRotaries[] = {"none", "half", "interleaved"};
constexpr std::string_view kStates[] = {"none", "in", "out", "both"};
constexpr std::string_view kLayouts[] = {"contiguous", "padded", "transposed",
                                         "offset", "mixed"};

template <size_t N>
bool find(const std::string_view (&names)[N], std::string_view name,
          int64_t* index) {
  for (size_t i = 0; i < N; ++i) {
    if (names[i] == name) {
      *index = static_cast<int64_t>(i);
      return true;
    }
  }
  return false;
}

bool set_field(Point& p, std::string_view key, std::string_view text) {
  const int64_t number = std::atoll(std::string(text).c_str());
  int64_t index = 0;
  if (key == "batch") {
    p.batch = number;
  } else if (key == "q_len") {
    p.q_len = number;
  } else if (key == "kv_len") {
    p.kv_len = number;
  } else if (key == "kv_heads") {
    p.kv_heads = number;
  } else if (key == "group") {
    p.group = number;
  } else if (key == "head_dim") {
    p.head_dim = number;
  } else if (key == "value_dim") {
    p.value_dim = number;
  } else if (key == "threads") {
    p.threads = number;
  } else if (key == "seed") {
    p.seed = number;
  } else if (key == "causal") {
    p.causal = number != 0;
  } else if (key == "normalized") {
    p.normalized = number != 0;
  } else if (key == "dtype") {
    if (!find(kDTypes, text, &index)) return false;
    p.dtype = kDTypeValues[index];
  } else if (key == "feature_map") {
    if (!find(kFeatureMaps, text, &index)) return false;
    p.feature_map = static_cast<FeatureMap>(index);
  } else if (key == "cosine") {
    return find(kCosines, text, &p.cosine);
  } else if (key == "rotary") {
    return find(kRotaries, text, &p.rotary);
  } else if (key == "starts") {
    return find(kStartsNames, text, &p.starts);
  } else if (key == "mask") {
    return find(kMaskNames, text, &p.mask);
  } else if (key == "packing") {
    return find(kPackingNames, text, &p.packing);
  } else if (key == "state") {
    return find(kStates, text, &p.state);
  } else if (key == "layout") {
    return find(kLayouts, text, &p.layout);
  } else {
    return false;
  }
  return true;
}

}  // namespace

std::string describe(const Point& p) {
  return str_cat(
      "batch=", p.batch, " q_len=", p.q_len, " kv_len=", p.kv_len,
      " kv_heads=", p.kv_heads, " group=", p.group, " head_dim=", p.head_dim,
      " value_dim=", p.value_dim, " dtype=", name(p.dtype),
      " feature_map=", kFeatureMaps[static_cast<size_t>(p.feature_map)],
      " cosine=", kCosines[p.cosine], " causal=", p.causal,
      " normalized=", p.normalized, " rotary=", kRotaries[p.rotary],
      " starts=", kStartsNames[p.starts], " mask=", kMaskNames[p.mask],
      " packing=", kPackingNames[p.packing], " state=", kStates[p.state],
      " layout=", kLayouts[p.layout], " threads=", p.threads, " seed=", p.seed);
}

std::optional<Point> parse_point(std::string_view text) {
  Point point;
  std::istringstream words{std::string(text)};
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    if (equals == std::string::npos) return std::nullopt;
    if (!set_field(point, std::string_view(word).substr(0, equals),
                   std::string_view(word).substr(equals + 1))) {
      return std::nullopt;
    }
  }
  return point;
}

}  // namespace cosformer::testing
