// Packing for the softmax engine: rows of strided memory, picked by index lists
// and widened to the type that is computed in. What does not take part becomes
// zeros whatever it holds.
//
//   as rows      [row][row_length(dim)], times a factor     (backward)
//   in strips    [strip of dim][row][kStrip], times a factor  (queries)
//   across       panels of kPanel rows, [dim][kPanel]       (scores: keys)
//   by columns   panels of columns, [row][width of panel]   (sums: values)
#if defined(COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_PACK_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_PACK_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_PACK_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_PACK_INL_H_
#endif

#include <cstring>

#include "kernels/simd/pack-inl.h"
#include "kernels/simd/softmax_plan.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

// Columns of a tile are taken in multiples of this.
template <typename T>
inline constexpr int64_t kTileStep = kLanes<T> < 4 ? 4 : kLanes<T>;

// The rows of one row and head of a tensor: index x at data + x stride.
struct HeadRows {
  const char* data = nullptr;
  int64_t stride = 0;  // bytes
  DType dtype = DType::kFloat32;

  const char* at(int64_t x) const { return data + x * stride; }
};
inline HeadRows head_rows(const ConstView4& view, int64_t batch, int64_t head,
                          int64_t offset) {
  const int64_t size = static_cast<int64_t>(size_of(view.dtype));
  const int64_t at =
      batch * view.stride[0] + offset * view.stride[1] + head * view.stride[2];
  return {static_cast<const char*>(view.data) + at * size,
          view.stride[1] * size, view.dtype};
}

// Calls pack(In()) with the type of the elements.
template <typename T, class F>
HWY_INLINE auto for_input(DType dtype, F&& pack) {
  if constexpr (sizeof(T) == 8) {
    return pack(double());
  } else {
    if (dtype == DType::kBFloat16) return pack(BFloat16());
    if (dtype == DType::kFloat16) return pack(Float16());
    return pack(float());
  }
}

// One row, padded with zeros to `length`, a multiple of the lanes. each(x, c):
// what to store of x at column c.
template <typename T, typename In, class F>
HWY_INLINE void load_row(const In* HWY_RESTRICT row, int64_t dim,
                         int64_t length, F&& each) {
  const Tag<T> d;
  constexpr int64_t kLane = kLanes<T>;
  int64_t c = 0;
  for (; c + kLane <= dim; c += kLane) each(Vec<T>(load_wide(row + c)), c);
  if (c < dim) {
    In last[kLane] = {};
    std::memcpy(last, row + c, static_cast<size_t>(dim - c) * sizeof(In));
    each(Vec<T>(load_wide(last)), c);
    c += kLane;
  }
  for (; c < length; c += kLane) each(Vec<T>(hn::Zero(d)), c);
}

template <typename T>
HWY_INLINE void zero_row(T* HWY_RESTRICT out, int64_t length) {
  for (int64_t c = 0; c < length; c += kLanes<T>)
    hn::Store(hn::Zero(Tag<T>()), Tag<T>(), out + c);
}

// Rows [from, to) of a list times `factor`, zeros where live(x) is not. Returns
// whether all are finite.
template <typename T, class Live>
HWY_NOINLINE bool pack_as_rows(const HeadRows& rows, const IndexList& list,
                               int64_t from, int64_t to, const Live& live,
                               int64_t dim, T factor, T* HWY_RESTRICT out) {
  const Tag<T> d;
  const int64_t length = row_length<T>(dim);
  const Vec<T> zero = hn::Zero(d);
  Vec<T> finite = zero;  // x 0 is 0 for every finite x, else NaN
  for_input<T>(rows.dtype, [&](auto type) HWY_ATTR {
    using In = decltype(type);
    const Vec<T> by = hn::Set(d, factor);
    for (int64_t t = from; t < to; ++t, out += length) {
      const int64_t x = list[t];
      if (!live(x)) {
        zero_row(out, length);
        continue;
      }
      load_row<T>(reinterpret_cast<const In*>(rows.at(x)), dim, length,
                  [&](Vec<T> v, int64_t c) COSFORMER_LAMBDA {
                    const Vec<T> y = hn::Mul(v, by);
                    finite = hn::MulAdd(y, zero, finite);
                    hn::Store(y, d, out + c);
                  });
    }
  });
  return hn::AllTrue(d, hn::Eq(finite, zero));
}

// Rows of a score tile are packed in strips of so many features, so that they
// are a constant apart and one register holds all of their addresses.
inline constexpr int64_t kStrip = 64;
inline int64_t strips_size(int64_t rows, int64_t dim) {
  return rows * round_up(dim, kStrip);
}

