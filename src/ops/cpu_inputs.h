// Kernel inputs made of a linear attention call's tensors.
#ifndef COSFORMER_OPS_CPU_INPUTS_H_
#define COSFORMER_OPS_CPU_INPUTS_H_

#include "cosformer/kernels.h"
#include "ops/cpu_call.h"
#include "ops/linear_call.h"

namespace cosformer::ops {

// The inputs, and what has to live as long as they do. Precondition:
// check_linear_call(call).
class CpuInputs {
 public:
  explicit CpuInputs(const LinearCall& call, Content content = Content::kAll);
  CpuInputs(const CpuInputs&) = delete;
  CpuInputs& operator=(const CpuInputs&) = delete;

  const LinearAttentionInputs& inputs() const { return inputs_; }
  int64_t rows() const { return call_.rows(); }

 private:
  CpuCall call_;
  LinearAttentionInputs inputs_;
  at::Tensor kv_state_, k_sum_;
  Integers state_start_, state_position_;
};

}  // namespace cosformer::ops

#endif  // COSFORMER_OPS_CPU_INPUTS_H_
