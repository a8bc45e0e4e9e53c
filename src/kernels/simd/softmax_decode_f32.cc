// The softmax engine's decode kernels that compute in float, for every
// instruction set.
#include "kernels/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/simd/softmax_decode_f32.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h: it defines the target that the rest is compiled for.
#include "kernels/simd/softmax_decode-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {
const SoftmaxDecode& softmax_decode_f32() {
  static constexpr SoftmaxDecode kDecode = SoftmaxDecodeEntry<float>::make();
  return kDecode;
}
}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cosformer::simd {
const SoftmaxDecode& softmax_decode_f32(Isa isa) {
  return COSFORMER_DISPATCH(isa, softmax_decode_f32);
}
}  // namespace cosformer::simd
#endif
