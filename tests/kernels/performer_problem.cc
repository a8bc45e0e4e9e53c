#include "tests/kernels/performer_problem.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "tests/kernels/comparison.h"

namespace cosformer::testing {
namespace {

// Every value, read and written alike.
void transform(Tensor& x, const std::function<double(double)>& f) {
  for (int64_t b = 0; b < x.size()[0]; ++b)
    for (int64_t s = 0; s < x.size()[1]; ++s)
      for (int64_t h = 0; h < x.size()[2]; ++h)
        for (int64_t c = 0; c < x.size()[3]; ++c)
          x.set(b, s, h, c, f(x.get(b, s, h, c)));
}

Tensor copy(const Tensor& x, DType dtype) {
  Tensor y(x.size(), dtype);
  for (int64_t b = 0; b < x.size()[0]; ++b)
    for (int64_t s = 0; s < x.size()[1]; ++s)
      for (int64_t h = 0; h < x.size()[2]; ++h)
        for (int64_t c = 0; c < x.size()[3]; ++c)
          y.set(b, s, h, c, x.get(b, s, h, c));
  return y;
}
PerformerState copy(const PerformerState& s, DType dtype) {
  return {copy(s.kv_state, dtype), copy(s.k_sum, dtype),
          copy(s.log_scale, dtype), s.start, s.position};
}

Tensor slice(const Tensor& x, int64_t from, int64_t to) {
  const auto [batch, seq, heads, dim] = x.size();
  Tensor y({batch, to - from, heads, dim}, x.dtype());
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t s = from; s < to; ++s)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t c = 0; c < dim; ++c)
          y.set(b, s - from, h, c, x.get(b, s, h, c));
  return y;
}

// As earlier calls left it: of nine keys a row, at the problem's scale.
void make_state_in(PerformerProblem& p, Random& random, double scale) {
  constexpr int64_t kPrefix = 9;
  const int64_t rows = p.base.rows(), kv_heads = p.base.k.size()[2];
  PerformerProblem prefix = p;
  prefix.base.q =
      Tensor({rows, 0, kv_heads, p.base.q.size()[3]}, p.base.q.dtype());
  prefix.base.k =
      Tensor({rows, kPrefix, kv_heads, p.base.k.size()[3]}, p.base.q.dtype());
  prefix.base.v =
      Tensor({rows, kPrefix, kv_heads, p.base.v.size()[3]}, p.base.q.dtype());
  prefix.base.k.fill_normal(random);
  prefix.base.v.fill_normal(random);
  transform(prefix.base.k, [scale](double x) { return scale * x; });
  prefix.base.q_start = prefix.base.kv_start = {};
  prefix.base.key_mask = prefix.base.query_mask = {};
  prefix.base.cu_seqlens_q = prefix.base.cu_seqlens_k = {};
  prefix.state.reset();
  prefix.return_state = true;
  const PerformerOutputs o = run_reference(prefix);
  EXPECT_TRUE(o.status.ok()) << o.status.message();
  // Rounded to the type that a call with this dtype takes.
  p.state = copy(*o.state, accumulator_of(p.base.q.dtype()));
  p.state->start = p.base.state->start;
  p.state->position = p.base.state->position;
}

}  // namespace

PerformerStateView PerformerState::view() {
  return {
      {kv_state.view().data, k_sum.view().data, start.data(), position.data()},
      log_scale.view().data};
}
ConstPerformerStateView PerformerState::view() const {
  return {
      {kv_state.view().data, k_sum.view().data, start.data(), position.data()},
      log_scale.view().data};
}
std::vector<double> PerformerState::means() const {
  const int64_t features = k_sum.numel();
  const int64_t columns = features == 0 ? 0 : kv_state.numel() / features;
  std::vector<double> all;
  for (int64_t f = 0; f < features; ++f) {
    const double sum = k_sum.get(0, 0, 0, f);
    for (int64_t c = 0; c < columns; ++c)
      all.push_back(sum == 0 ? 0
                             : kv_state.get(0, 0, 0, f * columns + c) / sum);
  }
  return all;
}
std::vector<double> PerformerState::log_sums() const {
  std::vector<double> all;
  for (int64_t f = 0; f < k_sum.numel(); ++f) {
    const double sum = k_sum.get(0, 0, 0, f);
    all.push_back(sum == 0 ? -1e9 : std::log(sum) + log_scale.get(0, 0, 0, f));
  }
  return all;
}

PerformerAttentionInputs PerformerProblem::inputs() const {
  PerformerAttentionInputs in;
  in.call = base.inputs();
  in.call.state = {};
  in.projection = projection.view().data;
  in.num_features = num_features;
  if (state) in.state = state->view();
  return in;
}

