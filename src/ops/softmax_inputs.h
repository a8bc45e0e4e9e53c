// Kernel inputs made of a softmax attention call's tensors.
#ifndef COSFORMER_OPS_SOFTMAX_INPUTS_H_
#define COSFORMER_OPS_SOFTMAX_INPUTS_H_

#include "cosformer/kernels.h"
#include "ops/cpu_call.h"
#include "ops/softmax_call.h"

namespace cosformer::ops {

// The inputs, and what has to live as long as they do. Precondition:
// check_softmax_call(call).
class SoftmaxInputs {
 public:
  explicit SoftmaxInputs(const SoftmaxCall& call,
                         Content content = Content::kAll);
  SoftmaxInputs(const SoftmaxInputs&) = delete;
  SoftmaxInputs& operator=(const SoftmaxInputs&) = delete;

  const SoftmaxAttentionInputs& inputs() const { return inputs_; }

 private:
  CpuCall call_;
  SoftmaxAttentionInputs inputs_;
  at::Tensor global_mask_, block_mask_, relative_bias_;
};

}  // namespace cosformer::ops

#endif  // COSFORMER_OPS_SOFTMAX_INPUTS_H_
