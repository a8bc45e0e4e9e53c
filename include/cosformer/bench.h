// What attention costs on this machine: every kind measured in interleaved runs
// against torch's own, as a share of the machine's floor, with its memory and
// the lengths at which kinds overtake each other; and advice drawn from it.
// Reaches no torch header.
#ifndef COSFORMER_BENCH_H_
#define COSFORMER_BENCH_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cosformer/base.h"
#include "cosformer/format.h"

namespace cosformer {

// kBackward is a forward and its backward, as a training step has them; kDecode
// is one token a row after `length - 1` others.
enum class BenchPass { kForward, kBackward, kDecode };
// "forward", "backward", "decode".
std::string_view name(BenchPass pass);

// A kind of attention under measurement. "sdpa" is torch's own
// scaled_dot_product_attention, the reference.
struct BenchKind {
  std::string name;
  std::string title;      // in plots
  std::string no_causal;  // why it has no causal form; "" = it has one
  std::string gives_up;   // against exact softmax, in a few words
};
const std::vector<BenchKind>& bench_kinds();
// The kind of that name; nullptr: none.
const BenchKind* find_bench_kind(std::string_view name);

struct BenchOptions {
  std::vector<std::string> kinds;  // empty = all; "sdpa" always joins them
  std::vector<BenchPass> passes{BenchPass::kForward, BenchPass::kBackward,
                                BenchPass::kDecode};
  std::vector<bool> causal{true, false};  // decoding is causal always
  std::vector<int64_t> lengths{64,   128,  256,  512,  1024,
                               2048, 4096, 8192, 16384};
  std::vector<int64_t> head_dims{64};
  std::vector<int64_t> threads;  // empty = torch's default
  int64_t heads = 8, batch = 1;
  DType dtype = DType::kFloat32;
  int64_t window = 512;         // tokens on each side (causal: to the left)
  int64_t num_features = 256;   // performer
  int64_t projected_len = 256;  // linformer
  int64_t repeats = 7;          // rounds of a point, at most
  double seconds = 240;         // that the whole run aims at
};
// Names the option, found, expected.
Status validate(const BenchOptions& options);
// How a model's config would ask for that kind with these options.
AttentionConfig attention_of(const BenchKind& kind,
                             const BenchOptions& options);

// One kind at one length.
struct BenchPoint {
  std::string kind;
  BenchPass pass = BenchPass::kForward;
  bool is_causal = true;
  int64_t length = 0, head_dim = 0, threads = 1;
  std::string left_out;        // why there are no figures; "" = measured
  double predicted = 0;        // seconds of a call left out for its time
  int64_t rounds = 0;          // timed runs
  double seconds = 0;          // of a call: their median
  double fastest_seconds = 0;  // the shortest of them
  // The least that its multiply-adds take at the FMA peak (decode: a plain loop
  // over its state or cache), measured beside every run, over the time; median.
  double share = 0;
  // Peak beyond inputs, outputs and gradients; decode: the state or cache, and
  // the peak of a step.
  int64_t extra_bytes = 0;

