// Rotary and sinusoidal positions. Angles, sines and cosines are computed in
// double and rounded once.
#include <algorithm>
#include <cmath>
#include <vector>

#include "base/half.h"
#include "kernels/check.h"

namespace cosformer {
namespace {

struct Float32 {
  using Element = float;
  using Work = float;
  static float load(float x) { return x; }
  static float store(float x) { return x; }
};
struct Float64 {
  using Element = double;
  using Work = double;
  static double load(double x) { return x; }
  static double store(double x) { return x; }
};
struct BFloat16 {
  using Element = uint16_t;
  using Work = float;
  static float load(uint16_t x) { return bfloat16_to_float(x); }
  static uint16_t store(float x) { return float_to_bfloat16(x); }
};
struct Float16 {
  using Element = uint16_t;
  using Work = float;
  static float load(uint16_t x) { return float16_to_float(x); }
  static uint16_t store(float x) { return float_to_float16(x); }
};

// Sines and cosines of position x base^(-2c/dim), c in [0, dim/2). A position
// is 64 a + b: the angle of each part is rounded once and both are put together
// by the addition theorem in double, so that a run of positions costs few calls
// of sin, and a position's values do not depend on the run it is in. Far out
// this is as near the true angle as position x frequency, rounded, which the
// attention kernels use, but not the same number.
class AngleTable {
 public:
  AngleTable(int64_t dim, double base)
      : pairs_(static_cast<size_t>(dim / 2)),
        frequency_(pairs_),
        far_cos_(pairs_),
        far_sin_(pairs_) {
    for (size_t c = 0; c < pairs_; ++c) {
      frequency_[c] = std::pow(
          base, -2.0 * static_cast<double>(c) / static_cast<double>(dim));
    }
  }

  template <typename Work>
  void at(int64_t position, Work* cos, Work* sin) {
    const int64_t far = position >> 6;
    const size_t near = static_cast<size_t>(position & 63);
    if (!has_far_ || far != far_) {
      has_far_ = true;
      far_ = far;
      for (size_t c = 0; c < pairs_; ++c) {
        const double angle = static_cast<double>(far * 64) * frequency_[c];
        far_cos_[c] = std::cos(angle);
        far_sin_[c] = std::sin(angle);
      }
    }
    if (near_cos_.empty()) {
      near_cos_.resize(64 * pairs_);
      near_sin_.resize(64 * pairs_);
    }
    double* near_cos = near_cos_.data() + near * pairs_;
    double* near_sin = near_sin_.data() + near * pairs_;
    if ((known_ >> near & 1) == 0) {
      known_ |= uint64_t{1} << near;
      for (size_t c = 0; c < pairs_; ++c) {
        const double angle = static_cast<double>(near) * frequency_[c];
        near_cos[c] = std::cos(angle);
        near_sin[c] = std::sin(angle);
      }
    }
    for (size_t c = 0; c < pairs_; ++c) {
      cos[c] = static_cast<Work>(far_cos_[c] * near_cos[c] -
                                 far_sin_[c] * near_sin[c]);
      sin[c] = static_cast<Work>(far_sin_[c] * near_cos[c] +
                                 far_cos_[c] * near_sin[c]);
    }
  }

