// The backward of one cell: a block of packed queries against a block of packed
// keys. With P_ij = exp(s_ij - log_sum_exp_i), the weights themselves, and
// delta_i = d_out_i . out_i,
//
//   dS_ij = P_ij (d_out_i . v_j - delta_i)
//   dv_j += sum_i P_ij d_out_i      dq_i += sum_j dS_ij k_j
//   dk_j += sum_i dS_ij q_i
//
// five products, all of them register tiles (tile-inl.h). Sums start at
// -log_sum_exp and -delta, so that neither costs a pass of its own. With
// dropout, m_ij = kept / (1 - p): dS = P (m d_out.v - delta), and dv takes m P.
//
// What is invisible is selected away. Where a block holds a NaN or an infinity
// the three sums are taken row by row over what is visible, in the same order,
// so that every other element keeps its bits.
#if defined(COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_BACKWARD_CELL_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_BACKWARD_CELL_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_BACKWARD_CELL_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_BACKWARD_CELL_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "kernels/simd/softmax_exp-inl.h"
#include "kernels/simd/state-inl.h"
#include "kernels/simd/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

// Queries and keys of a cell, at most.
inline constexpr int64_t kCellRows = 96;
template <typename T>
inline constexpr int64_t kCellKeys = 512 / static_cast<int64_t>(sizeof(T));
inline constexpr int64_t kCellWords = 2;  // of 64 keys, that a row's bits take
// Of rows across the keys of a cell: a cache line more, or they would meet in a
// few sets of the cache.
template <typename T>
inline constexpr int64_t kCellStride =
    kCellKeys<T> + 64 / static_cast<int64_t>(sizeof(T));

// Rows of a register tile: 6 x 4 vectors fill the registers of AVX-512.
inline constexpr int kCellTileRows =
    HWY_TARGET == HWY_AVX3 ? 6 : rows_for(kMaxVectors);

// Calls tile(rows, first row) for tiles that cover [begin, end), a multiple of
// 4 apart.
template <class F>
HWY_INLINE void for_cell_tiles(int64_t begin, int64_t end, F&& tile) {
  if constexpr (kCellTileRows != 4) {
    for (; end - begin >= kCellTileRows && end - begin != 8;
         begin += kCellTileRows)
      tile(std::integral_constant<int, kCellTileRows>(), begin);
  }
  for (; begin < end; begin += 4) tile(std::integral_constant<int, 4>(), begin);
}
// Calls panel(vectors, first column) for the columns [begin, end), whole
// vectors apart.
template <typename T, class F>
HWY_INLINE void for_cell_panels(int64_t begin, int64_t end, F&& panel) {
  for_panels<T>(end - begin, [&](auto vectors, int64_t c)
                                 HWY_ATTR { panel(vectors, begin + c); });
}

// Bits of the keys j, j + 1, ... of a row, as many as a vector has lanes.
template <typename T>
HWY_INLINE hn::Mask<Tag<T>> cell_mask(const uint64_t* bits, int64_t j) {
  uint8_t lanes[8];
  const uint64_t word = bits[j >> 6] >> (j & 63);
  __builtin_memcpy(lanes, &word, 8);
  return hn::LoadMaskBits(Tag<T>(), lanes);
}

template <typename T>
struct Cell {
  // Queries: rows in all (a multiple of 4), packed rows of q_stride and
  // v_stride. q carries the scale (and log2 e).
  int64_t rows = 0;
  const T *q, *d_out;
  const T *start, *delta;  // -log_sum_exp in units of log2, -delta
  T* dq;
  // Keys: whole vectors, a multiple of 4. kt, vt: [dim][kCellStride]; k packed
  // rows.
  int64_t keys = 0;
  const T *kt, *vt, *k;
  T *dk, *dv;
  int64_t dim, value_dim, q_stride, v_stride;

  // Work space [kCellRows][kCellStride].
  T *p, *ds;

  // [rows][kCellWords]: nullptr = every key of the block is visible to every
  // query (or what is not was packed as zeros).
  const uint64_t* visible = nullptr;
  // Blocks with a NaN or an infinity; visible must then be given, for whole
  // cells too.
  bool finite = true;
  // bias (times log2 e) of query i and key j at bias[i * bias_step + j];
  // nullptr = none.
  const T* bias = nullptr;
  int64_t bias_step = 0;
  // [rows][kCellWords]; nullptr = no dropout.
  const uint64_t* kept = nullptr;
  T kept_scale = 1;

