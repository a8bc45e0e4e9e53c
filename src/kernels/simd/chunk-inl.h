// What the passes share of the walk over a call's chunks: their sizes, where
// their rows lie, which to bring into the cache, and their memory.
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
#include "kernels/simd/dot_tile-inl.h"
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
  static Shape of(const LinearCall& call, int64_t chunk) {
    Shape s;
    s.parts = call.parts;
    s.rows = round_up(call.dim, 4);
    s.value_rows = round_up(call.value_dim, 4);
    s.q_stride = row_length<T>(call.dim);
    s.v_stride = row_length<T>(call.value_dim);
    s.chunk = call.limited(chunk);
    s.long_chunk = call.limited(32);
    s.slots = round_up(std::max(s.chunk, s.long_chunk), 4);
    return s;
  }
  int64_t parts;
  int64_t rows, value_rows;    // of a state: head_dim, value_dim
  int64_t q_stride, v_stride;  // of packed q and k, of packed v
  int64_t chunk;               // positions a chunk, causal
  int64_t long_chunk;          // where keys or queries are taken alone
  int64_t slots;               // rows of a packed chunk
};

// Positions a chunk of the forward and of dq: the fastest of 8, 12, 16 and 24,
// or within the noise of it, at head_dim 32, 64 and 128 of both AVX2 and
// AVX-512.
inline constexpr int64_t kForwardChunk = 16;
// An update of a depth that is known needs no loop, where that is faster.
inline constexpr int64_t kForwardDepth =
    HWY_TARGET == HWY_AVX3 ? kForwardChunk : 0;
template <typename T>
Shape forward_shape(const LinearCall& call) {
  return Shape::of<T>(call, call.dim > 256 ? 2 * kForwardChunk : kForwardChunk);
}

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

// Whether [begin, end) is a unit's whole causal walk, and so short that one
// chunk takes it. Where no state is given nor wanted its pairs then cost less
// than a state would: 2 d operations a pair and product, half of them visible,
// against 4 d (d + 1) a token to read a state and as much to add to it.
inline bool is_alone(const LinearCall& call, const Unit& unit, int64_t begin,
                     int64_t end, int64_t longest = kMaxChunk) {
  return end - begin <= longest && !call.rotary &&
         (!call.cosine || end - begin <= call.options.reweight_len) &&
         begin <= std::min(unit.row.q_start, unit.row.kv_start) &&
         end >= std::max(unit.q_end(), unit.kv_end());
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
  // Of a block of one chunk the next block's.
  const int64_t ahead = end - begin <= chunk ? 1 : kChunksAhead;
  const int64_t position = at + ahead * chunk;
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

// Calls ahead(target) and take(position) for the chunks of [begin, end).
template <class Look, class Take>
void walk_chunks(const Unit& unit, int64_t begin, int64_t end, int64_t chunk,
                 const Next& next, const Look& ahead, const Take& take) {
  for (int64_t at = begin; at < end; at += chunk) {
    ahead(target_after(unit, begin, end, at, chunk, next));
    take(at);
  }
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
