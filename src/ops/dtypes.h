// Types of the project and of torch.
#ifndef COSFORMER_OPS_DTYPES_H_
#define COSFORMER_OPS_DTYPES_H_

#include <ATen/core/Tensor.h>

#include <optional>

#include "cosformer/base.h"

namespace cosformer {

inline std::optional<DType> dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kHalf:
      return DType::kFloat16;
    case at::kLong:
      return DType::kInt64;
    case at::kBool:
      return DType::kBool;
    default:
      return std::nullopt;
  }
}

inline std::optional<at::ScalarType> scalar_type_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return at::kFloat;
    case DType::kFloat64:
      return at::kDouble;
    case DType::kBFloat16:
      return at::kBFloat16;
    case DType::kFloat16:
      return at::kHalf;
    case DType::kInt64:
      return at::kLong;
    case DType::kBool:
      return at::kBool;
    default:
      return std::nullopt;
  }
}

}  // namespace cosformer

#endif  // COSFORMER_OPS_DTYPES_H_
