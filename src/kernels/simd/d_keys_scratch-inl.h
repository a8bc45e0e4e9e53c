// What the pass of dk and dv keeps: its state, and the packed rows of a chunk.
#if defined(COSFORMER_SRC_KERNELS_SIMD_D_KEYS_SCRATCH_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_D_KEYS_SCRATCH_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_D_KEYS_SCRATCH_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_D_KEYS_SCRATCH_INL_H_
#endif

#include "kernels/simd/chunk-inl.h"
#include "kernels/simd/dot_tile-inl.h"
#include "kernels/simd/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

// Rows of a panel of T, of which so many are used.
constexpr int64_t d_keys_panel_rows(int64_t used) { return used + kDotColumns; }

// As the forward's state: T for S, u for the sums. dk reads a few rows of all
// panels and both parts at a time: some unused rows behind each keep these from
// the same places of the first-level cache.
template <typename T>
struct DKeysState {
  DKeysState(const Shape& s, const void* memory)
      : data(static_cast<T*>(const_cast<void*>(memory))), shape(s) {}
  static int64_t elements(const Shape& s) {
    return s.parts * (panel_rows(s) * s.v_stride + s.q_stride);
  }
  static int64_t panel_rows(const Shape& s) {
    return d_keys_panel_rows(s.rows);
  }
  Panels<T> part(int64_t p) const {
    return {data + p * panel_rows(shape) * shape.v_stride, panel_rows(shape),
            shape.v_stride};
  }
  T* sum(int64_t p) const {
    return data + shape.parts * panel_rows(shape) * shape.v_stride +
           p * shape.q_stride;
  }

  T* data;
  const Shape& shape;
};

// Positions a chunk: longer ones where the tiles' ends cost more than what a
// chunk's own products add.
#if HWY_TARGET == HWY_AVX3
constexpr int64_t d_keys_chunk(int64_t dim) {
  return dim > 32 && dim <= 128 ? kShortChunk : 16;
}
#else
constexpr int64_t d_keys_chunk(int64_t dim) {
  return dim > 96 ? 16 : kShortChunk;
}
#endif

template <typename T>
Shape d_keys_shape(const LinearCall& call) {
  return Shape::of<T>(call, kInLanes<T> ? kGroup : d_keys_chunk(call.dim));
}

// A chunk's keys, packed: [slots][q_stride] and [slots][v_stride].
template <typename T>
struct KeyRows {
  Chunk<T> chunk;
  Slots slots;
  T *k, *k_turned;
  T *v, *v_other;  // v_other: times ratio
};
// The queries of a head in a chunk, and their output gradients.
template <typename T>
struct QueryRows {
  Slots slots;
  bool finite;
  T *q, *q_turned;
  T *g_main, *g_other;    // times main, and ratio
  T *scale, *r, *r_main;  // [kMaxChunk]: 1 / n, r, r times main

  HWY_INLINE void finish(const Chunk<T>& chunk) {
    const Tag<T> d;
    for (int64_t i = 0; i < chunk.size; i += kLanes<T>) {
      hn::Store(hn::Mul(hn::Load(d, r + i), hn::LoadU(d, chunk.main + i)), d,
                r_main + i);
    }
  }
};

template <typename T>
struct DKeysScratch {
  DKeysScratch(const LinearCall& call, Carver<T>& carver)
      : shape(d_keys_shape<T>(call)),
        short_angles(call, shape.chunk,
                     carver.take(Angles<T>::size(call, shape.chunk))),
        long_angles(call, shape.long_chunk,
                    carver.take(Angles<T>::size(call, shape.long_chunk))) {
    for (QueryRows<T>& r : queries) {
      r.r_main = carver.take(kMaxChunk);
      r.scale = carver.take(kMaxChunk);
      r.r = carver.take(kMaxChunk);
    }
    key_scores = carver.take(kScoresStride * kScoresStride);
    value_scores = carver.take(kScoresStride * kScoresStride);
    ones = carver.take(kMaxChunk);
    Carver<T> counter(nullptr);
    lay_out(call, std::max(shape.slots, kMaxChunk), counter);
    packed_size = static_cast<int64_t>(counter.bytes() / sizeof(T));
    packed = carver.take(packed_size);
  }
  void start() {
    short_angles.start();
    long_angles.start();
    for (QueryRows<T>& r : queries) std::fill_n(r.r_main, kMaxChunk, T{0});
    for (T* scores : {key_scores, value_scores})
      std::fill_n(scores, kScoresStride * kScoresStride, T{0});
    std::fill_n(ones, kMaxChunk, T{1});
    // The padding of rows is read, though never used.
    std::fill_n(packed, packed_size, T{0});
  }
  // The packed rows of chunks of so many, side by side: of buffers made for
  // longer ones the first rows would share a part of the first-level cache.
  void lay_out(const LinearCall& call, int64_t rows) {
    Carver<T> carver(packed);
    lay_out(call, rows, carver);
  }
  void lay_out(const LinearCall& call, int64_t rows, Carver<T>& carver) {
    const int64_t qs = rows * shape.q_stride, vs = rows * shape.v_stride;
    for (KeyRows<T>& r : keys) {
      r.k_turned = r.k = carver.take(qs);
      if (call.rotary) r.k_turned = carver.take(qs);
      r.v = carver.take(vs);
      r.v_other = call.cosine ? carver.take(vs) : nullptr;
    }
    for (QueryRows<T>& r : queries) {
      r.q_turned = r.q = carver.take(qs);
      if (call.rotary) r.q_turned = carver.take(qs);
      r.g_main = carver.take(vs);
      r.g_other = call.cosine ? carver.take(vs) : nullptr;
    }
    dk = carver.take(qs);
    dk_plain = call.rotary ? carver.take(qs) : nullptr;
    dv = carver.take(vs);
  }
  // The same for d_keys_lanes-inl.h: rows of whole groups.
  void lay_out_lanes(const LinearCall& call, int64_t rows) {
    Carver<T> carver(packed);
    const int64_t qs = rows * shape.q_stride, vs = rows * shape.v_stride;
    k_across = carver.take(qs);
    v_across = carver.take(vs);
    QueryRows<T>& r = queries[0];
    r.q = carver.take(qs);
    r.g_main = carver.take(vs);
    r.g_other = call.cosine ? carver.take(vs) : nullptr;
    dk_across = carver.take(qs);
    dk = carver.take(qs);
    dv = carver.take(vs);
  }

  Shape shape;
  Angles<T> short_angles, long_angles;
  KeyRows<T> keys[2];  // at hand, and being packed
  QueryRows<T> queries[2];
  T *dk, *dk_plain;        // [slots][q_stride]
  T* dv;                   // [slots][v_stride]
  T *k_across, *v_across;  // in lanes: [slots / kGroup][stride][kGroup]
  T* dk_across;
  T *key_scores, *value_scores;  // rows of kScoresStride
  T* ones;
  T* packed;
  int64_t packed_size;
};

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_D_KEYS_SCRATCH_INL_H_
