// Steps on a packed chunk that forward and backward share: the sizes of a call,
// its state, reading a state by the rows of a chunk, and the triangular
// products inside a chunk. What lies beyond the triangle is selected away,
// never multiplied by zero; and where a chunk holds a NaN or an infinity the
// triangle is walked row by row, so that no row touches what it may not see.
#if defined(COSFORMER_SRC_KERNELS_SIMD_CHUNK_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_CHUNK_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_CHUNK_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_CHUNK_INL_H_
#endif

#include <algorithm>

#include "kernels/simd/call.h"
#include "kernels/simd/pack-inl.h"
#include "kernels/simd/state-inl.h"
#include "kernels/simd/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

// Hands out 64-byte aligned pieces of memory; from nullptr it only counts.
template <typename T>
class Carver {
 public:
  explicit Carver(void* memory) : base_(static_cast<T*>(memory)) {}
  T* take(int64_t elements) {
    T* piece = base_ == nullptr ? nullptr : base_ + used_;
    used_ += round_up(elements, 64 / static_cast<int64_t>(sizeof(T)));
    return piece;
  }
  size_t bytes() const { return static_cast<size_t>(used_) * sizeof(T); }

 private:
  T* base_;
  int64_t used_ = 0;
};

// out[r][c] = sum_k q[r][k] S_main[k][c] + ratio[r] sum_k q[r][k]
// S_other[k][c], for rows r < rows (a multiple of 4). other.data may be
// nullptr: one part.
template <typename T>
HWY_NOINLINE void read_state(const T* HWY_RESTRICT q, int64_t q_stride,
                             int64_t rows, int64_t depth,
                             const T* HWY_RESTRICT ratio, const Panels<T>& main,
                             const Panels<T>& other, T* HWY_RESTRICT out,
                             int64_t out_stride) {
  for_panels<T>(main.columns, [&](auto vectors, int64_t c0) HWY_ATTR {
    constexpr int kVectors = decltype(vectors)::value;
    constexpr int64_t kWidth = kVectors * kLanes<T>;
    for_row_tiles<kVectors>(rows, [&](auto count, int64_t r) COSFORMER_LAMBDA {
      Tile<T, decltype(count)::value, kVectors> tile;
      tile.zero();
      if (other.data != nullptr) {
        tile.template multiply<Along::kRow>(q + r * q_stride, q_stride,
                                            other.panel(c0), kWidth, depth);
        tile.scale_rows(ratio + r);
      }
      tile.template multiply<Along::kRow>(q + r * q_stride, q_stride,
                                          main.panel(c0), kWidth, depth);
      tile.store(out + r * out_stride + c0, out_stride);
    });
  });
}

// The triangle j <= i (kLower) or j >= i (kUpper) of a chunk.
enum class Triangle { kLower, kUpper };

