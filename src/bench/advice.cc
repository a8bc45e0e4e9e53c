// From measurements to a kind: rules that depend on figures alone.
#include <algorithm>
#include <cmath>

#include "base/format_text.h"
#include "bench/kinds.h"
#include "bench/report.h"

namespace cosformer {
namespace bench_internal {
namespace {

// Matrix products of a Transformer layer reach about so much of the peak.
constexpr double kProductShare = 0.8;
// Multiply-adds of a layer's projections (4 width^2) and feed-forward (8
// width^2), a token; the backward takes twice as many again.
constexpr double kLayerWeights = 12.0;
// Where the literature changes its advice, in tokens.
constexpr int64_t kThumbWindow = 1024, kThumbLinear = 8192;

// Exact first, then what reaches over the whole length, by the losses of one
// recipe (docs/training.md).
constexpr const char* kLinearKinds[] = {"performer", "linear", "relu",
                                        "cosformer"};

std::string_view family_of(std::string_view kind) {
  if (kind == "sdpa" || kind == "softmax" || kind == "softmax-t5") {
    return "softmax";
  }
  if (kind == "window" || kind == "longformer" || kind == "bigbird") {
    return "window";
  }
  return kind.empty() ? "" : kind == "linformer" ? "linformer" : "linear";
}

// How far lines go on, times the longest measured length: a slope's error grows
// with the distance, and more data leave the caches.
constexpr int64_t kReach = 16;

int64_t longest_of(const LengthCurve& curve) {
  return curve.empty() ? 0 : static_cast<int64_t>(curve.back().first);
}

// Bytes of figures from files and options: saturates instead of overflowing.
int64_t saturated(double value) {
  constexpr double kMost = 9e18;
  return value < kMost ? std::llround(value) : static_cast<int64_t>(kMost);
}

// The value at a length on log-log lines through the points; beyond them the
// nearest line goes on (*outside). nullopt: no point, one elsewhere, or beyond
// kReach.
std::optional<double> value_at(const LengthCurve& curve, double length,
                               bool* outside) {
  for (const auto& [x, y] : curve) {
    if (x == length) return y;
  }
  if (curve.size() < 2 ||
      length > static_cast<double>(kReach) * curve.back().first) {
    return std::nullopt;
  }
  size_t next = 1;
  while (next + 1 < curve.size() && curve[next].first < length) ++next;
  const auto& [x0, y0] = curve[next - 1];
  const auto& [x1, y1] = curve[next];
  *outside |= length < curve.front().first || length > curve.back().first;
  const double slope = std::log(y1 / y0) / std::log(x1 / x0);
  return y0 * std::exp(slope * std::log(length / x0));
}

class Adviser {
 public:
  Adviser(const AdviseOptions& options, const BenchReport& report,
          const BenchPeak& peak)
      : options_(options),
        report_(report),
        peak_(peak),
        scale_(
            static_cast<double>(options.heads * options.batch) /
            static_cast<double>(report.options.heads * report.options.batch)) {}

  Advice run() {
    Advice advice;
    advice.rest_of_layer = rest_of_layer(static_cast<double>(options_.length));
    for (const std::string& kind : report_.options.kinds) {
      advice.kinds.push_back(cost_of(*find_bench_kind(kind)));
    }
    advice.softmax_bearable = bearable();
    choose(&advice);
    const std::string_view thumb = options_.length <= kThumbWindow   ? "softmax"
                                   : options_.length <= kThumbLinear ? "window"
                                                                     : "linear";
    advice.rule_of_thumb = std::string(thumb);
    advice.agrees = family_of(advice.kind) == thumb;
    return advice;
  }

 private:
  BenchSeries series(BenchPass pass) const {
    return {pass, options_.is_causal || pass == BenchPass::kDecode,
            options_.head_dim, options_.threads};
  }
  BenchPass main_pass() const {
    return options_.is_decoding ? BenchPass::kDecode : BenchPass::kBackward;
  }
  double width() const {
    return static_cast<double>(options_.heads * options_.head_dim);
  }
  double element_bytes() const {
    return static_cast<double>(size_of(report_.options.dtype));
  }

