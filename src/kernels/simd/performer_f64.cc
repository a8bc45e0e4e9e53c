// Performer's features with states in double, for every instruction set.
#include "kernels/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/simd/performer_f64.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h: it defines the target that the rest is compiled for.
#include "kernels/simd/performer-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {
const PerformerKernels<double>& performer_f64() {
  static constexpr PerformerKernels<double> kKernels =
      PerformerEntry<double>::make();
  return kKernels;
}
}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cosformer::simd {
const PerformerKernels<double>& performer_f64(Isa isa) {
  return COSFORMER_DISPATCH(isa, performer_f64);
}
}  // namespace cosformer::simd
#endif
