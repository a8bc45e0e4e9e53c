// The measuring loop: which points, in which order, how often.
#include "cosformer/bench.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <map>
#include <thread>
#include <tuple>

#include "bench/cases.h"
#include "bench/floors.h"
#include "bench/kinds.h"
#include "bench/memory.h"
#include "bench/report.h"
#include "cosformer/kernels.h"
#include "ops/executor.h"

namespace cosformer {
namespace bench_internal {
namespace {

// A timed run repeats shorter calls until it takes so long: the clock and the
// caches of what ran before count for little then.
constexpr double kRunSeconds = 2e-3;
constexpr int64_t kMostCalls = 1000;  // in a timed run
constexpr int64_t kFewestRounds = 2;
// Before anything of a kind is measured, it is taken to reach so much of the
// peak.
constexpr double kGuessedShare = 0.25;

double wall_seconds() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

double median(std::vector<double> x) {
  if (x.empty()) return 0;
  std::sort(x.begin(), x.end());
  const size_t half = x.size() / 2;
  return x.size() % 2 == 1 ? x[half] : 0.5 * (x[half - 1] + x[half]);
}

// The points of one table column: kinds that take turns.
struct Group {
  BenchSeries series;
  int64_t length;
};

// A kind at its turn.
struct Contestant {
  BenchPoint* point;
  double work = 0;  // that its time grows with
  Case call;
  int64_t calls = 1;  // in a timed run
  int64_t rounds = 0;
  std::vector<double> seconds, shares;
  AlignedBuffer floor;  // decode: what the plain loop goes over
};

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t at = line.find(": ");
    if (line.rfind("model name", 0) == 0 && at != std::string::npos) {
      return line.substr(at + 2);
    }
  }
  return "unknown CPU";
}

class Bench {
 public:
  Bench(const BenchOptions& options, const BenchCallbacks& callbacks,
        const std::atomic<bool>& stop, Isa isa)
      : callbacks_(callbacks), stop_(stop), isa_(isa), began_(wall_seconds()) {
    report_.options = options;
    report_.machine = {cpu_name(), std::string(isa_name(isa)), torch_version(),
                       std::string(version()),
                       static_cast<int64_t>(
                           std::max(1u, std::thread::hardware_concurrency()))};
  }

  BenchReport run() {
    plan();
    peak_bytes([] {});  // counts from the first tensor on
    measure_machine();
    began_ = wall_seconds();  // the points have all of --seconds
    int64_t done = 0, left = static_cast<int64_t>(groups_.size());
    auto first = report_.points.begin();
    for (size_t g = 0; g < groups_.size() && !stop_; ++g, --left) {
      const auto last = std::find_if_not(
          first, report_.points.end(),
          [&](const BenchPoint& p) { return is_of(p, groups_[g]); });
      const double slot =
          std::max(0.0, seconds_left()) / static_cast<double>(left);
      run_group(groups_[g], {first, last}, slot, done);
      done += last - first;
      first = last;
      const bool ends_length =
          g + 1 == groups_.size() || groups_[g + 1].length != groups_[g].length;
      if (ends_length && callbacks_.on_partial) {
        BenchReport part = report_;
        finish(&part, false);
        callbacks_.on_partial(part);
      }
    }
    finish(&report_, !stop_);
    return std::move(report_);
  }

 private:
  double seconds() const { return wall_seconds() - began_; }
  double seconds_left() const { return report_.options.seconds - seconds(); }

  static bool is_of(const BenchPoint& p, const Group& group) {
    return p.length == group.length && series_of(p) == group.series;
  }

