// Dot products of rows with rows: both lie along memory, so that neither has to
// be transposed. A tile of kDotRows x 4 products keeps a vector of partial sums
// each; what remains is to add up the lanes of four vectors at a time, which
// costs shuffles and additions that run beside the multiply-adds.
#if defined(COSFORMER_SRC_KERNELS_SIMD_DOT_TILE_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_DOT_TILE_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_DOT_TILE_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_DOT_TILE_INL_H_
#endif

#include "kernels/simd/call.h"
#include "kernels/simd/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

// Rows a tile: with 4 columns, as many accumulators as the registers hold.
#if HWY_TARGET == HWY_AVX3
inline constexpr int kDotRows = 4;
#else
inline constexpr int kDotRows = 2;
#endif
inline constexpr int kDotColumns = 4;

// out[n] = the sum of the lanes of x[n], n < 4. out: aligned to 4 elements.
template <typename T>
HWY_INLINE void store_sums(const Vec<T>* x, T* HWY_RESTRICT out) {
  const Tag<T> d;
#if HWY_TARGET != HWY_SCALAR
  if constexpr (sizeof(T) == 4) {
    // In every 128-bit block the block's part of the four sums.
    const hn::Repartition<double, Tag<T>> dd;
    const auto ab =
        hn::BitCast(dd, hn::Add(hn::InterleaveLower(d, x[0], x[1]),
                                hn::InterleaveUpper(d, x[0], x[1])));
    const auto ce =
        hn::BitCast(dd, hn::Add(hn::InterleaveLower(d, x[2], x[3]),
                                hn::InterleaveUpper(d, x[2], x[3])));
    const Vec<T> blocks =
        hn::Add(hn::BitCast(d, hn::InterleaveLower(dd, ab, ce)),
                hn::BitCast(d, hn::InterleaveUpper(dd, ab, ce)));
    if constexpr (kLanes<T> == 4) {
      hn::Store(blocks, d, out);
    } else {
      const hn::Half<Tag<T>> dh;
      const auto half =
          hn::Add(hn::LowerHalf(dh, blocks), hn::UpperHalf(dh, blocks));
      if constexpr (kLanes<T> == 8) {
        hn::Store(half, dh, out);
      } else {
        const hn::Half<decltype(dh)> dq;
        hn::Store(hn::Add(hn::LowerHalf(dq, half), hn::UpperHalf(dq, half)), dq,
                  out);
      }
    }
    return;
  }
#endif
  for (int n = 0; n < 4; ++n) out[n] = hn::GetLane(hn::SumOfLanes(d, x[n]));
}

// The dot products of kRows rows of a with 4 rows of b.
template <typename T, int kRows = kDotRows>
struct DotTile {
  Vec<T> acc[kRows * kDotColumns];

  HWY_INLINE void zero() {
    unroll<kRows * kDotColumns>(
        [&](auto i) COSFORMER_LAMBDA { acc[i] = hn::Zero(Tag<T>()); });
  }
  // depth: whole vectors.
  HWY_INLINE void multiply(const T* HWY_RESTRICT a, int64_t a_stride,
                           const T* HWY_RESTRICT b, int64_t b_stride,
                           int64_t depth) {
    for (int64_t k = 0; k < depth; k += kLanes<T>)
      step(a + k, a_stride, b + k, b_stride);
  }
  // kVectors whole vectors: a depth that is known saves the loop.
  template <int kVectors>
  HWY_INLINE void multiply(const T* HWY_RESTRICT a, int64_t a_stride,
                           const T* HWY_RESTRICT b, int64_t b_stride) {
    unroll<kVectors>([&](auto k) COSFORMER_LAMBDA {
      step(a + k * kLanes<T>, a_stride, b + k * kLanes<T>, b_stride);
    });
  }
  // out[r][c], rows of `stride`.
  HWY_INLINE void store(T* HWY_RESTRICT out, int64_t stride) const {
    unroll<kRows>([&](auto r) COSFORMER_LAMBDA {
      store_sums<T>(acc + r * kDotColumns, out + r * stride);
    });
  }

