// The products of Performer's forward (performer_block-inl.h) on features of a
// piece as columns: element (f, j) at [f * kPerformerPiece + j].
#if defined(COSFORMER_SRC_KERNELS_SIMD_PERFORMER_PRODUCTS_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_PERFORMER_PRODUCTS_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_PERFORMER_PRODUCTS_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_PERFORMER_PRODUCTS_INL_H_
#endif

#include <algorithm>

#include "kernels/simd/dot_tile-inl.h"
#include "kernels/simd/pack-inl.h"
#include "kernels/simd/performer_block.h"
#include "kernels/simd/state-inl.h"
#include "kernels/simd/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

// Vectors of a tile of scores: 16 columns, so that little of what the triangle
// leaves out is formed.
template <typename T>
inline constexpr int kScoreVectors =
    static_cast<int>(std::min<int64_t>(16 / kLanes<T>, kMaxVectors));

// Keeps accumulators in registers: gcc spills one of the twelve without it.
template <class AnyTile>
HWY_INLINE void pin(AnyTile& tile) {
#if HWY_TARGET == HWY_AVX2 && !defined(__clang__)
  if constexpr (sizeof(tile.acc) == 12 * 32) {
    auto& acc = tile.acc;
    asm volatile(""
                 : "+x"(acc[0].raw), "+x"(acc[1].raw), "+x"(acc[2].raw),
                   "+x"(acc[3].raw), "+x"(acc[4].raw), "+x"(acc[5].raw),
                   "+x"(acc[6].raw), "+x"(acc[7].raw), "+x"(acc[8].raw),
                   "+x"(acc[9].raw), "+x"(acc[10].raw), "+x"(acc[11].raw));
  }
#else
  (void)tile;
#endif
}
template <Along kAlong, class AnyTile, typename T>
HWY_INLINE void multiply_pinned(AnyTile& tile, const T* HWY_RESTRICT a,
                                int64_t a_stride, const T* HWY_RESTRICT b,
                                int64_t b_stride, int64_t depth) {
  constexpr bool kIsRow = kAlong == Along::kRow;
  int64_t k = 0;
  for (; k + 4 <= depth; k += 4) {
    unroll<4>([&](auto i) COSFORMER_LAMBDA {
      tile.template multiply<kAlong>(a + (kIsRow ? i : i * a_stride), a_stride,
                                     b + i * b_stride, b_stride, 1);
      pin(tile);
    });
    a += kIsRow ? 4 : 4 * a_stride;
    b += 4 * b_stride;
  }
  tile.template multiply<kAlong>(a, a_stride, b, b_stride, depth - k);
}

#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
// Of rows that lie `stride` apart, as many as a vector has quarters: four
// elements of each. Blends of broadcast loads, where shuffles have one port.
HWY_INLINE Vec<float> load_quarters(const float* HWY_RESTRICT in,
                                    int64_t stride) {
  const Tag<float> d;
  const auto quarter = [&](int64_t i) COSFORMER_LAMBDA {
    return hn::LoadDup128(d, in + i * stride);
  };
  if constexpr (kLanes<float> == 8) {
    return hn::ConcatUpperLower(d, quarter(1), quarter(0));
  } else {
    return hn::ConcatUpperLower(d, hn::OddEvenBlocks(quarter(3), quarter(2)),
                                hn::OddEvenBlocks(quarter(1), quarter(0)));
  }
}
#endif