  bool measured() const { return left_out.empty(); }
};

struct BenchMachine {
  std::string cpu, isa, torch_version, version;
  int64_t cores = 0;
};
// What so many threads can do.
struct BenchPeak {
  int64_t threads = 1;
  double flops = 0;       // a second: multiply-adds; median over the run
  double read_bytes = 0;  // a second: a plain loop over memory, at the start
};
struct BenchReport {
  BenchMachine machine;
  BenchOptions options;
  bool is_complete = false;  // false: stopped on the way
  double seconds = 0;        // that it took
  std::vector<BenchPeak> peaks;
  std::vector<BenchPoint> points;
};

struct BenchProgress {
  int64_t done = 0, total = 0;  // points
  double seconds = 0;           // so far
  std::string now;              // what is measured: "forward, causal, 4096"
};
struct BenchCallbacks {
  std::function<void(const BenchProgress&)> on_progress;
  // After each length: what is there so far.
  std::function<void(const BenchReport&)> on_partial;
};
// Runs all points in ascending lengths; all kinds of a length take turns, round
// by round, in this process. A point whose runs would take too much of
// options.seconds is left out, and says so. *stop set to true ends it between
// two runs with what was measured. Installs an allocator that counts torch's
// CPU memory, for good.
Result<BenchReport> run_bench(const BenchOptions& options,
                              const BenchCallbacks& callbacks,
                              const std::atomic<bool>& stop);

// Where one curve of times passes below another (by 3% and more, which no
// noise makes up), by log-log interpolation between the lengths that both have.
struct Crossover {
  enum class Where {
    kUnknown,       // no length in common
    kAlwaysAhead,   // at `length`, the shortest, already
    kAt,            // from `length` on, the last crossing
    kAlwaysBehind,  // at `length`, the longest, still
  };
  Where where = Where::kUnknown;
  double length = 0;
};
// (length, seconds), lengths ascending.
using LengthCurve = std::vector<std::pair<double, double>>;
Crossover find_crossover(const LengthCurve& curve,
                         const LengthCurve& reference);
// "<= 64", "230" (two digits), "> 16,384", "-".
std::string to_text(const Crossover& crossover);

// Points that differ in kind and length alone.
struct BenchSeries {
  BenchPass pass = BenchPass::kForward;
  bool is_causal = true;
  int64_t head_dim = 0, threads = 1;
  bool operator==(const BenchSeries&) const = default;
};
BenchSeries series_of(const BenchPoint& point);
std::vector<BenchSeries> series_of(const BenchReport& report);
LengthCurve curve_of(const BenchReport& report, const BenchSeries& series,
                     std::string_view kind);

// How many times as fast as torch's SDPA at the same length; nullopt where one
// of both was not measured.
std::optional<double> times_as_fast(const BenchReport& report,
                                    const BenchPoint& point);

// For people: a table a series, the crossovers, what was left out and why.
std::string bench_text(const BenchReport& report);
// The same with every figure (time, ratio, share, memory), as markdown.
std::string bench_markdown(const BenchReport& report);
// bench.json, format_version 1.
std::string to_json(const BenchReport& report);
// Errors name the key, found, expected. `where`: the file, for messages.
Result<BenchReport> bench_report_from_json(std::string_view json,
                                           const std::string& where);
// time.png and memory.png (for several head dims or numbers of threads one pair
// each, time-d64-t2.png) into a folder; returns their paths.
Result<std::vector<std::string>> plot_bench(const BenchReport& report,
                                            const std::string& folder);

struct AdviseOptions {
  int64_t length = 0;
  bool is_causal = true;
  bool is_decoding = false;  // weigh decoding, not training
  int64_t head_dim = 64, heads = 8, layers = 12, batch = 1;
  int64_t memory = 0;   // bytes for attention over all layers; 0 = any
  int64_t threads = 0;  // 0 = torch's default, or the file's only one
};
Status validate(const AdviseOptions& options);
// That lines of advise_bench()'s lengths go on as far as options.length.
Status check_advise_bench(const AdviseOptions& options);
// A brief bench (about `seconds`) that advise() can read.
BenchOptions advise_bench(const AdviseOptions& options, double seconds);

struct CostEstimate {
  double seconds = 0;
  bool is_extrapolated = false;  // beyond the measured lengths
};
// What one kind costs; times are of one layer's attention, over all heads and
// rows. nullopt: not measured, or no such form.
struct KindAdvice {
  std::string kind;
  std::optional<CostEstimate> forward, training, decode;
  int64_t training_bytes = 0;  // see Advice
  // State or the most that a KV cache holds by that length, all layers.
  int64_t state_bytes = 0;
  std::string excluded;  // why it cannot be chosen; "" = it can
  Crossover against_sdpa, against_softmax;
};
struct Advice {
  std::string kind;    // to use; "" = none can be chosen
  std::string reason;  // in a sentence or two
  // What the rest of a layer (projections, a feed-forward of four times the
  // width) takes at the same length: 72 (decode: 24) width^2 operations a token
  // at 80% of the FMA peak, or for decoding its weights at the memory's rate.
  double rest_of_layer = 0;
  // Exact softmax takes no more than that up to here.
  Crossover softmax_bearable;
  std::string rule_of_thumb;  // the literature's kind at this length
  bool agrees = false;        // with `kind`
  std::vector<KindAdvice> kinds;
};
// Exact softmax while its attention takes no longer than the rest of the layer;
// then a window, as long as layers x window reach over the whole length; then
// the linear kinds, in the order of the losses in docs/training.md, the first
// whose attention takes no longer than the rest of the layer. Kinds that lack
// the form or the memory are passed over. Times of a saved bench are scaled to
// heads x batch in proportion, and to `length` on log-log lines, at most 16
// times the longest measured. An error beyond it, and where the report lacks
// what is asked (head_dim, threads, causal).
Result<Advice> advise(const AdviseOptions& options, const BenchReport& report);
std::string advice_text(const Advice& advice, const AdviseOptions& options,
                        const BenchReport& report);
std::string advice_json(const Advice& advice, const AdviseOptions& options,
                        const BenchReport& report);

}  // namespace cosformer

#endif  // COSFORMER_BENCH_H_
