// The two products of the softmax engine in registers, and the exponential
// between them:
//
//   score tile    weights[r][j] = 2^(q_r.k_j + bias - reference_r) for a few
//                 rows and up to kPanel keys, and their sums
//   value tile    out[r] (+)= sum_j weights[r][j] v_j
//
// No running maximum: the reference of a row is the first score that it sees,
// and the accumulators start at its negative, so that it costs nothing. Any
// reference is right as long as nothing overflows: a row whose weights in a
// tile sum to more than 2^30 takes its reference up to the largest score of the
// tile, and what it has so far down (raise_row). That is decided row by row
// from what the row itself sees, so no row's bits depend on another's content.
//
// Weights that do not count are selected to 0 after the exponential, so that a
// NaN among them is gone.
#if defined(COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_TILE_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_TILE_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_TILE_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_TILE_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/simd/exp-inl.h"
#include "kernels/simd/softmax_pack-inl.h"
#include "kernels/simd/softmax_plan.h"
#include "kernels/simd/softmax_product-inl.h"
#include "kernels/simd/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

// Rows of a tile: 6 x 4 vectors of 32 registers with AVX-512, 6 x 2 of 16 with
// AVX2.
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
inline constexpr int kSoftmaxRows = 6;
#else
inline constexpr int kSoftmaxRows = 4;
#endif

// Memory that is asked for while a tile is multiplied: an address a step of
// four features, from the first on.
inline constexpr int64_t kPrefetches = 16;
struct Prefetches {
  const char* at[kPrefetches];
  int64_t count = 0;
};

// Lanes of a vector as bits of a word, from its lowest on.
template <typename T>
HWY_INLINE hn::Mask<Tag<T>> lanes_of(uint64_t bits) {
  uint8_t bytes[8];
  std::memcpy(bytes, &bits, 8);
  return hn::LoadMaskBits(Tag<T>(), bytes);
}

// Whether a row has a reference.
inline constexpr uint8_t kUnseen = 0;
inline constexpr uint8_t kSeen = 1;
inline constexpr uint8_t kNothingFinite = 2;  // sees keys; none of use yet

// kSoftmaxRows rows and the keys of one panel from `column` of the tile on.
template <typename T>
struct ScoreTile {
  const T* q;            // packed in strips, scaled by scale log2(e)
  int64_t strip_stride;  // from a strip to the next
  const T* keys;         // [depth][kPanel], from the first key of the tile
  int64_t depth;         // multiple of 4
  T* weights;            // rows of kForwardKeys, from the first key of the tile
  const TileBits* bits;  // of each row, where masked
  int64_t column;        // of the first key, a multiple of the lanes
  const T* const* bias;  // of each row, from the first key; or nullptr
  T* reference;          // of each row; 0 where not seen
  uint8_t* seen;         // whether it has one
  T* sums;               // of each row by lanes
  T* out;                // rows of what they have so far, or nullptr
  int64_t out_stride;    // whole vectors
  int64_t before;        // columns of this tile already done, so that
                         // weights - before is the first
  const Prefetches* prefetch;

  uint64_t bits_of(int r) const {
    return bits[r].word[column / 64] >> (column % 64);
  }
};