// Rows of a list times `factor`, zeros where live(x) is not and for those up to
// `padded`, as strips of `padded` rows: [strip][row][kStrip].
template <typename T, class Live>
HWY_NOINLINE void pack_strips(const HeadRows& rows, const IndexList& list,
                              const Live& live, int64_t dim, T factor,
                              int64_t padded, T* HWY_RESTRICT out) {
  const Tag<T> d;
  const int64_t length = row_length<T>(dim);
  const auto place = [&](int64_t t, int64_t c) COSFORMER_LAMBDA {
    return out + (c / kStrip * padded + t) * kStrip + c % kStrip;
  };
  for_input<T>(rows.dtype, [&](auto type) HWY_ATTR {
    using In = decltype(type);
    const Vec<T> by = hn::Set(d, factor);
    for (int64_t t = 0; t < padded; ++t) {
      if (t < list.count && live(list[t])) {
        load_row<T>(reinterpret_cast<const In*>(rows.at(list[t])), dim, length,
                    [&](Vec<T> v, int64_t c) COSFORMER_LAMBDA {
                      hn::Store(hn::Mul(v, by), d, place(t, c));
                    });
      } else {
        for (int64_t c = 0; c < length; c += kLanes<T>)
          hn::Store(hn::Zero(d), d, place(t, c));
      }
    }
  });
}

// out[c * kPanel + r] = rows[r][c] for a square of lanes x lanes, from column c
// on.
template <typename T>
HWY_INLINE void transpose_square(const T* const* HWY_RESTRICT rows, int64_t c,
                                 T* HWY_RESTRICT out) {
  constexpr int64_t kLane = kLanes<T>;
  constexpr int64_t kStride = kPanel<T>;
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2
  if constexpr (sizeof(T) == 4) {
    // Blocks of 128 bits first, then 4 x 4 within them.
    const Tag<T> d;
    const hn::Repartition<double, Tag<T>> dd;
    constexpr int kBlocks = static_cast<int>(kLane / 4);
    const auto load = [&](int64_t r) COSFORMER_LAMBDA {
      return hn::LoadU(d, rows[r] + c);
    };
    Vec<T> x[kLane];  // x[r kBlocks + b]: block i is row 4 i + r, columns 4 b..
    unroll<4>([&](auto r) COSFORMER_LAMBDA {
#if HWY_TARGET == HWY_AVX3
      const Vec<T> r0 = load(r), r1 = load(r + 4), r2 = load(r + 8),
                   r3 = load(r + 12);
      const Vec<T> low02 = hn::ConcatLowerLower(d, r2, r0);
      const Vec<T> low13 = hn::ConcatLowerLower(d, r3, r1);
      const Vec<T> high02 = hn::ConcatUpperUpper(d, r2, r0);
      const Vec<T> high13 = hn::ConcatUpperUpper(d, r3, r1);
      x[r * 4] = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(low13), low02);
      x[r * 4 + 1] = hn::OddEvenBlocks(low13, hn::SwapAdjacentBlocks(low02));
      x[r * 4 + 2] = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(high13), high02);
      x[r * 4 + 3] = hn::OddEvenBlocks(high13, hn::SwapAdjacentBlocks(high02));
#else
      const Vec<T> r0 = load(r), r1 = load(r + 4);
      x[r * 2] = hn::ConcatLowerLower(d, r1, r0);
      x[r * 2 + 1] = hn::ConcatUpperUpper(d, r1, r0);
#endif
    });
    unroll<kBlocks>([&](auto b) COSFORMER_LAMBDA {
      const Vec<T> y0 = x[b], y1 = x[kBlocks + b], y2 = x[2 * kBlocks + b],
                   y3 = x[3 * kBlocks + b];
      const auto low01 = hn::BitCast(dd, hn::InterleaveLower(d, y0, y1));
      const auto high01 = hn::BitCast(dd, hn::InterleaveUpper(d, y0, y1));
      const auto low23 = hn::BitCast(dd, hn::InterleaveLower(d, y2, y3));
      const auto high23 = hn::BitCast(dd, hn::InterleaveUpper(d, y2, y3));
      T* HWY_RESTRICT to = out + (c + 4 * b) * kStride;
      hn::Store(hn::BitCast(d, hn::InterleaveLower(dd, low01, low23)), d, to);
      hn::Store(hn::BitCast(d, hn::InterleaveUpper(dd, low01, low23)), d,
                to + kStride);
      hn::Store(hn::BitCast(d, hn::InterleaveLower(dd, high01, high23)), d,
                to + 2 * kStride);
      hn::Store(hn::BitCast(d, hn::InterleaveUpper(dd, high01, high23)), d,
                to + 3 * kStride);
    });
    return;
  }
#endif
  for (int64_t i = 0; i < kLane; ++i)
    for (int64_t r = 0; r < kLane; ++r)
      out[(c + i) * kStride + r] = rows[r][c + i];
}

// How far ahead of packing rows are asked for.
inline void prefetch_row(const char* row, int64_t bytes) {
  for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(row + b);
}

// Elements of `count` rows packed across.
template <typename T>
int64_t across_size(int64_t count, int64_t dim) {
  return round_up(count, kPanel<T>) * row_length<T>(dim);
}