 private:
  size_t pairs_;
  std::vector<double> frequency_, far_cos_, far_sin_;
  std::vector<double> near_cos_, near_sin_;  // [64, pairs], filled on demand
  uint64_t known_ = 0;                       // bit b: row b is filled
  int64_t far_ = 0;
  bool has_far_ = false;
};

template <typename Type>
void rotate_token(const typename Type::Element* x, typename Type::Element* out,
                  const typename Type::Work* cos,
                  const typename Type::Work* sin, int64_t dim,
                  bool interleaved) {
  const int64_t half = dim / 2;
  const int64_t step = interleaved ? 2 : 1, apart = interleaved ? 1 : half;
  for (int64_t c = 0; c < half; ++c) {
    const auto a = Type::load(x[c * step]), b = Type::load(x[c * step + apart]);
    out[c * step] = Type::store(a * cos[c] - b * sin[c]);
    out[c * step + apart] = Type::store(a * sin[c] + b * cos[c]);
  }
}

template <typename Type>
void rotate_all(const ConstView4& x, const View4& out, const int64_t* positions,
                int64_t start, double base, bool interleaved, bool inverse,
                Executor& executor) {
  using Element = typename Type::Element;
  using Work = typename Type::Work;
  const auto [batch, seq, heads, dim] = x.size;
  // Without positions of its own, all of a batch stands at the same ones: a
  // task takes a stretch of the sequence in every row.
  constexpr int64_t kTokens = 64;
  const int64_t stretches = (seq + kTokens - 1) / kTokens;
  const int64_t rows_a_task = positions == nullptr ? batch : 1;
  const auto task = [&](int64_t index, int) {
    const int64_t first_row = index / stretches * rows_a_task;
    const int64_t first = index % stretches * kTokens;
    AngleTable table(dim, base);
    std::vector<Work> cos(static_cast<size_t>(dim / 2)), sin(cos.size());
    for (int64_t s = first; s < std::min(seq, first + kTokens); ++s) {
      table.at(
          positions != nullptr ? positions[first_row * seq + s] : start + s,
          cos.data(), sin.data());
      if (inverse)
        for (Work& value : sin) value = -value;
      for (int64_t b = first_row; b < first_row + rows_a_task; ++b) {
        for (int64_t h = 0; h < heads; ++h) {
          rotate_token<Type>(
              static_cast<const Element*>(x.data) + b * x.stride[0] +
                  s * x.stride[1] + h * x.stride[2],
              static_cast<Element*>(out.data) + b * out.stride[0] +
                  s * out.stride[1] + h * out.stride[2],
              cos.data(), sin.data(), dim, interleaved);
        }
      }
    }
  };
  executor.run(stretches * (batch / std::max<int64_t>(rows_a_task, 1)), task);
}

}  // namespace

Status apply_rotary(const ConstView4& x, const View4& out,
                    const int64_t* positions, int64_t start, double base,
                    bool interleaved, bool inverse, Executor& executor) {
  constexpr std::string_view kWhere = "apply_rotary";
  COSFORMER_RETURN_IF_ERROR(check_view(kWhere, "x", x, x.size, x.dtype));
  COSFORMER_RETURN_IF_ERROR(
      check_output_view(kWhere, "out", out, x.size, x.dtype));
  const auto [batch, seq, heads, dim] = x.size;
  if (dim % 2 != 0) {
    return invalid_argument(kWhere, ": x has dim ", dim,
                            ": pairs are turned, expected an even dim");
  }
  if (!(base > 0) || !std::isfinite(base)) {
    return invalid_argument(kWhere, ": base is ", base,
                            ", expected a finite number above 0");
  }
  const auto outside = [](int64_t position) {
    return position > kMaxPosition || position < -kMaxPosition;
  };
  if (positions == nullptr && (outside(start) || outside(start + seq))) {
    return invalid_argument(kWhere, ": start is ", start, " for ", seq,
                            " tokens: positions must lie within -2^53 and "
                            "2^53");
  }
  if (batch == 0 || seq == 0 || heads == 0 || dim == 0) return Status();
  if (positions != nullptr) {
    for (int64_t t = 0; t < batch * seq; ++t) {
      if (outside(positions[t])) {
        return invalid_argument(kWhere, ": positions[", t / seq, ", ", t % seq,
                                "] is ", positions[t],
                                ": positions must lie within -2^53 and 2^53");
      }
    }
  }
  switch (x.dtype) {
    case DType::kFloat32:
      rotate_all<Float32>(x, out, positions, start, base, interleaved, inverse,
                          executor);
      return Status();
    case DType::kFloat64:
      rotate_all<Float64>(x, out, positions, start, base, interleaved, inverse,
                          executor);
      return Status();
    case DType::kBFloat16:
      rotate_all<BFloat16>(x, out, positions, start, base, interleaved, inverse,
                           executor);
      return Status();
    case DType::kFloat16:
      rotate_all<Float16>(x, out, positions, start, base, interleaved, inverse,
                          executor);
      return Status();
    default:
      return invalid_argument(
          kWhere, ": x is ", name(x.dtype),
          ", expected float32, float64, bfloat16 or float16");
  }
}

void sinusoidal_positions(int64_t max_len, int64_t dim, float* table) {
  for (int64_t c = 0; c < dim; ++c) {
    const double frequency = std::pow(
        10000.0, -static_cast<double>(c - c % 2) / static_cast<double>(dim));
    for (int64_t p = 0; p < max_len; ++p) {
      const double angle = static_cast<double>(p) * frequency;
      table[p * dim + c] =
          static_cast<float>(c % 2 == 0 ? std::sin(angle) : std::cos(angle));
    }
  }
}

}  // namespace cosformer
