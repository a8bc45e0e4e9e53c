// BigBird's block mask: made once for a number of blocks, and looked at.
#include <algorithm>
#include <utility>

#include "nn/attention_parts.h"

namespace cosformer {
namespace {

// Masks beyond these are made anew: lengths vary without end, memory does not.
constexpr size_t kMostMasks = 16;

int64_t end_of(const std::optional<torch::Tensor>& start, int64_t count) {
  if (!start || start->numel() == 0) return count;
  return start->max().item<int64_t>() + count;
}

// Tokens of the longest sequence.
int64_t longest_of(const torch::Tensor& x,
                   const std::optional<torch::Tensor>& cu_seqlens) {
  if (!cu_seqlens) return x.size(1);
  return cu_seqlens->numel() > 1 ? cu_seqlens->diff().max().item<int64_t>() : 0;
}

}  // namespace

torch::Tensor AttentionImpl::block_mask(int64_t blocks) const {
  const AttentionOptions& o = options_;
  TORCH_CHECK(block_masks_,
              "attention: block_mask belongs to kind \"bigbird\", found \"",
              o.kind, "\"");
  const std::lock_guard<std::mutex> lock(block_masks_->mutex);
  auto& masks = block_masks_->by_blocks;
  torch::Tensor& mask = masks[blocks];
  if (!mask.defined()) {
    mask = bigbird_block_mask(o.num_heads, blocks, o.num_random_blocks,
                              o.window_blocks,
                              {o.first_global_blocks, o.last_global_blocks},
                              o.is_causal, o.block_seed);
  }
  const torch::Tensor found = mask;
  if (masks.size() > kMostMasks) masks.erase(masks.begin());
  return found;
}

torch::Tensor AttentionImpl::blocks_for(int64_t positions,
                                        at::Device device) const {
  const int64_t size = options_.block_size;
  int64_t blocks = std::max<int64_t>((positions + size - 1) / size, 1);
  if (options_.is_causal) {
    // A row of blocks does not change as a sequence grows.
    int64_t enough = 1;
    while (enough < blocks) enough *= 2;
    blocks = enough;
  }
  return block_mask(blocks).to(device);
}

// The pattern belongs to a sequence of its length (the last blocks are global,
// random ones are drawn among all): packed sequences have one each, unless
// causal, where it grows without change.
torch::Tensor AttentionImpl::bigbird_forward(const Heads& heads,
                                             SoftmaxAttentionArgs args) const {
  const AttentionOptions& o = options_;
  if (args.cu_seqlens_q && !o.is_causal) {
    BigBirdAttentionArgs packed;
    packed.block_size = o.block_size;
    packed.num_random_blocks = o.num_random_blocks;
    packed.window_blocks = o.window_blocks;
    packed.global_blocks = {o.first_global_blocks, o.last_global_blocks};
    packed.seed = o.block_seed;
    packed.softmax = std::move(args);
    return bigbird_attention(heads.q, heads.k, heads.v, packed);
  }
  const int64_t q_len = longest_of(heads.q, args.cu_seqlens_q);
  const int64_t kv_len = longest_of(
      heads.k, args.cu_seqlens_k ? args.cu_seqlens_k : args.cu_seqlens_q);
  const int64_t positions =
      std::max(end_of(args.q_start, q_len), end_of(args.kv_start, kv_len));
  args.block_size = o.block_size;
  args.block_mask = blocks_for(positions, heads.q.device());
  return softmax_attention(heads.q, heads.k, heads.v, args);
}

}  // namespace cosformer
