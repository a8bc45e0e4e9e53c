// The one-token step of softmax attention on CPU tensors.
#include "ops/softmax_call.h"

namespace cosformer::ops {

at::Tensor softmax_decode_cpu(const SoftmaxDecodeCall& call) {
  return softmax_decode_portable(call);
}

}  // namespace cosformer::ops
