// The public C++ functions of the softmax kinds.
#include <ATen/ops/scalar_tensor.h>

#include "cosformer/ops.h"
#include "ops/errors.h"
#include "ops/softmax_kinds.h"

namespace cosformer {
namespace {

using ops::OptionalTensor;
using ops::SoftmaxCall;

OptionalTensor seed_tensor(const std::optional<int64_t>& seed,
                           const at::Tensor& q) {
  if (!seed) return std::nullopt;
  return at::scalar_tensor(
      *seed, at::TensorOptions().dtype(at::kLong).device(q.device()));
}

// What a call refers to besides the tensors of the caller.
class HeldCall {
 public:
  HeldCall(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
           const SoftmaxAttentionArgs& args)
      : q_(q),
        k_(k),
        v_(v),
        args_(args),
        seed_(seed_tensor(args.dropout_seed, q)) {}

  SoftmaxCall get(std::optional<int64_t> block_size) const {
    std::optional<int64_t> left, right;
    if (args_.window) {
      left = args_.window->first;
      right = args_.window->second;
    }
    return {q_,
            k_,
            v_,
            args_.q_start,
            args_.kv_start,
            args_.key_mask,
            args_.query_mask,
            args_.cu_seqlens_q,
            args_.cu_seqlens_k,
            args_.global_mask,
            args_.block_mask,
            args_.relative_bias,
            seed_,
            args_.is_causal,
            args_.scale,
            left,
            right,
            args_.dilation,
            block_size,
            args_.dropout_p};
  }
  SoftmaxCall get() const { return get(args_.block_size); }

 private:
  const at::Tensor &q_, &k_, &v_;
  const SoftmaxAttentionArgs& args_;
  OptionalTensor seed_;
};

}  // namespace

at::Tensor softmax_attention(const at::Tensor& q, const at::Tensor& k,
                             const at::Tensor& v,
                             const SoftmaxAttentionArgs& args) {
  return std::get<0>(ops::call_softmax(HeldCall(q, k, v, args).get(), false));
}

at::Tensor softmax_attention_decode_step_(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    at::Tensor& keys, at::Tensor& values, at::Tensor& position,
    const OptionalTensor& start, const OptionalTensor& cache_mask, bool is_ring,
    const SoftmaxAttentionArgs& args) {
  if (args.q_start || args.kv_start || args.cu_seqlens_q || args.cu_seqlens_k ||
      args.key_mask || args.is_causal || args.dropout_p != 0) {
    ops::fail(
        "softmax_attention_decode_step_: starts, packing, key_mask, is_causal "
        "and dropout_p must be unset: the cache gives the positions and has a "
        "mask of its own (cache_mask), and nothing later is in it");
  }
  std::optional<int64_t> left, right;
  if (args.window) {
    left = args.window->first;
    right = args.window->second;
  }
  return ops::call_softmax_decode(
      {q, k, v, keys, values, position, start, cache_mask, args.query_mask,
       args.global_mask, args.block_mask, args.relative_bias, is_ring,
       args.scale, left, right, args.dilation, args.block_size});
}

at::Tensor linformer_attention(const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& v,
                               const at::Tensor& key_len_proj,
                               const at::Tensor& value_len_proj,
                               const LinformerAttentionArgs& args) {
  SoftmaxAttentionArgs softmax;
  softmax.scale = args.scale;
  softmax.dropout_p = args.dropout_p;
  softmax.dropout_seed = args.dropout_seed;
  softmax.key_mask = args.key_mask;
  softmax.query_mask = args.query_mask;
  return ops::linformer(HeldCall(q, k, v, softmax).get(), key_len_proj,
                        value_len_proj);
}

at::Tensor longformer_attention(const at::Tensor& q, const at::Tensor& k,
                                const at::Tensor& v, const at::Tensor& q_global,
                                const at::Tensor& k_global,
                                const at::Tensor& v_global,
                                const SoftmaxAttentionArgs& args) {
  return ops::longformer(HeldCall(q, k, v, args).get(), q_global, k_global,
                         v_global);
}

at::Tensor bigbird_block_mask(int64_t num_heads, int64_t num_blocks,
                              int64_t num_random_blocks, int64_t window_blocks,
                              std::pair<int64_t, int64_t> global_blocks,
                              bool is_causal, int64_t seed) {
  return ops::call_block_mask(
      num_heads, num_blocks, num_random_blocks, window_blocks,
      global_blocks.first, global_blocks.second, is_causal, seed, std::nullopt);
}

at::Tensor bigbird_attention(const at::Tensor& q, const at::Tensor& k,
                             const at::Tensor& v,
                             const BigBirdAttentionArgs& args) {
  if (args.softmax.block_size && *args.softmax.block_size != args.block_size) {
    ops::fail("bigbird_attention: block_size is ", args.block_size,
              ", softmax.block_size is ", *args.softmax.block_size,
              ": leave the latter unset");
  }
  return ops::bigbird(
      HeldCall(q, k, v, args.softmax).get(args.block_size),
      {args.num_random_blocks, args.window_blocks, args.global_blocks.first,
       args.global_blocks.second, args.seed});
}

at::Tensor t5_relative_bias(const at::Tensor& weight, bool bidirectional,
                            int64_t max_distance) {
  return ops::t5_bias(weight, bidirectional, max_distance);
}

}  // namespace cosformer
