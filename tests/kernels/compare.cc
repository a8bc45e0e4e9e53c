#include "tests/kernels/compare.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "kernels/check.h"

namespace cosformer::testing {
namespace {

// Relative norms. float32 sums of float32 products; float64 likewise.
constexpr double kOut32 = 3e-6, kGradient32 = 1e-5;
constexpr double kOut64 = 3e-13, kGradient64 = 1e-12;
// Below this share of its terms' magnitude a result is what they left over.
constexpr double kCancelled = 1e-3;

// Half of the distance of 1 from the next number.
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

template <typename Use>
void for_each_element(const Tensor& x, const Use& use) {
  for (int64_t b = 0; b < x.size()[0]; ++b)
    for (int64_t s = 0; s < x.size()[1]; ++s)
      for (int64_t h = 0; h < x.size()[2]; ++h)
        for (int64_t c = 0; c < x.size()[3]; ++c) use(b, s, h, c);
}

Tensor absolute(const Tensor& x) {
  Tensor y = x;
  for_each_element(x, [&](int64_t b, int64_t s, int64_t h, int64_t c) {
    y.set(b, s, h, c, std::fabs(x.get(b, s, h, c)));
  });
  return y;
}
State absolute(const State& x) {
  return {absolute(x.kv_state), absolute(x.k_sum), x.start, x.position};
}

// How large the terms are whose sum a result is: the same call with all signs
// taken off the values and the incoming gradients. Where they cancel (one key
// seen: the output is its value, whatever the query is) the result may be off
// by roundings of the terms, however small it is itself.
Outputs magnitudes(const Problem& narrow, const Outputs& want) {
  Problem p = widen(narrow);
  p.v = absolute(p.v);
  p.d_out = absolute(p.d_out);
  if (p.state) p.state = absolute(*p.state);
  if (p.d_state_out) p.d_state_out = absolute(*p.d_state_out);
  const bool normalized = p.options.normalizer == Normalizer::kSum;
  p.options.normalizer = Normalizer::kNone;
  const auto norm_at = [&](int64_t b, int64_t s, int64_t h) {
    return normalized
               ? std::max(want.denominator.get(b, s, h, 0), p.options.eps)
               : 1.0;
  };
  for_each_element(p.d_out, [&](int64_t b, int64_t s, int64_t h, int64_t c) {
    p.d_out.set(b, s, h, c, p.d_out.get(b, s, h, c) / norm_at(b, s, h));
  });
  Outputs sum = run_reference(p);
  // The cosine is a difference of products near its end: its error is that of
  // numbers around 1, even where it is nearly 0 (a key M away).
  if (p.options.reweight_len > 0) {
    p.options.reweight_len = 0;
    if (p.q_start.empty() && p.state) p.q_start = p.state->position;
    if (p.kv_start.empty() && p.state) p.kv_start = p.state->position;
    p.state.reset();
    p.return_state = false;
    p.d_state_out.reset();
    const Outputs flat = run_reference(p);
    for (Tensor Outputs::* x :
         {&Outputs::out, &Outputs::dq, &Outputs::dk, &Outputs::dv}) {
      for_each_element(sum.*x, [&](int64_t b, int64_t s, int64_t h, int64_t c) {
        (sum.*x).set(b, s, h, c,
                     (sum.*x).get(b, s, h, c) + (flat.*x).get(b, s, h, c));
      });
    }
  }
  for_each_element(sum.out, [&](int64_t b, int64_t s, int64_t h, int64_t c) {
    sum.out.set(b, s, h, c, sum.out.get(b, s, h, c) / norm_at(b, s, h));
  });
  return sum;
}

class Comparison {
 public:
  Comparison(const Problem& problem, const Outputs& want, Margins* margins)
      : problem_(problem), want_(want), margins_(margins) {}