// q_r.k_j + bias - reference_r.
template <typename T, int kVectors>
HWY_INLINE void scores(const ScoreTile<T>& tile, Vec<T>* result) {
  constexpr int kRows = kSoftmaxRows;
  constexpr int64_t kLane = kLanes<T>;
  const Tag<T> d;
  // A local: gcc would store what it has a pointer to at every step.
  Vec<T> acc[kRows * kVectors];
  if (tile.bias == nullptr) {
    unroll<kRows>([&](auto r) COSFORMER_LAMBDA {
      const Vec<T> start = hn::Set(d, -tile.reference[r]);
      unroll<kVectors>([&](auto n)
                           COSFORMER_LAMBDA { acc[r * kVectors + n] = start; });
    });
  } else {
    unroll<kRows>([&](auto r) COSFORMER_LAMBDA {
      const Vec<T> reference = hn::Set(d, tile.reference[r]);
      unroll<kVectors>([&](auto n) COSFORMER_LAMBDA {
        acc[r * kVectors + n] =
            hn::Sub(hn::LoadU(d, tile.bias[r] + n * kLane), reference);
      });
    });
  }
  // One vector of each row would wait for its own additions.
  constexpr bool kTwice = kVectors == 1;
  Vec<T> second[kRows];
  if constexpr (kTwice) {
    unroll<kRows>([&](auto r) COSFORMER_LAMBDA { second[r] = hn::Zero(d); });
  }
  const T* HWY_RESTRICT k = tile.keys;
  const char* const* prefetch = tile.prefetch->at;
  const char* const* prefetch_end = prefetch + tile.prefetch->count;
  const T* strip = tile.q;
  for (int64_t left = tile.depth; left > 0;
       left -= kStrip, strip += tile.strip_stride) {
    const T* HWY_RESTRICT q = strip;
    const T* q_end = q + std::min(left, kStrip);
    for (; q != q_end; q += 4, k += 4 * kPanel<T>) {
      if (prefetch != prefetch_end) {
        const char* at = *prefetch++;
        unroll<4>([&](auto line) COSFORMER_LAMBDA {
          __builtin_prefetch(at + line * 64, 0, 2);
        });
      }
      unroll<4>([&](auto f) COSFORMER_LAMBDA {
        Vec<T> kv[kVectors];
        unroll<kVectors>([&](auto n) COSFORMER_LAMBDA {
          kv[n] = hn::Load(d, k + f * kPanel<T> + n * kLane);
        });
        unroll<kRows>([&](auto r) COSFORMER_LAMBDA {
          const Vec<T> qv = hn::Set(d, q[r * kStrip + f]);
          if constexpr (kTwice && f % 2 == 1) {
            add_product<T>(qv, kv[0], second[r]);
          } else {
            unroll<kVectors>([&](auto n) COSFORMER_LAMBDA {
              add_product<T>(qv, kv[n], acc[r * kVectors + n]);
            });
          }
        });
      });
    }
  }
  if constexpr (kTwice) {
    unroll<kRows>(
        [&](auto r) COSFORMER_LAMBDA { acc[r] = hn::Add(acc[r], second[r]); });
  }
  unroll<kRows * kVectors>([&](auto i)
                               COSFORMER_LAMBDA { result[i] = acc[i]; });
}

inline constexpr double kLargeSum = 1073741824.0;  // 2^30

// Row r from its raw scores, where they rose far above its reference or are not
// finite. bits: what counts.
template <typename T>
HWY_NOINLINE void raise_row(const ScoreTile<T>& tile, int r, int64_t keys,
                            uint64_t bits, const T* HWY_RESTRICT scores) {
  constexpr int64_t kLane = kLanes<T>;
  const Tag<T> d;
  T* HWY_RESTRICT weights = tile.weights + r * kForwardKeys;
  T* HWY_RESTRICT sums = tile.sums + r * kLane;
  T& reference = tile.reference[r];
  Vec<T> most = hn::Set(d, reference);
  for (int64_t j = 0; j < keys; j += kLane) {
    // Not where it is NaN.
    const Vec<T> x = hn::Load(d, scores + j);
    const auto above = hn::And(lanes_of<T>(bits >> j), hn::Gt(x, most));
    most = hn::IfThenElse(above, x, most);
  }
  const T largest = hn::GetLane(hn::MaxOfLanes(d, most));
  if (largest > reference) {
    const T below = reference - largest;
    const T factor = below < kLowestWeight<T> ? T{0} : std::exp2(below);
    reference = largest;
    for (int64_t c = 0; c < kLane; ++c) sums[c] *= factor;
    if (tile.out != nullptr) {
      T* HWY_RESTRICT out = tile.out + r * tile.out_stride;
      for (int64_t c = 0; c < tile.out_stride; ++c) out[c] *= factor;
    }
    for (int64_t j = -tile.before; j < 0; ++j) weights[j] *= factor;
  }
  const Vec<T> by = hn::Set(d, reference);
  Vec<T> sum = hn::Load(d, sums);
  for (int64_t j = 0; j < keys; j += kLane) {
    const Vec<T> x = hn::Sub(hn::Load(d, scores + j), by);
    const Vec<T> weight = hn::IfThenElseZero(
        lanes_of<T>(bits >> j), zero_where_far<T>(x, weight_lanes<T>(x)));
    sum = hn::Add(sum, weight);
    hn::Store(weight, d, weights + j);
  }
  hn::Store(sum, d, sums);
}

