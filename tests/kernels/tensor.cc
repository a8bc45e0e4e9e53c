#include "tests/kernels/tensor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/half.h"

namespace cosformer::testing {
namespace {

// All bits set is a NaN in every floating type, and not the usual one.
constexpr uint64_t kBorn = ~uint64_t{0};

}  // namespace

DType accumulator_of(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

Tensor::Tensor(const std::array<int64_t, 4>& size, DType dtype, Layout layout)
    : size_(size), dtype_(dtype) {
  const auto [batch, seq, heads, dim] = size;
  switch (layout) {
    case Layout::kContiguous:
    case Layout::kOffset:
      stride_ = contiguous_strides(size);
      shift_ = layout == Layout::kOffset ? 1 : 0;
      break;
    case Layout::kPadded:
      stride_[2] = dim + 3;
      stride_[1] = heads * stride_[2] + 2;
      stride_[0] = seq * stride_[1] + 7;
      stride_[3] = 1;
      break;
    case Layout::kTransposed:
      stride_ = {heads * seq * dim, dim, seq * dim, 1};
      break;
  }
  elements_ = shift_ + 1;
  if (numel() > 0) {
    for (size_t d = 0; d < 4; ++d) elements_ += (size[d] - 1) * stride_[d];
  }
  memory_.assign((static_cast<size_t>(elements_) * size_of(dtype) + 7) / 8,
                 kBorn);
}

int64_t Tensor::index(int64_t b, int64_t s, int64_t h, int64_t c) const {
  return shift_ + b * stride_[0] + s * stride_[1] + h * stride_[2] + c;
}

double Tensor::get(int64_t b, int64_t s, int64_t h, int64_t c) const {
  const int64_t i = index(b, s, h, c);
  const void* data = memory_.data();
  switch (dtype_) {
    case DType::kFloat64:
      return static_cast<const double*>(data)[i];
    case DType::kBFloat16:
      return bfloat16_to_float(static_cast<const uint16_t*>(data)[i]);
    case DType::kFloat16:
      return float16_to_float(static_cast<const uint16_t*>(data)[i]);
    default:
      return static_cast<const float*>(data)[i];
  }
}

void Tensor::set(int64_t b, int64_t s, int64_t h, int64_t c, double value) {
  const int64_t i = index(b, s, h, c);
  void* data = memory_.data();
  switch (dtype_) {
    case DType::kFloat64:
      static_cast<double*>(data)[i] = value;
      break;
    case DType::kBFloat16:
      static_cast<uint16_t*>(data)[i] = double_to_bfloat16(value);
      break;
    case DType::kFloat16:
      static_cast<uint16_t*>(data)[i] = double_to_float16(value);
      break;
    default:
      static_cast<float*>(data)[i] = static_cast<float>(value);
  }
}

View4 Tensor::view() {
  return {reinterpret_cast<char*>(memory_.data()) +
              static_cast<size_t>(shift_) * size_of(dtype_),
          dtype_, size_, stride_};
}
ConstView4 Tensor::view() const { return const_cast<Tensor*>(this)->view(); }

void Tensor::fill(double value) {
  for (int64_t b = 0; b < size_[0]; ++b)
    for (int64_t s = 0; s < size_[1]; ++s)
      for (int64_t h = 0; h < size_[2]; ++h)
        for (int64_t c = 0; c < size_[3]; ++c) set(b, s, h, c, value);
}

void Tensor::fill_normal(Random& random) {
  std::normal_distribution<double> normal;
  for (int64_t b = 0; b < size_[0]; ++b)
    for (int64_t s = 0; s < size_[1]; ++s)
      for (int64_t h = 0; h < size_[2]; ++h)
        for (int64_t c = 0; c < size_[3]; ++c) set(b, s, h, c, normal(random));
}

std::vector<double> Tensor::values() const {
  std::vector<double> x;
  x.reserve(static_cast<size_t>(numel()));
  for (int64_t b = 0; b < size_[0]; ++b)
    for (int64_t s = 0; s < size_[1]; ++s)
      for (int64_t h = 0; h < size_[2]; ++h)
        for (int64_t c = 0; c < size_[3]; ++c) x.push_back(get(b, s, h, c));
  return x;
}

std::vector<uint64_t> Tensor::bits() const {
  std::vector<uint64_t> x;
  x.reserve(static_cast<size_t>(numel()));
  const size_t width = size_of(dtype_);
  const char* data = reinterpret_cast<const char*>(memory_.data());
  for (int64_t b = 0; b < size_[0]; ++b)
    for (int64_t s = 0; s < size_[1]; ++s)
      for (int64_t h = 0; h < size_[2]; ++h)
        for (int64_t c = 0; c < size_[3]; ++c) {
          uint64_t word = 0;
          std::memcpy(&word,
                      data + static_cast<size_t>(index(b, s, h, c)) * width,
                      width);
          x.push_back(word);
        }
  return x;
}

bool Tensor::gaps_untouched() const {
  const size_t width = size_of(dtype_);
  std::vector<bool> owned(static_cast<size_t>(elements_));
  for (int64_t b = 0; b < size_[0]; ++b)
    for (int64_t s = 0; s < size_[1]; ++s)
      for (int64_t h = 0; h < size_[2]; ++h)
        for (int64_t c = 0; c < size_[3]; ++c)
          owned[static_cast<size_t>(index(b, s, h, c))] = true;
  const char* data = reinterpret_cast<const char*>(memory_.data());
  for (size_t i = 0; i < owned.size(); ++i) {
    if (!owned[i] && std::memcmp(data + i * width, &kBorn, width) != 0)
      return false;
  }
  return true;
}

Tensor make_block(int64_t count, DType dtype) {
  return Tensor({1, 1, 1, count}, accumulator_of(dtype));
}

double norm(const std::vector<double>& x) {
  double sum = 0;
  for (double value : x) sum += value * value;
  return std::sqrt(sum);
}

double relative_error(const std::vector<double>& got,
                      const std::vector<double>& want) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (got.size() != want.size()) return kInfinity;
  double error = 0, size = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    if (!std::isfinite(want[i])) {
      if (std::isfinite(got[i])) return kInfinity;
      continue;
    }
    if (!std::isfinite(got[i])) return kInfinity;
    error += (got[i] - want[i]) * (got[i] - want[i]);
    size += want[i] * want[i];
  }
  if (error == 0) return 0;
  return std::sqrt(error / size);
}

}  // namespace cosformer::testing
