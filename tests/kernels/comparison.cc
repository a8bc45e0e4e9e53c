#include "tests/kernels/comparison.h"

#include <algorithm>
#include <cmath>

namespace cosformer::testing {
namespace {

// Below this share of its terms' magnitude a result is what they left over.
constexpr double kCancelled = 1e-3;

// A result beyond the largest float16 is infinity there, as it should be.
void clip_to_float16(std::vector<double>& x) {
  for (double& value : x)
    if (!std::isnan(value)) value = std::clamp(value, -65504.0, 65504.0);
}

double absolute_error(const std::vector<double>& g,
                      const std::vector<double>& w) {
  double sum = 0;
  for (size_t i = 0; i < w.size(); ++i) sum += (g[i] - w[i]) * (g[i] - w[i]);
  return std::sqrt(sum);  // NaN where one is
}

}  // namespace

double unit_roundoff(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 0x1p-53;
    case DType::kBFloat16:
      return 0x1p-8;
    case DType::kFloat16:
      return 0x1p-11;
    default:
      return 0x1p-24;
  }
}

Tensor absolute(const Tensor& x) {
  Tensor y = x;
  for_each_element(x, [&](int64_t b, int64_t s, int64_t h, int64_t c) {
    y.set(b, s, h, c, std::fabs(x.get(b, s, h, c)));
  });
  return y;
}
Tolerances::Tolerances(DType dtype) {
  const DType wide = accumulator_of(dtype);
  wide_out = wide == DType::kFloat64 ? 3e-13 : 3e-6;
  const double sums = wide == DType::kFloat64 ? 1e-12 : 1e-5;
  const double rounding = dtype != wide ? unit_roundoff(dtype) : 0;
  out = wide_out + rounding;
  gradient = wide_gradient = sums + 3 * rounding;
}

void Comparison::check(const char* name, const Tensor& got, const Tensor& want,
                       double tolerance, DType dtype,
                       const std::function<Tensor()>& terms) {
  std::vector<double> g = got.values(), w = want.values();
  if (dtype == DType::kFloat16) {
    clip_to_float16(g);
    clip_to_float16(w);
  }
  double allowed = tolerance * norm(w);
  if (dtype == DType::kFloat16)  // its smallest step is no relative one
    allowed += 0x1p-25 * std::sqrt(static_cast<double>(w.size()));
  const double error = absolute_error(g, w);
  if (!(error <= allowed) && std::isfinite(error) && terms != nullptr) {
    const double sizes = norm(terms().values());
    if (name[0] == 'd' && accumulator_of(dtype) != dtype) {
      // The backward of half types starts from the rounded output.
      allowed += sizes * unit_roundoff(dtype);
    } else if (norm(w) < kCancelled * sizes) {
      // A few roundings of terms that all but cancel.
      allowed += 4 * sizes * unit_roundoff(accumulator_of(dtype));
    }
  }
  if (margins_ != nullptr && allowed > 0) {
    double& margin = name[0] == 'd' ? margins_->gradients : margins_->out;
    margin = std::max(margin, error / allowed);
  }
  if (!(error <= allowed)) fail(name, got, g, w, error, allowed);
  if (!got.gaps_untouched())
    text_ += str_cat("  ", name, ": memory between its rows was written\n");
}

void Comparison::check_positions(const char* name,
                                 const std::vector<int64_t>& got,
                                 const std::vector<int64_t>& want) {
  for (size_t r = 0; r < want.size(); ++r) {
    if (got[r] != want[r]) {
      text_ += str_cat("  ", name, "[", r, "] is ", got[r], ", expected ",
                       want[r], "\n");
    }
  }
}

void Comparison::fail(const char* name, const Tensor& got,
                      const std::vector<double>& g,
                      const std::vector<double>& w, double error,
                      double allowed) {
  size_t worst = 0;
  double distance = -1;
  for (size_t i = 0; i < w.size(); ++i) {
    const double d = std::fabs(g[i] - w[i]);
    if (std::isnan(d)) {
      worst = i;
      break;
    }
    if (d > distance) {
      distance = d;
      worst = i;
    }
  }
  const auto& size = got.size();
  const auto at = static_cast<int64_t>(worst);
  text_ += str_cat("  ", name, ": error norm ", error, ", allowed ", allowed,
                   ", norm ", norm(w), "; [", at / size[3] / size[2] / size[1],
                   ", ", at / size[3] / size[2] % size[1], ", ",
                   at / size[3] % size[2], ", ", at % size[3], "] is ",
                   g[worst], ", expected ", w[worst], "\n");
}

}  // namespace cosformer::testing
