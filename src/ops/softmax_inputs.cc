#include "ops/softmax_inputs.h"

#include "ops/call_checks.h"

namespace cosformer::ops {

SoftmaxInputs::SoftmaxInputs(const SoftmaxCall& call, Content content) {
  call_.fill(attention_call("", call), content, inputs_);
  const bool all = content == Content::kAll;
  // A pointer that is never nullptr: an empty tensor is not an absent one.
  static const double somewhere = 0;
  const auto address = [all](const at::Tensor& tensor) -> const void* {
    return all && tensor.numel() > 0 ? tensor.const_data_ptr() : &somewhere;
  };
  if (call.global_mask) {
    global_mask_ = *call.global_mask;
    if (all) {
      inputs_.global_mask_stride =
          mask_view(*call.global_mask, global_mask_).stride;
    }
    inputs_.global_mask = static_cast<const uint8_t*>(address(global_mask_));
  }
  if (call.block_mask) {
    block_mask_ = all ? call.block_mask->contiguous() : *call.block_mask;
    inputs_.block_mask = static_cast<const uint8_t*>(address(block_mask_));
    inputs_.block_mask_heads = block_mask_.size(0);
    inputs_.q_blocks = block_mask_.size(1);
    inputs_.kv_blocks = block_mask_.size(2);
    inputs_.block_size = *call.block_size;
  }
  if (call.relative_bias) {
    relative_bias_ =
        all ? call.relative_bias->to(accumulation_dtype(call.q)).contiguous()
            : *call.relative_bias;
    inputs_.relative_bias = address(relative_bias_);
    inputs_.relative_reach = (relative_bias_.size(1) - 1) / 2;
  }
}

}  // namespace cosformer::ops
