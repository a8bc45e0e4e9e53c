// The kernels of dk and dv that compute in float, for every instruction set.
#include "kernels/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/simd/d_keys_f32.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h: it defines the target that the rest is compiled for.
#include "kernels/simd/d_keys-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {
const Pass& d_keys_f32() {
  static constexpr Pass kPass = DKeysPass<float>::make();
  return kPass;
}
}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cosformer::simd {
const Pass& d_keys_f32(Isa isa) { return COSFORMER_DISPATCH(isa, d_keys_f32); }
}  // namespace cosformer::simd
#endif
