// BigBird's block mask: made once for a number of blocks, and looked at.
#include "nn/attention_parts.h"
#include "nn/starts.h"

namespace cosformer {
namespace {

// Masks beyond these are made anew: lengths vary without end, memory does not.
constexpr size_t kMostMasks = 16;

int64_t end_of(const std::optional<torch::Tensor>& start, int64_t count) {
  if (!start || start->numel() == 0) return count;
  return start->max().item<int64_t>() + count;
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
// random ones are drawn among all): packed sequences go one by one, unless
// causal, where it grows without change.
torch::Tensor AttentionImpl::bigbird_forward(const Heads& heads,
                                             SoftmaxAttentionArgs args) const {
  args.block_size = options_.block_size;
  const auto run = [&](const torch::Tensor& q, const torch::Tensor& k,
                       const torch::Tensor& v, int64_t positions) {
    args.block_mask = blocks_for(positions, q.device());
    return softmax_attention(q, k, v, args);
  };
  const int64_t q_len = heads.q.size(1), kv_len = heads.k.size(1);
  if (!args.cu_seqlens_q) {
    return run(
        heads.q, heads.k, heads.v,
        std::max(end_of(args.q_start, q_len), end_of(args.kv_start, kv_len)));
  }
  const auto of_q = checked_offsets(*args.cu_seqlens_q, q_len, "cu_seqlens_q");
  const auto of_k = checked_offsets(
      args.cu_seqlens_k.value_or(*args.cu_seqlens_q), kv_len,
      args.cu_seqlens_k ? "cu_seqlens_k" : "cu_seqlens_q (for keys)");
  TORCH_CHECK(of_q.size() == of_k.size(), "attention: cu_seqlens_q has ",
              of_q.size() - 1, " sequences, cu_seqlens_k has ",
              of_k.size() - 1);
  const size_t sequences = of_q.size() - 1;
  if (options_.is_causal) {
    int64_t longest = 0;
    for (size_t i = 0; i < sequences; ++i) {
      longest =
          std::max({longest, of_q[i + 1] - of_q[i], of_k[i + 1] - of_k[i]});
    }
    return run(heads.q, heads.k, heads.v,
               std::max(end_of(args.q_start, longest),
                        end_of(args.kv_start, longest)));
  }
  const SoftmaxAttentionArgs packed = args;
  args.cu_seqlens_q.reset();
  args.cu_seqlens_k.reset();
  std::vector<torch::Tensor> parts;
  const auto start_of = [](const std::optional<torch::Tensor>& starts,
                           size_t i) -> std::optional<torch::Tensor> {
    if (!starts || starts->dim() == 0) return starts;
    return starts->narrow(0, static_cast<int64_t>(i), 1);
  };
  for (size_t i = 0; i < sequences; ++i) {
    const int64_t q_count = of_q[i + 1] - of_q[i];
    const int64_t k_count = of_k[i + 1] - of_k[i];
    if (q_count == 0) continue;
    args.q_start = start_of(packed.q_start, i);
    args.kv_start = start_of(packed.kv_start, i);
    if (packed.dropout_seed) {  // each call counts its rows from 0
      args.dropout_seed = *packed.dropout_seed ^ static_cast<int64_t>(i);
    }
    parts.push_back(run(heads.q.narrow(1, of_q[i], q_count),
                        heads.k.narrow(1, of_k[i], k_count),
                        heads.v.narrow(1, of_k[i], k_count),
                        std::max(end_of(args.q_start, q_count),
                                 end_of(args.kv_start, k_count))));
  }
  if (parts.empty()) {
    return heads.q.new_zeros({1, 0, heads.q.size(2), heads.v.size(3)});
  }
  return torch::cat(parts, 1);
}

}  // namespace cosformer