PerformerState PerformerProblem::make_state() const {
  const int64_t rows = base.rows(), units = rows * base.k.size()[2];
  const DType dtype = base.q.dtype();
  return {make_block(units * num_features * base.v.size()[3], dtype),
          make_block(units * num_features, dtype),
          make_block(units * num_features, dtype),
          std::vector<int64_t>(static_cast<size_t>(rows), -1),
          std::vector<int64_t>(static_cast<size_t>(rows), -1)};
}

PerformerState empty_state(const PerformerProblem& problem, int64_t position) {
  PerformerState state = problem.make_state();
  state.kv_state.fill(0);
  state.k_sum.fill(0);
  state.log_scale.fill(-std::numeric_limits<double>::infinity());
  std::fill(state.start.begin(), state.start.end(), position);
  std::fill(state.position.begin(), state.position.end(), position);
  return state;
}

PerformerProblem make_performer_problem(const std::string& text,
                                        int64_t num_features, double scale) {
  const auto point = parse_point(text);
  EXPECT_TRUE(point.has_value()) << text;
  PerformerProblem p;
  p.base = make_problem(*point);
  p.num_features = num_features;
  for (Tensor* x : {&p.base.q, &p.base.k})
    transform(*x, [scale](double value) { return scale * value; });
  const int64_t dim = p.base.q.size()[3];
  std::vector<double> w(static_cast<size_t>(num_features * dim));
  performer_projection(num_features, dim, true,
                       static_cast<uint64_t>(point->seed), w.data());
  p.projection = make_block(num_features * dim, p.base.q.dtype());
  for (int64_t i = 0; i < num_features * dim; ++i)
    p.projection.set(0, 0, 0, i, w[static_cast<size_t>(i)]);
  Random random(static_cast<uint64_t>(point->seed) + 77);
  if (p.base.state) make_state_in(p, random, scale);
  p.return_state = p.base.return_state;
  if (p.base.d_state_out) {
    p.d_state_out = p.make_state();
    p.d_state_out->kv_state.fill_normal(random);
    p.d_state_out->k_sum.fill_normal(random);
  }
  return p;
}

PerformerProblem widen(const PerformerProblem& narrow) {
  PerformerProblem p = narrow;
  p.base = widen(narrow.base);
  p.projection = copy(narrow.projection, DType::kFloat64);
  if (p.state) p.state = copy(*p.state, DType::kFloat64);
  if (p.d_state_out) p.d_state_out = copy(*p.d_state_out, DType::kFloat64);
  return p;
}

PerformerProblem slice(const PerformerProblem& whole, int64_t from,
                       int64_t to) {
  PerformerProblem p = whole;
  for (Tensor Problem::* x :
       {&Problem::q, &Problem::k, &Problem::v, &Problem::d_out})
    p.base.*x = slice(whole.base.*x, from, to);
  p.base.q_start = p.base.kv_start = {};
  return p;
}

namespace {

PerformerOutputs outputs_of(const PerformerProblem& p) {
  PerformerOutputs o;
  const Problem& b = p.base;
  o.out = Tensor({b.q.size()[0], b.q.size()[1], b.q.size()[2], b.v.size()[3]},
                 b.q.dtype());
  o.log_denominator.assign(
      static_cast<size_t>(b.q.size()[0] * b.q.size()[1] * b.q.size()[2]),
      std::numeric_limits<double>::quiet_NaN());
  if (p.return_state) o.state = p.make_state();
  return o;
}
void add_gradients(const PerformerProblem& p, PerformerOutputs& o) {
  o.dq = Tensor(p.base.q.size(), p.base.q.dtype());
  o.dk = Tensor(p.base.k.size(), p.base.q.dtype());
  o.dv = Tensor(p.base.v.size(), p.base.q.dtype());
  o.d_projection = make_block(p.projection.numel(), p.base.q.dtype());
  if (p.state) o.d_state = p.make_state();
}

}  // namespace

PerformerOutputs run_forward(const PerformerProblem& p, Executor& executor) {
  PerformerOutputs o = outputs_of(p);
  o.status = performer_attention_forward(
      p.options(), p.inputs(), o.out.view(), o.log_denominator.data(),
      o.state ? o.state->view() : PerformerStateView{}, executor);
  return o;
}

