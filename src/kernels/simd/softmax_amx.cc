// The softmax engine's forward kernels on AMX tiles.
#include "kernels/simd/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/simd/softmax_amx.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h: it defines the target that the rest is compiled for.
#include "kernels/simd/softmax_amx-inl.h"

#if HWY_TARGET == HWY_AVX3

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {
const SoftmaxForward& softmax_forward_amx(DType dtype) {
  static const SoftmaxForward kBFloat16 = make_amx_forward<1, 2>();
  static const SoftmaxForward kFloat16 = make_amx_forward<2, 2>();
  static const SoftmaxForward kFloat32 = make_amx_forward<3, 3>();
  return dtype == DType::kBFloat16  ? kBFloat16
         : dtype == DType::kFloat16 ? kFloat16
                                    : kFloat32;
}
}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif

#if HWY_ONCE
namespace cosformer::simd {
const SoftmaxForward& softmax_forward_amx([[maybe_unused]] DType dtype) {
#if HWY_TARGETS & HWY_AVX3
  return N_AVX3::softmax_forward_amx(dtype);
#else
  return softmax_forward_f32(Isa::kGeneric);  // dispatch.h gives no kAmx
#endif
}
}  // namespace cosformer::simd
#endif