// scores[i][j] = (sum_k a[i][k] across[k][j] + add_i or add_j)
//                (1 + ratio[i] ratio[j])
// inside the triangle, 0 beyond it. add belongs to the queries: to row i of the
// lower triangle, to column j of the upper one; nullptr = 0. across: [depth]
// rows of across_stride, columns 0 .. rows - 1.
template <typename T, Triangle kTriangle>
HWY_NOINLINE void triangle_scores(const T* HWY_RESTRICT a, int64_t a_stride,
                                  const T* HWY_RESTRICT across,
                                  int64_t across_stride, int64_t rows,
                                  int64_t depth, const T* HWY_RESTRICT ratio,
                                  bool cosine, const T* HWY_RESTRICT add,
                                  T* HWY_RESTRICT scores,
                                  int64_t scores_stride) {
  constexpr int64_t kLane = kLanes<T>;
  const Tag<T> d;
  const Vec<T> one = hn::Set(d, T{1});
  const int64_t columns = round_up(rows, kLane);
  for_panels<T>(columns, [&](auto vectors, int64_t c0) HWY_ATTR {
    constexpr int kVectors = decltype(vectors)::value;
    for_row_tiles<kVectors>(rows, [&](auto count, int64_t r) COSFORMER_LAMBDA {
      constexpr int kRows = decltype(count)::value;
      // Tiles beyond the triangle are never read.
      if (kTriangle == Triangle::kLower ? r + kRows <= c0
                                        : r >= c0 + kVectors * kLane) {
        return;
      }
      Tile<T, kRows, kVectors> tile;
      tile.zero();
      tile.template multiply<Along::kRow>(a + r * a_stride, a_stride,
                                          across + c0, across_stride, depth);
      unroll<kRows>([&](auto rr) COSFORMER_LAMBDA {
        const int64_t i = r + rr;
        const Vec<T> ratio_i = hn::Set(d, ratio[i]);
        unroll<kVectors>([&](auto n) COSFORMER_LAMBDA {
          const int64_t j = c0 + n * kLane;
          Vec<T> x = tile.acc[rr * kVectors + n];
          if (add != nullptr) {
            x = hn::Add(x, kTriangle == Triangle::kLower
                               ? hn::Set(d, add[i])
                               : hn::LoadU(d, add + j));
          }
          if (cosine)
            x = hn::Mul(x, hn::MulAdd(ratio_i, hn::LoadU(d, ratio + j), one));
          const int64_t edge =
              kTriangle == Triangle::kLower ? i + 1 - j : i - j;
          const auto before = hn::FirstN(
              d, static_cast<size_t>(std::clamp<int64_t>(edge, 0, kLane)));
          x = kTriangle == Triangle::kLower ? hn::IfThenElseZero(before, x)
                                            : hn::IfThenZeroElse(before, x);
          hn::Store(x, d, scores + i * scores_stride + j);
        });
      });
    });
  });
}

// out[i] += sum_j scores[i][j] b[j] over the triangle. finite: b is, so that
// whole tiles may be taken: zeros beyond the triangle then add nothing.
template <typename T, Triangle kTriangle>
HWY_NOINLINE void add_triangle_product(const T* HWY_RESTRICT scores,
                                       int64_t scores_stride,
                                       const T* HWY_RESTRICT b,
                                       int64_t b_stride, int64_t rows,
                                       bool finite, T* HWY_RESTRICT out,
                                       int64_t columns) {
  constexpr int64_t kLane = kLanes<T>;
  if (finite) {
    for_panels<T>(columns, [&](auto vectors, int64_t c0) HWY_ATTR {
      constexpr int kVectors = decltype(vectors)::value;
      for_row_tiles<kVectors>(rows, [&](auto count,
                                        int64_t r) COSFORMER_LAMBDA {
        constexpr int kRows = decltype(count)::value;
        const int64_t first = kTriangle == Triangle::kLower ? 0 : r;
        const int64_t last = kTriangle == Triangle::kLower ? r + kRows : rows;
        Tile<T, kRows, kVectors> tile;
        tile.load(out + r * b_stride + c0, b_stride);
        tile.template multiply<Along::kRow>(
            scores + r * scores_stride + first, scores_stride,
            b + first * b_stride + c0, b_stride, last - first);
        tile.store(out + r * b_stride + c0, b_stride);
      });
    });
    return;
  }
  const Tag<T> d;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t first = kTriangle == Triangle::kLower ? 0 : i;
    const int64_t last = kTriangle == Triangle::kLower ? i + 1 : rows;
    for (int64_t c = 0; c < columns; c += kLane) {
      Vec<T> sum = hn::Load(d, out + i * b_stride + c);
      for (int64_t j = first; j < last; ++j) {
        sum = hn::MulAdd(hn::Set(d, scores[i * scores_stride + j]),
                         hn::Load(d, b + j * b_stride + c), sum);
      }
      hn::Store(sum, d, out + i * b_stride + c);
    }
  }
}

// sum_c a[c] b[c], by lanes.
template <typename T>
HWY_INLINE Vec<T> dot_lanes(const T* HWY_RESTRICT a, const T* HWY_RESTRICT b,
                            int64_t n, Vec<T> sum) {
  const Tag<T> d;
  for (int64_t c = 0; c < n; c += kLanes<T>)
    sum = hn::MulAdd(hn::Load(d, a + c), hn::Load(d, b + c), sum);
  return sum;
}

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_CHUNK_INL_H_