  // Every point, ascending lengths outermost: what a run has no time for are
  // the longest.
  void plan() {
    BenchOptions& options = report_.options;
    if (options.threads.empty()) options.threads = {use_torch_threads(0)};
    std::sort(options.lengths.begin(), options.lengths.end());
    std::vector<std::string> kinds = {std::string(kReference)};
    for (const BenchKind& kind : bench_kinds()) {
      const bool asked =
          options.kinds.empty() ||
          std::count(options.kinds.begin(), options.kinds.end(), kind.name) > 0;
      if (asked && kind.name != kReference) kinds.push_back(kind.name);
    }
    options.kinds = kinds;
    for (const int64_t length : options.lengths) {
      for (const BenchPass pass : options.passes) {
        for (const bool causal : options.causal) {
          // Decoding is causal, once.
          if (pass == BenchPass::kDecode && causal != options.causal[0]) {
            continue;
          }
          for (const int64_t dim : options.head_dims) {
            for (const int64_t threads : options.threads) {
              add_group(
                  {{pass, causal || pass == BenchPass::kDecode, dim, threads},
                   length});
            }
          }
        }
      }
    }
  }

  void add_group(const Group& group) {
    groups_.push_back(group);
    for (const std::string& kind : report_.options.kinds) {
      BenchPoint point;
      point.kind = kind;
      point.pass = group.series.pass;
      point.is_causal = group.series.is_causal;
      point.length = group.length;
      point.head_dim = group.series.head_dim;
      point.threads = group.series.threads;
      point.left_out = "not reached";
      report_.points.push_back(std::move(point));
    }
  }

  void progress(const BenchPoint& point, int64_t done) const {
    if (!callbacks_.on_progress) return;
    callbacks_.on_progress(
        {done, static_cast<int64_t>(report_.points.size()), seconds(),
         str_cat(counted(point.length, "token"), ", ",
                 title_of(series_of(point)), ": ", point.kind)});
  }

  using Points = std::pair<std::vector<BenchPoint>::iterator,
                           std::vector<BenchPoint>::iterator>;

  // Warms every kind up (which measures its memory and says what a run costs),
  // then lets them take turns.
  void run_group(const Group& group, const Points& points, double slot,
                 int64_t done) {
    use_torch_threads(group.series.threads);
    const CaseMaker maker(report_.options, group.series.pass,
                          group.series.is_causal, group.length,
                          group.series.head_dim);
    std::vector<Contestant> contestants;
    for (auto at = points.first; at != points.second; ++at, ++done) {
      if (stop_) break;
      progress(*at, done);
      Contestant one;
      one.point = &*at;
      at->left_out = prepare(maker, slot, &one);
      if (!at->measured()) continue;
      contestants.push_back(std::move(one));
    }
    // Each kind has an equal part of what the group may take.
    for (Contestant& one : contestants) {
      const double part = slot / static_cast<double>(contestants.size());
      const double run = one.point->seconds * static_cast<double>(one.calls);
      one.rounds =
          std::min(report_.options.repeats,
                   std::max(std::min(kFewestRounds, report_.options.repeats),
                            static_cast<int64_t>(part / run)));
    }
    for (int64_t round = 0; round < report_.options.repeats; ++round) {
      for (Contestant& one : contestants) {
        if (stop_) break;
        if (round < one.rounds) time_run(group, &one);
      }
    }
    for (Contestant& one : contestants) conclude(&one);
  }

  // One call to warm up. Returns why the kind is left out, "" = it is not.
  std::string prepare(const CaseMaker& maker, double slot, Contestant* one) {
    BenchPoint& point = *one->point;
    const BenchKind& kind = *find_bench_kind(point.kind);
    if (!kind.no_causal.empty() && point.is_causal) {
      return str_cat(point.pass == BenchPass::kDecode ? "no decoding: "
                                                      : "no causal form: ",
                     kind.no_causal);
    }
    // Before anything is allocated: long inputs may be more than there is.
    one->work = maker.work(kind);
    const double run = predicted(*one);
    // With the one that warms up.
    if (run * static_cast<double>(kFewestRounds + 1) > slot / 2) {
      point.predicted = run;
      return str_cat("no time for it in --seconds ", report_.options.seconds);
    }
    auto made = maker.make(kind);
    if (!made.ok()) return made.status().message();
    one->call = std::move(*made);
    maker.release();
    Status status;
    const double start = clock(point.threads);
    const int64_t peak = peak_bytes([&] { status = run_once(one->call); });
    point.extra_bytes = std::max<int64_t>(peak - one->call.result_bytes, 0) +
                        one->call.state_bytes;
    point.seconds = clock(point.threads) - start;
    if (!status.ok()) return status.message();
    // The first call may be far slower than the next ones.
    if (point.seconds < kRunSeconds) {
      const double again = clock(point.threads);
      status = run_once(one->call);
      point.seconds = clock(point.threads) - again;
      if (!status.ok()) return status.message();
    }
    point.seconds = std::max(point.seconds, 1e-7);
    one->calls = std::clamp<int64_t>(
        static_cast<int64_t>(kRunSeconds / point.seconds), 1, kMostCalls);
    if (one->call.floor_bytes > 0) {
      constexpr int64_t kStep = 256;  // bytes that the loops go by
      const int64_t bytes = (one->call.floor_bytes + kStep - 1) / kStep *
                            kStep * std::max<int64_t>(point.threads, 1);
      one->floor = AlignedBuffer(static_cast<size_t>(bytes));
      if (one->floor.data() == nullptr) return "out of memory";
      std::fill_n(one->floor.as<float>(), bytes / 4, 1.0f);
    }
    return "";
  }

