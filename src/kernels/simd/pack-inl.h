// Rows of strided memory into packed chunks and back: any float type is widened
// to the type that is computed in, the feature map is applied on the way, and
// rows that do not count (masked, or outside the row's range) become zeros
// whatever they hold. Packed rows are padded with zeros to whole vectors, and
// to a multiple of 4 rows.
#if defined(COSFORMER_SRC_KERNELS_SIMD_PACK_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_PACK_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_PACK_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_PACK_INL_H_
#endif

#include <cstring>

#include "base/half.h"
#include "kernels/simd/call.h"
#include "kernels/simd/exp-inl.h"
#include "kernels/simd/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

HWY_INLINE Vec<float> load_wide(const float* p) {
  return hn::LoadU(Tag<float>(), p);
}
HWY_INLINE Vec<double> load_wide(const double* p) {
  return hn::LoadU(Tag<double>(), p);
}
HWY_INLINE Vec<float> load_wide(const BFloat16* p) {
  const hn::Rebind<uint32_t, Tag<float>> d32;
  const hn::Rebind<uint16_t, Tag<float>> d16;
  return hn::BitCast(
      Tag<float>(),
      hn::ShiftLeft<16>(hn::PromoteTo(
          d32, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(p)))));
}
HWY_INLINE Vec<float> load_wide(const Float16* p) {
#if HWY_TARGET == HWY_SCALAR
  // Highway's own takes infinities and NaN for numbers there.
  return hn::Set(Tag<float>(), float16_to_float(p->bits));
#else
  const hn::Rebind<hwy::float16_t, Tag<float>> d16;
  return hn::PromoteTo(
      Tag<float>(), hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(p)));
#endif
}

// x: a vector.
HWY_INLINE void narrow(const float* x, BFloat16* out, int64_t n) {
#if HWY_TARGET != HWY_SCALAR
  if (n == kLanes<float>) {  // as float_to_bfloat16
    const Tag<float> d;
    const hn::RebindToUnsigned<Tag<float>> du;
    const hn::Rebind<uint16_t, Tag<float>> d16;
    const auto v = hn::Load(d, x);
    const auto bits = hn::BitCast(du, v);
    const auto high = hn::ShiftRight<16>(bits);
    const auto even = hn::And(high, hn::Set(du, 1));
    const auto rounded =
        hn::ShiftRight<16>(hn::Add(bits, hn::Add(even, hn::Set(du, 0x7FFF))));
    const auto quiet = hn::Or(high, hn::Set(du, 0x0040));
    hn::StoreU(
        hn::TruncateTo(d16, hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)),
                                           quiet, rounded)),
        d16, reinterpret_cast<uint16_t*>(out));
    return;
  }
#endif
  for (int64_t i = 0; i < n; ++i) out[i].bits = float_to_bfloat16(x[i]);
}
HWY_INLINE void narrow(const float* x, Float16* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i].bits = float_to_float16(x[i]);
}

// Comparisons are written so that NaN goes through.
template <FeatureMap kMap, typename T>
HWY_INLINE Vec<T> feature(Vec<T> x) {
  const Tag<T> d;
  const Vec<T> zero = hn::Zero(d);
  if constexpr (kMap == FeatureMap::kRelu) {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
    // Of these instructions the second operand is what a NaN makes.
    return hn::Max(zero, x);
#else
    return hn::IfThenZeroElse(hn::Le(x, zero), x);
#endif
  } else if constexpr (kMap == FeatureMap::kElu1) {
    return hn::IfThenElse(hn::Le(x, zero), exp_below_zero<T>(x),
                          hn::Add(x, hn::Set(d, T{1})));
  } else {
    return x;
  }
}

// Where the rows of a chunk come from or go to: slot s is element
// data[(first + s) * stride].
struct Rows {
  const void* data;
  int64_t first, stride;
};

template <typename T, typename In, FeatureMap kMap>
HWY_NOINLINE bool pack_rows_as(const Rows& from, uint64_t valid, int64_t rows,
                               int64_t dim, T* HWY_RESTRICT out,
                               int64_t out_stride) {
  const Tag<T> d;
  const Vec<T> zero = hn::Zero(d);
  constexpr int64_t kLane = kLanes<T>;
  const In* HWY_RESTRICT data = static_cast<const In*>(from.data);
  const int64_t whole = dim / kLane * kLane;
  // x * 0 is 0 for every finite x, else NaN.
  Vec<T> finite = zero;
  for (int64_t s = 0; s < rows; ++s, out += out_stride) {
    int64_t c = 0;
    if ((valid >> s & 1) != 0) {
      const In* HWY_RESTRICT row = data + (from.first + s) * from.stride;
      for (; c < whole; c += kLane) {
        const Vec<T> x = feature<kMap, T>(load_wide(row + c));
        finite = hn::MulAdd(x, zero, finite);
        hn::Store(x, d, out + c);
      }
      if (c < dim) {
        In last[kLane] = {};
        std::memcpy(last, row + c, static_cast<size_t>(dim - c) * sizeof(In));
        const Vec<T> x =
            hn::IfThenElseZero(hn::FirstN(d, static_cast<size_t>(dim - c)),
                               feature<kMap, T>(load_wide(last)));
        finite = hn::MulAdd(x, zero, finite);
        hn::Store(x, d, out + c);
        c += kLane;
      }
    }
    for (; c < out_stride; c += kLane) hn::Store(zero, d, out + c);
  }
  return hn::AllTrue(d, hn::Eq(finite, zero));
}

