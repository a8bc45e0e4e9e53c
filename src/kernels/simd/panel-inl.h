// The two products of a chunk with a state, a panel of columns at a time:
//
//   read    acc_r = ratio_r (x_r S_other + w_r z_other) + x_r S_main
//                   + w_r z_main + sum_j P_rj y_j
//   update  S += sum_j a_j^T b_j
//
// A tile of the first runs through all of its terms in registers and is handed
// over finished: nothing in between is stored.
#if defined(COSFORMER_SRC_KERNELS_SIMD_PANEL_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_PANEL_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_PANEL_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_PANEL_INL_H_
#endif

#include <limits>

#include "kernels/simd/call.h"
#include "kernels/simd/dot_tile-inl.h"
#include "kernels/simd/pack-inl.h"
#include "kernels/simd/state-inl.h"
#include "kernels/simd/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

// Elements of the scores of a chunk with kMaxChunk rows.
inline constexpr int64_t kSquare = kScoresStride * kScoresStride;

// What the rows of a chunk read.
template <typename T>
struct Reading {
  const T* x = nullptr;  // [rows][x_stride], or blocks of 4 such rows
  int64_t x_stride = 0, rows = 0, depth = 0;
  const T* ratio = nullptr;
  // Without data: no state, or one part.
  Panels<T> main{nullptr, 0, 0}, other{nullptr, 0, 0};
  // The sums of the state and their weights; nullptr: not read.
  const T *weight = nullptr, *sum_main = nullptr, *sum_other = nullptr;
  // Rows of kScoresStride, and what they weigh; nullptr: nothing. Blocks beyond
  // the triangle hold zeros.
  const T *scores = nullptr, *y = nullptr;
  int64_t y_stride = 0;
  bool finite = true;  // y is: zeros of the scores add nothing
  // kBefore (read_panel): so many rows, a multiple of kMaxChunk, lie before y
  // and are read too; each kMaxChunk of them have a square of scores.
  int64_t before = 0;
  const T* squares = nullptr;
};

template <typename T, int kRows, int kVectors, Triangle kTriangle, Along kAlong,
          bool kBefore, class Side>
HWY_INLINE void read_tile(const Reading<T>& in, int64_t r, int64_t c0,
                          Side& side, Tile<T, kRows, kVectors>& tile) {
  constexpr int64_t kWidth = kVectors * kLanes<T>;
  tile.zero();
  if (in.main.data != nullptr) {
    if (in.other.data != nullptr) {
      tile.template multiply_rows<kAlong>(in.x, in.x_stride, r,
                                          in.other.panel(c0), kWidth, in.depth);
      side.step();
      if (in.weight != nullptr) {
        tile.template multiply<Along::kRow>(in.weight + r, 1, in.sum_other + c0,
                                            0, 1);
      }
      tile.scale_rows(in.ratio + r);
    }
    tile.template multiply_rows<kAlong>(in.x, in.x_stride, r, in.main.panel(c0),
                                        kWidth, in.depth);
    side.step();
    if (in.weight != nullptr) {
      tile.template multiply<Along::kRow>(in.weight + r, 1, in.sum_main + c0, 0,
                                          1);
    }
  }
  if (in.scores != nullptr) {
    const int64_t first = kTriangle == Triangle::kLower ? 0 : r;
    const int64_t last = kTriangle == Triangle::kLower ? r + kRows : in.rows;
    static_assert(kAlong == Along::kRow || kTriangle == Triangle::kLower);
    if constexpr (kBefore) {
      const T* scores = in.squares;
      for (int64_t j = -in.before; j < 0; j += kMaxChunk, scores += kSquare) {
        tile.template multiply_rows<kAlong>(scores, kScoresStride, r,
                                            in.y + j * in.y_stride + c0,
                                            in.y_stride, kMaxChunk);
      }
    }
    tile.template multiply_rows<kAlong>(in.scores + first, kScoresStride, r,
                                        in.y + first * in.y_stride + c0,
                                        in.y_stride, last - first);
  }
}

// scores[i][j] = (a_i . b_j) (1 + ratio_i ratio_{first + j}) of kMaxChunk rows
// of b, whose ratios begin so far from those of a; ratio nullptr: no factor.
template <typename T>
HWY_NOINLINE void square_dots(const T* HWY_RESTRICT a, const T* HWY_RESTRICT b,
                              int64_t stride, int64_t rows,
                              const T* HWY_RESTRICT ratio, int64_t first,
                              T* HWY_RESTRICT scores) {
  const hn::CappedTag<T, 4> d4;
  const auto one = hn::Set(d4, T{1});
  for (int64_t j = 0; j < kMaxChunk; j += kDotColumns) {
    for (int64_t i = 0; i < rows; i += kDotRows) {
      DotTile<T> tile;
      tile.zero();
      tile.multiply(a + i * stride, stride, b + j * stride, stride, stride);
      T* HWY_RESTRICT to = scores + i * kScoresStride + j;
      tile.store(to, kScoresStride);
      if (ratio == nullptr) continue;
      for (int64_t r = 0; r < kDotRows; ++r, to += kScoresStride) {
        const auto ratio_i = hn::Set(d4, ratio[i + r]);
        for (int64_t c = 0; c < kDotColumns; c += hn::MaxLanes(d4)) {
          const auto factor =
              hn::MulAdd(ratio_i, hn::LoadU(d4, ratio + first + j + c), one);
          hn::Store(hn::Mul(hn::Load(d4, to + c), factor), d4, to + c);
        }
      }
    }
  }
}

