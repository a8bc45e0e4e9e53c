// CPU tensors as the kernels' views.
#ifndef COSFORMER_OPS_VIEWS_H_
#define COSFORMER_OPS_VIEWS_H_

#include <ATen/core/Tensor.h>

#include "cosformer/base.h"
#include "ops/errors.h"

namespace cosformer::ops {

inline DType dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kHalf:
      return DType::kFloat16;
    default:
      fail("cosformer: dtype ", tensor.scalar_type(),
           " has no CPU kernel, expected float32, float64, bfloat16 or "
           "float16");
  }
}

// The tensor itself if its last dimension is contiguous, else a copy, kept
// alive by holder.
inline const at::Tensor& dense_rows(const at::Tensor& tensor,
                                    at::Tensor& holder) {
  if (tensor.size(3) <= 1 || tensor.stride(3) == 1) return tensor;
  holder = tensor.contiguous();
  return holder;
}

// Precondition: four dimensions, the last one contiguous.
inline ConstView4 view(const at::Tensor& tensor) {
  ConstView4 result;
  result.data = tensor.const_data_ptr();
  result.dtype = dtype_of(tensor);
  for (int i = 0; i < 4; ++i) {
    result.size[i] = tensor.size(i);
    result.stride[i] = tensor.stride(i);
  }
  result.stride[3] = 1;
  return result;
}
inline View4 mutable_view(const at::Tensor& tensor) {
  const ConstView4 from = view(tensor);
  return {tensor.mutable_data_ptr(), from.dtype, from.size, from.stride};
}

}  // namespace cosformer::ops

#endif  // COSFORMER_OPS_VIEWS_H_
