// Elements and rows of strided memory as double, whatever their dtype: what the
// reference reads and writes through, and sums with. Slow and plain.
#ifndef COSFORMER_SRC_KERNELS_REFERENCE_ACCESS_H_
#define COSFORMER_SRC_KERNELS_REFERENCE_ACCESS_H_

#include <cstdint>
#include <vector>

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

using Doubles = std::vector<double>;

// Four sums, so that the compiler may use the machine's vectors.
inline double dot(const double* a, const double* b, int64_t n) {
  double sum[4] = {};
  int64_t i = 0;
  for (; i + 4 <= n; i += 4)
    for (int64_t l = 0; l < 4; ++l) sum[l] += a[i + l] * b[i + l];
  for (; i < n; ++i) sum[0] += a[i] * b[i];
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}
inline void add_scaled(double scale, const double* x, double* sum, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] += scale * x[i];
}

inline Doubles load_row(const ConstView4& view, int64_t b, int64_t s,
                        int64_t h) {
  Doubles x(static_cast<size_t>(view.size[3]));
  const int64_t at = offset(view, b, s, h);
  for (int64_t c = 0; c < view.size[3]; ++c)
    x[static_cast<size_t>(c)] = load(view.data, view.dtype, at + c);
  return x;
}
inline void store_row(const View4& view, int64_t b, int64_t s, int64_t h,
                      const Doubles& x) {
  const int64_t at = offset(view, b, s, h);
  for (int64_t c = 0; c < view.size[3]; ++c)
    store(view.data, view.dtype, at + c, x[static_cast<size_t>(c)]);
}
inline Doubles load_block(const void* data, DType dtype, int64_t at,
                          int64_t count) {
  Doubles x(static_cast<size_t>(count), 0.0);
  if (data == nullptr) return x;
  for (int64_t i = 0; i < count; ++i)
    x[static_cast<size_t>(i)] = load(data, dtype, at + i);
  return x;
}
inline void store_block(void* data, DType dtype, int64_t at, const Doubles& x) {
  if (data == nullptr) return;
  for (size_t i = 0; i < x.size(); ++i)
    store(data, dtype, at + static_cast<int64_t>(i), x[i]);
}

}  // namespace cosformer::reference

#endif  // COSFORMER_SRC_KERNELS_REFERENCE_ACCESS_H_
