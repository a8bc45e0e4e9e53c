// The kinds over softmax attention, made of its operator and of torch's own:
// operators without kernels or gradients of their own, so that Python and C++
// share them.
#ifndef COSFORMER_OPS_SOFTMAX_KINDS_H_
#define COSFORMER_OPS_SOFTMAX_KINDS_H_

#include <functional>

#include "ops/softmax_call.h"

namespace cosformer::ops {

// call: scale, dropout, key_mask and query_mask; the rest unset.
at::Tensor linformer(const SoftmaxCall& call, const at::Tensor& key_len_proj,
                     const at::Tensor& value_len_proj);

// call.global_mask is set; block_mask is not.
at::Tensor longformer(const SoftmaxCall& call, const at::Tensor& q_global,
                      const at::Tensor& k_global, const at::Tensor& v_global);

struct BigBirdPattern {
  int64_t num_random_blocks, window_blocks;
  int64_t first_global_blocks, last_global_blocks;
  int64_t seed;
};
// call.block_size is set; window, global_mask and block_mask are not.
at::Tensor bigbird(const SoftmaxCall& call, const BigBirdPattern& pattern);

// bool [num_heads, num_blocks, num_blocks]; device none = CPU.
using BlockMaskSignature = at::Tensor(int64_t num_heads, int64_t num_blocks,
                                      int64_t num_random_blocks,
                                      int64_t window_blocks,
                                      int64_t first_global_blocks,
                                      int64_t last_global_blocks,
                                      bool is_causal, int64_t seed,
                                      std::optional<at::Device> device);
BlockMaskSignature call_block_mask;
BlockMaskSignature block_mask_cpu;
BlockMaskSignature block_mask_meta;
// Chooses by the device: the operator has no tensor that would tell.
BlockMaskSignature block_mask_select;

at::Tensor t5_bias(const at::Tensor& weight, bool bidirectional,
                   int64_t max_distance);

// One call a sequence of a packed call, each as a batch of one; the results in
// a row. A sequence's dropout has a seed of its own.
at::Tensor for_each_sequence(
    const SoftmaxCall& call,
    const std::function<at::Tensor(const SoftmaxCall&, int64_t q_begin,
                                   int64_t q_end, int64_t kv_begin,
                                   int64_t kv_end)>& one);

}  // namespace cosformer::ops

#endif  // COSFORMER_OPS_SOFTMAX_KINDS_H_
