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

#include "kernels/simd/exp-inl.h"
#include "kernels/simd/softmax_pack-inl.h"
#include "kernels/simd/softmax_plan.h"
#include "kernels/simd/softmax_product-inl.h"
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
  // Keys: whole vectors, a multiple of 4. kt, vt: packed across
  // (softmax_pack-inl.h); k packed rows.
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

  // Keys [begin, end) that a tile of rows sees, by tile; and rows that see a
  // tile of keys. Tiles and products take a few more, whose weights are 0.
  struct Span {
    int64_t begin, end;
    Span outward(int64_t step) const {
      return {begin / step * step, round_up(end, step)};
    }
  };
  Span keys_of[kCellRows / 4], rows_of[kCellKeys<T> / 4];

  HWY_INLINE const uint64_t* visible_row(int64_t r) const {
    return visible + r * kCellWords;
  }
  HWY_INLINE const uint64_t* kept_row(int64_t r) const {
    return kept + r * kCellWords;
  }
};

// Which keys each tile of rows sees at all, and the other way round.
template <typename T>
HWY_INLINE void find_cell_spans(Cell<T>& cell) {
  using Span = typename Cell<T>::Span;
  int64_t tile = 0;
  for_cell_tiles(0, cell.rows, [&](auto count, int64_t r) COSFORMER_LAMBDA {
    Span span{0, cell.keys};
    if (cell.visible != nullptr) {
      span = {kCellKeys<T>, 0};
      for (int64_t w = 0; w * 64 < cell.keys; ++w) {
        uint64_t any = 0;
        for (int64_t i = r; i < r + count; ++i) any |= cell.visible_row(i)[w];
        if (any == 0) continue;
        span.begin = std::min(span.begin, w * 64 + __builtin_ctzll(any));
        span.end = w * 64 + 64 - __builtin_clzll(any);
      }
      if (span.end == 0) span.begin = 0;
    }
    cell.keys_of[tile++] = span;
  });
  tile = 0;
  for_cell_tiles(0, cell.keys, [&](auto count, int64_t j) COSFORMER_LAMBDA {
    Span span{0, cell.rows};
    if (cell.visible != nullptr) {
      span = {cell.rows, 0};
      int64_t t = 0;
      for_cell_tiles(0, cell.rows, [&](auto rows, int64_t r) COSFORMER_LAMBDA {
        const Span& keys = cell.keys_of[t++];
        if (keys.begin >= j + count || keys.end <= j) return;
        span = {std::min(span.begin, r), r + rows};
      });
    }
    cell.rows_of[tile++] = span;
  });
}

