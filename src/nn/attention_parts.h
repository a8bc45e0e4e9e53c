// What the files of the attention layer share.
#ifndef COSFORMER_SRC_NN_ATTENTION_PARTS_H_
#define COSFORMER_SRC_NN_ATTENTION_PARTS_H_

#include <map>
#include <mutex>

#include "cosformer/nn.h"

namespace cosformer {

struct AttentionImpl::Heads {
  torch::Tensor q, k, v;  // [batch, seq, heads, dim]
};

// BigBird's masks by number of blocks, on the CPU or wherever they were used
// last.
struct AttentionImpl::BlockMasks {
  std::mutex mutex;
  std::map<int64_t, torch::Tensor> by_blocks;
};

// [batch, seq, heads * dim] -> [batch, seq, heads, dim]
inline torch::Tensor split_heads(const torch::Tensor& x, int64_t heads) {
  return x.view({x.size(0), x.size(1), heads, x.size(2) / heads});
}

// The state of a kind of constant size; none = nothing seen. Throws c10::Error
// for a KvCache.
std::optional<LinearState> linear_state_of(const AttentionState& state,
                                           const std::string& kind);

}  // namespace cosformer

#endif  // COSFORMER_SRC_NN_ATTENTION_PARTS_H_