  // Keys [first, last) that a tile of rows sees, whole vectors, by tile.
  int64_t first[kCellRows / 4], last[kCellRows / 4];

  HWY_INLINE const uint64_t* visible_row(int64_t r) const {
    return visible + r * kCellWords;
  }
  HWY_INLINE const uint64_t* kept_row(int64_t r) const {
    return kept + r * kCellWords;
  }
};

// Which keys each tile of rows sees at all.
template <typename T>
HWY_INLINE void find_cell_spans(Cell<T>& cell) {
  int64_t tile = 0;
  for_cell_tiles(0, cell.rows, [&](auto count, int64_t r) COSFORMER_LAMBDA {
    int64_t first = 0, last = cell.keys;
    if (cell.visible != nullptr) {
      first = kCellKeys<T>;
      last = 0;
      for (int64_t w = 0; w * 64 < cell.keys; ++w) {
        uint64_t any = 0;
        for (int64_t i = r; i < r + count; ++i) any |= cell.visible_row(i)[w];
        if (any == 0) continue;
        first = std::min(first, w * 64 + __builtin_ctzll(any));
        last = w * 64 + 64 - __builtin_clzll(any);
      }
      if (last == 0) first = 0;
      first = first / kLanes<T> * kLanes<T>;
      last = round_up(last, kLanes<T>);
    }
    cell.first[tile] = first;
    cell.last[tile] = last;
    ++tile;
  });
}

// 2^x; NaN stays NaN, and -infinity gives 0 or next to it. A weight is at most
// 1: beyond it x is rounding, which large scores make large enough to overflow.
template <typename T>
HWY_INLINE Vec<T> weight_of(Vec<T> x) {
  const Tag<T> d;
  // The bounds come first: of two arguments x86 returns the second where one
  // is NaN. Other targets return the one that is not.
  const Vec<T> y =
      exp2_lanes<T>(hn::Min(hn::Zero(d), hn::Max(hn::Set(d, T{-2000}), x)));
  if constexpr (HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2) return y;
  return hn::IfThenElse(hn::Eq(x, x), y, x);
}

// P of the cell: its scores, exponentiated.
template <typename T, int kRows, int kVectors, bool kPlain>
HWY_NOINLINE void cell_weights(const Cell<T>& cell, int64_t r, int64_t j) {
  const Tag<T> d;
  constexpr int64_t kLane = kLanes<T>;
  Tile<T, kRows, kVectors> tile;
  unroll<kRows>([&](auto i) COSFORMER_LAMBDA {
    const Vec<T> start = hn::Set(d, cell.start[r + i]);
    unroll<kVectors>(
        [&](auto n) COSFORMER_LAMBDA { tile.acc[i * kVectors + n] = start; });
  });
  tile.template multiply<Along::kRow>(cell.q + r * cell.q_stride, cell.q_stride,
                                      cell.kt + j, kCellStride<T>, cell.dim);
  unroll<kRows>([&](auto i) COSFORMER_LAMBDA {
    unroll<kVectors>([&](auto n) COSFORMER_LAMBDA {
      Vec<T> x = tile.acc[i * kVectors + n];
      const int64_t at = j + n * kLane;
      if constexpr (!kPlain) {
        if (cell.bias != nullptr)
          x = hn::Add(x,
                      hn::LoadU(d, cell.bias + (r + i) * cell.bias_step + at));
      }
      x = weight_of<T>(x);
      if constexpr (!kPlain) {
        if (cell.visible != nullptr) {
          x = hn::IfThenElseZero(cell_mask<T>(cell.visible_row(r + i), at), x);
        }
      }
      hn::Store(x, d, cell.p + (r + i) * kCellStride<T> + at);
    });
  });
}

