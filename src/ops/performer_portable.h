// Performer in tensor operations: any device that has float64, any floating
// dtype, differentiable any number of times. Serves devices without kernels,
// and the gradient of the backward operator.
#ifndef COSFORMER_OPS_PERFORMER_PORTABLE_H_
#define COSFORMER_OPS_PERFORMER_PORTABLE_H_

#include <vector>

#include "ops/performer_call.h"

namespace cosformer::ops {

// As the operator, without checks: autograd records what it does. d_out: what
// the caller will send back, where known. Features are formed in float64 with
// the maxima of all keys that a row's state and call hold, which is exact while
// these rise by less than some 500 over a sequence, and takes memory linear in
// it; beyond, every weight of a call is formed on its own, which takes memory
// q_len x kv_len x features.
PerformerOutputs portable_performer_attention(const PerformerCall& call,
                                              bool return_state,
                                              const OptionalTensor& d_out);

// Of it: dq, dk, dv, d_projection, d_kv_state, d_k_sum; undefined where nothing
// depends on the input. The call's tensors require gradients.
std::vector<at::Tensor> portable_performer_gradients(
    const PerformerCall& call, const OptionalTensor& d_out,
    const OptionalTensor& d_kv_state, const OptionalTensor& d_k_sum,
    bool create_graph);

}  // namespace cosformer::ops

#endif  // COSFORMER_OPS_PERFORMER_PORTABLE_H_
