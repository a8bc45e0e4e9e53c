// The multiply-adds of the softmax engine in registers: tile-inl.h's product
// with depths in whole steps of 4.
#if defined(COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_PRODUCT_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_PRODUCT_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_PRODUCT_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_PRODUCT_INL_H_
#endif

#include "kernels/simd/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

// sum += a b, in place: left to itself gcc renames the twelve accumulators of
// AVX2 as it goes, runs out of registers, and takes some through memory at
// every step (10% of a product).
template <typename T>
HWY_INLINE void add_product(Vec<T> a, Vec<T> b, Vec<T>& sum) {
#if HWY_TARGET == HWY_AVX2 && !defined(__clang__)
  if constexpr (sizeof(T) == 4) {
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum.raw) : "x"(a.raw), "x"(b.raw));
  } else {
    asm("vfmadd231pd %2, %1, %0" : "+x"(sum.raw) : "x"(a.raw), "x"(b.raw));
  }
#else
  sum = hn::MulAdd(a, b, sum);
#endif
}

// acc[r][n] += sum_k A(r, k) b[k][n], k < depth, a multiple of 4.
template <typename T, Along kAlong, int kRows, int kVectors>
HWY_INLINE void multiply_add(const T* HWY_RESTRICT a, int64_t a_stride,
                             const T* HWY_RESTRICT b, int64_t b_stride,
                             int64_t depth, Vec<T>* sums) {
  const Tag<T> d;
  // A local: gcc may store what it has a pointer to at every step.
  Vec<T> acc[kRows * kVectors];
  unroll<kRows * kVectors>([&](auto i) COSFORMER_LAMBDA { acc[i] = sums[i]; });
  for (int64_t k = 0; k < depth; k += 4) {
    unroll<4>([&](auto kk) COSFORMER_LAMBDA {
      Vec<T> bv[kVectors];
      unroll<kVectors>([&](auto n) COSFORMER_LAMBDA {
        bv[n] = hn::Load(d, b + kk * b_stride + n * kLanes<T>);
      });
      unroll<kRows>([&](auto r) COSFORMER_LAMBDA {
        const Vec<T> av =
            hn::Set(d, kAlong == Along::kRow ? a[r * a_stride + kk]
                                             : a[kk * a_stride + r]);
        unroll<kVectors>([&](auto n) COSFORMER_LAMBDA {
          add_product<T>(av, bv[n], acc[r * kVectors + n]);
        });
      });
    });
    a += kAlong == Along::kRow ? 4 : 4 * a_stride;
    b += 4 * b_stride;
  }
  unroll<kRows * kVectors>([&](auto i) COSFORMER_LAMBDA { sums[i] = acc[i]; });
}

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_PRODUCT_INL_H_