// As transpose, whole vectors of rows at a time.
template <typename T>
HWY_NOINLINE void transpose_vectors(const T* HWY_RESTRICT in, int64_t in_stride,
                                    int64_t rows, int64_t columns,
                                    T* HWY_RESTRICT out, int64_t out_stride) {
  int64_t r = 0;
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
  if constexpr (sizeof(T) == 4) {
    const Tag<T> d;
    const hn::Repartition<double, Tag<T>> dd;
    for (; r + kLanes<T> <= rows; r += kLanes<T>) {
      for (int64_t c = 0; c < columns; c += 4) {
        const T* from = in + r * in_stride + c;
        T* to = out + c * out_stride + r;
        Vec<T> x[4];
        unroll<4>([&](auto i) COSFORMER_LAMBDA {
          x[i] = load_quarters(from + i * in_stride, 4 * in_stride);
        });
        const auto y0 = hn::BitCast(dd, hn::InterleaveLower(d, x[0], x[1]));
        const auto y1 = hn::BitCast(dd, hn::InterleaveLower(d, x[2], x[3]));
        const auto y2 = hn::BitCast(dd, hn::InterleaveUpper(d, x[0], x[1]));
        const auto y3 = hn::BitCast(dd, hn::InterleaveUpper(d, x[2], x[3]));
        hn::StoreU(hn::BitCast(d, hn::InterleaveLower(dd, y0, y1)), d, to);
        hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(dd, y0, y1)), d,
                   to + out_stride);
        hn::StoreU(hn::BitCast(d, hn::InterleaveLower(dd, y2, y3)), d,
                   to + 2 * out_stride);
        hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(dd, y2, y3)), d,
                   to + 3 * out_stride);
      }
    }
  }
#endif
  if (r < rows) {
    transpose<T>(in + r * in_stride, in_stride, rows - r, columns, out + r,
                 out_stride);
  }
}

template <typename T>
struct PerformerProducts {
  static constexpr int64_t kPiece = kPerformerPiece;
  static constexpr int64_t kLane = kLanes<T>;

  // scores[i][j] += sum_f Q_fi K_fj where a tile meets j <= i.
  static HWY_NOINLINE void add_scores(const PerformerWork<T>& work,
                                      int64_t rows, int64_t depth) {
    constexpr int kVectors = kScoreVectors<T>;
    constexpr int64_t kWidth = kVectors * kLane;
    for (int64_t c0 = 0; c0 < rows; c0 += kWidth) {
      const int64_t first = c0 / 4 * 4;
      for_row_tiles<kVectors>(
          rows - first, [&](auto count, int64_t below) COSFORMER_LAMBDA {
            T* at = work.scores + (first + below) * kPiece + c0;
            Tile<T, decltype(count)::value, kVectors> tile;
            tile.load(at, kPiece);
            tile.template multiply<Along::kColumn>(work.queries + first + below,
                                                   kPiece, work.keys + c0,
                                                   kPiece, depth);
            tile.store(at, kPiece);
          });
    }
  }

  static HWY_NOINLINE void read_strip(const T* HWY_RESTRICT queries,
                                      int64_t rows, int64_t depth,
                                      const Panels<T>& kv, int64_t f0,
                                      T* HWY_RESTRICT out, int64_t stride) {
    for_panels<T>(kv.columns, [&](auto vectors, int64_t c0) HWY_ATTR {
      constexpr int kVectors = decltype(vectors)::value;
      constexpr int64_t kWidth = kVectors * kLane;
      for_row_tiles<kVectors>(
          rows, [&](auto count, int64_t r) COSFORMER_LAMBDA {
            Tile<T, decltype(count)::value, kVectors> tile;
            tile.load(out + r * stride + c0, stride);
            tile.template multiply<Along::kColumn>(
                queries + r, kPiece, kv.panel(c0) + f0 * kWidth, kWidth, depth);
            tile.store(out + r * stride + c0, stride);
          });
    });
  }

  static void add_denominators(const T* HWY_RESTRICT queries, int64_t depth,
                               const T* HWY_RESTRICT sum,
                               T* HWY_RESTRICT denominator) {
    const Tag<T> d;
    for (int64_t j = 0; j < kPiece; j += kLane) {
      Vec<T> even = hn::Load(d, denominator + j), odd = hn::Zero(d);
      int64_t i = 0;
      for (; i + 2 <= depth; i += 2) {
        even = hn::MulAdd(hn::Load(d, queries + i * kPiece + j),
                          hn::Set(d, sum[i]), even);
        odd = hn::MulAdd(hn::Load(d, queries + (i + 1) * kPiece + j),
                         hn::Set(d, sum[i + 1]), odd);
      }
      if (i < depth) {
        even = hn::MulAdd(hn::Load(d, queries + i * kPiece + j),
                          hn::Set(d, sum[i]), even);
      }
      hn::Store(hn::Add(even, odd), d, denominator + j);
    }
  }

