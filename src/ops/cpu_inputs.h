// Kernel inputs made of a call's CPU tensors.
#ifndef COSFORMER_OPS_CPU_INPUTS_H_
#define COSFORMER_OPS_CPU_INPUTS_H_

#include <c10/util/SmallVector.h>

#include "cosformer/kernels.h"
#include "ops/linear_call.h"
#include "ops/views.h"

namespace cosformer::ops {

// The inputs, and what has to live as long as they do. Precondition:
// check_linear_call(call).
class CpuInputs {
 public:
  // kValuesOnly: for check_linear_attention on any device, with addresses that
  // are not to be followed; small integer tensors are copied to the host.
  enum Content { kAll, kValuesOnly };
  explicit CpuInputs(const LinearCall& call, Content content = kAll);
  CpuInputs(const CpuInputs&) = delete;
  CpuInputs& operator=(const CpuInputs&) = delete;

  const LinearAttentionInputs& inputs() const { return inputs_; }
  int64_t rows() const { return rows_; }

 private:
  using Integers = c10::SmallVector<int64_t, 8>;

  // A 0-dim tensor is repeated for every row; never nullptr, which would mean
  // that nothing is given.
  const int64_t* integers(const at::Tensor& tensor, Integers& buffer) const;
  void set_tensors(const LinearCall& call);
  void set_placeholders(const LinearCall& call);

  LinearAttentionInputs inputs_;
  int64_t rows_ = 0;
  at::Tensor q_, k_, v_, key_mask_, query_mask_, kv_state_, k_sum_;
  Integers q_start_, kv_start_, cu_seqlens_q_, cu_seqlens_k_, state_start_,
      state_position_;
};

}  // namespace cosformer::ops

#endif  // COSFORMER_OPS_CPU_INPUTS_H_
