// 2^x and e^x in vectors: to about 1e-7 in float, 1e-15 in double.
#if defined(COSFORMER_SRC_KERNELS_SIMD_EXP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_EXP_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_EXP_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_EXP_INL_H_
#endif

#include <numbers>

#include "kernels/simd/exp_table.h"
#include "kernels/simd/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

// Results that are no normal numbers cost an Intel processor 200 cycles each.
template <typename T>
inline constexpr T kLowestPower = sizeof(T) == 4 ? T{-126} : T{-1022};
// Of weights: products with them are normal numbers too. What weighs less
// counts as so much (AVX-512 goes down to the least normal number, then to 0),
// or as nothing where a bias may have hidden it (zero_where_far).
template <typename T>
inline constexpr T kLowestWeight = sizeof(T) == 4 ? T{-100} : T{-900};

// 2^x for x of at most 126 (double: 1022), and 2^lowest where x is below that;
// infinity or something huge where it is above; NaN where x is NaN.
template <typename T>
HWY_INLINE Vec<T> exp2_lanes(Vec<T> x, T lowest = kLowestPower<T>);

// weight, which is 2^x; 0 where x is below the lowest weight. A bias hides keys
// whose values may be anything.
template <typename T>
HWY_INLINE Vec<T> zero_where_far(Vec<T> x, Vec<T> weight) {
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(Tag<T>(), kLowestWeight<T>)),
                            weight);
}

// A weight of softmax, 2^x, where tiny results are flushed (flush_tiny.h).
// AVX-512 scales by any power, and what ends below the normal numbers is 0:
// nothing need bound x there. Elsewhere the lowest weight does.
template <typename T>
HWY_INLINE Vec<T> weight_lanes(Vec<T> x);

// Rounding to a multiple of a power of 2: adding a number so large that its
// last bit is that power.
template <typename T>
struct Rounded {
  Vec<T> sum;       // whose low bits count the multiples
  Vec<T> multiple;  // x rounded
  Vec<T> rest;      // x - multiple
};
template <typename T>
HWY_INLINE Rounded<T> round_by(Vec<T> x, T magic) {
  const Vec<T> m = hn::Set(Tag<T>(), magic);
  Rounded<T> r;
  r.sum = hn::Add(x, m);
  r.multiple = hn::Sub(r.sum, m);
  r.rest = hn::Sub(x, r.multiple);
  return r;
}

// x within bounds; NaN goes through, whatever Min and Max of a target do to it.
template <typename T>
HWY_INLINE Vec<T> clamped(Vec<T> x, T low, T high) {
  const Tag<T> d;
#if HWY_TARGET == HWY_SCALAR
  x = hn::IfThenElse(hn::Lt(x, hn::Set(d, low)), hn::Set(d, low), x);
  return hn::IfThenElse(hn::Gt(x, hn::Set(d, high)), hn::Set(d, high), x);
#else
  // Of two NaN-free bounds and x, x comes second.
  return hn::Min(hn::Set(d, high), hn::Max(hn::Set(d, low), x));
#endif
}

// p x 2^k by adding k to the exponent's bits; NaN, whose bits would overflow,
// stays.
template <typename T, int kShift>
HWY_INLINE Vec<T> times_power(Vec<T> p, Vec<T> sum) {
  const hn::RebindToSigned<Tag<T>> di;
  const Vec<T> result = hn::BitCast(
      Tag<T>(),
      hn::Add(hn::BitCast(di, p), hn::ShiftLeft<kShift>(hn::BitCast(di, sum))));
  return hn::IfThenElse(hn::Eq(p, p), result, p);
}

// Degree 13 of the series in half a step: what is left is below 1e-17.
template <>
HWY_INLINE Vec<double> exp2_lanes<double>(Vec<double> x, double lowest) {
  const Tag<double> d;
  x = clamped<double>(x, lowest, 1023.0);
  const Rounded<double> r = round_by<double>(x, 0x1.8p52);
  Vec<double> p = hn::Set(d, kExp2Series.c[kExp2Degree]);
  unroll<kExp2Degree>([&](auto i) COSFORMER_LAMBDA {
    p = hn::MulAdd(p, r.rest, hn::Set(d, kExp2Series.c[kExp2Degree - 1 - i]));
  });
  return times_power<double, 52>(p, r.sum);
}

