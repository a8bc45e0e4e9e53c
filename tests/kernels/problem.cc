#include "tests/kernels/problem.h"

#include <algorithm>
#include <cmath>

#include "kernels/check.h"

namespace cosformer::testing {
namespace {

void take_absolute(Tensor& x) {
  for (int64_t b = 0; b < x.size()[0]; ++b)
    for (int64_t s = 0; s < x.size()[1]; ++s)
      for (int64_t h = 0; h < x.size()[2]; ++h)
        for (int64_t c = 0; c < x.size()[3]; ++c)
          x.set(b, s, h, c, std::fabs(x.get(b, s, h, c)));
}

// The farthest that a query is from a key which it can see, by looking at all
// pairs of ends.
int64_t reach_of(const Problem& problem) {
  int64_t reach = 0;
  for (int64_t r = 0; r < problem.rows(); ++r) {
    const AttentionRow row = attention_row(problem.inputs(), r);
    std::vector<int64_t> keys;
    if (row.state_position > row.state_start)
      keys = {row.state_start, row.state_position - 1};
    if (row.kv_len > 0) {
      keys.push_back(row.kv_start);
      keys.push_back(row.kv_start + row.kv_len - 1);
    }
    if (row.q_len == 0) continue;
    for (int64_t query : {row.q_start, row.q_start + row.q_len - 1}) {
      for (int64_t key : keys) {
        if (problem.options.is_causal && key > query) continue;
        reach = std::max(reach, std::abs(query - key));
      }
    }
  }
  return reach;
}

void set_reweight_len(const Point& point, Problem& problem) {
  if (point.cosine == 0) return;
  const int64_t reach = std::max<int64_t>(1, reach_of(problem));
  problem.options.reweight_len = point.cosine == 1 ? reach : 3 * reach + 7;
}

// A state as an earlier call left it: of a few keys, some of them masked, from
// where the problem's keys would have started.
void make_state_in(const Point& point, Random& random, Problem& problem) {
  constexpr int64_t kPrefix = 9;
  const int64_t rows = problem.rows();
  Problem prefix;
  prefix.options = problem.options;
  prefix.q = Tensor({rows, 0, point.kv_heads, point.head_dim}, DType::kFloat64);
  prefix.k =
      Tensor({rows, kPrefix, point.kv_heads, point.head_dim}, DType::kFloat64);
  prefix.v =
      Tensor({rows, kPrefix, point.kv_heads, point.value_dim}, DType::kFloat64);
  prefix.k.fill_normal(random);
  prefix.v.fill_normal(random);
  if (point.feature_map == FeatureMap::kIdentity) take_absolute(prefix.k);
  prefix.kv_start = problem.kv_start;
  for (int64_t i = 0; i < rows * kPrefix; ++i)
    prefix.key_mask.push_back(draw(random, 0, 3) != 0);
  // Only positions for now: M follows from them.
  State state = make_state(problem.options, prefix.inputs());
  Tensor out({rows, 0, point.kv_heads, point.value_dim}, DType::kFloat64);
  Status status = reference::linear_attention_forward(
      prefix.options, prefix.inputs(), out.view(), nullptr, state.view());
  problem.state = state;
  problem.kv_start = state.position;
  for (int64_t r = 0; r < rows; ++r) {
    int64_t& q_start = problem.q_start[static_cast<size_t>(r)];
    const int64_t position = state.position[static_cast<size_t>(r)];
    if (point.starts == 0) q_start = position;  // what "not given" means
    if (problem.options.is_causal)
      q_start = position + std::max<int64_t>(0, std::min<int64_t>(5, q_start));
    if (point.starts == 0 && problem.options.is_causal) q_start = position;
  }
  set_reweight_len(point, problem);

  prefix.options = problem.options;
  state = make_state(problem.options, prefix.inputs());
  if (status.ok()) {
    status = reference::linear_attention_forward(
        prefix.options, prefix.inputs(), out.view(), nullptr, state.view());
  }
  if (!status.ok()) {
    problem.text += " (no state: " + status.message() + ")";
    return;
  }
  // Rounded to the type that a call with this dtype takes.
  State rounded = make_state(problem.options, problem.inputs());
  for (int64_t i = 0; i < state.kv_state.numel(); ++i)
    rounded.kv_state.set(0, 0, 0, i, state.kv_state.get(0, 0, 0, i));
  for (int64_t i = 0; i < state.k_sum.numel(); ++i)
    rounded.k_sum.set(0, 0, 0, i, state.k_sum.get(0, 0, 0, i));
  rounded.start = state.start;
  rounded.position = state.position;
  problem.state = rounded;
}

bool sees_a_key(const Problem& problem, const AttentionRow& row, int64_t i) {
  for (int64_t j = 0; j < row.kv_len; ++j) {
    if (problem.options.is_causal && row.kv_start + j > row.q_start + i)
      return false;
    if (problem.key_is_real(row, j)) return true;
  }
  return false;
}

void hide_junk(Random& random, Problem& problem) {
  hide_masked_junk(random, problem);
  for (int64_t r = 0; r < problem.rows() && !problem.state; ++r) {
    const AttentionRow row = attention_row(problem.inputs(), r);
    for (int64_t i = 0; i < row.q_len; ++i) {
      if (sees_a_key(problem, row, i)) continue;
      fill_with_junk(problem.q, row.batch, row.q_offset + i, random);
      fill_with_junk(problem.d_out, row.batch, row.q_offset + i, random);
    }
  }
  if (!problem.options.is_causal || problem.return_state) return;
  // Keys later than every query of their row.
  for (int64_t r = 0; r < problem.rows(); ++r) {
    const AttentionRow row = attention_row(problem.inputs(), r);
    for (int64_t j = 0; j < row.kv_len; ++j) {
      if (row.kv_start + j < row.q_start + row.q_len) continue;
      fill_with_junk(problem.k, row.batch, row.kv_offset + j, random);
      fill_with_junk(problem.v, row.batch, row.kv_offset + j, random);
    }
  }
}

State widen(const State& state) {
  return {widen(state.kv_state), widen(state.k_sum), state.start,
          state.position};
}

}  // namespace

LinearStateView State::view() {
  return {kv_state.view().data, k_sum.view().data, start.data(),
          position.data()};
}
ConstLinearStateView State::view() const {
  return {kv_state.view().data, k_sum.view().data, start.data(),
          position.data()};
}

State make_state(const LinearAttentionOptions& options,
                 const LinearAttentionInputs& inputs) {
  const int64_t rows = num_rows(inputs);
  const int64_t features =
      inputs.q.size[3] * (options.reweight_len > 0 ? 2 : 1);
  const int64_t sums = rows * inputs.k.size[2] * features;
  // A position that no call would give: one that is left stands out.
  const std::vector<int64_t> unset(static_cast<size_t>(rows), -12345);
  return {make_block(sums * inputs.v.size[3], inputs.q.dtype),
          make_block(sums, inputs.q.dtype), unset, unset};
}

LinearAttentionInputs Problem::inputs() const {
  LinearAttentionInputs in = inputs_of<LinearAttentionInputs>(*this);
  if (state) in.state = state->view();
  return in;
}

Problem make_problem(const Point& point) {
  Random random(static_cast<uint64_t>(point.seed));
  Problem problem;
  problem.text = describe(point);
  problem.options.feature_map = point.feature_map;
  problem.options.is_causal = point.causal;
  problem.options.normalizer =
      point.normalized ? Normalizer::kSum : Normalizer::kNone;
  problem.options.rotary_base = point.rotary == 0 ? 0.0 : 1000.0;
  problem.options.rotary_interleaved = point.rotary == 2;
  make_call(point, random, problem);
  if (point.feature_map == FeatureMap::kIdentity) {
    take_absolute(problem.q);
    take_absolute(problem.k);
  }
  make_starts(point, point.rotary != 0 ? 100000 : (int64_t{1} << 40) + 3,
              random, problem);
  problem.return_state = (point.state & 2) != 0;
  if ((point.state & 1) != 0) {
    make_state_in(point, random, problem);
  } else {
    set_reweight_len(point, problem);
  }
  if (point.starts == 0) problem.q_start = problem.kv_start = {};
  if (problem.return_state) {
    problem.d_state_out = make_state(problem.options, problem.inputs());
    problem.d_state_out->kv_state.fill_normal(random);
    problem.d_state_out->k_sum.fill_normal(random);
  }
  hide_junk(random, problem);
  return problem;
}

Problem widen(const Problem& problem) {
  Problem wide = problem;
  widen_call(wide);
  if (wide.state) wide.state = widen(*wide.state);
  if (wide.d_state_out) wide.d_state_out = widen(*wide.d_state_out);
  return wide;
}

Outputs run_forward(const Problem& problem, Executor& executor,
                    int64_t layout) {
  Outputs o;
  const LinearAttentionInputs inputs = problem.inputs();
  const DType dtype = problem.q.dtype();
  o.out = Tensor(problem.out_size(), dtype, layout_of(layout, 0));
  o.denominator =
      Tensor({problem.q.size()[0], problem.q.size()[1], problem.q.size()[2], 1},
             accumulator_of(dtype));
  if (problem.return_state) o.state = make_state(problem.options, inputs);
  o.status = linear_attention_forward(
      problem.options, inputs, o.out.view(), o.denominator.view().data,
      o.state ? o.state->view() : LinearStateView{}, executor);
  return o;
}

Outputs run(const Problem& problem, Executor& executor, int64_t layout) {
  Outputs o = run_forward(problem, executor, layout);
  if (!o.status.ok()) return o;
  const LinearAttentionInputs inputs = problem.inputs();
  const DType dtype = problem.q.dtype();
  o.dq = Tensor(problem.q.size(), dtype, layout_of(layout, 1));
  o.dk = Tensor(problem.k.size(), dtype, layout_of(layout, 2));
  o.dv = Tensor(problem.v.size(), dtype, layout_of(layout, 3));
  if (problem.state) o.d_state = make_state(problem.options, inputs);
  const Outputs& given = o;
  o.status = linear_attention_backward(
      problem.options, inputs, given.out.view(), given.denominator.view().data,
      problem.d_out.view(),
      problem.d_state_out
          ? static_cast<const State&>(*problem.d_state_out).view()
          : ConstLinearStateView{},
      o.dq.view(), o.dk.view(), o.dv.view(),
      o.d_state ? o.d_state->view() : LinearStateView{}, executor);
  return o;
}

Outputs run_reference(const Problem& narrow) {
  const Problem problem = widen(narrow);
  Outputs o;
  const LinearAttentionInputs inputs = problem.inputs();
  const DType dtype = problem.q.dtype();
  o.out = Tensor(problem.out_size(), dtype);
  o.denominator =
      Tensor({problem.q.size()[0], problem.q.size()[1], problem.q.size()[2], 1},
             dtype);
  if (problem.return_state) o.state = make_state(problem.options, inputs);
  o.status = reference::linear_attention_forward(
      problem.options, inputs, o.out.view(), o.denominator.view().data,
      o.state ? o.state->view() : LinearStateView{});
  if (!o.status.ok()) return o;
  o.dq = Tensor(problem.q.size(), dtype);
  o.dk = Tensor(problem.k.size(), dtype);
  o.dv = Tensor(problem.v.size(), dtype);
  if (problem.state) o.d_state = make_state(problem.options, inputs);
  o.status = reference::linear_attention_backward(
      problem.options, inputs, problem.d_out.view(),
      problem.d_state_out
          ? static_cast<const State&>(*problem.d_state_out).view()
          : ConstLinearStateView{},
      o.dq.view(), o.dk.view(), o.dv.view(),
      o.d_state ? o.d_state->view() : LinearStateView{});
  return o;
}

}  // namespace cosformer::testing
