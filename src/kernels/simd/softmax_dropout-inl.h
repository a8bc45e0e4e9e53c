// Which weights of a tile dropout keeps: softmax_dropout.h for 64 keys at a
// time.
#if defined(COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_DROPOUT_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_DROPOUT_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_DROPOUT_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_DROPOUT_INL_H_
#endif

#include <cstring>

#include "kernels/simd/softmax_plan.h"
#include "kernels/simd/tile-inl.h"
#include "kernels/softmax_dropout.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

// dropout_keeps_block, 16 counters in a vector or two.
HWY_INLINE uint64_t keeps_block(uint64_t key, uint32_t threshold,
                                int64_t query_position, int64_t block) {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
  constexpr int64_t kLane = kLanes<uint32_t>;
  const Tag<uint32_t> d;
  const hn::Repartition<uint64_t, Tag<uint32_t>> dw;
  using V = Vec<uint32_t>;
  struct Product {
    V high, low;
  };
  const auto multiply = [&](V x, uint32_t by) COSFORMER_LAMBDA {
    const V m = hn::Set(d, by);
    const auto even = hn::MulEven(x, m);
    const auto odd =
        hn::MulEven(hn::BitCast(d, hn::ShiftRight<32>(hn::BitCast(dw, x))), m);
    return Product{hn::OddEven(hn::BitCast(d, odd),
                               hn::BitCast(d, hn::ShiftRight<32>(even))),
                   hn::OddEven(hn::BitCast(d, hn::ShiftLeft<32>(odd)),
                               hn::BitCast(d, even))};
  };
  const uint64_t low = static_cast<uint64_t>(block) * 16;
  const uint64_t high = static_cast<uint64_t>(query_position);
  uint64_t keeps = 0;
  for (int64_t lane = 0; lane < 16; lane += kLane) {
    V c0 = hn::Add(hn::Iota(d, static_cast<uint32_t>(lane)),
                   hn::Set(d, static_cast<uint32_t>(low)));
    V c1 = hn::Set(d, static_cast<uint32_t>(low >> 32));
    V c2 = hn::Set(d, static_cast<uint32_t>(high));
    V c3 = hn::Set(d, static_cast<uint32_t>(high >> 32));
    uint32_t k0 = static_cast<uint32_t>(key);
    uint32_t k1 = static_cast<uint32_t>(key >> 32);
    for (int round = 0; round < 10; ++round) {
      const Product p0 = multiply(c0, 0xD2511F53);
      const Product p1 = multiply(c2, 0xCD9E8D57);
      c0 = hn::Xor(hn::Xor(p1.high, c1), hn::Set(d, k0));
      c1 = p1.low;
      c2 = hn::Xor(hn::Xor(p0.high, c3), hn::Set(d, k1));
      c3 = p0.low;
      k0 += 0x9E3779B9;
      k1 += 0xBB67AE85;
    }
    const V limit = hn::Set(d, threshold);
    const V words[4] = {c0, c1, c2, c3};
    unroll<4>([&](auto word) COSFORMER_LAMBDA {
      uint8_t bytes[8] = {};
      hn::StoreMaskBits(d, hn::Eq(hn::Max(words[word], limit), words[word]),
                        bytes);
      uint64_t bits;
      std::memcpy(&bits, bytes, 8);
      keeps |= bits << (word * 16 + lane);
    });
  }
  return keeps;
#else
  return dropout_keeps_block(key, threshold, query_position, block);
#endif
}

// Those of one row and query head.
class DropoutRows {
 public:
  DropoutRows(const SoftmaxCall& call, int64_t row, int64_t head)
      : key_(dropout_key(call.options.dropout_seed, row, head)),
        threshold_(dropout_threshold(call.options.dropout_p)) {}

  // Of a query at a position and keys [first, first + count) of a list, at most
  // a tile; kv_start: the position of key 0.
  TileBits keeps(int64_t query_position, const IndexList& keys, int64_t first,
                 int64_t count, int64_t kv_start) const {
    TileBits bits;
    if (keys.list == nullptr && keys.step == 1) {
      const int64_t position = kv_start + keys[first];
      const int64_t block = dropout_block(position);
      const int64_t skip = position - block * kDropoutKeys;
      for (int64_t b = 0; b * kDropoutKeys < skip + count; ++b) {
        // Its key 0 is element 64 b - skip of the tile.
        const uint64_t word =
            keeps_block(key_, threshold_, query_position, block + b);
        if (b > 0 && skip > 0) bits.word[b - 1] |= word << (64 - skip);
        if (b < 2) bits.word[b] |= word >> skip;
      }
      return bits;
    }
    int64_t block = 0;
    uint64_t word = 0;
    for (int64_t c = 0; c < count; ++c) {
      const int64_t position = kv_start + keys[first + c];
      if (c == 0 || dropout_block(position) != block) {
        block = dropout_block(position);
        word = keeps_block(key_, threshold_, query_position, block);
      }
      bits.word[c / 64] |= (word >> (position & 63) & 1) << (c % 64);
    }
    return bits;
  }

 private:
  uint64_t key_;
  uint32_t threshold_;
};

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_DROPOUT_INL_H_
