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
#include <cstring>
#include <new>

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

// Sizes of a call's packed chunks and state.
struct Shape {
  template <typename T>
  static Shape of(const LinearCall& call) {
    Shape s;
    s.parts = call.parts;
    s.rows = round_up(call.dim, 4);
    s.value_rows = round_up(call.value_dim, 4);
    s.q_stride = row_length<T>(call.dim);
    s.v_stride = row_length<T>(call.value_dim);
    s.chunk = call.limited(call.dim > 96 ? 32 : 16);
    s.long_chunk = call.limited(32);
    s.slots = round_up(std::max(s.chunk, s.long_chunk), 4);
    s.scores_stride = row_length<T>(s.slots);
    return s;
  }
  int64_t parts;
  int64_t rows, value_rows;    // of a state: head_dim, value_dim
  int64_t q_stride, v_stride;  // of packed q and k, of packed v
  int64_t chunk;               // positions a chunk, causal
  int64_t long_chunk;          // where keys or queries are taken alone
  int64_t slots;               // rows of a packed chunk
  int64_t scores_stride;
};

// Rows of the chunk at `position` of a unit's keys, values and their gradients,
// or of the queries of one of its heads.
inline Rows rows_at(const ConstView4& view, int64_t batch, int64_t head,
                    int64_t first) {
  const int64_t at = batch * view.stride[0] + head * view.stride[2];
  return {static_cast<const char*>(view.data) +
              at * static_cast<int64_t>(size_of(view.dtype)),
          first, view.stride[1]};
}
inline Rows key_rows(const ConstView4& view, const Unit& unit,
                     int64_t position) {
  return rows_at(view, unit.row.batch, unit.head,
                 unit.row.kv_offset + position - unit.row.kv_start);
}
inline Rows query_rows(const ConstView4& view, const Unit& unit, int64_t head,
                       int64_t position) {
  return rows_at(view, unit.row.batch, head,
                 unit.row.q_offset + position - unit.row.q_start);
}

// How many chunks ahead rows are brought in: one is too late.
inline constexpr int64_t kChunksAhead = 2;

// The chunk to bring in while the one at `at` of a block is taken; rows <= 0:
// none. Behind the block lies `next`.
struct Target {
  const Unit* unit;
  int64_t position, rows;
};
inline Target target_after(const Unit& unit, int64_t begin, int64_t end,
                           int64_t at, int64_t chunk, const Next& next) {
  const int64_t position = at + kChunksAhead * chunk;
  if (position < end) return {&unit, position, std::min(chunk, end - position)};
  if (next.unit == nullptr) return {&unit, 0, 0};
  const int64_t behind = position - round_up(end - begin, chunk) - begin;
  return {next.unit, next.begin + behind,
          std::min(chunk, next.end - next.begin - behind)};
}
inline Target target_before(const Unit& unit, int64_t begin, int64_t at,
                            int64_t chunk, const Next& next) {
  const int64_t position = at - kChunksAhead * chunk;
  if (position >= begin) return {&unit, position, chunk};
  if (next.unit == nullptr) return {&unit, 0, 0};
  const int64_t before =
      next.begin + round_up(next.end - next.begin, chunk) + position - begin;
  return {next.unit, before,
          before < next.begin ? 0 : std::min(chunk, next.end - before)};
}

// Rows of `view`, of so many heads that lie side by side.
inline void add_ahead(Ahead& ahead, const ConstView4& view, const Rows& rows,
                      int64_t heads = 1) {
  const int64_t size = static_cast<int64_t>(size_of(view.dtype));
  ahead.add(reinterpret_cast<uintptr_t>(rows.data) +
                static_cast<uintptr_t>(rows.first * rows.stride * size),
            rows.stride * size,
            ((heads - 1) * view.stride[2] + view.size[3]) * size);
}
inline void add_keys_ahead(Ahead& ahead, const LinearCall& call,
                           const Target& to) {
  for (const ConstView4* view : {&call.inputs.k, &call.inputs.v})
    add_ahead(ahead, *view, key_rows(*view, *to.unit, to.position));
}
inline void add_queries_ahead(Ahead& ahead, const LinearCall& call,
                              const ConstView4& view, const Target& to) {
  add_ahead(ahead, view,
            query_rows(view, *to.unit, to.unit->head * call.group, to.position),
            call.group);
}

// Packed rows turned by the chunk's rotary angles; `rows` with the padding.
template <typename T>
void turn_rows(const LinearCall& call, const Chunk<T>& chunk, const T* in,
               int64_t rows, int64_t stride, T* out) {
  rotate_rows<T>(in, chunk.rotary_cos, chunk.rotary_sin,
                 call.options.rotary_interleaved, false, chunk.size, call.dim,
                 stride, out);
  std::fill_n(out + chunk.size * stride, (rows - chunk.size) * stride, T{0});
}

// out[r][c] = sum_k q[r][k] S_main[k][c] + ratio[r] sum_k q[r][k]
// S_other[k][c], for rows r < rows (a multiple of 4). other.data may be
// nullptr: one part.
template <typename T>
HWY_NOINLINE void read_state(const T* HWY_RESTRICT q, int64_t q_stride,
                             int64_t rows, int64_t depth,
                             const T* HWY_RESTRICT ratio, const Panels<T>& main,
                             const Panels<T>& other, T* HWY_RESTRICT out,
                             int64_t out_stride, Ahead& ahead) {
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
      ahead.tile();
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

// Functions that all passes have (pass.h). Scratch: a struct with a
// constructor that carves its memory, and start().
template <typename T, class Scratch>
size_t scratch_bytes(const LinearCall& call) {
  Carver<T> counter(nullptr);
  const Scratch counted(call, counter);
  return round_up(sizeof(Scratch), 64) + counter.bytes();
}
template <typename T, class Scratch>
void init_scratch(const LinearCall& call, void* memory) {
  Carver<T> carver(static_cast<char*>(memory) + round_up(sizeof(Scratch), 64));
  (new (memory) Scratch(call, carver))->start();
}
using StateBytes = size_t(const LinearCall& call);
template <StateBytes& kBytes>
void zero_state(const LinearCall& call, void* memory) {
  std::memset(memory, 0, kBytes(call));
}
template <typename T, StateBytes& kBytes>
void add_state(const LinearCall& call, const void* from, void* to) {
  const int64_t n = static_cast<int64_t>(kBytes(call) / sizeof(T));
  const T* HWY_RESTRICT x = static_cast<const T*>(from);
  T* HWY_RESTRICT y = static_cast<T*>(to);
  for (int64_t i = 0; i < n; ++i) y[i] += x[i];
}

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_CHUNK_INL_H_
