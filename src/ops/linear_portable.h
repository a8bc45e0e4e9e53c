// Linear attention in tensor operations: any device, any floating dtype,
// differentiable any number of times, memory linear in the sequence. Serves
// devices without kernels, and the gradient of the backward operator.
#ifndef COSFORMER_OPS_LINEAR_PORTABLE_H_
#define COSFORMER_OPS_LINEAR_PORTABLE_H_

#include "ops/linear_call.h"

namespace cosformer::ops {

// As the operator, without checks: autograd records what it does.
// elementwise: no product may join an element with one that it does not see
// (0 x NaN); for non-finite inputs, slower.
ForwardOutputs portable_linear_attention(const LinearCall& call,
                                         bool return_state, bool elementwise);

// Whether products over what is invisible would be harmless.
bool all_finite(std::initializer_list<const at::Tensor*> tensors);

}  // namespace cosformer::ops

#endif  // COSFORMER_OPS_LINEAR_PORTABLE_H_
