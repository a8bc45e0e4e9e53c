#include "bench/floors.h"

#include <algorithm>
#include <ctime>
#include <numeric>

#include "kernels/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/floors.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h: it defines the target that the rest is compiled for.
#include "kernels/simd/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

template <typename T>
double peak() {
  // Enough chains to hide the latency, few enough to stay in registers.
  constexpr int kChains = HWY_TARGET == HWY_AVX3 ? 24 : 12;
  constexpr int kRounds = 8000;
  const Tag<T> d;
  volatile T one = 1;
  const Vec<T> a = hn::Set(d, one * T(0.9999)), b = hn::Set(d, one * T(1e-4));
  Vec<T> x[kChains];
  unroll<kChains>([&](auto i)
                      COSFORMER_LAMBDA { x[i] = hn::Set(d, one + T(i)); });
  const double start = bench_internal::thread_seconds();
  for (int round = 0; round < kRounds; ++round) {
    unroll<kChains>([&](auto i)
                        COSFORMER_LAMBDA { x[i] = hn::MulAdd(x[i], a, b); });
    unroll<kChains>([&](auto i)
                        COSFORMER_LAMBDA { x[i] = hn::MulAdd(x[i], a, b); });
  }
  const double seconds = bench_internal::thread_seconds() - start;
  Vec<T> sum = hn::Zero(d);
  unroll<kChains>([&](auto i) COSFORMER_LAMBDA { sum = hn::Add(sum, x[i]); });
  volatile T sink = hn::GetLane(sum);
  (void)sink;
  return 2.0 * 2 * kChains * kRounds * static_cast<double>(kLanes<T>) / seconds;
}

constexpr int kStreams = 4;  // vectors in flight

void update(float* data, int64_t count) {
  const Tag<float> d;
  const Vec<float> factor = hn::Set(d, 0.999f);
  for (int64_t x = 0; x < count; x += kStreams * kLanes<float>) {
    unroll<kStreams>([&](auto i) COSFORMER_LAMBDA {
      float* at = data + x + static_cast<int64_t>(i) * kLanes<float>;
      hn::StoreU(hn::Mul(hn::LoadU(d, at), factor), d, at);
    });
  }
}

float read(const float* data, int64_t count) {
  const Tag<float> d;
  Vec<float> sum[kStreams];
  unroll<kStreams>([&](auto i) COSFORMER_LAMBDA { sum[i] = hn::Zero(d); });
  for (int64_t x = 0; x < count; x += kStreams * kLanes<float>) {
    unroll<kStreams>([&](auto i) COSFORMER_LAMBDA {
      const float* at = data + x + static_cast<int64_t>(i) * kLanes<float>;
      sum[i] = hn::Add(sum[i], hn::LoadU(d, at));
    });
  }
  unroll<kStreams - 1>(
      [&](auto i) COSFORMER_LAMBDA { sum[0] = hn::Add(sum[0], sum[i + 1]); });
  return hn::GetLane(sum[0]);
}

using Peak = double();
Peak* peak_f32() { return &peak<float>; }
Peak* peak_f64() { return &peak<double>; }
using Update = void(float*, int64_t);
Update* update_f32() { return &update; }
using Read = float(const float*, int64_t);
Read* read_f32() { return &read; }

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cosformer {
namespace simd {
namespace {
// The entries, where the targets' namespaces are in sight.
double peak_on(Isa isa, bool is_double) {
  return is_double ? COSFORMER_DISPATCH(isa, peak_f64)()
                   : COSFORMER_DISPATCH(isa, peak_f32)();
}
void update_on(Isa isa, float* data, int64_t count) {
  COSFORMER_DISPATCH(isa, update_f32)(data, count);
}
float read_on(Isa isa, const float* data, int64_t count) {
  return COSFORMER_DISPATCH(isa, read_f32)(data, count);
}
}  // namespace
}  // namespace simd

namespace bench_internal {
double thread_seconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}
double fma_peak(Isa isa, bool is_double) {
  return simd::peak_on(isa, is_double);
}
double peak_of_all(const std::vector<double>& peaks, int64_t cores) {
  const double sum = std::accumulate(peaks.begin(), peaks.end(), 0.0);
  const auto threads = static_cast<double>(peaks.size());
  return sum * std::min(1.0, static_cast<double>(cores) / threads);
}
void update_memory(Isa isa, float* data, int64_t count) {
  simd::update_on(isa, data, count);
}
float read_memory(Isa isa, const float* data, int64_t count) {
  return simd::read_on(isa, data, count);
}
}  // namespace bench_internal
}  // namespace cosformer
#endif