  // Seconds. Decoding reads the weights once for all rows.
  double rest_of_layer(double length) const {
    const double weights = kLayerWeights * width() * width();
    const double rate = kProductShare * peak_.flops;
    const auto rows = static_cast<double>(options_.batch);
    if (!options_.is_decoding) return 6 * weights * length * rows / rate;
    const double read =
        peak_.read_bytes > 0 ? weights * element_bytes() / peak_.read_bytes : 0;
    return std::max(read, 2 * weights * rows / rate);
  }

  std::optional<CostEstimate> seconds(const std::string& kind,
                                      BenchPass pass) const {
    bool outside = false;
    const auto at = value_at(curve_of(report_, series(pass), kind),
                             static_cast<double>(options_.length), &outside);
    if (!at) return std::nullopt;
    return CostEstimate{*at * scale_, outside};
  }

  KindAdvice cost_of(const BenchKind& kind) const {
    KindAdvice cost;
    cost.kind = kind.name;
    const BenchSeries main = series(main_pass());
    cost.against_sdpa = find_crossover(curve_of(report_, main, kind.name),
                                       curve_of(report_, main, "sdpa"));
    cost.against_softmax = find_crossover(curve_of(report_, main, kind.name),
                                          curve_of(report_, main, "softmax"));
    cost.forward = seconds(kind.name, BenchPass::kForward);
    cost.training = seconds(kind.name, BenchPass::kBackward);
    const bool has_causal = kind.no_causal.empty();
    if (options_.is_causal && has_causal) {
      cost.decode = seconds(kind.name, BenchPass::kDecode);
      // Of one head, whose bytes fit into 64 bits. What a layer may hold: a
      // longformer's twice what the bench's step reads, since its cache drops
      // tokens out of sight only when as many again have come.
      const StateSize state =
          state_size(attention_of(kind, report_.options), 1, options_.head_dim,
                     static_cast<int64_t>(element_bytes()));
      cost.state_bytes =
          saturated(static_cast<double>(state.bytes_at(options_.length)) *
                    static_cast<double>(options_.heads) *
                    static_cast<double>(options_.layers) *
                    static_cast<double>(options_.batch));
    }
    cost.training_bytes = training_bytes(kind.name);
    const int64_t needed =
        options_.is_decoding ? cost.state_bytes : cost.training_bytes;
    if (options_.is_causal && !has_causal) {
      cost.excluded = "no causal form: " + kind.no_causal;
    } else if (options_.memory > 0 && needed > options_.memory) {
      cost.excluded = str_cat("does not fit: ", byte_size(needed), " of ",
                              byte_size(options_.memory));
    } else if (!(options_.is_decoding ? cost.decode : cost.training)) {
      cost.excluded = why_unknown(curve_of(report_, main, kind.name));
    }
    return cost;
  }

  // Why a curve says nothing at the length.
  std::string why_unknown(const LengthCurve& curve) const {
    if (curve.empty()) {
      return str_cat("not measured: ", title_of(main_pass()));
    }
    const std::string longest = counted(longest_of(curve), "token");
    if (curve.size() == 1) return "measured at " + longest + " alone";
    return str_cat("measured up to ", longest, ", which tells up to ",
                   with_commas(kReach * longest_of(curve)));
  }

  // What a training step keeps of all layers (queries, keys, values, outputs)
  // and the peak of one layer beyond that.
  int64_t training_bytes(const std::string& kind) const {
    LengthCurve extra;
    const BenchSeries backward = series(BenchPass::kBackward);
    for (const auto& [length, seconds] : curve_of(report_, backward, kind)) {
      const BenchPoint* p =
          find_point(report_, backward, kind, static_cast<int64_t>(length));
      extra.emplace_back(length,
                         std::max(1.0, static_cast<double>(p->extra_bytes)));
    }
    bool outside = false;
    const double length = static_cast<double>(options_.length);
    const double one = value_at(extra, length, &outside).value_or(0) * scale_;
    const double kept = 4 * length * width() *
                        static_cast<double>(options_.batch * options_.layers) *
                        element_bytes();
    return saturated(kept + one);
  }

  // Of a kind that is not excluded, in seconds.
  double main_cost(const KindAdvice& cost) const {
    return (options_.is_decoding ? cost.decode : cost.training)->seconds;
  }

