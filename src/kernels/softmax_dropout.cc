#include "kernels/softmax_dropout.h"

#include "cosformer/kernels.h"

namespace cosformer {

bool softmax_dropout_keeps(double dropout_p, uint64_t seed, int64_t row,
                           int64_t head, int64_t query_position,
                           int64_t key_position) {
  const int64_t block = dropout_block(key_position);
  const int64_t r = key_position - block * kDropoutKeys;
  const std::array<uint32_t, 4> numbers = philox(
      dropout_key(seed, row, head), static_cast<uint64_t>(query_position),
      static_cast<uint64_t>(block * 16 + r % 16));
  return numbers[static_cast<size_t>(r / 16)] >= dropout_threshold(dropout_p);
}

}  // namespace cosformer