// A tile of which some rows sum to too much: theirs anew, from scores without a
// reference, which may be so far off that what is left of them is rounding; and
// the others' sums, whose weights stand.
template <typename T, int kVectors>
HWY_NOINLINE void raise_rows(const ScoreTile<T>& tile, bool masked) {
  constexpr int kRows = kSoftmaxRows;
  constexpr int64_t kLane = kLanes<T>;
  const Tag<T> d;
  T nothing[kRows] = {};
  ScoreTile<T> raw = tile;
  raw.reference = nothing;
  Vec<T> acc[kRows * kVectors];
  scores<T, kVectors>(raw, acc);
  HWY_ALIGN T stored[kRows * kVectors * kLane];
  unroll<kRows * kVectors>([&](auto i) COSFORMER_LAMBDA {
    hn::Store(acc[i], d, stored + i * kLane);
  });
  for (int r = 0; r < kRows; ++r) {
    const T* HWY_RESTRICT weights = tile.weights + r * kForwardKeys;
    Vec<T> sum = hn::Load(d, weights);
    for (int n = 1; n < kVectors; ++n)
      sum = hn::Add(sum, hn::Load(d, weights + n * kLane));
    if (hn::AllTrue(d, hn::Le(sum, hn::Set(d, static_cast<T>(kLargeSum))))) {
      T* at = tile.sums + r * kLane;
      hn::Store(hn::Add(sum, hn::Load(d, at)), d, at);
    } else {
      raise_row(tile, r, kVectors * kLane,
                masked ? tile.bits_of(r) : ~uint64_t{0},
                stored + r * kVectors * kLane);
    }
  }
}

// The rows of a tile that have no reference yet and see a key of it: from their
// stored scores the first that they see or, where that is not finite, the
// largest that is. Their scores are made less it.
template <typename T, int kVectors>
HWY_NOINLINE void set_references(const ScoreTile<T>& tile) {
  constexpr int64_t kLane = kLanes<T>;
  constexpr int64_t kKeys = kVectors * kLane;
  constexpr uint64_t kAll =
      kKeys >= 64 ? ~uint64_t{0} : (uint64_t{1} << (kKeys % 64)) - 1;
  const Tag<T> d;
  for (int r = 0; r < kSoftmaxRows; ++r) {
    if (tile.seen[r] == kSeen) continue;
    uint64_t bits = tile.bits_of(r) & kAll;
    if (bits == 0) continue;
    T* HWY_RESTRICT x = tile.weights + r * kForwardKeys;
    T reference = x[std::countr_zero(bits)];
    if (!std::isfinite(reference)) {
      reference = -std::numeric_limits<T>::infinity();
      for (; bits != 0; bits &= bits - 1) {
        const T score = x[std::countr_zero(bits)];
        if (std::isfinite(score) && score > reference) reference = score;
      }
    }
    if (!std::isfinite(reference)) {
      tile.seen[r] = kNothingFinite;  // from 0 for now
      continue;
    }
    tile.reference[r] = reference;
    tile.seen[r] = kSeen;
    const Vec<T> by = hn::Set(d, reference);
    for (int64_t j = 0; j < kKeys; j += kLane)
      hn::Store(hn::Sub(hn::Load(d, x + j), by), d, x + j);
  }
}

