#include "bench/kinds.h"

#include <algorithm>
#include <set>

namespace cosformer {

std::string_view name(BenchPass pass) {
  switch (pass) {
    case BenchPass::kForward:
      return "forward";
    case BenchPass::kBackward:
      return "backward";
    case BenchPass::kDecode:
      break;
  }
  return "decode";
}

const std::vector<BenchKind>& bench_kinds() {
  static const std::vector<BenchKind> kinds = {
      {"sdpa", "torch SDPA", "", "nothing: exact softmax, torch's own kernel"},
      {"softmax", "softmax", "",
       "nothing: exact (rotary positions are applied before it); the KV cache "
       "grows"},
      {"softmax-t5", "softmax, T5 bias", "",
       "nothing: exact, with a learned bias by distance; the KV cache grows"},
      {"window", "softmax, window", "",
       "locality: a layer sees the window alone"},
      {"longformer", "Longformer", "",
       "locality beyond its global tokens; three more projections"},
      {"bigbird", "BigBird", "",
       "a layer sees some blocks alone; the KV cache grows"},
      {"performer", "Performer", "",
       "approximation: random features of the exponential"},
      {"linear", "linear (elu + 1)", "",
       "another function than softmax, which cannot be as sharp"},
      {"relu", "ReLU", "",
       "another function than softmax; a row may see nothing"},
      {"cosformer", "cosFormer", "",
       "another function than softmax; no distance beyond M"},
      {"linformer", "Linformer",
       "each projected key mixes all positions, later ones included",
       "no causal form, no decoding, a fixed longest length, two learned "
       "projections of it"},
  };
  return kinds;
}

const BenchKind* find_bench_kind(std::string_view name) {
  for (const BenchKind& kind : bench_kinds()) {
    if (kind.name == name) return &kind;
  }
  return nullptr;
}

AttentionConfig attention_of(const BenchKind& kind,
                             const BenchOptions& options) {
  AttentionConfig config;
  if (kind.name == "sdpa" || kind.name == "softmax-t5") {
    config.kind = "softmax";
  } else if (kind.name == "window") {
    config.kind = "softmax";
    config.window = options.window;
  } else if (kind.name == "relu") {
    config.kind = "linear";
    config.feature_map = "relu";
  } else {
    config.kind = kind.name;
  }
  if (kind.name == "longformer") {
    config.window = options.window;
    config.global_tokens = 1;
  }
  if (kind.name == "performer") config.num_features = options.num_features;
  if (kind.name == "linformer") config.projected_len = options.projected_len;
  return config;
}

namespace {

template <typename T>
Status check_list(const char* option, const std::vector<T>& values, T most,
                  const char* what) {
  if (values.empty()) {
    return invalid_argument(option, ": empty, expected ", what);
  }
  std::set<T> seen;
  for (const T value : values) {
    if (value < 1 || value > most) {
      return invalid_argument(option, ": found ", value, ", expected ", what,
                              " from 1 to ", most);
    }
    if (!seen.insert(value).second) {
      return invalid_argument(option, ": found ", value, " twice");
    }
  }
  return {};
}

Status check_kinds(const std::vector<std::string>& kinds) {
  std::vector<std::string> known;
  std::string list;
  for (const BenchKind& kind : bench_kinds()) {
    known.push_back(kind.name);
    list += (list.empty() ? "" : ", ") + kind.name;
  }
  std::set<std::string> seen;
  for (const std::string& kind : kinds) {
    if (find_bench_kind(kind) == nullptr) {
      const std::string near = nearest_key(kind, known);
      return invalid_argument(
          "kinds: unknown kind \"", kind, "\": ",
          near.empty() ? "expected one of " + list
                       : "did you mean " + near + "? (all: " + list + ")");
    }
    if (!seen.insert(kind).second) {
      return invalid_argument("kinds: found ", kind, " twice");
    }
  }
  return {};
}

}  // namespace

Status validate(const BenchOptions& options) {
  constexpr int64_t kLongest = int64_t{1} << 26;
  constexpr int64_t kMany = 4096;
  COSFORMER_RETURN_IF_ERROR(check_kinds(options.kinds));
  COSFORMER_RETURN_IF_ERROR(
      check_list("lengths", options.lengths, kLongest, "numbers of tokens"));
  COSFORMER_RETURN_IF_ERROR(check_list<int64_t>("head-dims", options.head_dims,
                                                1024, "widths of a head"));
  if (!options.threads.empty()) {
    COSFORMER_RETURN_IF_ERROR(
        check_list("threads", options.threads, kMany, "numbers of threads"));
  }
  if (options.passes.empty()) {
    return invalid_argument(
        "passes: empty, expected some of forward, backward, decode");
  }
  if (options.causal.empty()) {
    return invalid_argument("causal: neither causal nor not is asked for");
  }
  const std::pair<const char*, int64_t> at_least_one[] = {
      {"heads", options.heads},
      {"batch", options.batch},
      {"window", options.window},
      {"num-features", options.num_features},
      {"projected-len", options.projected_len},
      {"repeats", options.repeats}};
  for (const auto& [option, value] : at_least_one) {
    if (value < 1 || value > kLongest) {
      return invalid_argument(option, ": found ", value,
                              ", expected a number from 1 to ", kLongest);
    }
  }
  if (!(options.seconds > 0 && options.seconds <= 1e6)) {
    return invalid_argument("seconds: found ", options.seconds,
                            ", expected a number above 0 and at most 1e6");
  }
  for (const DType dtype :
       {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16}) {
    if (options.dtype == dtype) return {};
  }
  return invalid_argument("dtype: found ", name(options.dtype),
                          ", expected float32, float64, bfloat16 or float16");
}

namespace bench_internal {

double visible_pairs(int64_t length, bool is_causal, int64_t window) {
  // The keys before a row, itself included, and those after it: the same by
  // symmetry.
  const auto n = static_cast<double>(length);
  const double reach =
      window < 0 ? n - 1 : std::min(static_cast<double>(window), n - 1);
  // Rows up to `reach` see all before them, the rest `reach`.
  const double before = reach * (reach + 1) / 2 + (n - 1 - reach) * reach;
  return n + (is_causal ? 1 : 2) * before;
}

double softmax_operations(double pairs, int64_t head_dim, bool with_backward) {
  return (with_backward ? 14 : 4) * pairs * static_cast<double>(head_dim);
}

double linear_operations(int64_t features, int64_t head_dim,
                         bool with_backward) {
  return (with_backward ? 14 : 4) * static_cast<double>(features) *
         static_cast<double>(head_dim + 1);
}

}  // namespace bench_internal
}  // namespace cosformer
