// Single elements of strided memory as double, whatever their dtype: what the
// reference reads and writes through. Slow and plain.
#ifndef COSFORMER_SRC_KERNELS_REFERENCE_ACCESS_H_
#define COSFORMER_SRC_KERNELS_REFERENCE_ACCESS_H_

#include <cstdint>

#include "base/half.h"
#include "cosformer/base.h"

namespace cosformer::reference {

inline double load(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kFloat64:
      return static_cast<const double*>(data)[index];
    case DType::kBFloat16:
      return bfloat16_to_float(static_cast<const uint16_t*>(data)[index]);
    case DType::kFloat16:
      return float16_to_float(static_cast<const uint16_t*>(data)[index]);
    default:
      return static_cast<const float*>(data)[index];
  }
}

inline void store(void* data, DType dtype, int64_t index, double value) {
  switch (dtype) {
    case DType::kFloat64:
      static_cast<double*>(data)[index] = value;
      break;
    case DType::kBFloat16:
      static_cast<uint16_t*>(data)[index] = double_to_bfloat16(value);
      break;
    case DType::kFloat16:
      static_cast<uint16_t*>(data)[index] = double_to_float16(value);
      break;
    default:
      static_cast<float*>(data)[index] = static_cast<float>(value);
  }
}

// Element [b, s, h, 0] of a view, as an index into its data.
inline int64_t offset(const ConstView4& view, int64_t b, int64_t s, int64_t h) {
  return b * view.stride[0] + s * view.stride[1] + h * view.stride[2];
}

// States and denominators: float64 for float64 inputs, else float32.
inline DType accumulator_of(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

}  // namespace cosformer::reference

#endif  // COSFORMER_SRC_KERNELS_REFERENCE_ACCESS_H_