// kFirst: some row may have no reference yet; then also kMasked.
template <typename T, int kVectors, bool kMasked, bool kFirst>
HWY_NOINLINE void score_tile(const ScoreTile<T>& tile) {
  constexpr int kRows = kSoftmaxRows;
  constexpr int64_t kLane = kLanes<T>;
  const Tag<T> d;
  Vec<T> acc[kRows * kVectors];
  scores<T, kVectors>(tile, acc);
  T* HWY_RESTRICT weights = tile.weights;
  if constexpr (kFirst) {
    unroll<kRows * kVectors>([&](auto i) COSFORMER_LAMBDA {
      hn::Store(acc[i], d,
                weights + i / kVectors * kForwardKeys + i % kVectors * kLane);
    });
    set_references<T, kVectors>(tile);
    unroll<kRows * kVectors>([&](auto i) COSFORMER_LAMBDA {
      acc[i] = hn::Load(
          d, weights + i / kVectors * kForwardKeys + i % kVectors * kLane);
    });
  }
  Vec<T> sum[kRows];
  unroll<kRows>([&](auto r) COSFORMER_LAMBDA {
    uint64_t bits = 0;
    if constexpr (kMasked) bits = tile.bits_of(r);
    unroll<kVectors>([&](auto n) COSFORMER_LAMBDA {
      const Vec<T> x = acc[r * kVectors + n];
      Vec<T> p = weight_lanes<T>(x);
      if (tile.bias != nullptr) p = zero_where_far<T>(x, p);
      if constexpr (kMasked)
        p = hn::IfThenElseZero(lanes_of<T>(bits >> (n * kLane)), p);
      sum[r] = n == 0 ? p : hn::Add(sum[r], p);
      hn::Store(p, d, weights + r * kForwardKeys + n * kLane);
    });
  });
  // Weights are not negative: if all of them together are not too large, no
  // row is. What is NaN is not below, either.
  Vec<T> all = sum[0];
  unroll<kRows - 1>([&](auto r)
                        COSFORMER_LAMBDA { all = hn::Add(all, sum[r + 1]); });
  if (HWY_UNLIKELY(
          !hn::AllTrue(d, hn::Le(all, hn::Set(d, static_cast<T>(kLargeSum))))))
    return raise_rows<T, kVectors>(tile, kMasked);
  unroll<kRows>([&](auto r) COSFORMER_LAMBDA {
    T* at = tile.sums + r * kLane;
    hn::Store(hn::Add(sum[r], hn::Load(d, at)), d, at);
  });
}

// out[r] = or += sum_j weights[r][j] values[j], a panel of kVectors: values
// [keys][kVectors lanes].
template <typename T, int kVectors, bool kAdd>
HWY_NOINLINE void value_tile(const T* HWY_RESTRICT weights,
                             const T* HWY_RESTRICT values, int64_t keys,
                             T* HWY_RESTRICT out, int64_t out_stride) {
  constexpr int kRows = kSoftmaxRows;
  constexpr int64_t kLane = kLanes<T>, kWidth = kVectors * kLane;
  const Tag<T> d;
  Vec<T> acc[kRows * kVectors];
  unroll<kRows * kVectors>([&](auto i)
                               COSFORMER_LAMBDA { acc[i] = hn::Zero(d); });
  multiply_add<T, Along::kRow, kRows, kVectors>(weights, kForwardKeys, values,
                                                kWidth, keys, acc);
  unroll<kRows>([&](auto r) COSFORMER_LAMBDA {
    unroll<kVectors>([&](auto n) COSFORMER_LAMBDA {
      T* at = out + r * out_stride + n * kLane;
      Vec<T> x = acc[r * kVectors + n];
      if constexpr (kAdd) x = hn::Add(x, hn::Load(d, at));
      hn::Store(x, d, at);
    });
  });
}

// The same for one row where values hold a NaN or an infinity: only what bits
// tell is touched, in the same order, for the same result.
template <typename T>
HWY_NOINLINE void value_row(const T* HWY_RESTRICT weights, const TileBits& seen,
                            const T* HWY_RESTRICT values, int64_t width,
                            bool add, T* HWY_RESTRICT out) {
  const Tag<T> d;
  for (int64_t c = 0; c < width; c += kLanes<T>) {
    Vec<T> sum = hn::Zero(d);
    for (int64_t half = 0; half < 2; ++half) {
      for (uint64_t bits = seen.word[half]; bits != 0; bits &= bits - 1) {
        const int64_t j = half * 64 + std::countr_zero(bits);
        sum = hn::MulAdd(hn::Set(d, weights[j]),
                         hn::Load(d, values + j * width + c), sum);
      }
    }
    if (add) sum = hn::Add(sum, hn::Load(d, out + c));
    hn::Store(sum, d, out + c);
  }
}

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_TILE_INL_H_
