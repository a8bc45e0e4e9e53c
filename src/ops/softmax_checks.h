// What a softmax attention call must satisfy whatever the device, and its
// options as the kernels have them.
#ifndef COSFORMER_OPS_SOFTMAX_CHECKS_H_
#define COSFORMER_OPS_SOFTMAX_CHECKS_H_

#include "cosformer/kernels.h"
#include "ops/softmax_call.h"

namespace cosformer::ops {

// Throw; values of tensors are not looked at.
void check_softmax_call(const SoftmaxCall& call);
void check_softmax_gradients(const SoftmaxGradients& gradients,
                             const SoftmaxCall& call);
void check_softmax_decode(const SoftmaxDecodeCall& call);

// Reads the seed.
SoftmaxAttentionOptions kernel_options(const SoftmaxCall& call);

}  // namespace cosformer::ops

#endif  // COSFORMER_OPS_SOFTMAX_CHECKS_H_