// dS of the cell; with dropout P becomes m P.
template <typename T, int kRows, int kVectors, bool kPlain>
HWY_NOINLINE void cell_score_gradients(const Cell<T>& cell, int64_t r,
                                       int64_t j) {
  const Tag<T> d;
  constexpr int64_t kLane = kLanes<T>;
  Tile<T, kRows, kVectors> tile;
  unroll<kRows>([&](auto i) COSFORMER_LAMBDA {
    const bool apart = !kPlain && cell.kept != nullptr;
    const Vec<T> start = hn::Set(d, apart ? T{0} : cell.delta[r + i]);
    unroll<kVectors>(
        [&](auto n) COSFORMER_LAMBDA { tile.acc[i * kVectors + n] = start; });
  });
  tile.template multiply<Along::kRow>(cell.d_out + r * cell.v_stride,
                                      cell.v_stride, cell.vt + j,
                                      kCellStride<T>, cell.value_dim);
  unroll<kRows>([&](auto i) COSFORMER_LAMBDA {
    unroll<kVectors>([&](auto n) COSFORMER_LAMBDA {
      const int64_t at = j + n * kLane;
      T* weight = cell.p + (r + i) * kCellStride<T> + at;
      const Vec<T> p = hn::Load(d, weight);
      Vec<T> x = tile.acc[i * kVectors + n];
      if constexpr (!kPlain) {
        if (cell.kept != nullptr) {
          const Vec<T> m =
              hn::IfThenElseZero(cell_mask<T>(cell.kept_row(r + i), at),
                                 hn::Set(d, cell.kept_scale));
          x = hn::MulAdd(x, m, hn::Set(d, cell.delta[r + i]));
          hn::Store(hn::Mul(p, m), d, weight);
        }
      }
      x = hn::Mul(x, p);
      if constexpr (!kPlain) {
        if (cell.visible != nullptr) {
          x = hn::IfThenElseZero(cell_mask<T>(cell.visible_row(r + i), at), x);
        }
      }
      hn::Store(x, d, cell.ds + (r + i) * kCellStride<T> + at);
    });
  });
}

// y[r] += sum_k A(r, k) b[k]: a tile of rows of y, `columns` of them (whole
// vectors).
template <typename T, Along kAlong, int kRows>
HWY_INLINE void add_cell_product(const T* a, const T* b, int64_t stride,
                                 int64_t depth, int64_t columns, T* y) {
  for_panels<T>(columns, [&](auto vectors, int64_t c) HWY_ATTR {
    Tile<T, kRows, decltype(vectors)::value> tile;
    tile.zero();
    tile.template multiply<kAlong>(a, kCellStride<T>, b + c, stride, depth);
    tile.add_to(y + c, stride);
  });
}
template <typename T, int kRows>
HWY_NOINLINE void add_to_queries(const T* a, const T* b, int64_t stride,
                                 int64_t depth, T* y) {
  add_cell_product<T, Along::kRow, kRows>(a, b, stride, depth, stride, y);
}
template <typename T, int kRows>
HWY_NOINLINE void add_to_keys(const T* a, const T* b, int64_t stride,
                              int64_t depth, T* y) {
  add_cell_product<T, Along::kColumn, kRows>(a, b, stride, depth, stride, y);
}

// The same over what is visible alone: y[row] += sum over the other side, in
// its order, of a b. kAlong kRow: y are queries, b keys.
template <typename T, Along kAlong>
HWY_NOINLINE void add_visible(const Cell<T>& cell, const T* a, const T* b,
                              int64_t stride, T* y) {
  const Tag<T> d;
  constexpr bool kQueries = kAlong == Along::kRow;
  const int64_t rows = kQueries ? cell.rows : cell.keys;
  const int64_t depth = kQueries ? cell.keys : cell.rows;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < stride; c += kLanes<T>) {
      Vec<T> sum = hn::Zero(d);
      for (int64_t x = 0; x < depth; ++x) {
        const int64_t i = kQueries ? r : x, j = kQueries ? x : r;
        if ((cell.visible_row(i)[j >> 6] >> (j & 63) & 1) == 0) continue;
        sum = hn::MulAdd(hn::Set(d, a[i * kCellStride<T> + j]),
                         hn::Load(d, b + x * stride + c), sum);
      }
      T* at = y + r * stride + c;
      hn::Store(hn::Add(sum, hn::Load(d, at)), d, at);
    }
  }
}

template <typename T>
HWY_INLINE void zero_cell_row(T* row, int64_t begin, int64_t end) {
  for (int64_t j = begin; j < end; j += kLanes<T>)
    hn::Store(hn::Zero(Tag<T>()), Tag<T>(), row + j);
}

