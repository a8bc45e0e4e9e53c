#include "ops/performer_portable.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>

#include <cfloat>
#include <cmath>
#include <limits>

#include "ops/call_checks.h"
#include "ops/cpu_call.h"
#include "ops/linear_portable.h"

namespace cosformer::ops {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();
// A row whose sum is smaller lost what it sees to the maxima of later keys.
constexpr double kLost = 1e-250;

// A batch of rows in the wide dtype: no packing, no defaults left.
struct Rows {
  at::Tensor q, k, v, projection;
  at::Tensor q_start, kv_start;  // int64 [batch]
  OptionalTensor key_mask, query_mask;
  // Undefined: no state.
  at::Tensor kv_state, k_sum, log_scale, start, position;
};

at::Tensor places(const at::Tensor& start, int64_t length) {
  return start.unsqueeze(1) + at::arange(length, start.options());
}

// Maxima leave NaN out, and have no gradient.
at::Tensor comparable(const at::Tensor& x) {
  return x.detach().masked_fill(x.isnan(), kMinusInfinity);
}

class Portable {
 public:
  Portable(const PerformerCall& call, bool return_state,
           const OptionalTensor& d_out)
      : call_(call),
        dtype_(accumulation_dtype(call.q)),
        return_state_(return_state),
        d_out_(d_out) {}

  // out in the wide dtype.
  PerformerOutputs forward(Rows rows) const {
    const int64_t kv_heads = rows.k.size(2);
    const int64_t group = rows.q.size(2) / kv_heads;
    const at::Tensor real = real_keys(rows),
                     seeing = seeing_queries(rows, real);
    // What is invisible must not reach an exponential: its derivative would be
    // NaN x 0.
    const at::Tensor absent = real.logical_not().unsqueeze(-1).unsqueeze(-1);
    const at::Tensor blind = seeing.logical_not().unsqueeze(-1).unsqueeze(-1);
    rows.k = rows.k.masked_fill(absent, 0);
    rows.v = rows.v.masked_fill(absent, 0);
    rows.q = rows.q.masked_fill(blind, 0);
    const at::Tensor q = logs(rows.q, rows.projection)
                             .unflatten(2, {kv_heads, group}),
                     k = logs(rows.k, rows.projection);

    const at::Tensor before = rows.log_scale.defined()
                                  ? rows.log_scale.detach()
                                  : at::full({k.size(0), kv_heads, k.size(3)},
                                             kMinusInfinity, k.options());
    at::Tensor maxima = before;
    if (k.size(1) > 0) {
      maxima = at::maximum(
          before, comparable(k).masked_fill(absent, kMinusInfinity).amax(1));
    }
    maxima = maxima.to(dtype_).to(k.scalar_type());  // as it is stored
    const at::Tensor shift = maxima.masked_fill(maxima == kMinusInfinity, 0);
    const at::Tensor keys = (k - shift.unsqueeze(1)).exp();
    const at::Tensor scaled = q + maxima.unsqueeze(1).unsqueeze(3);
    at::Tensor top = comparable(scaled).amax(-1);
    top = top.masked_fill(top == kMinusInfinity, 0);
    const at::Tensor queries = (scaled - top.unsqueeze(-1)).exp();
    Rows features = rows;
    if (rows.kv_state.defined()) {
      const at::Tensor factor = (before - shift).exp();
      features.kv_state = rows.kv_state * factor.unsqueeze(-1);
      features.k_sum = rows.k_sum * factor;
    }
    auto [out, denominator, kv_state, k_sum, start, position] =
        linear(features, queries.flatten(2, 3), keys, real, seeing);
    denominator = denominator.detach().unflatten(2, {kv_heads, group});
    if (((denominator < kLost) & seeing.unsqueeze(-1).unsqueeze(-1))
            .any()
            .item<bool>()) {
      std::tie(out, denominator, top) =
          every_weight(rows, q, k, before, real, seeing);
    }
    const at::Tensor log_denominator =
        (denominator.log() + top - std::log(static_cast<double>(k.size(3))))
            .masked_fill(blind, kMinusInfinity)
            .flatten(2, 3)
            .detach();
    if (!return_state_) return {out, log_denominator, {}, {}, {}, {}, {}};
    return {out,
            log_denominator,
            kv_state.to(dtype_),
            k_sum.to(dtype_),
            maxima.to(dtype_),
            start,
            position};
  }

 private:
  static at::Tensor logs(const at::Tensor& x, const at::Tensor& projection) {
    const double dim = static_cast<double>(x.size(3));
    return at::einsum("bshd,fd->bshf", {x, projection * std::pow(dim, -0.25)}) -
           x.square().sum(-1, true) * (0.5 / std::sqrt(dim));
  }