template <typename T, FeatureMap kMap>
HWY_INLINE bool pack_rows_of(DType dtype, const Rows& from, uint64_t valid,
                             int64_t rows, int64_t dim, T* out,
                             int64_t out_stride) {
  if constexpr (sizeof(T) == 8) {
    return pack_rows_as<T, double, kMap>(from, valid, rows, dim, out,
                                         out_stride);
  } else {
    switch (dtype) {
      case DType::kBFloat16:
        return pack_rows_as<T, BFloat16, kMap>(from, valid, rows, dim, out,
                                               out_stride);
      case DType::kFloat16:
        return pack_rows_as<T, Float16, kMap>(from, valid, rows, dim, out,
                                              out_stride);
      default:
        return pack_rows_as<T, float, kMap>(from, valid, rows, dim, out,
                                            out_stride);
    }
  }
}

// Packs `rows` rows (a multiple of 4) of `dim` elements, zeros where the bit of
// `valid` is 0. Returns whether all of them are finite.
template <typename T>
HWY_INLINE bool pack_rows(FeatureMap map, DType dtype, const Rows& from,
                          uint64_t valid, int64_t rows, int64_t dim, T* out,
                          int64_t out_stride) {
  switch (map) {
    case FeatureMap::kRelu:
      return pack_rows_of<T, FeatureMap::kRelu>(dtype, from, valid, rows, dim,
                                                out, out_stride);
    case FeatureMap::kElu1:
      return pack_rows_of<T, FeatureMap::kElu1>(dtype, from, valid, rows, dim,
                                                out, out_stride);
    case FeatureMap::kIdentity:
      break;
  }
  return pack_rows_of<T, FeatureMap::kIdentity>(dtype, from, valid, rows, dim,
                                                out, out_stride);
}

template <typename T, typename Out>
HWY_NOINLINE void write_rows_as(const T* HWY_RESTRICT in, int64_t in_stride,
                                const T* HWY_RESTRICT scale, uint64_t written,
                                uint64_t live, int64_t dim, const Rows& to,
                                bool stream) {
  const Tag<T> d;
  constexpr int64_t kLane = kLanes<T>;
  const Vec<T> zero = hn::Zero(d);
  Out* HWY_RESTRICT data = static_cast<Out*>(const_cast<void*>(to.data));
  // A word has no 64th shift.
  for (int64_t s = 0; s < kMaxChunk && written >> s != 0;
       ++s, in += in_stride) {
    if ((written >> s & 1) == 0) continue;
    Out* HWY_RESTRICT row = data + (to.first + s) * to.stride;
    if ((live >> s & 1) == 0) {
      std::memset(row, 0, static_cast<size_t>(dim) * sizeof(Out));
      continue;
    }
    const Vec<T> factor = hn::Set(d, scale[s]);
    int64_t c = 0;
    // Adding 0 makes -0 a 0: the sign of a zero would tell of keys that do not
    // count.
    if constexpr (sizeof(Out) == sizeof(T)) {
      const bool aligned =
          reinterpret_cast<uintptr_t>(row) % sizeof(Vec<T>) == 0;
      if (stream && aligned) {
        for (; c + kLane <= dim; c += kLane)
          hn::Stream(hn::MulAdd(hn::Load(d, in + c), factor, zero), d, row + c);
      }
      for (; c + kLane <= dim; c += kLane)
        hn::StoreU(hn::MulAdd(hn::Load(d, in + c), factor, zero), d, row + c);
    }
    for (; c < dim; c += kLane) {
      HWY_ALIGN T last[kLane];
      hn::Store(hn::MulAdd(hn::Load(d, in + c), factor, zero), d, last);
      const int64_t n = dim - c < kLane ? dim - c : kLane;
      if constexpr (sizeof(Out) == sizeof(T)) {
        std::memcpy(row + c, last, static_cast<size_t>(n) * sizeof(T));
      } else {
        narrow(last, row + c, n);
      }
    }
  }
}

