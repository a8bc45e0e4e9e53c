// What the softmax engine gave against what the reference gives.
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "tests/kernels/softmax_problem.h"

namespace cosformer::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Tensor zeros(const std::array<int64_t, 4>& size) {
  Tensor x(size, DType::kFloat64);
  x.fill(0);
  return x;
}
void add(Tensor& x, int64_t b, int64_t s, int64_t h, int64_t c, double value) {
  x.set(b, s, h, c, x.get(b, s, h, c) + value);
}

// How large the terms are whose sums the results are: every product by its
// size, every difference as a sum. In particular that of d_weight and its mean,
// which cancel where a row sees one key.
SoftmaxOutputs magnitudes(const SoftmaxProblem& narrow) {
  const SoftmaxProblem p = widen(narrow);
  const auto& size = p.q.size();
  const int64_t heads = size[2], group = heads / p.k.size()[2];
  const int64_t q_len = size[1], kv_len = p.k.size()[1];
  const int64_t dim = size[3], value_dim = p.v.size()[3];
  std::vector<double> weights(
      static_cast<size_t>(size[0] * heads * q_len * kv_len));
  const Status status = reference::softmax_attention_weights(
      p.options, p.inputs(), weights.data());
  SoftmaxOutputs sum;
  sum.status = status;
  sum.out = zeros(p.out_size());
  sum.log_sum_exp = zeros({size[0], q_len, heads, 1});
  sum.dq = zeros(size);
  sum.dk = zeros(p.k.size());
  sum.dv = zeros(p.v.size());
  sum.d_bias = zeros(p.relative_bias.size());
  for (int64_t r = 0; r < p.rows(); ++r) {
    const AttentionRow row = p.row(r);
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < row.q_len; ++i) {
        const int64_t b = row.batch, s = row.q_offset + i, kv = h / group;
        const double* weight = weights.data() +
                               ((b * heads + h) * q_len + s) * kv_len +
                               row.kv_offset;
        std::vector<double> kept(static_cast<size_t>(row.kv_len)),
            d_weight(kept);
        double mean = 0;
        for (int64_t j = 0; j < row.kv_len; ++j) {
          const int64_t t = row.kv_offset + j;
          if (weight[j] == 0) continue;
          const bool stays =
              p.options.dropout_p == 0 ||
              softmax_dropout_keeps(p.options.dropout_p, p.options.dropout_seed,
                                    r, h, row.q_start + i, row.kv_start + j);
          const size_t at = static_cast<size_t>(j);
          kept[at] = stays ? 1 / (1 - p.options.dropout_p) : 0;
          for (int64_t c = 0; c < value_dim; ++c) {
            const double v = std::fabs(p.v.get(b, t, kv, c));
            const double g = std::fabs(p.d_out.get(b, s, h, c));
            add(sum.out, b, s, h, c, kept[at] * weight[j] * v);
            add(sum.dv, b, t, kv, c, kept[at] * weight[j] * g);
            d_weight[at] += kept[at] * g * v;
          }
          mean += weight[j] * d_weight[at];
        }
        for (int64_t j = 0; j < row.kv_len; ++j) {
          const int64_t t = row.kv_offset + j;
          if (weight[j] == 0) continue;
          const double d_score =
              weight[j] * (d_weight[static_cast<size_t>(j)] + mean);
          double score = 0;
          for (int64_t c = 0; c < dim; ++c) {
            const double q = std::fabs(p.q.get(b, s, h, c));
            const double k = std::fabs(p.k.get(b, t, kv, c));
            add(sum.dq, b, s, h, c, p.scale() * d_score * k);
            add(sum.dk, b, t, kv, c, p.scale() * d_score * q);
            score += p.scale() * q * k;
          }
          if (p.has_bias()) {
            const int64_t reach = p.relative_reach;
            const int64_t at =
                std::clamp((row.kv_start + j) - (row.q_start + i), -reach,
                           reach) +
                reach;
            score += std::fabs(p.relative_bias.get(0, 0, h, at));
            add(sum.d_bias, 0, 0, h, at, d_score);
          }
          add(sum.log_sum_exp, b, s, h, 0, weight[j] * (1 + score));
        }
      }
  }
  return sum;
}

// Where a row sees nothing both say -infinity: the same.
void drop_infinities(Tensor& got, Tensor& want) {
  for_each_element(want, [&](int64_t b, int64_t s, int64_t h, int64_t c) {
    if (want.get(b, s, h, c) == -kInfinity &&
        got.get(b, s, h, c) == -kInfinity) {
      want.set(b, s, h, c, 0);
      got.set(b, s, h, c, 0);
    }
  });
}

}  // namespace

std::string compare(const SoftmaxProblem& problem, const SoftmaxOutputs& got,
                    const SoftmaxOutputs& want, Margins* margins) {
  if (!want.status.ok())
    return "  the reference refuses: " + want.status.message() + "\n";
  if (!got.status.ok())
    return "  the kernels refuse: " + got.status.message() + "\n";
  Comparison comparison(margins);
  std::optional<SoftmaxOutputs> sizes;
  const auto terms = [&](Tensor SoftmaxOutputs::* x) {
    return [&, x] {
      if (!sizes) sizes = magnitudes(problem);
      return (*sizes).*x;
    };
  };
  const DType dtype = problem.q.dtype(), wide = accumulator_of(dtype);
  const Tolerances allowed(dtype);
  comparison.check("out", got.out, want.out, allowed.out, dtype,
                   terms(&SoftmaxOutputs::out));
  Tensor got_log = got.log_sum_exp, want_log = want.log_sum_exp;
  drop_infinities(got_log, want_log);
  comparison.check("log_sum_exp", got_log, want_log, allowed.wide_out, wide,
                   terms(&SoftmaxOutputs::log_sum_exp));
  comparison.check("dq", got.dq, want.dq, allowed.gradient, dtype,
                   terms(&SoftmaxOutputs::dq));
  comparison.check("dk", got.dk, want.dk, allowed.gradient, dtype,
                   terms(&SoftmaxOutputs::dk));
  comparison.check("dv", got.dv, want.dv, allowed.gradient, dtype,
                   terms(&SoftmaxOutputs::dv));
  if (problem.has_bias()) {
    comparison.check("d_relative_bias", got.d_bias, want.d_bias,
                     allowed.wide_gradient, dtype,
                     terms(&SoftmaxOutputs::d_bias));
  }
  return comparison.text();
}

}  // namespace cosformer::testing