  // Seconds of a call, from the length before by the work of both.
  double predicted(const Contestant& one) const {
    const BenchPoint& p = *one.point;
    const auto before = last_.find(key_of(p));
    if (before != last_.end()) {
      return before->second.first * one.work / before->second.second;
    }
    if (p.pass == BenchPass::kDecode) return 0;  // a step is short
    const double peak = fma_peak(isa_, is_double());
    return one.work / (kGuessedShare * peak * static_cast<double>(p.threads));
  }

  using Key = std::tuple<std::string, BenchPass, bool, int64_t, int64_t>;
  static Key key_of(const BenchPoint& p) {
    return {p.kind, p.pass, p.is_causal, p.head_dim, p.threads};
  }

  // One thread: its processor time. More: the clock on the wall.
  static double clock(int64_t threads) {
    return threads == 1 ? thread_seconds() : wall_seconds();
  }

  bool is_double() const { return report_.options.dtype == DType::kFloat64; }

  // All threads at once, as the kernels use them.
  double peak_of(int64_t threads) const {
    std::vector<double> each(static_cast<size_t>(threads));
    shared_out(threads, [&](int64_t task, int) {
      each[static_cast<size_t>(task)] = fma_peak(isa_, is_double());
    });
    return peak_of_all(each, report_.machine.cores);
  }

  // The peak even where nothing but decoding is measured, and the rate of
  // memory, from more bytes than caches hold.
  void measure_machine() {
    constexpr int64_t kBytes = int64_t{1} << 28;
    const AlignedBuffer memory(static_cast<size_t>(kBytes));
    if (memory.data() != nullptr) {
      std::fill_n(memory.as<float>(), kBytes / 4, 1.0f);
    }
    for (const int64_t threads : report_.options.threads) {
      use_torch_threads(threads);
      BenchPeak peak{threads, 0, 0};
      std::vector<double> rates;
      for (int i = 0; i < 3; ++i) {
        peaks_[threads].push_back(peak_of(threads));
        if (memory.data() == nullptr) continue;
        const int64_t count = kBytes / 4 / threads / 64 * 64;
        const double start = clock(threads);
        shared_out(threads, [&](int64_t task, int) {
          sink_ = read_memory(isa_, memory.as<float>() + task * count, count);
        });
        rates.push_back(static_cast<double>(kBytes) / (clock(threads) - start));
      }
      peak.read_bytes = median(rates);
      report_.peaks.push_back(peak);
    }
  }

  static void shared_out(int64_t threads,
                         const std::function<void(int64_t, int)>& task) {
    if (threads == 1) return task(0, 0);
    ops::torch_executor().run(threads, task);
  }

  // The plain loop over what a step moves: of one thread, or shared out, where
  // that is faster (starting threads takes longer than a small state).
  double floor_seconds(const Contestant& one) const {
    const double alone = loop_seconds(one, 1);
    const int64_t threads = one.point->threads;
    return threads == 1 ? alone : std::min(alone, loop_seconds(one, threads));
  }

