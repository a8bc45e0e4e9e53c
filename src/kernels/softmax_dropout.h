// Which weights dropout keeps: from the numbers of Philox alone, laid out so
// that vector kernels make them for 64 keys at a time.
//
// The generator's key is drawn from (seed, row, head). The counter of (query
// position, key position) is, with b = floor(key position / 64) and
// r = key position - 64 b:
//   high word: the query position
//   low word:  16 b + r mod 16
// and its output word r / 16 is the number that is compared with the
// threshold. So 16 counters in a row, one a lane, give in each of their four
// words 16 keys in a row.
#ifndef COSFORMER_SRC_KERNELS_SOFTMAX_DROPOUT_H_
#define COSFORMER_SRC_KERNELS_SOFTMAX_DROPOUT_H_

#include <array>
#include <cmath>
#include <cstdint>

#include "cosformer/base.h"

namespace cosformer {

inline constexpr int64_t kDropoutKeys = 64;  // of a block of keys

// floor(key position / kDropoutKeys).
inline int64_t dropout_block(int64_t key_position) { return key_position >> 6; }

// A weight stays where its number is not below this: dropout_p x 2^32.
inline uint32_t dropout_threshold(double dropout_p) {
  const double threshold = std::nearbyint(std::ldexp(dropout_p, 32));
  return threshold >= 0x1p32 - 1 ? ~uint32_t{0}
                                 : static_cast<uint32_t>(threshold);
}

// The generator's key for the weights of one row and query head.
inline uint64_t dropout_key(uint64_t seed, int64_t row, int64_t head) {
  const std::array<uint32_t, 4> r =
      philox(seed, static_cast<uint64_t>(row), static_cast<uint64_t>(head));
  return (uint64_t{r[1]} << 32) | r[0];
}

// Bit r: whether the weight of the key at position 64 block + r stays.
inline uint64_t dropout_keeps_block(uint64_t key, uint32_t threshold,
                                    int64_t query_position, int64_t block) {
  uint64_t keeps = 0;
  for (int64_t lane = 0; lane < 16; ++lane) {
    const std::array<uint32_t, 4> numbers =
        philox(key, static_cast<uint64_t>(query_position),
               static_cast<uint64_t>(block * 16 + lane));
    for (int64_t word = 0; word < 4; ++word) {
      const bool stays = numbers[static_cast<size_t>(word)] >= threshold;
      keeps |= uint64_t{stays} << (word * 16 + lane);
    }
  }
  return keeps;
}

}  // namespace cosformer

#endif  // COSFORMER_SRC_KERNELS_SOFTMAX_DROPOUT_H_
