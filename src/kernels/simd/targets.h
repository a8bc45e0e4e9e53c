// Which instruction sets the vector kernels are compiled for: the baseline of
// the compiler's flags ("generic"), AVX2 and AVX-512. Included before Highway
// in every source of this folder.
#ifndef COSFORMER_SRC_KERNELS_SIMD_TARGETS_H_
#define COSFORMER_SRC_KERNELS_SIMD_TARGETS_H_

// More targets would double the build for machines between these.
#ifdef COSFORMER_WITHOUT_AVX512  // a shorter build, for the thread sanitizer
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_AVX3)
#else
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#endif

#include <hwy/targets.h>

#include "kernels/dispatch.h"

namespace cosformer {
inline constexpr bool kBuiltForAvx512 = (HWY_TARGETS & HWY_AVX3) != 0;
inline constexpr bool kBuiltForAvx2 = (HWY_TARGETS & HWY_AVX2) != 0;
}  // namespace cosformer

// Calls the function of this name in the namespace of an instruction set that
// this build has (dispatch.h gives no other).
#if HWY_TARGETS & HWY_AVX3
#define COSFORMER_IF_AVX512(isa, function) \
  isa >= Isa::kAvx512 ? N_AVX3::function():
#else
#define COSFORMER_IF_AVX512(isa, function)
#endif
#if HWY_TARGETS & HWY_AVX2
#define COSFORMER_IF_AVX2(isa, function) isa == Isa::kAvx2 ? N_AVX2::function():
#else
#define COSFORMER_IF_AVX2(isa, function)
#endif
#define COSFORMER_DISPATCH(isa, function)                              \
  (COSFORMER_IF_AVX512(isa, function) COSFORMER_IF_AVX2(isa, function) \
       HWY_STATIC_DISPATCH(function)())

#endif  // COSFORMER_SRC_KERNELS_SIMD_TARGETS_H_