  Crossover bearable() const {
    LengthCurve softmax = curve_of(report_, series(main_pass()), "softmax");
    LengthCurve rest;
    for (auto& [length, seconds] : softmax) {
      seconds *= scale_;
      rest.emplace_back(length, rest_of_layer(length));
    }
    return find_crossover(rest, softmax);
  }

  const KindAdvice* open(const Advice& advice, std::string_view kind) const {
    for (const KindAdvice& each : advice.kinds) {
      if (each.kind == kind && each.excluded.empty()) return &each;
    }
    return nullptr;
  }

  std::string times_rest(const Advice& advice, const KindAdvice& cost) const {
    return three_digits(main_cost(cost) / advice.rest_of_layer) +
           " times as long as the rest of its layer";
  }

  void choose(Advice* advice) const {
    const auto bears = [&](const KindAdvice* cost) {
      return cost != nullptr && main_cost(*cost) <= advice->rest_of_layer;
    };
    const KindAdvice* softmax = open(*advice, "softmax");
    if (bears(softmax)) {
      advice->kind = "softmax";
      advice->reason =
          "exact softmax (with rotary positions) is the better model wherever "
          "its cost is bearable, and here its attention takes " +
          times_rest(*advice, *softmax);
      return;
    }
    const std::string instead =
        softmax != nullptr
            ? "exact softmax would take " + times_rest(*advice, *softmax)
            : "exact softmax cannot be chosen";
    const KindAdvice* window = open(*advice, "window");
    const int64_t reach =
        saturated(static_cast<double>(options_.layers) *
                  static_cast<double>(report_.options.window));
    const std::string layers = counted(options_.layers, "layer");
    if (bears(window) && reach >= options_.length) {
      advice->kind = "window";
      advice->reason =
          str_cat(instead, "; a window of ", report_.options.window, " takes ",
                  times_rest(*advice, *window), ", and through ", layers,
                  " it reaches ", counted(reach, "token"));
      return;
    }
    const KindAdvice* cheapest = nullptr;
    for (const KindAdvice& each : advice->kinds) {
      if (each.kind == kReference || !each.excluded.empty()) continue;
      if (cheapest == nullptr || main_cost(each) < main_cost(*cheapest)) {
        cheapest = &each;
      }
    }
    for (const char* kind : kLinearKinds) {
      const KindAdvice* cost = open(*advice, kind);
      if (!bears(cost)) continue;
      advice->kind = kind;
      advice->reason = str_cat(
          instead, "; ", layers, " of a window of ", report_.options.window,
          options_.layers == 1 ? " reaches " : " reach ",
          counted(reach, "token"),
          "; of the linear kinds that are bearable here, ", kind,
          " had the lowest loss (docs/training.md), and takes ",
          times_rest(*advice, *cost));
      return;
    }
    if (cheapest == nullptr) {
      advice->reason = "no kind can be chosen: see the last column";
      return;
    }
    advice->kind = cheapest->kind;
    advice->reason = str_cat(instead, "; ", cheapest->kind,
                             " is the cheapest that can be chosen: it takes ",
                             times_rest(*advice, *cheapest));
  }

