// The kernels of a decode step that compute in double, for every instruction
// set.
#include "kernels/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/simd/decode_f64.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h: it defines the target that the rest is compiled for.
#include "kernels/simd/decode-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {
const Decode& decode_f64() {
  static constexpr Decode kDecode = DecodeEntry<double>::make();
  return kDecode;
}
}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cosformer::simd {
const Decode& decode_f64(Isa isa) {
  return COSFORMER_DISPATCH(isa, decode_f64);
}
}  // namespace cosformer::simd
#endif