  // Keys that take part and that something sees.
  at::Tensor real_keys(const Rows& rows) const {
    const at::Tensor at_key = places(rows.kv_start, rows.k.size(1));
    at::Tensor real =
        rows.key_mask ? *rows.key_mask : at::ones_like(at_key, at::kBool);
    if (return_state_) return real;
    if (rows.q.size(1) == 0) return at::zeros_like(real);
    at::Tensor at_query = places(rows.q_start, rows.q.size(1));
    if (rows.query_mask) {
      at_query = at_query.masked_fill(rows.query_mask->logical_not(),
                                      std::numeric_limits<int64_t>::min());
    }
    return call_.is_causal ? real & (at_key <= at_query.amax(1, true)) : real;
  }

  at::Tensor seeing_queries(const Rows& rows, const at::Tensor& real) const {
    const at::Tensor at_query = places(rows.q_start, rows.q.size(1));
    at::Tensor sees = at::zeros_like(at_query, at::kBool);
    if (rows.k.size(1) > 0) {
      const int64_t never = std::numeric_limits<int64_t>::max();
      const at::Tensor first = places(rows.kv_start, rows.k.size(1))
                                   .masked_fill(real.logical_not(), never)
                                   .amin(1, true);
      sees = call_.is_causal ? at_query >= first
                             : (first != never).expand_as(at_query);
    }
    if (rows.kv_state.defined())
      sees = sees | (rows.position > rows.start).unsqueeze(1);
    return rows.query_mask ? *rows.query_mask & sees : sees;
  }

  ForwardOutputs linear(const Rows& rows, const at::Tensor& q,
                        const at::Tensor& k, const at::Tensor& real,
                        const at::Tensor& seeing) const {
    const OptionalTensor none, q_start = rows.q_start, kv_start = rows.kv_start,
                               key_mask = real, query_mask = seeing;
    OptionalTensor kv_state, k_sum, start, position;
    if (rows.kv_state.defined()) {
      kv_state = rows.kv_state;
      k_sum = rows.k_sum;
      start = rows.start;
      position = rows.position;
    }
    return portable_linear_attention(
        {q,        k,          rows.v,       q_start,
         kv_start, key_mask,   query_mask,   none,
         none,     kv_state,   k_sum,        start,
         position, "identity", std::nullopt, call_.is_causal,
         "sum",    DBL_MIN,    std::nullopt, false},
        return_state_, d_out_);
  }

  // out, and each row's sum and shift, from every weight.
  std::tuple<at::Tensor, at::Tensor, at::Tensor> every_weight(
      const Rows& rows, const at::Tensor& q, const at::Tensor& k,
      const at::Tensor& before, const at::Tensor& real,
      const at::Tensor& seeing) const {
    // [batch, q_len, kv_len, kv_heads, group, features]
    at::Tensor visible = (real.unsqueeze(1) & seeing.unsqueeze(2));
    if (call_.is_causal) {
      visible = visible & (places(rows.kv_start, k.size(1)).unsqueeze(1) <=
                           places(rows.q_start, q.size(1)).unsqueeze(2));
    }
    const at::Tensor hidden =
        visible.logical_not().unsqueeze(-1).unsqueeze(-1).unsqueeze(-1);
    const at::Tensor pairs = (q.unsqueeze(2) + k.unsqueeze(1).unsqueeze(4))
                                 .masked_fill(hidden, kMinusInfinity);
    const at::Tensor given = q + before.unsqueeze(1).unsqueeze(3);
    at::Tensor top = comparable(given).amax(-1);
    if (k.size(1) > 0) top = at::maximum(top, comparable(pairs).amax({2, -1}));
    top = top.masked_fill(top == kMinusInfinity, 0);
    const at::Tensor weights =
        (pairs - top.unsqueeze(2).unsqueeze(-1)).exp().sum(-1);
    at::Tensor denominator = weights.sum(2);
    at::Tensor numerator = at::einsum("bijhg,bjhd->bihgd", {weights, rows.v});
    if (rows.kv_state.defined()) {
      const at::Tensor features = (given - top.unsqueeze(-1)).exp();
      denominator =
          denominator + at::einsum("bihgf,bhf->bihg", {features, rows.k_sum});
      numerator = numerator +
                  at::einsum("bihgf,bhfd->bihgd", {features, rows.kv_state});
    }
    const at::Tensor blind =
        seeing.logical_not().unsqueeze(-1).unsqueeze(-1).unsqueeze(-1);
    const at::Tensor out =
        (numerator / denominator.unsqueeze(-1).masked_fill(blind, 1))
            .masked_fill(blind, 0);
    return {out.flatten(2, 3), denominator.detach(), top};
  }

  const PerformerCall& call_;
  at::ScalarType dtype_;
  bool return_state_;
  const OptionalTensor& d_out_;
};

// int64 [rows]: what is given, repeated if 0-dim, or the default.
at::Tensor start_of(const OptionalTensor& start, const OptionalTensor& fallback,
                    int64_t rows, const at::TensorOptions& integers) {
  const OptionalTensor& chosen = start ? start : fallback;
  if (!chosen) return at::zeros({rows}, integers);
  return chosen->to(integers.device()).expand({rows});
}

}  // namespace

