// The softmax engine's forward kernels that compute in double, for every
// instruction set.
#include "kernels/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/simd/softmax_forward_f64.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h: it defines the target that the rest is compiled for.
#include "kernels/simd/softmax_forward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {
const SoftmaxForward& softmax_forward_f64() {
  static const SoftmaxForward kForward = make_softmax_forward<double>();
  return kForward;
}
}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cosformer::simd {
const SoftmaxForward& softmax_forward_f64(Isa isa) {
  return COSFORMER_DISPATCH(isa, softmax_forward_f64);
}
}  // namespace cosformer::simd
#endif