 private:
  HWY_INLINE void step(const T* HWY_RESTRICT a, int64_t a_stride,
                       const T* HWY_RESTRICT b, int64_t b_stride) {
    const Tag<T> d;
    Vec<T> av[kRows];
    unroll<kRows>([&](auto r) COSFORMER_LAMBDA {
      av[r] = hn::Load(d, a + r * a_stride);
    });
    unroll<kDotColumns>([&](auto c) COSFORMER_LAMBDA {
      const Vec<T> bv = hn::Load(d, b + c * b_stride);
      unroll<kRows>([&](auto r) COSFORMER_LAMBDA {
        acc[r * kDotColumns + c] =
            hn::MulAdd(av[r], bv, acc[r * kDotColumns + c]);
      });
    });
  }
};

// The triangle j <= i (kLower) or j >= i (kUpper) of a chunk.
enum class Triangle { kLower, kUpper };

// Elements between the rows of a chunk's scores: a constant, so that a tile
// reads them at constant offsets.
inline constexpr int64_t kScoresStride = kMaxChunk;

// scores[i][j] = (a_i . b_j + add_i or add_j) (1 + ratio_i ratio_j) inside the
// triangle, 0 beyond it, selected away: what is not finite there stays there.
// Of the 4 x 4 blocks that lie beyond the triangle nothing is written. add
// belongs to the queries: to row i of the lower triangle, to column j of the
// upper one; nullptr = 0. rows: a multiple of 4 up to kScoresStride; depth:
// whole vectors. Rows of a and b, and ratio, are there for all of `rows`.
template <typename T, Triangle kTriangle>
HWY_NOINLINE void triangle_dots(const T* HWY_RESTRICT a, int64_t a_stride,
                                const T* HWY_RESTRICT b, int64_t b_stride,
                                int64_t rows, int64_t depth,
                                const T* HWY_RESTRICT ratio, bool cosine,
                                const T* HWY_RESTRICT add,
                                T* HWY_RESTRICT scores) {
  const hn::CappedTag<T, 4> d4;
  constexpr int64_t kLane4 = hn::MaxLanes(d4);
  const auto one = hn::Set(d4, T{1});
  for (int64_t i0 = 0; i0 < rows; i0 += 4) {
    const int64_t first = kTriangle == Triangle::kLower ? 0 : i0;
    const int64_t last = kTriangle == Triangle::kLower ? i0 + 4 : rows;
    for (int64_t j0 = first; j0 < last; j0 += kDotColumns) {
      for (int64_t i = i0; i < i0 + 4; i += kDotRows) {
        DotTile<T> tile;
        tile.zero();
        tile.multiply(a + i * a_stride, a_stride, b + j0 * b_stride, b_stride,
                      depth);
        tile.store(scores + i * kScoresStride + j0, kScoresStride);
      }
      for (int64_t i = i0; i < i0 + 4; ++i) {
        const auto ratio_i = hn::Set(d4, ratio[i]);
        for (int64_t j = j0; j < j0 + 4; j += kLane4) {
          T* HWY_RESTRICT at = scores + i * kScoresStride + j;
          auto x = hn::Load(d4, at);
          if (add != nullptr) {
            x = hn::Add(x, kTriangle == Triangle::kLower
                               ? hn::Set(d4, add[i])
                               : hn::LoadU(d4, add + j));
          }
          if (cosine)
            x = hn::Mul(x, hn::MulAdd(ratio_i, hn::LoadU(d4, ratio + j), one));
          if (i0 == j0) {
            const auto column = hn::Iota(d4, static_cast<T>(j));
            const auto row = hn::Set(d4, static_cast<T>(i));
            x = hn::IfThenElseZero(kTriangle == Triangle::kLower
                                       ? hn::Le(column, row)
                                       : hn::Ge(column, row),
                                   x);
          }
          hn::Store(x, d4, at);
        }
      }
    }
  }
}

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_DOT_TILE_INL_H_
