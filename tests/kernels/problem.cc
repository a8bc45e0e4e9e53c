#include "tests/kernels/problem.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "kernels/check.h"

namespace cosformer::testing {
namespace {

int64_t draw(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

void take_absolute(Tensor& x) {
  for (int64_t b = 0; b < x.size()[0]; ++b)
    for (int64_t s = 0; s < x.size()[1]; ++s)
      for (int64_t h = 0; h < x.size()[2]; ++h)
        for (int64_t c = 0; c < x.size()[3]; ++c)
          x.set(b, s, h, c, std::fabs(x.get(b, s, h, c)));
}

// What must never have an effect.
double junk(Random& random, DType dtype) {
  const double huge = dtype == DType::kFloat64   ? 1e308
                      : dtype == DType::kFloat16 ? 65504.0
                                                 : 3e38;
  const double kinds[] = {std::numeric_limits<double>::quiet_NaN(),
                          std::numeric_limits<double>::infinity(),
                          -std::numeric_limits<double>::infinity(), huge,
                          -huge};
  return kinds[draw(random, 0, 4)];
}
void fill_with_junk(Tensor& x, int64_t b, int64_t s, Random& random) {
  for (int64_t h = 0; h < x.size()[2]; ++h)
    for (int64_t c = 0; c < x.size()[3]; ++c)
      x.set(b, s, h, c, junk(random, x.dtype()));
}

std::vector<int64_t> offsets_of(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> offsets = {0};
  for (int64_t n : lengths) offsets.push_back(offsets.back() + n);
  return offsets;
}

// Four parts that sum to total, some of them perhaps empty.
std::vector<int64_t> split(int64_t total, Random& random) {
  std::vector<int64_t> cuts = {0, total};
  for (int i = 0; i < 3; ++i) cuts.push_back(draw(random, 0, total));
  std::sort(cuts.begin(), cuts.end());
  std::vector<int64_t> lengths;
  for (size_t i = 1; i < cuts.size(); ++i)
    lengths.push_back(cuts[i] - cuts[i - 1]);
  return lengths;
}

void make_packing(const Point& point, Random& random, Problem& problem,
                  int64_t& q_len, int64_t& kv_len) {
  std::vector<int64_t> q, k;
  switch (point.packing) {
    case 0:
      return;
    case 1:
      q = {q_len};
      k = {kv_len};
      break;
    case 2:
      q = k = {0, 5, 0, 1};
      if (point.q_len != point.kv_len) k = {3, 4, 0, 2};
      break;
    default:
      q = split(q_len, random);
      k = point.q_len == point.kv_len ? q : split(kv_len, random);
  }
  problem.cu_seqlens_q = offsets_of(q);
  problem.cu_seqlens_k = offsets_of(k);
  q_len = problem.cu_seqlens_q.back();
  kv_len = problem.cu_seqlens_k.back();
}

void make_masks(const Point& point, Random& random, Problem& problem) {
  const int64_t batch = problem.q.size()[0], q_len = problem.q.size()[1],
                kv_len = problem.k.size()[1];
  const bool self = q_len == kv_len;
  std::vector<uint8_t> keys(static_cast<size_t>(batch * kv_len), 1),
      queries(static_cast<size_t>(batch * q_len), 1);
  for (int64_t b = 0; b < batch; ++b) {
    uint8_t* key = keys.data() + b * kv_len;
    uint8_t* query = queries.data() + b * q_len;
    const int64_t real = draw(random, 0, kv_len);
    const int64_t real_queries = self ? real : draw(random, 0, q_len);
    switch (point.mask) {
      case 1:
        std::fill(key + real, key + kv_len, 0);
        std::fill(query + real_queries, query + q_len, 0);
        break;
      case 2:
        std::fill(key, key + kv_len - real, 0);
        std::fill(query, query + q_len - real_queries, 0);
        break;
      case 3:
        for (int64_t j = 0; j < kv_len; ++j) key[j] = draw(random, 0, 3) != 0;
        for (int64_t i = 0; i < q_len; ++i) query[i] = draw(random, 0, 7) != 0;
        break;
      case 4:  // every other row, the first one included
        if (b % 2 == 0) std::fill(key, key + kv_len, 0);
        break;
      case 5:
        for (int64_t i = 0; i < q_len; ++i) query[i] = draw(random, 0, 1) != 0;
        break;
      case 6:
        std::fill(key, key + kv_len, 0);
        std::fill(query, query + q_len, b % 2 == 0);
        break;
      default:
        break;
    }
  }
  // Any nonzero byte means "takes part".
  for (uint8_t& bit : keys) bit = bit != 0 ? (draw(random, 0, 1) ? 1 : 255) : 0;
  if (point.mask != 0 && point.mask != 5) problem.key_mask = keys;
  if (point.mask != 0 && point.mask != 4) problem.query_mask = queries;
}

void make_starts(const Point& point, Random& random, Problem& problem) {
  const int64_t rows = problem.rows();
  const int64_t far = point.rotary != 0 ? 100000 : (int64_t{1} << 40) + 3;
  // The problem sees them when all are there: its inputs read one a row.
  std::vector<int64_t> q_start, kv_start;
  for (int64_t r = 0; r < rows; ++r) {
    const AttentionRow row = attention_row(problem.inputs(), r);
    int64_t q = 0, kv = 0;
    switch (point.starts) {
      case 1:
        q = kv = 17;
        break;
      case 2:
        q = std::max<int64_t>(0, row.kv_len - row.q_len);
        break;
      case 3:
        q = draw(random, 0, 20);
        kv = draw(random, 0, 20);
        break;
      case 4:
        q = far + draw(random, 0, 20);
        kv = far + draw(random, 0, 20);
        break;
      case 5:
        kv = -row.kv_len / 2 - 1;
        q = kv + draw(random, 0, 5);
        break;
      default:
        break;
    }
    q_start.push_back(q);
    kv_start.push_back(kv);
  }
  problem.q_start = std::move(q_start);
  problem.kv_start = std::move(kv_start);
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
    const size_t at = static_cast<size_t>(row.batch * problem.k.size()[1] +
                                          row.kv_offset + j);
    if (problem.key_mask.empty() || problem.key_mask[at] != 0) return true;
  }
  return false;
}

void hide_junk(Random& random, Problem& problem) {
  for (int64_t b = 0; b < problem.k.size()[0]; ++b) {
    for (int64_t j = 0; j < problem.k.size()[1]; ++j) {
      const size_t at = static_cast<size_t>(b * problem.k.size()[1] + j);
      if (!problem.key_mask.empty() && problem.key_mask[at] == 0) {
        fill_with_junk(problem.k, b, j, random);
        fill_with_junk(problem.v, b, j, random);
      }
    }
    for (int64_t i = 0; i < problem.q.size()[1]; ++i) {
      const size_t at = static_cast<size_t>(b * problem.q.size()[1] + i);
      if (!problem.query_mask.empty() && problem.query_mask[at] == 0) {
        fill_with_junk(problem.q, b, i, random);
        fill_with_junk(problem.d_out, b, i, random);
      }
    }
  }
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

Tensor widen(const Tensor& x) {
  Tensor y(x.size(), DType::kFloat64);
  for (int64_t b = 0; b < x.size()[0]; ++b)
    for (int64_t s = 0; s < x.size()[1]; ++s)
      for (int64_t h = 0; h < x.size()[2]; ++h)
        for (int64_t c = 0; c < x.size()[3]; ++c)
          y.set(b, s, h, c, x.get(b, s, h, c));
  return y;
}
State widen(const State& state) {
  return {widen(state.kv_state), widen(state.k_sum), state.start,
          state.position};
}

std::array<int64_t, 4> out_size(const Problem& p) {
  return {p.q.size()[0], p.q.size()[1], p.q.size()[2], p.v.size()[3]};
}

const int64_t* pointer(const std::vector<int64_t>& x) {
  return x.empty() ? nullptr : x.data();
}

}  // namespace

Layout layout_of(int64_t layout, int64_t n) {
  return static_cast<Layout>(layout < kNumLayouts ? layout
                                                  : (n + 1) % kNumLayouts);
}

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
  LinearAttentionInputs in;
  in.q = q.view();
  in.k = k.view();
  in.v = v.view();
  in.q_start = pointer(q_start);
  in.kv_start = pointer(kv_start);
  in.key_mask = key_mask.empty() ? nullptr : key_mask.data();
  in.key_mask_stride = k.size()[1];
  in.query_mask = query_mask.empty() ? nullptr : query_mask.data();
  in.query_mask_stride = q.size()[1];
  in.cu_seqlens_q = pointer(cu_seqlens_q);
  in.cu_seqlens_k = pointer(cu_seqlens_k);
  in.num_sequences = static_cast<int64_t>(cu_seqlens_q.size()) - 1;
  if (cu_seqlens_q.empty()) in.num_sequences = 0;
  if (state) in.state = state->view();
  return in;
}

int64_t Problem::rows() const {
  return cu_seqlens_q.empty() ? q.size()[0]
                              : static_cast<int64_t>(cu_seqlens_q.size()) - 1;
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
  int64_t q_len = point.q_len, kv_len = point.kv_len;
  make_packing(point, random, problem, q_len, kv_len);
  const int64_t batch = point.packing != 0 ? 1 : point.batch;
  const int64_t heads = point.kv_heads * point.group;
  const auto make = [&](int64_t len, int64_t num_heads, int64_t dim,
                        int64_t n) {
    Tensor x({batch, len, num_heads, dim}, point.dtype,
             layout_of(point.layout, n));
    x.fill_normal(random);
    return x;
  };
  problem.q = make(q_len, heads, point.head_dim, 0);
  problem.k = make(kv_len, point.kv_heads, point.head_dim, 1);
  problem.v = make(kv_len, point.kv_heads, point.value_dim, 2);
  problem.d_out = make(q_len, heads, point.value_dim, 3);
  if (point.feature_map == FeatureMap::kIdentity) {
    take_absolute(problem.q);
    take_absolute(problem.k);
  }
  if (point.packing == 0) make_masks(point, random, problem);
  make_starts(point, random, problem);
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
  for (Tensor* x : {&wide.q, &wide.k, &wide.v, &wide.d_out}) *x = widen(*x);
  if (wide.state) wide.state = widen(*wide.state);
  if (wide.d_state_out) wide.d_state_out = widen(*wide.d_state_out);
  return wide;
}

Outputs run_forward(const Problem& problem, Executor& executor,
                    int64_t layout) {
  Outputs o;
  const LinearAttentionInputs inputs = problem.inputs();
  const DType dtype = problem.q.dtype();
  o.out = Tensor(out_size(problem), dtype, layout_of(layout, 0));
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
  o.out = Tensor(out_size(problem), dtype);
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
