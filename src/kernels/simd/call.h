// What the vector kernels of one call share, whatever the instruction set: the
// call's sizes and options, the units of work, and the angles of the cosine and
// the rotary positions.
#ifndef COSFORMER_SRC_KERNELS_SIMD_CALL_H_
#define COSFORMER_SRC_KERNELS_SIMD_CALL_H_

#include <cstdint>

#include "cosformer/kernels.h"
#include "kernels/check.h"

namespace cosformer::simd {

// Chunks of positions: rows of a chunk are bits of a word.
inline constexpr int64_t kMaxChunk = 64;
// Angles are added within groups of so many positions.
inline constexpr int64_t kAngleGroup = 16;

// Call at this many positions a head before turning to the next head.
inline constexpr int64_t kBlock = 256;

struct Unit;

struct LinearCall {
  LinearCall(const LinearAttentionOptions& options,
             const LinearAttentionInputs& inputs);

  LinearAttentionOptions options;
  LinearAttentionInputs inputs;
  DType dtype;
  int64_t dim, value_dim, heads, kv_heads, group;
  bool cosine, rotary, normalize;
  int parts;  // of a state: 2 with the cosine ([phi cos, phi sin]), else 1

  // Positions a chunk, at most: of a causal call, and where keys or queries
  // are taken alone. Small where M is, so that the angle turns little in one.
  int64_t chunk_limit;
  int64_t limited(int64_t chunk) const {
    return chunk < chunk_limit ? chunk : chunk_limit;
  }

  View4 out;
  void* denominator = nullptr;
  LinearStateView state_out;  // of the forward
  bool stream = false;        // outputs past the caches

  // Backward.
  ConstView4 saved_out, d_out;
  const void* saved_denominator = nullptr;
  View4 dq, dk, dv;
  // What the pass of dk and dv leaves for that of dq (query_notes-inl.h);
  // nullptr: nothing.
  void* query_notes = nullptr;
  ConstLinearStateView d_state_out;
  bool has_d_state_out() const {
    return d_state_out.kv_state != nullptr || d_state_out.k_sum != nullptr;
  }
  LinearStateView d_state_in;
  bool wants_d_state() const {
    return d_state_in.kv_state != nullptr || d_state_in.k_sum != nullptr;
  }

  // Where the state of a unit lies in the caller's, in elements.
  int64_t kv_state_at(const Unit& unit) const;
  int64_t k_sum_at(const Unit& unit) const;
};

// One row and kv head: what has a state of its own.
struct Unit {
  AttentionRow row;
  int64_t row_index = 0, head = 0;
  // Queries from this position on see a key (all where there is a state).
  int64_t visible_from = 0;
  // Keys before this position are seen (all where the returned state has a
  // gradient).
  int64_t seen_until = 0;

  int64_t q_end() const { return row.q_start + row.q_len; }
  int64_t kv_end() const { return row.kv_start + row.kv_len; }
};
// What a thread will walk after the block at hand: nothing, or a block of this
// or another unit, so that its rows can be brought into the cache.
struct Next {
  const Unit* unit = nullptr;
  int64_t begin = 0, end = 0;  // positions
};
Unit make_unit(const LinearCall& call, int64_t row_index, int64_t head);

// Bits of the slots of a chunk (positions position .. position + n).
struct Slots {
  uint64_t present = 0;  // an element of the tensors stands there
  uint64_t real = 0;     // and the mask lets it take part
};
Slots query_slots(const LinearCall& call, const Unit& unit, int64_t position,
                  int64_t n);
Slots key_slots(const LinearCall& call, const Unit& unit, int64_t position,
                int64_t n);
// real: and something sees it.
Slots seen_key_slots(const LinearCall& call, const Unit& unit, int64_t position,
                     int64_t n);

// A chunk of positions. With (main, other) = (cos, sin) or (sin, cos) of the
// positions' angles, whichever is larger at the chunk's middle, and ratio =
// other / main, at most about 2:
//   cos(a_i - a_j) = main_i main_j (1 + ratio_i ratio_j).
// So the numerator is main_i (q_i S_main + ratio_i q_i S_other + sum_j
// (q_i.k_j) (1 + ratio_i ratio_j) main_j v_j): q is packed once, and nothing
// grows as the angle nears pi/2 or turns on.
template <typename T>
struct Chunk {
  int64_t position, size;
  int main_part;  // 0: main is the cosine
  const T* main;  // [size]; ones without the cosine
  const T* ratio;
  const T* rotary_cos;  // [size][dim / 2]
  const T* rotary_sin;

  // A part of a chunk without rotary angles.
  Chunk part(int64_t at, int64_t count) const {
    const int64_t skip = at - position;
    return {at, count, main_part, main + skip, ratio + skip, nullptr, nullptr};
  }
};

// The angles of a block of positions, kept for the heads that follow.
template <typename T>
class Angles {
 public:
  // Elements of T that it needs.
  static int64_t size(const LinearCall& call, int64_t chunk);
  // Touches no memory before start().
  Angles(const LinearCall& call, int64_t chunk, T* memory);
  void start();

  // The chunk at `position` of the block of positions [begin, end), at most
  // kBlock; position - begin is a multiple of the chunk.
  Chunk<T> chunk(int64_t begin, int64_t end, int64_t position);

  // All of [begin, end) as a chunk that shares no state with another: at most
  // `longest` positions (up to kBlock) and, with the cosine, at most M; not for
  // rotary calls. Its angles are counted from the middle of the longest such
  // chunk, so that none passes pi / 4, and a row's bits do not depend on how
  // many follow.
  Chunk<T> alone(int64_t begin, int64_t end, int64_t longest = kMaxChunk);

 private:
  void fill_cosine(int64_t begin, int64_t end, int64_t origin, int64_t chunk);
  void fill_rotary(int64_t position, int64_t size);

  const LinearCall& call_;
  int64_t chunk_;
  T *main_, *ratio_ = nullptr, *rotary_cos_ = nullptr, *rotary_sin_ = nullptr;
  uint8_t part_[kBlock];
  bool turned_ = false;
  int64_t begin_ = 0, end_ = 0, origin_ = 0, cut_ = 0;  // of what is filled
  int64_t turned_position_ = 0, turned_size_ = 0;
  // Rotary: of each pair, and its cosine and sine.
  double *frequency_ = nullptr, *turn_cos_ = nullptr, *turn_sin_ = nullptr;
  // cos and sin of 0 .. kAngleGroup - 1 positions.
  double step_cos_[kAngleGroup], step_sin_[kAngleGroup];
};

}  // namespace cosformer::simd

#endif  // COSFORMER_SRC_KERNELS_SIMD_CALL_H_