  double loop_seconds(const Contestant& one, int64_t parts) const {
    constexpr int64_t kStep = 64;  // elements
    const int64_t count =
        (one.call.floor_bytes / 4 / parts + kStep - 1) / kStep * kStep;
    float* data = one.floor.as<float>();
    const double start = clock(one.point->threads);
    for (int64_t i = 0; i < one.calls; ++i) {
      shared_out(parts, [&](int64_t part, int) {
        if (one.call.is_update) {
          update_memory(isa_, data + part * count, count);
        } else {
          sink_ = read_memory(isa_, data + part * count, count);
        }
      });
    }
    return (clock(one.point->threads) - start) / static_cast<double>(one.calls);
  }

  // A round of one kind: the floor, the calls, the floor again.
  void time_run(const Group& group, Contestant* one) {
    const int64_t threads = group.series.threads;
    const bool is_decoding = group.series.pass == BenchPass::kDecode;
    const auto floor = [&] {
      return is_decoding ? floor_seconds(*one) : peak_of(threads);
    };
    double before = floor();
    const double start = clock(threads);
    for (int64_t i = 0; i < one->calls; ++i) {
      const Status status = run_once(one->call);
      if (!status.ok()) {
        one->point->left_out = status.message();
        return;
      }
    }
    const double taken =
        (clock(threads) - start) / static_cast<double>(one->calls);
    before = 0.5 * (before + floor());
    if (!is_decoding) peaks_[threads].push_back(before);
    one->seconds.push_back(taken);
    one->shares.push_back(is_decoding ? before / taken
                                      : one->call.operations / taken / before);
  }

  void conclude(Contestant* one) {
    BenchPoint& point = *one->point;
    if (point.measured() && one->seconds.empty()) {
      point.left_out = "stopped before it was measured";
    }
    if (!point.measured()) return;
    point.rounds = static_cast<int64_t>(one->seconds.size());
    point.seconds = median(one->seconds);
    point.fastest_seconds =
        *std::min_element(one->seconds.begin(), one->seconds.end());
    point.share = median(one->shares);
    last_[key_of(point)] = {point.seconds, one->work};
  }

  void finish(BenchReport* report, bool is_complete) const {
    report->is_complete = is_complete;
    report->seconds = seconds();
    for (BenchPeak& peak : report->peaks) {
      peak.flops = median(peaks_.at(peak.threads));
    }
  }

  const BenchCallbacks& callbacks_;
  const std::atomic<bool>& stop_;
  const Isa isa_;
  double began_;
  BenchReport report_;
  std::vector<Group> groups_;
  std::map<int64_t, std::vector<double>> peaks_;   // by threads
  std::map<Key, std::pair<double, double>> last_;  // seconds, work
  mutable std::atomic<float> sink_{0};
};

}  // namespace
}  // namespace bench_internal

Result<BenchReport> run_bench(const BenchOptions& options,
                              const BenchCallbacks& callbacks,
                              const std::atomic<bool>& stop) {
  COSFORMER_RETURN_IF_ERROR(validate(options));
  const Result<Isa> isa = chosen_isa();
  COSFORMER_RETURN_IF_ERROR(isa.status());
  return bench_internal::Bench(options, callbacks, stop, *isa).run();
}

BenchSeries series_of(const BenchPoint& point) {
  return {point.pass, point.is_causal, point.head_dim, point.threads};
}

std::vector<BenchSeries> series_of(const BenchReport& report) {
  std::vector<BenchSeries> all;
  for (const BenchPoint& p : report.points) {
    const BenchSeries series = series_of(p);
    if (std::find(all.begin(), all.end(), series) == all.end()) {
      all.push_back(series);
    }
  }
  return all;
}

LengthCurve curve_of(const BenchReport& report, const BenchSeries& series,
                     std::string_view kind) {
  LengthCurve curve;
  for (const BenchPoint& p : report.points) {
    if (p.kind == kind && p.measured() && series_of(p) == series) {
      curve.emplace_back(static_cast<double>(p.length), p.seconds);
    }
  }
  return curve;
}

}  // namespace cosformer