// Writes row s of `in` times scale[s] where its bit of `written` is set: zeros
// where its bit of `live` is not. stream: past the caches, where aligned.
template <typename T>
HWY_INLINE void write_rows(DType dtype, const T* in, int64_t in_stride,
                           const T* scale, uint64_t written, uint64_t live,
                           int64_t dim, const Rows& to, bool stream) {
  if constexpr (sizeof(T) == 8) {
    write_rows_as<T, double>(in, in_stride, scale, written, live, dim, to,
                             stream);
  } else if (dtype == DType::kBFloat16) {
    write_rows_as<T, BFloat16>(in, in_stride, scale, written, live, dim, to,
                               stream);
  } else if (dtype == DType::kFloat16) {
    write_rows_as<T, Float16>(in, in_stride, scale, written, live, dim, to,
                              stream);
  } else {
    write_rows_as<T, float>(in, in_stride, scale, written, live, dim, to,
                            stream);
  }
}

// out[c][r] = in[r][c]: rows a multiple of 4, columns rounded up to one.
template <typename T>
HWY_NOINLINE void transpose(const T* HWY_RESTRICT in, int64_t in_stride,
                            int64_t rows, int64_t columns, T* HWY_RESTRICT out,
                            int64_t out_stride) {
#if HWY_TARGET != HWY_SCALAR
  if constexpr (sizeof(T) == 4) {
    // 4 x 4 in 128-bit registers: the same shuffles on every target.
    const hn::FixedTag<float, 4> d;
    const hn::FixedTag<double, 2> dd;
    for (int64_t r = 0; r < rows; r += 4) {
      for (int64_t c = 0; c < columns; c += 4) {
        const T* from = in + r * in_stride + c;
        T* to = out + c * out_stride + r;
        const auto x0 = hn::Load(d, from);
        const auto x1 = hn::Load(d, from + in_stride);
        const auto x2 = hn::Load(d, from + 2 * in_stride);
        const auto x3 = hn::Load(d, from + 3 * in_stride);
        const auto y0 = hn::BitCast(dd, hn::InterleaveLower(d, x0, x1));
        const auto y1 = hn::BitCast(dd, hn::InterleaveLower(d, x2, x3));
        const auto y2 = hn::BitCast(dd, hn::InterleaveUpper(d, x0, x1));
        const auto y3 = hn::BitCast(dd, hn::InterleaveUpper(d, x2, x3));
        hn::Store(hn::BitCast(d, hn::InterleaveLower(dd, y0, y1)), d, to);
        hn::Store(hn::BitCast(d, hn::InterleaveUpper(dd, y0, y1)), d,
                  to + out_stride);
        hn::Store(hn::BitCast(d, hn::InterleaveLower(dd, y2, y3)), d,
                  to + 2 * out_stride);
        hn::Store(hn::BitCast(d, hn::InterleaveUpper(dd, y2, y3)), d,
                  to + 3 * out_stride);
      }
    }
    return;
  }
#endif
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t r = 0; r < rows; ++r)
      out[c * out_stride + r] = in[r * in_stride + c];
}

// out[r][c] = in[r][c] * scale[r], whole packed rows.
template <typename T>
HWY_INLINE void scale_rows(const T* HWY_RESTRICT in,
                           const T* HWY_RESTRICT scale, int64_t rows,
                           int64_t stride, T* HWY_RESTRICT out) {
  const Tag<T> d;
  for (int64_t r = 0; r < rows; ++r) {
    const Vec<T> s = hn::Set(d, scale[r]);
    for (int64_t c = 0; c < stride; c += kLanes<T>) {
      hn::Store(hn::Mul(hn::Load(d, in + r * stride + c), s), d,
                out + r * stride + c);
    }
  }
}

// Turns packed rows by their positions (inverse: back); out may be in. cos,
// sin: [rows][dim / 2].
template <typename T>
HWY_NOINLINE void rotate_rows(const T* in, const T* cos, const T* sin,
                              bool interleaved, bool inverse, int64_t rows,
                              int64_t dim, int64_t stride, T* out) {
  const int64_t half = dim / 2;
  const T sign = inverse ? T{-1} : T{1};
  const int64_t step = interleaved ? 2 : 1, apart = interleaved ? 1 : half;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < half; ++c) {
      const T* x = in + r * stride + c * step;
      T* y = out + r * stride + c * step;
      const T a = x[0], b = x[apart];
      const T co = cos[r * half + c], si = sign * sin[r * half + c];
      y[0] = a * co - b * si;
      y[apart] = a * si + b * co;
    }
    for (int64_t c = dim; c < stride; ++c) out[r * stride + c] = T{0};
  }
}

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_PACK_INL_H_
