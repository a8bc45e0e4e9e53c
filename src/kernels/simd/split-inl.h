// Numbers as sums of bfloat16 terms, for the products of AMX tiles: a float32
// has 24 bits, three terms of 8 hold them all; a float16 two, a bfloat16 one.
// The product of two such sums is that of their terms, of which those below the
// last bit are left out: 6 of 9 for three terms.
//
// A tile's row pairs elements that lie kLanes apart: vectors x (elements c ..)
// and y (c + 16 ..) become one vector of pairs (x_i, y_i) without a shuffle.
// Both operands of a product are paired so, whatever the order means.
#if defined(COSFORMER_SRC_KERNELS_SIMD_SPLIT_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_SPLIT_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_SPLIT_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_SPLIT_INL_H_
#endif

#include "kernels/simd/amx.h"
#include "kernels/simd/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

// The terms a and b of a product of split numbers, small products first;
// neighbours share a term, whose tiles then stay where they are.
struct TermProduct {
  int a, b;
};
template <int kTermsA, int kTermsB>
inline constexpr TermProduct kTermProducts[1] = {};
template <>
inline constexpr TermProduct kTermProducts<1, 1>[1] = {{0, 0}};
template <>
inline constexpr TermProduct kTermProducts<2, 1>[2] = {{1, 0}, {0, 0}};
template <>
inline constexpr TermProduct kTermProducts<2, 2>[4] = {
    {1, 1}, {0, 1}, {0, 0}, {1, 0}};
template <>
inline constexpr TermProduct kTermProducts<3, 3>[6] = {{0, 2}, {0, 1}, {1, 1},
                                                       {1, 0}, {2, 0}, {0, 0}};

template <int kTermsA, int kTermsB>
inline constexpr int kNumProducts =
    sizeof(kTermProducts<kTermsA, kTermsB>) / sizeof(TermProduct);

using Bits = hn::Vec<hn::RebindToUnsigned<Tag<float>>>;

// Pairs of bfloat16 out of two vectors whose upper halves they are.
HWY_INLINE Bits paired(Vec<float> x, Vec<float> y) {
  const hn::RebindToUnsigned<Tag<float>> du;
  return hn::Or(
      hn::ShiftRight<16>(hn::BitCast(du, x)),
      hn::And(hn::BitCast(du, y), hn::Set(du, uint32_t{0xffff0000u})));
}

HWY_INLINE Vec<float> upper_half(Vec<float> x) {
  const hn::RebindToUnsigned<Tag<float>> du;
  return hn::BitCast(Tag<float>(), hn::And(hn::BitCast(du, x),
                                           hn::Set(du, uint32_t{0xffff0000u})));
}

// Splits x and y by cutting bits off: each term has the next 8. For numbers
// that are finite or NaN. each(term, pairs).
template <int kTerms, class F>
HWY_INLINE void split_cut(Vec<float> x, Vec<float> y, F&& each) {
  unroll<kTerms>([&](auto t) COSFORMER_LAMBDA {
    if constexpr (t + 1 == kTerms) {
      each(t, paired(x, y));
    } else {
      const Vec<float> high_x = upper_half(x), high_y = upper_half(y);
      each(t, paired(high_x, high_y));
      x = hn::Sub(x, high_x);
      y = hn::Sub(y, high_y);
    }
  });
}

// Beyond it a number may round to infinity, which leaves no rest.
inline constexpr float kLargestSplit = 0x1.fcp127f;

// Whether split_nearest may have these numbers: none is NaN, infinite or
// larger.
inline bool can_split(const float* from, int64_t count) {
  const Tag<float> d;
  const Vec<float> largest = hn::Set(d, kLargestSplit);
  auto within = hn::Eq(largest, largest);
  for (int64_t i = 0; i < count; i += kLanes<float>)
    within = hn::And(within, hn::Le(hn::Abs(hn::Load(d, from + i)), largest));
  return hn::AllTrue(d, within);
}

// The nearest bfloat16 (of two as near the larger), and what is left.
HWY_INLINE Vec<float> take_nearest(Vec<float>& x) {
  const Tag<float> d;
  const hn::RebindToUnsigned<Tag<float>> du;
  const Vec<float> near = upper_half(hn::BitCast(
      d, hn::Add(hn::BitCast(du, x), hn::Set(du, uint32_t{0x8000u}))));
  x = hn::Sub(x, near);
  return near;
}

// As split_cut, each term rounded to nearest: the rest is half as large, and of
// either sign.
template <int kTerms, class F>
HWY_INLINE void split_nearest(Vec<float> x, Vec<float> y, F&& each) {
  unroll<kTerms>([&](auto t) COSFORMER_LAMBDA {
    const Vec<float> near_x = take_nearest(x), near_y = take_nearest(y);
    each(t, paired(near_x, near_y));
  });
}

// Multiplies what tiles 4, 5 (rows) and 6, 7 (columns) are loaded with, term by
// term, into tiles 0 to 3. load_a(which, term), load_b(which, term): where they
// are; between() runs after every product.
template <int kTermsA, int kTermsB, class LoadA, class LoadB, class Between>
HWY_INLINE void multiply_terms(const LoadA& load_a, const LoadB& load_b,
                               const Between& between) {
  constexpr auto& kProducts = kTermProducts<kTermsA, kTermsB>;
  unroll<kNumProducts<kTermsA, kTermsB>>([&](auto i) COSFORMER_LAMBDA {
    constexpr TermProduct p = kProducts[i];
    constexpr bool kFirst = i == 0;
    constexpr TermProduct before = kProducts[kFirst ? 0 : i - 1];
    if constexpr (kFirst || before.a != p.a) {
      tile_load<4>(load_a(0, p.a));
      tile_load<5>(load_a(1, p.a));
    }
    if constexpr (kFirst || before.b != p.b) {
      tile_load<6>(load_b(0, p.b));
      tile_load<7>(load_b(1, p.b));
    }
    tile_multiply<0, 4, 6>();
    tile_multiply<1, 4, 7>();
    tile_multiply<2, 5, 6>();
    tile_multiply<3, 5, 7>();
    between(i);
  });
}

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_SPLIT_INL_H_
