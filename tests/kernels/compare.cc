#include "tests/kernels/compare.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "kernels/check.h"

namespace cosformer::testing {
namespace {

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

}  // namespace

std::string compare(const Problem& problem, const Outputs& got,
                    const Outputs& want, Margins* margins) {
  if (!want.status.ok())
    return "  the reference refuses: " + want.status.message() + "\n";
  if (!got.status.ok())
    return "  the kernels refuse: " + got.status.message() + "\n";
  Comparison comparison(margins);
  std::optional<Outputs> sizes;
  const auto terms = [&](Tensor Outputs::* x) {
    return [&, x] {
      if (!sizes) sizes = magnitudes(problem, want);
      return (*sizes).*x;
    };
  };
  const DType dtype = problem.q.dtype(), wide = accumulator_of(dtype);
  const Tolerances allowed(dtype);
  comparison.check("out", got.out, want.out, allowed.out, dtype,
                   terms(&Outputs::out));
  if (problem.options.normalizer == Normalizer::kSum) {
    comparison.check("denominator", got.denominator, want.denominator,
                     allowed.wide_out, wide);
  }
  if (problem.return_state) {
    comparison.check("kv_state", got.state->kv_state, want.state->kv_state,
                     allowed.wide_out, wide);
    comparison.check("k_sum", got.state->k_sum, want.state->k_sum,
                     allowed.wide_out, wide);
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
  comparison.check("dq", got.dq, want.dq, allowed.gradient, dtype,
                   terms(&Outputs::dq));
  comparison.check("dk", got.dk, want.dk, allowed.gradient, dtype,
                   terms(&Outputs::dk));
  comparison.check("dv", got.dv, want.dv, allowed.gradient, dtype,
                   terms(&Outputs::dv));
  if (problem.state) {
    comparison.check("d_state.kv_state", got.d_state->kv_state,
                     want.d_state->kv_state, allowed.wide_gradient, wide);
    comparison.check("d_state.k_sum", got.d_state->k_sum, want.d_state->k_sum,
                     allowed.wide_gradient, wide);
  }
  return comparison.text();
}

}  // namespace cosformer::testing
