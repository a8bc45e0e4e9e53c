#include "tests/kernels/tokens.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "cosformer/kernels.h"

namespace cosformer::testing {
namespace {

template <typename T>
std::vector<T> part(const std::vector<T>& all, const Tensor& x, int64_t b,
                    int64_t from, int64_t to) {
  const int64_t width = x.size()[2] * x.size()[3];
  const auto begin = all.begin() + (b * x.size()[1] + from) * width;
  return {begin, begin + (to - from) * width};
}

}  // namespace

void for_each_isa(const std::function<void()>& body) {
  for (std::string_view isa : supported_isas()) {
    SCOPED_TRACE(str_cat("isa=", isa));
    ASSERT_TRUE(force_isa(isa).ok());
    body();
  }
  ASSERT_TRUE(force_isa("").ok());
}

void fill_token(Tensor& x, int64_t b, int64_t s, double value) {
  for (int64_t h = 0; h < x.size()[2]; ++h)
    for (int64_t c = 0; c < x.size()[3]; ++c) x.set(b, s, h, c, value);
}

std::vector<uint64_t> bits_of(const Tensor& x, int64_t b, int64_t from,
                              int64_t to) {
  return part(x.bits(), x, b, from, to);
}
std::vector<double> values_of(const Tensor& x, int64_t b, int64_t from,
                              int64_t to) {
  return part(x.values(), x, b, from, to);
}
Tensor cut(const Tensor& x, int64_t b, int64_t from, int64_t to) {
  Tensor y({1, to - from, x.size()[2], x.size()[3]}, x.dtype());
  for (int64_t s = from; s < to; ++s)
    for (int64_t h = 0; h < x.size()[2]; ++h)
      for (int64_t c = 0; c < x.size()[3]; ++c)
        y.set(0, s - from, h, c, x.get(b, s, h, c));
  return y;
}

bool all_nan(const std::vector<double>& x) {
  return std::all_of(x.begin(), x.end(),
                     [](double v) { return std::isnan(v); });
}
bool all_finite(const std::vector<double>& x) {
  return std::all_of(x.begin(), x.end(),
                     [](double v) { return std::isfinite(v); });
}
bool all_finite(const Tensor& x) { return all_finite(x.values()); }
bool all_zero(const std::vector<double>& x) {
  return std::all_of(x.begin(), x.end(), [](double v) { return v == 0; });
}

}  // namespace cosformer::testing