// Calls finish(tile, first row) for the rows' tiles in the panel of columns at
// c0. Where y is not finite rows are taken one by one, so that none touches
// what it may not see; the order of additions stays the same.
template <typename T, int kVectors, Triangle kTriangle,
          Along kAlong = Along::kRow, bool kBefore = false, class Side,
          class Finish>
HWY_INLINE void read_panel(const Reading<T>& in, int64_t c0, Side& side,
                           const Finish& finish) {
  if (HWY_LIKELY(in.finite || in.scores == nullptr)) {
    for_row_tiles<kVectors>(in.rows, [&](auto rows,
                                         int64_t r) COSFORMER_LAMBDA {
      Tile<T, decltype(rows)::value, kVectors> tile;
      read_tile<T, decltype(rows)::value, kVectors, kTriangle, kAlong, kBefore>(
          in, r, c0, side, tile);
      finish(tile, r);
      side.tile();
    });
    return;
  }
  for (int64_t r = 0; r < in.rows; ++r) {
    Tile<T, 1, kVectors> tile;
    read_tile<T, 1, kVectors, kTriangle, kAlong, kBefore>(in, r, c0, side,
                                                          tile);
    finish(tile, r);
  }
}

// Whether the rows of a chunk all count, in a view of the type that is computed
// in.
template <typename T>
bool all_rows(const View4& view, const Slots& slots, int64_t size) {
  return size_of(view.dtype) == sizeof(T) && size % 4 == 0 &&
         slots.real == ~uint64_t{0} >> (64 - size);
}

// Whether the tiles of a chunk may write its rows into `view` themselves: whole
// vectors, in rows that all count.
template <typename T>
bool whole_rows(const View4& view, const Slots& slots, int64_t size,
                int64_t packed_stride) {
  return view.size[3] == packed_stride && all_rows<T>(view, slots, size);
}

// The same for rows that end amid a vector (Writer::columns), where masked
// stores do not slow down the tiles of whole vectors.
inline constexpr bool kMaskedRows = HWY_TARGET == HWY_AVX3;
template <typename T>
bool direct_rows(const View4& view, const Slots& slots, int64_t size,
                 int64_t packed_stride) {
  return kMaskedRows ? all_rows<T>(view, slots, size)
                     : whole_rows<T>(view, slots, size, packed_stride);
}

// Where tiles are written: into memory of a caller, past the caches where that
// is wanted and possible, or into packed rows.
template <typename T>
struct Writer {
  static Writer direct(const Rows& to, bool stream) {
    Writer w;
    w.data = static_cast<T*>(const_cast<void*>(to.data)) + to.first * to.stride;
    w.stride = to.stride;
    w.stream = stream && (reinterpret_cast<uintptr_t>(w.data) |
                          static_cast<uintptr_t>(w.stride) * sizeof(T)) %
                                 sizeof(Vec<T>) ==
                             0;
    return w;
  }
  static Writer packed(T* to, int64_t stride) {
    Writer w;
    w.data = to;
    w.stride = stride;
    return w;
  }
  template <class AnyTile>
  HWY_INLINE void write(const AnyTile& tile, int64_t r, int64_t c0) const {
    T* HWY_RESTRICT at = data + r * stride + c0;
    if (kMaskedRows && HWY_UNLIKELY(columns - c0 < AnyTile::kColumns)) {
      tile.store_columns(at, stride, columns - c0);
    } else if (stream) {
      tile.stream(at, stride);
    } else {
      tile.store_unaligned(at, stride);
    }
  }

  T* data = nullptr;
  int64_t stride = 0;
  // What lies beyond stays as it is.
  int64_t columns = std::numeric_limits<int64_t>::max();
  bool stream = false;
};

// panel += A^T B over `depth` rows of packed chunks; panel: [rows][kVectors
// vectors], b: at the panel's first column. Summed from zero and added at the
// end: short sums lose less to rounding, and the additions do not wait for the
// old state.
template <typename T, int kVectors, int64_t kUsualDepth = kShortChunk,
          class Side>
HWY_INLINE void update_panel(const T* HWY_RESTRICT a, int64_t a_stride,
                             const T* HWY_RESTRICT b, int64_t b_stride,
                             int64_t depth, T* HWY_RESTRICT panel, int64_t rows,
                             Side& side) {
  constexpr int64_t kWidth = kVectors * kLanes<T>;
  for_row_tiles<kVectors>(rows, [&](auto count, int64_t r) COSFORMER_LAMBDA {
    Tile<T, decltype(count)::value, kVectors> tile;
    tile.zero();
    if (kUsualDepth > 0 &&
        HWY_LIKELY(depth == kUsualDepth)) {  // saves the loop
      tile.template multiply<Along::kColumn>(a + r, a_stride, b, b_stride,
                                             kUsualDepth);
    } else {
      tile.template multiply<Along::kColumn>(a + r, a_stride, b, b_stride,
                                             depth);
    }
    tile.add_to(panel + r * kWidth, kWidth);
    side.tile();
  });
}

