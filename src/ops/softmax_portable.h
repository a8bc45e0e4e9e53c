// Softmax attention in tensor operations: any device, any floating dtype,
// differentiable any number of times. Quadratic: it serves devices without
// kernels, and the gradient of the backward operator. Without gradients memory
// is bounded (queries are taken in chunks).
#ifndef COSFORMER_OPS_SOFTMAX_PORTABLE_H_
#define COSFORMER_OPS_SOFTMAX_PORTABLE_H_

#include "ops/softmax_call.h"

namespace cosformer::ops {

// out, log_sum_exp (without graph). As the operator, without checks: autograd
// records what it does. Where something visible is not finite (or a gradient:
// d_out is what the caller will send back), products are formed pair by pair,
// so that none joins what does not see each other (0 x NaN); slower.
SoftmaxOutputs portable_softmax_attention(const SoftmaxCall& call,
                                          const OptionalTensor& d_out);

// The answers of a decoding step, over keys that stand at any positions.
struct PlacedKeys {
  at::Tensor keys;       // [rows, kv_len, kv_heads, head_dim]
  at::Tensor values;     // [rows, kv_len, kv_heads, value_dim]
  at::Tensor positions;  // int64 [rows, kv_len]
  at::Tensor mask;       // bool [rows, kv_len]
  // bool [rows, kv_len], and of the queries [rows, 1]; undefined = none.
  at::Tensor global, query_global;
};
at::Tensor portable_softmax_over(const SoftmaxCall& call,
                                 const at::Tensor& q_positions,
                                 const PlacedKeys& keys);

}  // namespace cosformer::ops

#endif  // COSFORMER_OPS_SOFTMAX_PORTABLE_H_