PerformerOutputs portable_performer_attention(const PerformerCall& call,
                                              bool return_state,
                                              const OptionalTensor& d_out) {
  // The operator has cast its inputs; what follows keeps its dtypes.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
  const at::ScalarType wide =
      call.q.device().is_mps() ? at::kFloat : at::kDouble;
  const at::TensorOptions integers = call.q.options().dtype(at::kLong);
  const bool packed = call.cu_seqlens_q.has_value();
  const int64_t count =
      packed ? call.cu_seqlens_q->size(0) - 1 : call.q.size(0);
  const auto widened = [wide](const OptionalTensor& tensor) {
    return tensor ? tensor->to(wide) : at::Tensor();
  };
  const Rows all{call.q.to(wide),
                 call.k.to(wide),
                 call.v.to(wide),
                 call.projection.to(wide),
                 start_of(call.q_start, call.state_position, count, integers),
                 start_of(call.kv_start, call.state_position, count, integers),
                 call.key_mask,
                 call.query_mask,
                 widened(call.kv_state),
                 widened(call.k_sum),
                 widened(call.log_scale),
                 call.state_start.value_or(at::Tensor()),
                 call.state_position.value_or(at::Tensor())};
  const OptionalTensor wide_gradient =
      d_out ? OptionalTensor(d_out->to(wide)) : std::nullopt;
  const auto finish = [&](PerformerOutputs outputs) {
    std::get<0>(outputs) = std::get<0>(outputs).to(call.q.scalar_type());
    return outputs;
  };
  if (!packed)
    return finish(Portable(call, return_state, wide_gradient).forward(all));

  // Packed: one sequence after the other; none: one of no tokens, for shapes.
  std::vector<int64_t> q_at = host_integers(*call.cu_seqlens_q);
  std::vector<int64_t> k_at =
      call.cu_seqlens_k ? host_integers(*call.cu_seqlens_k) : q_at;
  std::vector<std::vector<at::Tensor>> parts(7);
  const int64_t runs = std::max<int64_t>(count, 1);
  if (count == 0) q_at = k_at = {0, 0};
  for (int64_t s = 0; s < runs; ++s) {
    const auto row = [s, count](const at::Tensor& tensor) {
      return tensor.defined() && count > 0 ? tensor.slice(0, s, s + 1) : tensor;
    };
    const size_t at = static_cast<size_t>(s);
    Rows one = all;
    one.q = all.q.slice(1, q_at[at], q_at[at + 1]);
    one.k = all.k.slice(1, k_at[at], k_at[at + 1]);
    one.v = all.v.slice(1, k_at[at], k_at[at + 1]);
    one.key_mask = one.query_mask = std::nullopt;
    for (at::Tensor Rows::* x :
         {&Rows::q_start, &Rows::kv_start, &Rows::kv_state, &Rows::k_sum,
          &Rows::log_scale, &Rows::start, &Rows::position})
      one.*x = row(all.*x);
    if (count == 0) {
      one.q_start = one.kv_start = at::zeros({1}, integers);
      one.kv_state = one.k_sum = one.log_scale = at::Tensor();
    }
    const OptionalTensor d_one =
        wide_gradient
            ? OptionalTensor(wide_gradient->slice(1, q_at[at], q_at[at + 1]))
            : std::nullopt;
    const auto [out, log_denominator, kv_state, k_sum, log_scale, start,
                position] = Portable(call, return_state, d_one).forward(one);
    const at::Tensor outputs[] = {out,       log_denominator, kv_state, k_sum,
                                  log_scale, start,           position};
    for (size_t i = 0; i < 7; ++i) parts[i].push_back(outputs[i]);
  }
  const auto join = [&](size_t i) {
    if (i < 2) return at::cat(parts[i], 1);
    if (!return_state) return at::Tensor();
    return at::cat(parts[i], 0).slice(0, 0, count);
  };
  return finish(
      {join(0), join(1), join(2), join(3), join(4), join(5), join(6)});
}

std::vector<at::Tensor> portable_performer_gradients(
    const PerformerCall& call, const OptionalTensor& d_out,
    const OptionalTensor& d_kv_state, const OptionalTensor& d_k_sum,
    bool create_graph) {
  const PerformerOutputs outputs =
      portable_performer_attention(call, d_kv_state || d_k_sum, d_out);
  torch::autograd::variable_list roots, root_gradients;
  const auto root = [&](const at::Tensor& output, const OptionalTensor& d) {
    if (!d || !output.requires_grad()) return;
    roots.push_back(output);
    root_gradients.push_back(*d);
  };
  root(std::get<0>(outputs), d_out);
  root(std::get<2>(outputs), d_kv_state);
  root(std::get<3>(outputs), d_k_sum);
  torch::autograd::variable_list inputs = {call.q, call.k, call.v,
                                           call.projection};
  if (call.kv_state) inputs.insert(inputs.end(), {*call.kv_state, *call.k_sum});
  torch::autograd::variable_list result(6);
  if (roots.empty()) return result;
  const torch::autograd::variable_list found = torch::autograd::grad(
      roots, inputs, root_gradients, /*retain_graph=*/create_graph,
      create_graph, /*allow_unused=*/true);
  std::copy(found.begin(), found.end(), result.begin());
  return result;
}

}  // namespace cosformer::ops