  const AdviseOptions& options_;
  const BenchReport& report_;
  const BenchPeak& peak_;
  const double scale_;
};

template <typename T>
std::string list_of(const std::vector<T>& values) {
  std::string list;
  for (const T& value : values) {
    list += str_cat(list.empty() ? "" : ", ", value);
  }
  return list;
}

}  // namespace
}  // namespace bench_internal

// That advise_bench() measures.
constexpr int64_t kLongest = 16384;

Status validate(const AdviseOptions& options) {
  constexpr int64_t kMost = int64_t{1} << 40;
  // Elements of queries, keys, values and outputs whose bytes still count in 64
  // bits.
  constexpr double kMostElements = 1e17;
  const std::pair<const char*, int64_t> at_least_one[] = {
      {"length", options.length},
      {"head-dim", options.head_dim},
      {"heads", options.heads},
      {"layers", options.layers},
      {"batch", options.batch}};
  for (const auto& [option, value] : at_least_one) {
    if (value < 1 || value > kMost) {
      return invalid_argument(option, ": found ", value,
                              ", expected a number from 1 to ", kMost);
    }
  }
  double elements = 1;
  for (const auto& [option, value] : at_least_one) {
    elements *= static_cast<double>(value);
  }
  if (elements > kMostElements) {
    return invalid_argument(
        "length x head-dim x heads x layers x batch: found ", elements,
        ", expected at most ", kMostElements);
  }
  if (options.threads < 0) {
    return invalid_argument("threads: found ", options.threads,
                            ", expected a number of them, or 0 for torch's");
  }
  if (options.memory < 0) {
    return invalid_argument("memory: found ", options.memory,
                            ", expected bytes, 0 or more");
  }
  if (options.is_decoding && !options.is_causal) {
    return invalid_argument(
        "decode: found --no-causal with it, expected causal: only causal "
        "attention goes on from token to token");
  }
  return {};
}

Status check_advise_bench(const AdviseOptions& options) {
  constexpr int64_t kMost = bench_internal::kReach * kLongest;
  if (options.length <= kMost) return {};
  return invalid_argument(
      "length: found ", options.length, ", expected at most ", kMost, ", ",
      bench_internal::kReach, " times the longest that is measured here, ",
      kLongest,
      ": measure longer by `cosformer bench --lengths` and read that "
      "by --bench");
}

BenchOptions advise_bench(const AdviseOptions& options, double seconds) {
  // Enough lengths for the crossovers, and the one that is asked for; beyond
  // the longest, lines go on.
  BenchOptions bench;
  bench.lengths = {64, 256, 1024, 4096};
  const int64_t length = std::min(options.length, kLongest);
  if (std::count(bench.lengths.begin(), bench.lengths.end(), length) == 0) {
    bench.lengths.push_back(length);
  }
  if (!options.is_causal) {
    bench.passes = {BenchPass::kForward, BenchPass::kBackward};
  }
  bench.causal = {options.is_causal};
  bench.head_dims = {options.head_dim};
  if (options.threads > 0) bench.threads = {options.threads};
  bench.heads = options.heads;
  bench.repeats = 5;
  bench.seconds = seconds;
  return bench;
}

Result<Advice> advise(const AdviseOptions& asked, const BenchReport& report) {
  using namespace bench_internal;  // NOLINT: this file's own helpers
  COSFORMER_RETURN_IF_ERROR(validate(asked));
  AdviseOptions options = asked;
  const BenchOptions& bench = report.options;
  if (options.threads == 0 && bench.threads.size() == 1) {
    options.threads = bench.threads[0];
  }
  if (options.threads == 0) {
    return invalid_argument("threads: the bench has several numbers of them, ",
                            list_of(bench.threads),
                            ": choose one by --threads");
  }
  const auto lacks = [](const auto& values, auto value) {
    return std::count(values.begin(), values.end(), value) == 0;
  };
  if (lacks(bench.head_dims, options.head_dim)) {
    return not_found("the bench has no head_dim ", options.head_dim, ", only ",
                     list_of(bench.head_dims));
  }
  const BenchPeak* peak = find_peak(report, options.threads);
  if (lacks(bench.threads, options.threads) || peak == nullptr) {
    return not_found("the bench has no measurement with ",
                     counted(options.threads, "thread"), ", only with ",
                     list_of(bench.threads), ": choose by --threads");
  }
  if (lacks(bench.causal, options.is_causal)) {
    return not_found("the bench has no ",
                     options.is_causal ? "causal" : "non-causal",
                     " measurement");
  }
  if (!(peak->flops > 0)) {
    return not_found("the bench has no peak of multiply-adds for ",
                     counted(options.threads, "thread"));
  }
  const BenchSeries main = {
      options.is_decoding ? BenchPass::kDecode : BenchPass::kBackward,
      options.is_causal, options.head_dim, options.threads};
  int64_t longest = 0;
  for (const std::string& kind : bench.kinds) {
    longest = std::max(longest, longest_of(curve_of(report, main, kind)));
  }
  if (longest > 0 && options.length > kReach * longest) {
    return invalid_argument(
        "length: found ", options.length, ", expected at most ",
        kReach * longest, ", ", kReach, " times the longest measured, ",
        longest,
        ": measure longer by more --seconds or `cosformer bench "
        "--lengths`");
  }
  return Adviser(options, report, *peak).run();
}

}  // namespace cosformer
