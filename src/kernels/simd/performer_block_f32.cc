// Performer's forward in float, for every instruction set.
#include "kernels/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/simd/performer_block_f32.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h: it defines the target that the rest is compiled for.
#include "kernels/simd/performer_block-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {
const PerformerBlockKernels<float>& performer_block_f32() {
  static constexpr PerformerBlockKernels<float> kKernels =
      PerformerBlock<float>::make();
  return kKernels;
}
}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cosformer::simd {
const PerformerBlockKernels<float>& performer_block_f32(Isa isa) {
  return COSFORMER_DISPATCH(isa, performer_block_f32);
}
}  // namespace cosformer::simd
#endif