  // tolerance: relative norm; dtype: what the result was rounded to.
  void check(const char* name, const Tensor& got, const Tensor& want,
             double tolerance, DType dtype, Tensor Outputs::* in_magnitudes) {
    std::vector<double> g = got.values(), w = want.values();
    if (dtype == DType::kFloat16) {
      clip_to_float16(g);
      clip_to_float16(w);
    }
    double allowed = tolerance * norm(w);
    if (dtype == DType::kFloat16)  // its smallest step is no relative one
      allowed += 0x1p-25 * std::sqrt(static_cast<double>(w.size()));
    const double error = absolute_error(g, w);
    if (!(error <= allowed) && std::isfinite(error) &&
        in_magnitudes != nullptr) {
      if (!magnitudes_) magnitudes_ = magnitudes(problem_, want_);
      const double terms = norm(((*magnitudes_).*in_magnitudes).values());
      if (name[0] == 'd' && accumulator_of(dtype) != dtype) {
        // The backward of half types starts from the rounded output.
        allowed += terms * unit_roundoff(dtype);
      } else if (norm(w) < kCancelled * terms) {
        // A few roundings of terms that all but cancel.
        allowed += 4 * terms * unit_roundoff(accumulator_of(dtype));
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

  void check_positions(const char* name, const std::vector<int64_t>& got,
                       const std::vector<int64_t>& want) {
    for (size_t r = 0; r < want.size(); ++r) {
      if (got[r] != want[r]) {
        text_ += str_cat("  ", name, "[", r, "] is ", got[r], ", expected ",
                         want[r], "\n");
      }
    }
  }

  std::string text() const { return text_; }

 private:
  // A result beyond the largest float16 is infinity there, as it should be.
  static void clip_to_float16(std::vector<double>& x) {
    for (double& value : x)
      if (!std::isnan(value)) value = std::clamp(value, -65504.0, 65504.0);
  }

  static double absolute_error(const std::vector<double>& g,
                               const std::vector<double>& w) {
    double sum = 0;
    for (size_t i = 0; i < w.size(); ++i) sum += (g[i] - w[i]) * (g[i] - w[i]);
    return std::sqrt(sum);  // NaN where one is
  }

  void fail(const char* name, const Tensor& got, const std::vector<double>& g,
            const std::vector<double>& w, double error, double allowed) {
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
    text_ += str_cat(
        "  ", name, ": error norm ", error, ", allowed ", allowed, ", norm ",
        norm(w), "; [", at / size[3] / size[2] / size[1], ", ",
        at / size[3] / size[2] % size[1], ", ", at / size[3] % size[2], ", ",
        at % size[3], "] is ", g[worst], ", expected ", w[worst], "\n");
  }

  const Problem& problem_;
  const Outputs& want_;
  Margins* margins_;
  std::optional<Outputs> magnitudes_;
  std::string text_;
};

}  // namespace

std::string compare(const Problem& problem, const Outputs& got,
                    const Outputs& want, Margins* margins) {
  if (!want.status.ok())
    return "  the reference refuses: " + want.status.message() + "\n";
  if (!got.status.ok())
    return "  the kernels refuse: " + got.status.message() + "\n";
  Comparison comparison(problem, want, margins);
  const DType dtype = problem.q.dtype(), wide = accumulator_of(dtype);
  const bool half = dtype != wide;
  const double out = wide == DType::kFloat64 ? kOut64 : kOut32;
  const double gradient = wide == DType::kFloat64 ? kGradient64 : kGradient32;
  // Half types: the result is rounded once. The backward is given the rounded
  // output, whose error enters its sums.
  const double out_half = half ? out + unit_roundoff(dtype) : out;
  const double gradient_half =
      half ? gradient + 3 * unit_roundoff(dtype) : gradient;
  comparison.check("out", got.out, want.out, out_half, dtype, &Outputs::out);
  if (problem.options.normalizer == Normalizer::kSum) {
    comparison.check("denominator", got.denominator, want.denominator, out,
                     wide, nullptr);
  }
  if (problem.return_state) {
    comparison.check("kv_state", got.state->kv_state, want.state->kv_state, out,
                     wide, nullptr);
    comparison.check("k_sum", got.state->k_sum, want.state->k_sum, out, wide,
                     nullptr);
    comparison.check_positions("state.start", got.state->start,
                               want.state->start);
    comparison.check_positions("state.position", got.state->position,
                               want.state->position);
  }
  // The backward starts from the output: where that has left float16 there is
  // nothing to compare.
  for (double value : want.out.values()) {
    if (dtype == DType::kFloat16 && !(std::fabs(value) < 65504))
      return comparison.text();
  }
  comparison.check("dq", got.dq, want.dq, gradient_half, dtype, &Outputs::dq);
  comparison.check("dk", got.dk, want.dk, gradient_half, dtype, &Outputs::dk);
  comparison.check("dv", got.dv, want.dv, gradient_half, dtype, &Outputs::dv);
  if (problem.state) {
    comparison.check("d_state.kv_state", got.d_state->kv_state,
                     want.d_state->kv_state, gradient_half, wide, nullptr);
    comparison.check("d_state.k_sum", got.d_state->k_sum, want.d_state->k_sum,
                     gradient_half, wide, nullptr);
  }
  return comparison.text();
}

}  // namespace cosformer::testing
