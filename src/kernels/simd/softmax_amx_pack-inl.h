// Packing of keys and values for AMX tiles: widened and laid out as the
// vectors' kernels have them, then split into terms.
#if defined(COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_AMX_PACK_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_AMX_PACK_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_AMX_PACK_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_AMX_PACK_INL_H_
#endif

#include <algorithm>
#include <cmath>

#include "kernels/simd/softmax_amx_tile-inl.h"
#include "kernels/simd/softmax_pack-inl.h"
#include "kernels/simd/softmax_packed-inl.h"

#if HWY_TARGET == HWY_AVX3  // machines with AMX have it

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

template <int kTerms>
class AmxTilePacker {
 public:
  AmxTilePacker(const SoftmaxCall& call, const AmxShape& shape,
                Carver<float>& carver)
      : call_(call), shape_(shape) {
    keys_ = carver.take(across_size<float>(kForwardKeys, call_.dim));
    values_ = carver.take(kForwardKeys * row_length<float>(call_.value_dim));
    memory_ = carver.take(kLanes<float> * row_length<float>(call_.dim));
  }

  // Elements [first, first + count) of a list, those of `real`: the others are
  // zeros. k, v: the rows of the head.
  void pack(const HeadRows& k, const HeadRows& v, const IndexList& list,
            int64_t first, int64_t count, const TileBits& real,
            const PackedTile<float>& tile) {
    widen(k, v, list, first, count, real);
    note_strange(tile);
    split_keys(tile);
    split_values(tile);
  }

  // What is noted of a packed tile.
  AmxShape::Note& note_of(const PackedTile<float>& tile) const {
    return *reinterpret_cast<AmxShape::Note*>(
        reinterpret_cast<char*>(tile.values) + shape_.value_bytes -
        AmxShape::kNoteBytes);
  }

 private:
  // The tile's keys and values as they are.
  void widen(const HeadRows& k, const HeadRows& v, const IndexList& list,
             int64_t first, int64_t count, const TileBits& real) {
    pack_across<float>(k, list, first, count, real, call_.dim, keys_, memory_);
    const int64_t length = row_length<float>(call_.value_dim);
    pack_by_columns<float>(v, list, first, count, real, call_.value_dim,
                           values_);
    // What they leave out up to a whole tile.
    const Tag<float> d;
    for (int64_t j = round_up(count, kTileStep<float>); j < kForwardKeys;
         j += kLanes<float>)
      for (int64_t c = 0; c < call_.dim; ++c)
        hn::Store(hn::Zero(d), d, keys_ + c * kPanel<float> + j);
    for (int64_t c = 0; c < length; c += kPanel<float>) {
      const int64_t width = std::min(kPanel<float>, length - c);
      const int64_t j = round_up(count, kTileStep<float>);
      zero_row(values_ + c * kForwardKeys + j * width,
               (kForwardKeys - j) * width);
    }
  }

  // Which keys cannot be split, or have values that cannot; these become
  // zeros.
  void note_strange(const PackedTile<float>& tile) {
    const Tag<float> d;
    const int64_t length = row_length<float>(call_.value_dim);
    AmxShape::Note& note = note_of(tile);
    note = {};
    if (!can_split(keys_, call_.dim * kPanel<float>)) {
      for (int64_t j = 0; j < kForwardKeys; ++j)
        for (int64_t c = 0; c < call_.dim; ++c)
          if (!(std::abs(keys_[c * kPanel<float> + j]) <= kLargestSplit))
            note.strange_keys |= uint64_t{1} << j;
    }
    if (can_split(values_, length * kForwardKeys)) return;
    for (int64_t j = 0; j < kForwardKeys; ++j) {
      bool strange = false;
      const auto parts = [&](auto&& each) {
        for (int64_t c = 0; c < length; c += kPanel<float>) {
          const int64_t width = std::min(kPanel<float>, length - c);
          each(values_ + c * kForwardKeys + j * width, width);
        }
      };
      parts([&](float* row, int64_t width) {
        strange |= !can_split(row, width);
      });
      if (!strange) continue;
      note.strange_values |= uint64_t{1} << j;
      parts([](float* row, int64_t width) { zero_row(row, width); });
    }
  }

  void split_keys(const PackedTile<float>& tile) {
    static_assert(kPanel<float> == kForwardKeys);
    const Tag<float> d;
    const hn::RebindToUnsigned<Tag<float>> du;
    const auto load = [&](int64_t c, int64_t j) COSFORMER_LAMBDA {
      return c < call_.dim ? hn::Load(d, keys_ + c * kPanel<float> + j)
                           : hn::Zero(d);
    };
    char* to = reinterpret_cast<char*>(tile.keys);
    for (int64_t j = 0; j < kForwardKeys; j += kTileRows) {
      for (int64_t s = 0; s < shape_.steps; ++s, to += kTerms * kTileBytes) {
        for (int64_t p = 0; p < kTileRows; ++p) {
          const int64_t c = s * kTileDepth + p;
          split_nearest<kTerms>(
              load(c, j), load(c + kTileRows, j),
              [&](auto term, Bits pairs) COSFORMER_LAMBDA {
                hn::Store(pairs, du,
                          reinterpret_cast<uint32_t*>(to + term * kTileBytes +
                                                      p * kTileRowBytes));
              });
        }
      }
    }
  }

  void split_values(const PackedTile<float>& tile) {
    const Tag<float> d;
    const hn::RebindToUnsigned<Tag<float>> du;
    const int64_t length = row_length<float>(call_.value_dim);
    const auto load = [&](int64_t j, int64_t c) COSFORMER_LAMBDA {
      if (c >= length) return Vec<float>(hn::Zero(d));
      const int64_t panel = c / kPanel<float> * kPanel<float>;
      const int64_t width = std::min(kPanel<float>, length - panel);
      return Vec<float>(
          hn::Load(d, values_ + panel * kForwardKeys + j * width + c - panel));
    };
    char* to = reinterpret_cast<char*>(tile.values);
    for (int64_t j = 0; j < kForwardKeys; j += kCell) {
      for (int64_t c = 0; c < shape_.width;
           c += kTileRows, to += kTerms * kTileBytes) {
        for (int64_t p = 0; p < kTileRows; ++p) {
          split_nearest<kTerms>(
              load(j + p, c), load(j + kTileRows + p, c),
              [&](auto term, Bits pairs) COSFORMER_LAMBDA {
                hn::Store(pairs, du,
                          reinterpret_cast<uint32_t*>(to + term * kTileBytes +
                                                      p * kTileRowBytes));
              });
        }
      }
    }
  }

  const SoftmaxCall& call_;
  const AmxShape& shape_;
  float *keys_, *values_;  // of a tile, in float
  float* memory_;
};

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HWY_TARGET == HWY_AVX3

#endif  // COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_AMX_PACK_INL_H_
