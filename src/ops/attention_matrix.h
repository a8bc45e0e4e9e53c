// How the attention matrix of a kind is found: by attention to unit vectors.
#ifndef COSFORMER_OPS_ATTENTION_MATRIX_H_
#define COSFORMER_OPS_ATTENTION_MATRIX_H_

#include <ATen/core/Tensor.h>

namespace cosformer::ops {

// Unit vectors for the keys k [batch, kv_len, kv_heads, dim] to carry: [batch,
// kv_len, kv_heads, kv_len], without memory for each. Throws where the matrix
// would be too large to look at.
at::Tensor unit_values(const at::Tensor& q, const at::Tensor& k);
// What attention made of them, as [batch, heads, q_len, kv_len].
at::Tensor as_matrix(const at::Tensor& out);

}  // namespace cosformer::ops

#endif  // COSFORMER_OPS_ATTENTION_MATRIX_H_
