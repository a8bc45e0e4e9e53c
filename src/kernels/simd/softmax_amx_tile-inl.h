// The two products of the softmax engine on AMX tiles, and where their operands
// lie: a cell is 32 queries x a tile of 64 keys, each half of which fills four
// registers with scores.
#if defined(COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_AMX_TILE_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_AMX_TILE_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_AMX_TILE_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_AMX_TILE_INL_H_
#endif

#include <algorithm>

#include "kernels/simd/amx.h"
#include "kernels/simd/softmax_plan.h"
#include "kernels/simd/split-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

inline constexpr int64_t kAmxBlockQueries = 288;
// Queries of a cell, and keys of its halves.
inline constexpr int64_t kCell = 2 * kTileRows;
inline constexpr int64_t kHalves = kForwardKeys / kCell;
static_assert(kAmxBlockQueries % kCell == 0 && kForwardKeys <= 64);

// Tiles' places, in bytes. Rows: [two of a group][step of 32][term]; keys:
// [16 keys][step of 32 features][term]; values: [32 keys][16 columns][term].
struct AmxShape {
  AmxShape(const SoftmaxCall& call, int terms)
      : steps((call.dim + kTileDepth - 1) / kTileDepth),
        columns(round_up((call.value_dim + kTileRows - 1) / kTileRows, 2)),
        key_bytes(kForwardKeys / kTileRows * steps * terms * kTileBytes),
        value_bytes(kHalves * columns * terms * kTileBytes + kNoteBytes),
        query_bytes(2 * steps * terms * kTileBytes),
        width(columns * kTileRows) {}

  // What is noted of a tile of keys, behind its values.
  struct Note {
    uint64_t strange_keys, strange_values;
  };
  static constexpr int64_t kNoteBytes = 64;

  int64_t steps, columns;
  int64_t key_bytes, value_bytes;  // of a tile of keys
  int64_t query_bytes;             // of a group of rows
  int64_t width;                   // of a row of the output, in floats
};

// scores[32][32] of a group's rows and two panels of 16 keys. between(i)
// runs after product i of terms.
template <int kTerms, class Between>
HWY_INLINE void amx_scores(const char* q, const char* k, int64_t steps,
                           float* scores, const Between& between) {
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
  const int64_t next = steps * kTerms * kTileBytes;
  for (int64_t s = 0; s < steps; ++s) {
    multiply_terms<kTerms, kTerms>(
        [&](int i, int term)
            COSFORMER_LAMBDA { return q + i * next + term * kTileBytes; },
        [&](int i, int term)
            COSFORMER_LAMBDA { return k + i * next + term * kTileBytes; },
        between);
    q += kTerms * kTileBytes;
    k += kTerms * kTileBytes;
  }
  constexpr int64_t kStride = kForwardKeys * sizeof(float);
  tile_store<0>(scores, kStride);
  tile_store<1>(scores + kTileRows, kStride);
  tile_store<2>(scores + kTileRows * kForwardKeys, kStride);
  tile_store<3>(scores + kTileRows * kForwardKeys + kTileRows, kStride);
}

// out[32][width] (+)= weights times values of the halves [from, to) of a cell.
template <int kTerms, int kWeightTerms, class Between>
HWY_INLINE void amx_values(const char* weights, const char* values,
                           int64_t from, int64_t to, int64_t columns, bool add,
                           float* out, const Between& between) {
  const int64_t width = columns * kTileRows;
  const int64_t stride = width * static_cast<int64_t>(sizeof(float));
  for (int64_t c = 0; c < columns; c += 2) {
    float* at = out + c * kTileRows;
    float* below = at + kTileRows * width;
    if (add) {
      tile_load<0>(at, stride);
      tile_load<1>(at + kTileRows, stride);
      tile_load<2>(below, stride);
      tile_load<3>(below + kTileRows, stride);
    } else {
      tile_zero<0>();
      tile_zero<1>();
      tile_zero<2>();
      tile_zero<3>();
    }
    for (int64_t half = from; half < to; ++half) {
      const char* w = weights + half * kWeightTerms * kTileBytes;
      const char* v = values + (half * columns + c) * kTerms * kTileBytes;
      multiply_terms<kWeightTerms, kTerms>(
          [&](int i, int term) COSFORMER_LAMBDA {
            return w + (i * kHalves * kWeightTerms + term) * kTileBytes;
          },
          [&](int i, int term)
              COSFORMER_LAMBDA { return v + (i * kTerms + term) * kTileBytes; },
          between);
    }
    tile_store<0>(at, stride);
    tile_store<1>(at + kTileRows, stride);
    tile_store<2>(below, stride);
    tile_store<3>(below + kTileRows, stride);
  }
}

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_AMX_TILE_INL_H_
