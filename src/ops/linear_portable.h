// Linear attention in tensor operations: any device, any floating dtype,
// differentiable any number of times, memory linear in the sequence. Serves
// devices without kernels, and the gradient of the backward operator.
#ifndef COSFORMER_OPS_LINEAR_PORTABLE_H_
#define COSFORMER_OPS_LINEAR_PORTABLE_H_

#include "ops/linear_call.h"

namespace cosformer::ops {

// As the operator, without checks: autograd records what it does. Where a
// causal call has visible elements that are not finite (or gradients: d_out is
// what the caller will send back), chunks shrink to one element, so that no
// product joins what does not see each other (0 x NaN); slower, and the last
// bits of other rows may differ.
ForwardOutputs portable_linear_attention(const LinearCall& call,
                                         bool return_state,
                                         const OptionalTensor& d_out);

}  // namespace cosformer::ops

#endif  // COSFORMER_OPS_LINEAR_PORTABLE_H_
