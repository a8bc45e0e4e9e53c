// What the pass of dk and dv knows of the queries and leaves for that of dq, so
// that it reads neither these nor the outputs again. A few bytes a token and
// head: 1 / n_i, r_i (backward-inl.h) and, for relu, a bit an element, set
// where the derivative is 1.
#if defined(COSFORMER_SRC_KERNELS_SIMD_QUERY_NOTES_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_QUERY_NOTES_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_QUERY_NOTES_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_QUERY_NOTES_INL_H_
#endif

#include "kernels/simd/chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

// Where a head's notes of a chunk lie.
template <typename T>
struct QueryNotes {
  // Where vectors are masked by bits: elsewhere that takes what it gives.
  static constexpr bool kPossible =
      HWY_TARGET == HWY_AVX3 && kLanes<T> % 8 == 0;
  static bool has_bits(const LinearCall& call) {
    return call.options.feature_map == FeatureMap::kRelu;
  }
  static int64_t tokens(const LinearCall& call) {
    return round_up(call.inputs.q.size[0] * call.inputs.q.size[1], kLine);
  }
  static int64_t bit_bytes(const LinearCall& call) {
    return row_length<T>(call.dim) / 8;
  }
  // Behind the last token a chunk's padding may be read.
  static size_t bytes(const LinearCall& call) {
    return static_cast<size_t>(call.heads * tokens(call) *
                                   (kFloats * static_cast<int64_t>(sizeof(T)) +
                                    (has_bits(call) ? bit_bytes(call) : 0)) +
                               kMaxChunk * bit_bytes(call));
  }
  QueryNotes() = default;
  QueryNotes(const LinearCall& call, const Unit& unit, int64_t head,
             int64_t position)
      : stride(bit_bytes(call)) {
    const int64_t all = tokens(call);
    const int64_t token = unit.row.batch * call.inputs.q.size[1] +
                          unit.row.q_offset + position - unit.row.q_start;
    T* const numbers = static_cast<T*>(call.query_notes);
    scale = numbers + kFloats * head * all + token;
    r = scale + all;

    if (has_bits(call)) {
      bits = reinterpret_cast<uint8_t*>(numbers + kFloats * call.heads * all) +
             (head * all + token) * stride;
    }
  }

  T *scale = nullptr, *r = nullptr;
  uint8_t* bits = nullptr;  // rows of `stride`
  int64_t stride = 0;

 private:
  static constexpr int64_t kFloats = 2;
  static constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
};

// Of the queries whose bit of `real` is set. scale, r: of the gradient's job
// (backward-inl.h); q: packed.
template <typename T>
HWY_NOINLINE void leave_notes(const QueryNotes<T>& to, uint64_t real,
                              int64_t size, const T* HWY_RESTRICT scale,
                              const T* HWY_RESTRICT r, const T* HWY_RESTRICT q,
                              int64_t stride) {
  const Tag<T> d;
  for (int64_t i = 0; i < size; ++i) {
    if ((real >> i & 1) == 0) continue;
    to.scale[i] = scale[i];
    to.r[i] = r[i];

    if (to.bits == nullptr) continue;
    for (int64_t c = 0; c < stride; c += kLanes<T>) {
      // NaN goes through.
      hn::StoreMaskBits(
          d, hn::Not(hn::Le(hn::Load(d, q + i * stride + c), hn::Zero(d))),
          to.bits + i * to.stride + c / 8);
    }
  }
}

// A tile of gradients from row r and column c on, times the derivative.
template <typename T, int kRows, int kVectors>
HWY_INLINE void times_bits(const QueryNotes<T>& notes, int64_t r, int64_t c,
                           Tile<T, kRows, kVectors>& tile) {
  const Tag<T> d;
  unroll<kRows>([&](auto i) COSFORMER_LAMBDA {
    unroll<kVectors>([&](auto n) COSFORMER_LAMBDA {
      Vec<T>& y = tile.acc[i * kVectors + n];
      y = hn::IfThenElseZero(
          hn::LoadMaskBits(
              d, notes.bits + (r + i) * notes.stride + (c + n * kLanes<T>) / 8),
          y);
    });
  });
}

// Brings the notes of a later chunk into the cache.
template <typename T>
HWY_INLINE void look_at_notes(const LinearCall& call, const Target& to) {
  if (to.rows <= 0) return;
  for (int64_t g = 0; g < call.group; ++g) {
    const QueryNotes<T> notes(call, *to.unit, to.unit->head * call.group + g,
                              to.position);
    const auto look = [](const void* at, int64_t bytes) HWY_ATTR {
      for (int64_t n = 0; n < bytes; n += 64)
        __builtin_prefetch(static_cast<const char*>(at) + n, 0, 2);
    };
    for (const T* x : {notes.scale, notes.r})
      look(x, to.rows * static_cast<int64_t>(sizeof(T)));
    if (notes.bits != nullptr) look(notes.bits, to.rows * notes.stride);
  }
}

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_QUERY_NOTES_INL_H_
