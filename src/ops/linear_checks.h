// What a linear attention call must satisfy whatever the device: shapes,
// dtypes, options. Shared by every implementation, so C++, Python, eager and
// compiled code give the same errors.
#ifndef COSFORMER_OPS_LINEAR_CHECKS_H_
#define COSFORMER_OPS_LINEAR_CHECKS_H_

#include <c10/core/SymInt.h>

#include "cosformer/kernels.h"
#include "ops/call_checks.h"
#include "ops/linear_call.h"

namespace cosformer::ops {

// Throws; values of tensors are not looked at.
void check_linear_call(const LinearCall& call);
// A state of any kind on the linear engine, or none of it.
void check_state_tensors(const AttentionCall& call,
                         const OptionalTensor& kv_state,
                         const OptionalTensor& k_sum,
                         const OptionalTensor& start,
                         const OptionalTensor& position,
                         const c10::SymInt& features);
void check_state_spec(const LinearCall& call, const StateSpec& spec);
// Shapes and dtypes of what only the backward takes.
void check_gradients(const LinearGradients& gradients, const LinearCall& call);

// float64 for float64 inputs, else float32: of states and denominators.
at::ScalarType accumulation_dtype(const LinearCall& call);
// Batch rows, or packed sequences.
c10::SymInt num_rows(const LinearCall& call);
// 2 head_dim with the cosine, head_dim without.
c10::SymInt num_features(const LinearCall& call);

LinearAttentionOptions kernel_options(const LinearCall& call);

}  // namespace cosformer::ops

#endif  // COSFORMER_OPS_LINEAR_CHECKS_H_
