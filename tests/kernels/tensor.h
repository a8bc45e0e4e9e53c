// Memory for the kernel tests: strided tensors of any dtype and layout, filled
// with NaN at birth, that notice writes between their rows.
#ifndef COSFORMER_TESTS_KERNELS_TENSOR_H_
#define COSFORMER_TESTS_KERNELS_TENSOR_H_

#include <array>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "cosformer/base.h"

namespace cosformer::testing {

using Random = std::mt19937_64;

// How [batch, seq, heads, dim] lies in memory.
enum class Layout {
  kContiguous,
  kPadded,      // gaps after every head, token and batch row
  kTransposed,  // [batch, heads, seq, dim]
  kOffset,      // contiguous, one element past an aligned address
};
inline constexpr int kNumLayouts = 4;

class Tensor {
 public:
  Tensor() = default;
  Tensor(const std::array<int64_t, 4>& size, DType dtype,
         Layout layout = Layout::kContiguous);

  double get(int64_t b, int64_t s, int64_t h, int64_t c) const;
  void set(int64_t b, int64_t s, int64_t h, int64_t c, double value);
  View4 view();
  ConstView4 view() const;

  const std::array<int64_t, 4>& size() const { return size_; }
  DType dtype() const { return dtype_; }
  int64_t numel() const { return size_[0] * size_[1] * size_[2] * size_[3]; }

  void fill(double value);
  // Standard normal numbers, rounded to the dtype.
  void fill_normal(Random& random);
  // [batch, seq, heads, dim] in order.
  std::vector<double> values() const;
  // The elements' memory in order, for comparing bit by bit (NaN included).
  std::vector<uint64_t> bits() const;
  // Whether memory that belongs to no element still holds what it was born
  // with.
  bool gaps_untouched() const;

 private:
  int64_t index(int64_t b, int64_t s, int64_t h, int64_t c) const;

  std::array<int64_t, 4> size_{}, stride_{};
  DType dtype_ = DType::kFloat32;
  int64_t shift_ = 0;     // elements in front of the first one
  int64_t elements_ = 0;  // of memory, gaps included
  std::vector<uint64_t> memory_;
};

// A contiguous tensor in the type of states and denominators.
Tensor make_block(int64_t count, DType dtype);
// float64 for float64, else float32.
DType accumulator_of(DType dtype);

// |got - want| / |want|, Euclidean; infinity where got has a NaN or infinity
// that want has not.
double relative_error(const std::vector<double>& got,
                      const std::vector<double>& want);
double norm(const std::vector<double>& x);

}  // namespace cosformer::testing

#endif  // COSFORMER_TESTS_KERNELS_TENSOR_H_
