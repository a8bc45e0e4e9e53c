// Layers as torch modules: attention kinds behind one call, positions, norms,
// feed-forward, blocks.
#ifndef COSFORMER_NN_H_
#define COSFORMER_NN_H_

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "cosformer/ops.h"

namespace cosformer {

// Keys and values seen so far: grows with the sequence (the contrast to
// LinearState). keys, values: [batch, seen, kv_heads, dim].
struct KvCache {
  torch::Tensor keys, values;
  KvCache clone() const;
  KvCache detach() const;
  KvCache select(const torch::Tensor& rows) const;
};
// Of one attention layer: nothing yet, constant size, or a cache.
using AttentionState = std::variant<std::monostate, LinearState, KvCache>;

}  // namespace cosformer

#endif  // COSFORMER_NN_H_