// P and dS.
template <typename T, bool kPlain>
HWY_NOINLINE void cell_scores(Cell<T>& cell, Ahead& ahead) {
  int64_t tile = 0;
  for_cell_tiles(0, cell.rows, [&](auto count, int64_t r) COSFORMER_LAMBDA {
    constexpr int kRows = decltype(count)::value;
    const int64_t first = cell.first[tile], last = cell.last[tile];
    ++tile;
    if (!kPlain) {
      for (int64_t i = r; i < r + kRows; ++i) {
        for (T* to : {cell.p, cell.ds}) {
          zero_cell_row<T>(to + i * kCellStride<T>, 0, first);
          zero_cell_row<T>(to + i * kCellStride<T>, last, cell.keys);
        }
      }
    }
    for_cell_panels<T>(first, last, [&](auto vectors, int64_t j) HWY_ATTR {
      cell_weights<T, kRows, decltype(vectors)::value, kPlain>(cell, r, j);
      ahead.tile();
    });
  });
  tile = 0;
  for_cell_tiles(0, cell.rows, [&](auto count, int64_t r) COSFORMER_LAMBDA {
    constexpr int kRows = decltype(count)::value;
    for_cell_panels<T>(
        cell.first[tile], cell.last[tile],
        [&](auto vectors, int64_t j) HWY_ATTR {
          cell_score_gradients<T, kRows, decltype(vectors)::value, kPlain>(
              cell, r, j);
          ahead.tile();
        });
    ++tile;
  });
}

// P and dS of the cell, and which keys each tile of rows sees.
template <typename T>
HWY_NOINLINE void start_cell(Cell<T>& cell, Ahead& ahead) {
  find_cell_spans(cell);
  const bool plain =
      cell.visible == nullptr && cell.bias == nullptr && cell.kept == nullptr;
  if (plain) {
    cell_scores<T, true>(cell, ahead);
  } else {
    cell_scores<T, false>(cell, ahead);
  }
}

// What it adds to dq, dk and dv, where these are not nullptr.
template <typename T>
HWY_NOINLINE void finish_cell(Cell<T>& cell, Ahead& ahead) {
  if (!cell.finite) {
    if (cell.dq != nullptr) {
      add_visible<T, Along::kRow>(cell, cell.ds, cell.k, cell.q_stride,
                                  cell.dq);
    }
    if (cell.dv != nullptr) {
      add_visible<T, Along::kColumn>(cell, cell.p, cell.d_out, cell.v_stride,
                                     cell.dv);
    }
    if (cell.dk != nullptr) {
      add_visible<T, Along::kColumn>(cell, cell.ds, cell.q, cell.q_stride,
                                     cell.dk);
    }
    return;
  }
  int64_t tiles = 0;
  if (cell.dq != nullptr)
    for_cell_tiles(0, cell.rows, [&](auto count, int64_t r) COSFORMER_LAMBDA {
      const int64_t first = cell.first[tiles], last = cell.last[tiles];
      ++tiles;
      if (first >= last) return;
      add_to_queries<T, decltype(count)::value>(
          cell.ds + r * kCellStride<T> + first, cell.k + first * cell.q_stride,
          cell.q_stride, last - first, cell.dq + r * cell.q_stride);
      ahead.tile();
    });
  for (const bool of_values : {true, false}) {
    const T* a = of_values ? cell.p : cell.ds;
    const T* b = of_values ? cell.d_out : cell.q;
    const int64_t stride = of_values ? cell.v_stride : cell.q_stride;
    T* y = of_values ? cell.dv : cell.dk;
    if (y == nullptr) continue;
    for_cell_tiles(0, cell.keys, [&](auto count, int64_t j) COSFORMER_LAMBDA {
      int64_t begin = 0, end = cell.rows;
      if (cell.visible != nullptr) {
        // The rows of the tiles that see one of these keys.
        begin = cell.rows;
        end = 0;
        int64_t tile = 0;
        for_cell_tiles(
            0, cell.rows, [&](auto rows, int64_t r) COSFORMER_LAMBDA {
              if (cell.first[tile] < j + count && cell.last[tile] > j) {
                begin = std::min(begin, r);
                end = r + rows;
              }
              ++tile;
            });
        if (begin >= end) return;
      }
      add_to_keys<T, decltype(count)::value>(a + begin * kCellStride<T> + j,
                                             b + begin * stride, stride,
                                             end - begin, y + j * stride);
      ahead.tile();
    });
  }
}

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_BACKWARD_CELL_INL_H_