PerformerOutputs run(const PerformerProblem& p, Executor& executor) {
  PerformerOutputs o = run_forward(p, executor);
  add_gradients(p, o);
  if (!o.status.ok()) return o;
  o.status = performer_attention_backward(
      p.options(), p.inputs(), std::as_const(o.out).view(),
      o.log_denominator.data(), p.base.d_out.view(),
      p.d_state_out ? std::as_const(*p.d_state_out).view().sums
                    : ConstLinearStateView{},
      o.dq.view(), o.dk.view(), o.dv.view(), o.d_projection.view().data,
      o.d_state ? o.d_state->view().sums : LinearStateView{}, executor);
  return o;
}

PerformerOutputs run_reference(const PerformerProblem& narrow) {
  const PerformerProblem p = widen(narrow);
  PerformerOutputs o = outputs_of(p);
  o.status = reference::performer_attention_forward(
      p.options(), p.inputs(), o.out.view(), o.log_denominator.data(),
      o.state ? o.state->view() : PerformerStateView{});
  if (!o.status.ok()) return o;
  add_gradients(p, o);
  o.status = reference::performer_attention_backward(
      p.options(), p.inputs(), p.base.d_out.view(),
      p.d_state_out ? std::as_const(*p.d_state_out).view().sums
                    : ConstLinearStateView{},
      o.dq.view(), o.dk.view(), o.dv.view(), o.d_projection.view().data,
      o.d_state ? o.d_state->view().sums : LinearStateView{});
  return o;
}

std::string compare(const PerformerProblem& problem,
                    const PerformerOutputs& got, const PerformerOutputs& want,
                    double out_limit, double gradient_limit) {
  if (!got.status.ok()) return "the kernels refuse: " + got.status.message();
  if (!want.status.ok())
    return "the reference refuses: " + want.status.message();
  std::string text;
  const auto check = [&](const char* name, const std::vector<double>& g,
                         const std::vector<double>& w, double limit,
                         double rest = 0) {
    std::vector<double> difference;
    for (size_t i = 0; i < w.size(); ++i) difference.push_back(g[i] - w[i]);
    const double error = norm(difference), allowed = limit * norm(w) + rest;
    if (!(error <= allowed)) {
      text += str_cat("  ", name, ": error norm ", error, ", allowed ", allowed,
                      ", norm ", norm(w), "\n");
    }
  };
  check("out", got.out.values(), want.out.values(), out_limit);
  for (size_t i = 0; i < want.log_denominator.size(); ++i) {
    const double g = got.log_denominator[i], w = want.log_denominator[i];
    if (!(g == w || std::fabs(g - w) <= 10 * out_limit)) {
      text +=
          str_cat("  log_denominator[", i, "]: ", g, ", expected ", w, "\n");
      break;
    }
  }
  if (want.state) {
    check("state means", got.state->means(), want.state->means(),
          2 * out_limit);
    check("state sums", got.state->log_sums(), want.state->log_sums(),
          2 * out_limit);
    EXPECT_EQ(got.state->start, want.state->start);
    EXPECT_EQ(got.state->position, want.state->position);
  }
  if (got.dq.numel() != want.dq.numel()) return text;
  // Where one key or one feature is all that a row has, its gradients are what
  // terms leave over that cancel: roundings of g.v, times W and x'.
  std::vector<double> finite_gradient, x;
  for (double value : problem.base.d_out.values())
    if (std::fabs(value) < 1e30) finite_gradient.push_back(value);
  for (const Tensor* t : {&problem.base.q, &problem.base.k})
    for (double value : t->values())
      if (std::fabs(value) < 1e30) x.push_back(value);
  const double dim = static_cast<double>(problem.base.q.size()[3]);
  const double size =
      1 + norm(x) / std::sqrt(static_cast<double>(x.size()) + 1);
  const double rest = 2 *
                      unit_roundoff(accumulator_of(problem.base.q.dtype())) *
                      norm(finite_gradient) *
                      std::sqrt(static_cast<double>(problem.base.v.size()[3])) *
                      std::pow(dim, 0.25) * size;
  check("dq", got.dq.values(), want.dq.values(), gradient_limit, rest);
  check("dk", got.dk.values(), want.dk.values(), gradient_limit, rest);
  check("dv", got.dv.values(), want.dv.values(), gradient_limit);
  check("d_projection", got.d_projection.values(), want.d_projection.values(),
        gradient_limit, rest);
  if (want.d_state) {
    check("d_state.kv_state", got.d_state->kv_state.values(),
          want.d_state->kv_state.values(), gradient_limit);
    check("d_state.k_sum", got.d_state->k_sum.values(),
          want.d_state->k_sum.values(), gradient_limit, rest);
  }
  return text;
}

}  // namespace cosformer::testing