// kBounded: by `lowest`; targets other than AVX-512 always are.
template <bool kBounded>
HWY_INLINE Vec<float> exp2_floats(Vec<float> x, [[maybe_unused]] float lowest) {
  const Tag<float> d;
  [[maybe_unused]] const hn::RebindToSigned<Tag<float>> di;
#if HWY_TARGET == HWY_AVX3
  // x down to a 32nd; 2^(its fraction) from a table, the rest by degree 2, so
  // that whole powers are exact. The table's look-up takes the low five bits of
  // its index. Scaling rounds down too, and makes infinity of what is too
  // large. Seven operations and the bound: all of 512 bits share two ports with
  // the multiply-adds of Intel's processors. NaN, which comes second, stays.
  if constexpr (kBounded) x = hn::Max(hn::Set(d, lowest), x);
  const Vec<float> sum{
      _mm512_add_round_ps(x.raw, _mm512_set1_ps(0x1.8p18f),
                          _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
  constexpr int kBits = 5;
  const Vec<float> rest{_mm512_reduce_ps(
      x.raw, kBits << 4 | _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
  const Vec<float> table{_mm512_permutex2var_ps(
      hn::Load(d, kExp2Table32.value).raw, hn::BitCast(di, sum).raw,
      hn::Load(d, kExp2Table32.value + 16).raw)};
  const Vec<float> u = hn::MulAdd(hn::Set(d, 0.2426526993513107f), rest,
                                  hn::Set(d, 0.6931237578392029f));
  const Vec<float> p = hn::MulAdd(hn::Mul(rest, table), u, table);
  return Vec<float>{_mm512_scalef_ps(p.raw, x.raw)};
#elif HWY_TARGET == HWY_AVX2
  // x to an 8th; the table's entry 2^(i/8) has i/8 taken off its exponent's
  // bits, so that adding the multiple gives the exponent alone.
  x = clamped<float>(x, lowest, 127.0f);
  const Rounded<float> r = round_by<float>(x, 0x1.8p20f);
  const Vec<float> entry{_mm256_permutevar8x32_ps(
      hn::Load(d, kExp2Table8.value).raw, hn::BitCast(di, r.sum).raw)};
  const Vec<float> table =
      hn::BitCast(d, hn::Add(hn::BitCast(di, entry),
                             hn::ShiftLeft<20>(hn::BitCast(di, r.sum))));
  Vec<float> u = hn::MulAdd(hn::Set(d, 0.0554962232708931f), r.rest,
                            hn::Set(d, 0.2402577356127236f));
  u = hn::MulAdd(u, r.rest, hn::Set(d, 0.6931472420692444f));
  return hn::MulAdd(hn::Mul(r.rest, table), u, table);
#else
  x = clamped<float>(x, lowest, 127.0f);
  const Rounded<float> r = round_by<float>(x, 0x1.8p23f);
  Vec<float> p = hn::MulAdd(hn::Set(d, 0.001326472731307149f), r.rest,
                            hn::Set(d, 0.009671512991189957f));
  p = hn::MulAdd(p, r.rest, hn::Set(d, 0.05550733581185341f));
  p = hn::MulAdd(p, r.rest, hn::Set(d, 0.24022242426872253f));
  p = hn::MulAdd(p, r.rest, hn::Set(d, 0.6931470036506653f));
  p = hn::MulAdd(p, r.rest, hn::Set(d, 1.0f));
  return times_power<float, 23>(p, r.sum);
#endif
}
template <>
HWY_INLINE Vec<float> exp2_lanes<float>(Vec<float> x, float lowest) {
  return exp2_floats<true>(x, lowest);
}
template <typename T>
HWY_INLINE Vec<T> weight_lanes(Vec<T> x) {
  if constexpr (sizeof(T) == 4) {
    return exp2_floats<false>(x, kLowestWeight<T>);
  } else {
    return exp2_lanes<T>(x, kLowestWeight<T>);
  }
}

// e^x for x <= 0, infinity included; below e^-87 (double: e^-708) it is 0. The
// product with log2(e) keeps its rounding error, which far from 0 is more than
// the last bit of the result. Above 0 it is some number or infinity.
template <typename T>
HWY_INLINE Vec<T> exp_below_zero(Vec<T> x) {
  const Tag<T> d;
  const Vec<T> lowest = hn::Set(d, T{sizeof(T) == 4 ? -87 : -708});
  const Vec<T> log2e = hn::Set(d, static_cast<T>(std::numbers::log2e));
  // What is left of log2(e) after rounding it to T.
  const Vec<T> log2e_rest =
      hn::Set(d, static_cast<T>(sizeof(T) == 4 ? 1.9259629911266175e-08
                                               : 2.0355273740931033e-17));
  const Vec<T> bounded = hn::IfThenElse(hn::Lt(x, lowest), lowest, x);
  const Vec<T> whole = hn::Mul(bounded, log2e);
  const Vec<T> rest =
      hn::MulAdd(bounded, log2e_rest, hn::MulSub(bounded, log2e, whole));
  const Vec<T> power = exp2_lanes<T>(whole);
  const Vec<T> ln2 = hn::Set(d, static_cast<T>(std::numbers::ln2));
  return hn::IfThenZeroElse(hn::Lt(x, lowest),
                            hn::MulAdd(hn::Mul(power, ln2), rest, power));
}

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_EXP_INL_H_