  static HWY_NOINLINE void update_strip(const T* HWY_RESTRICT keys, int64_t n,
                                        int64_t depth, const T* HWY_RESTRICT v,
                                        int64_t v_stride, const Panels<T>& kv,
                                        int64_t f0, T* HWY_RESTRICT sum) {
    for_panels<T>(kv.columns, [&](auto vectors, int64_t c0) HWY_ATTR {
      constexpr int kVectors = decltype(vectors)::value;
      constexpr int64_t kWidth = kVectors * kLane;
      for_row_tiles<kVectors>(
          round_up(depth, 4), [&](auto count, int64_t r) COSFORMER_LAMBDA {
            Tile<T, decltype(count)::value, kVectors> tile;
            tile.zero();
            tile.template multiply<Along::kRow>(keys + r * kPiece, kPiece,
                                                v + c0, v_stride, n);
            tile.add_to(kv.panel(c0) + (f0 + r) * kWidth, kWidth);
          });
    });
    // Four rows at a time: their lanes are added up together.
    const Tag<T> d;
    for (int64_t i = 0; i < depth; i += 4) {
      Vec<T> lanes[4];
      unroll<4>([&](auto r) COSFORMER_LAMBDA { lanes[r] = hn::Zero(d); });
      for (int64_t j = 0; j < n; j += kLane) {
        unroll<4>([&](auto r) COSFORMER_LAMBDA {
          lanes[r] =
              hn::Add(lanes[r], hn::Load(d, keys + (i + r) * kPiece + j));
        });
      }
      HWY_ALIGN T more[4];
      store_sums<T>(lanes, more);
      for (int64_t r = 0; r < std::min<int64_t>(4, depth - i); ++r)
        sum[f0 + i + r] += more[r];
    }
  }

  // Zeros above the triangle; the sums of what is left.
  static void add_triangle(T* HWY_RESTRICT scores, int64_t n, int64_t rows,
                           T* HWY_RESTRICT denominator) {
    const Tag<T> d;
    for (int64_t i = 0; i < rows; ++i) {
      Vec<T> sum = hn::Zero(d);
      for (int64_t j = 0; j < kPiece; j += kLane) {
        const int64_t inside =
            i < n ? std::clamp<int64_t>(i + 1 - j, 0, kLane) : 0;
        T* at = scores + i * kPiece + j;
        const Vec<T> x = hn::IfThenElseZero(
            hn::FirstN(d, static_cast<size_t>(inside)), hn::Load(d, at));
        hn::Store(x, d, at);
        sum = hn::Add(sum, x);
      }
      if (i < n) denominator[i] += hn::GetLane(hn::SumOfLanes(d, sum));
    }
  }

  // out[i] += sum_{j <= i} scores[i][j] v[j]; row by row where v is not finite.
  static HWY_NOINLINE void add_own_values(const T* HWY_RESTRICT scores,
                                          const T* HWY_RESTRICT v,
                                          int64_t stride, int64_t n,
                                          int64_t rows, bool finite,
                                          T* HWY_RESTRICT out) {
    if (!finite) {
      const Tag<T> d;
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t c = 0; c < stride; c += kLane) {
          Vec<T> sum = hn::Load(d, out + i * stride + c);
          for (int64_t j = 0; j <= i; ++j) {
            sum = hn::MulAdd(hn::Set(d, scores[i * kPiece + j]),
                             hn::Load(d, v + j * stride + c), sum);
          }
          hn::Store(sum, d, out + i * stride + c);
        }
      }
      return;
    }
    for_panels<T>(stride, [&](auto vectors, int64_t c0) HWY_ATTR {
      constexpr int kVectors = decltype(vectors)::value;
      for_row_tiles<kVectors>(
          rows, [&](auto count, int64_t r) COSFORMER_LAMBDA {
            constexpr int kRows = decltype(count)::value;
            Tile<T, kRows, kVectors> tile;
            tile.load(out + r * stride + c0, stride);
            tile.template multiply<Along::kRow>(scores + r * kPiece, kPiece,
                                                v + c0, stride, r + kRows);
            tile.store(out + r * stride + c0, stride);
          });
    });
  }
};

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_PERFORMER_PRODUCTS_INL_H_
