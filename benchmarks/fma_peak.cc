#include "benchmarks/fma_peak.h"

#include <ctime>

#include "kernels/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "benchmarks/fma_peak.cc"
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
  const double start = benchmarks::thread_seconds();
  for (int round = 0; round < kRounds; ++round) {
    unroll<kChains>([&](auto i)
                        COSFORMER_LAMBDA { x[i] = hn::MulAdd(x[i], a, b); });
    unroll<kChains>([&](auto i)
                        COSFORMER_LAMBDA { x[i] = hn::MulAdd(x[i], a, b); });
  }
  const double seconds = benchmarks::thread_seconds() - start;
  Vec<T> sum = hn::Zero(d);
  unroll<kChains>([&](auto i) COSFORMER_LAMBDA { sum = hn::Add(sum, x[i]); });
  volatile T sink = hn::GetLane(sum);
  (void)sink;
  return 2.0 * 2 * kChains * kRounds * static_cast<double>(kLanes<T>) / seconds;
}

using Peak = double();
Peak* peak_f32() { return &peak<float>; }
Peak* peak_f64() { return &peak<double>; }

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cosformer {
namespace simd {
namespace {
double measure(Isa isa, bool is_double) {
  return is_double ? COSFORMER_DISPATCH(isa, peak_f64)()
                   : COSFORMER_DISPATCH(isa, peak_f32)();
}
}  // namespace
}  // namespace simd
namespace benchmarks {
double thread_seconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}
double fma_peak(Isa isa, bool is_double) {
  return simd::measure(isa, is_double);
}
}  // namespace benchmarks
}  // namespace cosformer
#endif