// sum_main += main_r x_r, sum_other += main_r ratio_r x_r; sum_other may be
// nullptr. main nullptr: ones.
template <typename T>
HWY_NOINLINE void add_to_sums(const T* HWY_RESTRICT x, int64_t stride,
                              int64_t rows, const T* HWY_RESTRICT main,
                              const T* HWY_RESTRICT ratio,
                              T* HWY_RESTRICT sum_main,
                              T* HWY_RESTRICT sum_other) {
  const Tag<T> d;
  constexpr int64_t kLane = kLanes<T>;
  const auto columns = [&](auto vectors, int64_t c0) COSFORMER_LAMBDA {
    constexpr int kVectors = decltype(vectors)::value;
    Vec<T> a[kVectors], b[kVectors];
    unroll<kVectors>([&](auto n)
                         COSFORMER_LAMBDA { a[n] = b[n] = hn::Zero(d); });
    for (int64_t r = 0; r < rows; ++r) {
      const T m = main != nullptr ? main[r] : T{1};
      const Vec<T> u = hn::Set(d, m);
      const Vec<T> w = hn::Set(d, m * ratio[r]);
      unroll<kVectors>([&](auto n) COSFORMER_LAMBDA {
        const Vec<T> y = hn::Load(d, x + r * stride + c0 + n * kLane);
        a[n] = hn::MulAdd(y, u, a[n]);
        b[n] = hn::MulAdd(y, w, b[n]);
      });
    }
    unroll<kVectors>([&](auto n) COSFORMER_LAMBDA {
      T* HWY_RESTRICT at = sum_main + c0 + n * kLane;
      hn::Store(hn::Add(hn::Load(d, at), a[n]), d, at);
      if (sum_other == nullptr) return;
      at = sum_other + c0 + n * kLane;
      hn::Store(hn::Add(hn::Load(d, at), b[n]), d, at);
    });
  };
  int64_t c = 0;
  for (; c + 4 * kLane <= stride; c += 4 * kLane)
    columns(std::integral_constant<int, 4>(), c);
  for (; c < stride; c += kLane) columns(std::integral_constant<int, 1>(), c);
}

// out[r] = x_r . (sum_main + ratio_r sum_other) + scores_r . main, what is
// nullptr left out; rows a multiple of 4. x may be read for sums only where
// sum_main is given. before, squares: as in Reading, beside main.
template <typename T>
HWY_NOINLINE void read_sums(const T* HWY_RESTRICT x, int64_t stride,
                            int64_t rows, const T* HWY_RESTRICT ratio,
                            const T* HWY_RESTRICT sum_main,
                            const T* HWY_RESTRICT sum_other,
                            const T* HWY_RESTRICT scores,
                            const T* HWY_RESTRICT main, T* HWY_RESTRICT out,
                            int64_t before = 0,
                            const T* HWY_RESTRICT squares = nullptr) {
  const Tag<T> d;
  constexpr int64_t kLane = kLanes<T>;
  for (int64_t r = 0; r < rows; r += 4) {
    Vec<T> acc[4], t[4];
    const auto weigh = [&](const T* HWY_RESTRICT row, const T* HWY_RESTRICT y,
                           int64_t count) COSFORMER_LAMBDA {
      for (int64_t j = 0; j < count; j += kLane) {
        const Vec<T> m = hn::LoadU(d, y + j);
        unroll<4>([&](auto i) COSFORMER_LAMBDA {
          acc[i] =
              hn::MulAdd(hn::Load(d, row + i * kScoresStride + j), m, acc[i]);
        });
      }
    };
    unroll<4>([&](auto i) COSFORMER_LAMBDA {
      acc[i] = hn::Zero(d);
      t[i] = hn::Set(d, ratio[r + i]);
    });
    if (sum_main != nullptr) {
      for (int64_t c = 0; c < stride; c += kLane) {
        const Vec<T> a = hn::Load(d, sum_main + c);
        const Vec<T> b =
            sum_other != nullptr ? hn::Load(d, sum_other + c) : hn::Zero(d);
        unroll<4>([&](auto i) COSFORMER_LAMBDA {
          acc[i] = hn::MulAdd(hn::Load(d, x + (r + i) * stride + c),
                              hn::MulAdd(t[i], b, a), acc[i]);
        });
      }
    }
    if (scores != nullptr) {
      const T* row = squares + r * kScoresStride;
      for (int64_t j = -before; j < 0; j += kMaxChunk, row += kSquare)
        weigh(row, main + j, kMaxChunk);
      weigh(scores + r * kScoresStride, main, r + 4);
    }
    store_sums<T>(acc, out + r);
  }
}

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_PANEL_INL_H_
