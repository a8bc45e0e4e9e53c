// What the kernels' benchmarks share: inputs, and a time as a share of the
// machine's peak.
#ifndef COSFORMER_BENCHMARKS_KERNEL_BENCH_H_
#define COSFORMER_BENCHMARKS_KERNEL_BENCH_H_

#include <benchmark/benchmark.h>

#include <algorithm>
#include <bit>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "bench/floors.h"
#include "cosformer/kernels.h"

namespace cosformer::benchmarks {

using bench_internal::fma_peak;
using bench_internal::thread_seconds;
using bench_internal::update_memory;

enum class Pass { kForward, kBackward };

// A tensor [1, length, heads, dim] of normal numbers; seed 0: of zeros.
struct Tensor {
  Tensor(DType dtype, int64_t length, int64_t heads, int64_t dim, int seed)
      : buffer(static_cast<size_t>(length * heads * dim) * size_of(dtype)) {
    view.data = buffer.data();
    view.dtype = dtype;
    view.size = {1, length, heads, dim};
    view.stride = contiguous_strides(view.size);
    const int64_t count = length * heads * dim;
    std::mt19937 random(static_cast<unsigned>(seed));
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < count; ++i) {
      const float x = seed == 0 ? 0.0f : normal(random);
      if (dtype == DType::kFloat64) {
        buffer.as<double>()[i] = x;
      } else if (dtype == DType::kFloat32) {
        buffer.as<float>()[i] = x;
      } else {  // the upper half of a float32 is a bfloat16
        buffer.as<uint16_t>()[i] =
            static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16);
      }
    }
  }
  AlignedBuffer buffer;
  View4 view;
};

inline double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x.empty() ? 0 : x[x.size() / 2];
}

inline double since(double start) { return thread_seconds() - start; }

// Times run() (a Status) of so many operations, and measures the peak of
// multiply-adds before and after every run. Counters: the median share under
// `name`, the largest, the peak. Runs shorter than at_least operations are
// repeated between two measurements.
template <typename Run>
void measure_share(::benchmark::State& state, Isa isa, bool is_double,
                   double operations, double at_least, const char* name,
                   const Run& run) {
  const int repeats = std::max(1, static_cast<int>(at_least / operations));
  std::vector<double> share, peaks;
  for (auto _ : state) {
    double peak = fma_peak(isa, is_double);
    const double start = thread_seconds();
    for (int i = 0; i < repeats; ++i)
      if (!run().ok()) state.SkipWithError("kernel failed");
    const double seconds = since(start) / repeats;
    peak = 0.5 * (peak + fma_peak(isa, is_double));
    state.SetIterationTime(seconds);
    share.push_back(100 * operations / seconds / peak);
    peaks.push_back(peak * 1e-9);
  }
  state.counters[name] = median(share);
  state.counters["best%"] = *std::max_element(share.begin(), share.end());
  state.counters["peak_GF/s"] = median(peaks);
}

// Registers attention(state, c) under a name.
template <typename Case>
void register_case(const std::string& name, const Case& c,
                   void (*attention)(::benchmark::State&, const Case&)) {
  ::benchmark::RegisterBenchmark(
      name.c_str(),
      [c, attention](::benchmark::State& state) { attention(state, c); })
      ->UseManualTime()
      ->Unit(::benchmark::kMillisecond);
}

// Runs what is registered and asked for; the program's exit status.
inline int run_benchmarks(int argc, char** argv) {
  ::benchmark::Initialize(&argc, argv);
  if (::benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  ::benchmark::RunSpecifiedBenchmarks();
  ::benchmark::Shutdown();
  return 0;
}

}  // namespace cosformer::benchmarks

#endif  // COSFORMER_BENCHMARKS_KERNEL_BENCH_H_