// 2^x; NaN stays NaN, and -infinity gives next to 0. A weight is at most
// 1: beyond it x is rounding, which large scores make large enough to overflow.
template <typename T>
HWY_INLINE Vec<T> weight_of(Vec<T> x) {
  const Tag<T> d;
  // The bound comes first: of two arguments x86 returns the second where one is
  // NaN. Other targets return the one that is not.
  const Vec<T> y = weight_lanes<T>(hn::Min(hn::Zero(d), x));
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
  multiply_add<T, Along::kRow, kRows, kVectors>(
      cell.q + r * cell.q_stride, cell.q_stride,
      cell.kt + place_across<T>(j, cell.q_stride), kPanel<T>,
      round_up(cell.dim, 4), tile.acc);
  unroll<kRows>([&](auto i) COSFORMER_LAMBDA {
    unroll<kVectors>([&](auto n) COSFORMER_LAMBDA {
      Vec<T> x = tile.acc[i * kVectors + n];
      const int64_t at = j + n * kLane;
      if constexpr (!kPlain) {
        if (cell.bias != nullptr)
          x = hn::Add(x,
                      hn::LoadU(d, cell.bias + (r + i) * cell.bias_step + at));
      }
      const Vec<T> power = x;
      x = weight_of<T>(x);
      if constexpr (!kPlain) {
        if (cell.bias != nullptr) x = zero_where_far<T>(power, x);
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
  multiply_add<T, Along::kRow, kRows, kVectors>(
      cell.d_out + r * cell.v_stride, cell.v_stride,
      cell.vt + place_across<T>(j, cell.v_stride), kPanel<T>,
      round_up(cell.value_dim, 4), tile.acc);
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

// y[r] += sum_k A(r, k) b[k]: a tile of rows and columns of y.
template <typename T, Along kAlong, int kRows, int kVectors>
HWY_NOINLINE void add_cell_product(const T* a, const T* b, int64_t stride,
                                   int64_t depth, T* y) {
  Tile<T, kRows, kVectors> tile;
  tile.zero();
  multiply_add<T, kAlong, kRows, kVectors>(a, kCellStride<T>, b, stride, depth,
                                           tile.acc);
  tile.add_to(y, stride);
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

// Calls tile(rows, first row, vectors, first key) for tiles that cover what
// each tile of rows sees: a panel of keys, which stays in the first cache, with
// all rows, then the next.
template <typename T>
inline constexpr int64_t kScoreStep = kLanes<T> < 4 ? 4 : kLanes<T>;
template <typename T, class F>
HWY_INLINE void for_score_tiles(const Cell<T>& cell, F&& f) {
  for (int64_t j = 0; j < cell.keys; j += kPanel<T>) {
    int64_t tile = 0;
    for_cell_tiles(0, cell.rows, [&](auto rows, int64_t r) COSFORMER_LAMBDA {
      const auto span = cell.keys_of[tile++].outward(kScoreStep<T>);
      const int64_t from = std::max(span.begin, j);
      const int64_t to = std::min(span.end, j + kPanel<T>);
      if (from >= to) return;
      for_vectors<T>((to - from) / kLanes<T>,
                     [&](auto vectors) HWY_ATTR { f(rows, r, vectors, from); });
    });
  }
}

// P and dS.
template <typename T, bool kPlain>
HWY_NOINLINE void cell_scores(Cell<T>& cell, Ahead& ahead) {
  if (!kPlain) {
    int64_t tile = 0;
    for_cell_tiles(0, cell.rows, [&](auto count, int64_t r) COSFORMER_LAMBDA {
      const auto span = cell.keys_of[tile++].outward(kScoreStep<T>);
      for (int64_t i = r; i < r + count; ++i) {
        for (T* to : {cell.p, cell.ds}) {
          zero_cell_row<T>(to + i * kCellStride<T>, 0, span.begin);
          zero_cell_row<T>(to + i * kCellStride<T>, span.end, cell.keys);
        }
      }
    });
  }
  for_score_tiles(cell, [&](auto rows, int64_t r, auto vectors,
                            int64_t j) HWY_ATTR {
    cell_weights<T, decltype(rows)::value, decltype(vectors)::value, kPlain>(
        cell, r, j);
    ahead.tile();
  });
  for_score_tiles(
      cell, [&](auto rows, int64_t r, auto vectors, int64_t j) HWY_ATTR {
        cell_score_gradients<T, decltype(rows)::value, decltype(vectors)::value,
                             kPlain>(cell, r, j);
        ahead.tile();
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

// y[r] += sum_k A(r, k) b[k] over the spans of y's rows, a panel of columns at
// a time, whose b then stays in the first cache.
template <typename T, Along kAlong>
HWY_INLINE void add_cell_products(const T* a, const T* b, int64_t rows,
                                  const typename Cell<T>::Span* spans,
                                  int64_t stride, T* y, Ahead& ahead) {
  constexpr int64_t kRowStride = kAlong == Along::kRow ? kCellStride<T> : 1;
  constexpr int64_t kDepthStride = kAlong == Along::kRow ? 1 : kCellStride<T>;
  for_panels<T>(stride, [&](auto vectors, int64_t c) HWY_ATTR {
    int64_t tile = 0;
    for_cell_tiles(0, rows, [&](auto count, int64_t r) COSFORMER_LAMBDA {
      const auto span = spans[tile++].outward(4);
      if (span.begin >= span.end) return;
      add_cell_product<T, kAlong, decltype(count)::value,
                       decltype(vectors)::value>(
          a + r * kRowStride + span.begin * kDepthStride,
          b + span.begin * stride + c, stride, span.end - span.begin,
          y + r * stride + c);
      ahead.tile();
    });
  });
}

// Tiles of a whole cell: how often it calls Ahead::tile().
template <typename T>
int64_t tiles_of_cell(const SoftmaxCall& call) {
  const auto tiles = [](int64_t rows, int64_t columns) {
    return (rows + kCellTileRows - 1) / kCellTileRows *
           ((columns + kPanel<T> - 1) / kPanel<T>);
  };
  return 2 * tiles(kCellRows, kCellKeys<T>) + tiles(kCellRows, call.dim) +
         tiles(kCellKeys<T>, call.dim) + tiles(kCellKeys<T>, call.value_dim);
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
  if (cell.dq != nullptr) {
    add_cell_products<T, Along::kRow>(cell.ds, cell.k, cell.rows, cell.keys_of,
                                      cell.q_stride, cell.dq, ahead);
  }
  if (cell.dv != nullptr) {
    add_cell_products<T, Along::kColumn>(cell.p, cell.d_out, cell.keys,
                                         cell.rows_of, cell.v_stride, cell.dv,
                                         ahead);
  }
  if (cell.dk != nullptr) {
    add_cell_products<T, Along::kColumn>(cell.ds, cell.q, cell.keys,
                                         cell.rows_of, cell.q_stride, cell.dk,
                                         ahead);
  }
}

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_BACKWARD_CELL_INL_H_