// Where row j begins among them; length: row_length(dim).
template <typename T>
HWY_INLINE int64_t place_across(int64_t j, int64_t length) {
  return j / kPanel<T> * kPanel<T> * length + j % kPanel<T>;
}

// Elements [first, first + count) of a list, a tile, across; rows whose bit of
// `real` is not set, and those up to kTileStep, become zeros. memory: lanes
// x row_length(dim).
template <typename T>
HWY_NOINLINE void pack_across(const HeadRows& rows, const IndexList& list,
                              int64_t first, int64_t count,
                              const TileBits& real, int64_t dim,
                              T* HWY_RESTRICT out, T* HWY_RESTRICT memory) {
  const Tag<T> d;
  constexpr int64_t kLane = kLanes<T>;
  const int64_t length = row_length<T>(dim);
  const int64_t padded = round_up(count, kTileStep<T>);
  for_input<T>(rows.dtype, [&](auto type) HWY_ATTR {
    using In = decltype(type);
    const int64_t bytes = dim * static_cast<int64_t>(sizeof(In));
    for (int64_t j = 0; j < padded; j += kLane) {
      T* HWY_RESTRICT to = out + place_across<T>(j, length);
      const T* from[kLane];
      int64_t direct = 0;  // columns that are read in place
      for (int64_t r = 0; r < kLane; ++r) {
        if (j + kLane + r < count)
          prefetch_row(rows.at(list[first + j + kLane + r]), bytes);
        const bool live = j + r < count &&
                          (real.word[(j + r) / 64] >> ((j + r) % 64) & 1) != 0;
        if constexpr (sizeof(In) == sizeof(T)) {
          if (live) {
            from[r] = reinterpret_cast<const T*>(rows.at(list[first + j + r]));
            ++direct;
            continue;
          }
        }
        from[r] = memory + r * length;
        if (live) {
          load_row<T>(reinterpret_cast<const In*>(rows.at(list[first + j + r])),
                      dim, length, [&](Vec<T> v, int64_t c) COSFORMER_LAMBDA {
                        hn::Store(v, d, memory + r * length + c);
                      });
        } else {
          zero_row(memory + r * length, length);
        }
      }
      const int64_t whole = dim / kLane * kLane;
      for (int64_t c = 0; c < whole; c += kLane) transpose_square(from, c, to);
      for (int64_t c = round_up(dim, kLane); c < length; ++c)
        hn::Store(hn::Zero(d), d, to + c * kPanel<T>);
      if (whole == dim) continue;
      if (direct > 0) {  // the last columns, padded
        for (int64_t r = 0; r < kLane; ++r) {
          if (from[r] == memory + r * length) continue;
          T* HWY_RESTRICT last = memory + r * length + whole;
          zero_row(last, kLane);
          std::memcpy(last, from[r] + whole,
                      static_cast<size_t>(dim - whole) * sizeof(T));
          from[r] = memory + r * length;
        }
      }
      transpose_square(from, whole, to);
    }
  });
}

// The same elements by columns: panels of kPanel columns (the last as wide as
// is left, in whole vectors), kForwardKeys rows high. Returns whether all that
// take part are finite. Rows up to kTileStep become zeros.
template <typename T>
HWY_NOINLINE bool pack_by_columns(const HeadRows& rows, const IndexList& list,
                                  int64_t first, int64_t count,
                                  const TileBits& real, int64_t dim,
                                  T* HWY_RESTRICT out) {
  const Tag<T> d;
  const int64_t length = row_length<T>(dim);
  const Vec<T> zero = hn::Zero(d);
  Vec<T> finite = zero;  // x 0 is 0 for every finite x, else NaN
  const int64_t padded = round_up(count, kTileStep<T>);
  for_input<T>(rows.dtype, [&](auto type) HWY_ATTR {
    using In = decltype(type);
    const int64_t bytes = dim * static_cast<int64_t>(sizeof(In));
    for (int64_t j = 0; j < padded; ++j) {
      const auto place = [&](int64_t c) COSFORMER_LAMBDA {
        const int64_t panel = c / kPanel<T> * kPanel<T>;
        const int64_t left = length - panel;
        const int64_t width = left < kPanel<T> ? left : kPanel<T>;
        return out + panel * kForwardKeys + j * width + c - panel;
      };
      if (j < count && (real.word[j / 64] >> (j % 64) & 1) != 0) {
        if (j + 8 < count) prefetch_row(rows.at(list[first + j + 8]), bytes);
        load_row<T>(reinterpret_cast<const In*>(rows.at(list[first + j])), dim,
                    length, [&](Vec<T> v, int64_t c) COSFORMER_LAMBDA {
                      finite = hn::MulAdd(v, zero, finite);
                      hn::Store(v, d, place(c));
                    });
      } else {
        for (int64_t c = 0; c < length; c += kLanes<T>)
          hn::Store(zero, d, place(c));
      }
    }
  });
  return hn::AllTrue(d, hn::Eq(finite, zero));
}

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_PACK_INL_H_
