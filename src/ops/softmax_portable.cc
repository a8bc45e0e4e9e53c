#include "ops/softmax_portable.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cosformer/kernels.h"
#include "ops/call_checks.h"
#include "ops/cpu_call.h"
#include "ops/softmax_checks.h"

namespace cosformer::ops {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A batch of rows in the accumulation dtype: no packing, no defaults left.
struct Rows {
  at::Tensor q, k, v;
  at::Tensor q_positions, k_positions;  // int64 [batch, length]
  at::Tensor key_mask, query_mask;      // undefined: none
  at::Tensor global, query_global;      // [batch, length]; undefined: none
  int64_t first_row = 0;                // of the call
};

at::Tensor hidden(const at::Tensor& mask) {
  return mask.logical_not().unsqueeze(-1).unsqueeze(-1);
}

bool is_finite(const at::Tensor& tensor) {
  return tensor.isfinite().all().item<bool>();
}

at::Tensor floor_divide(const at::Tensor& x, int64_t by) {
  return at::div(x, by, "floor");
}

class Portable {
 public:
  Portable(const SoftmaxCall& call, bool bad_gradient)
      : call_(call),
        options_(kernel_options(call)),
        scale_(call.scale.value_or(
            1 / std::sqrt(static_cast<double>(call.q.size(3))))),
        bad_gradient_(bad_gradient) {}

  // out in the accumulation dtype, log_sum_exp.
  SoftmaxOutputs forward(Rows rows) const {
    const int64_t q_len = rows.q.size(1), kv_len = rows.k.size(1);
    const int64_t heads = rows.q.size(2), group = heads / rows.k.size(2);
    if (q_len == 0 || kv_len == 0 || rows.q.size(0) == 0) return nothing(rows);
    if (rows.query_mask.defined())
      rows.q = rows.q.masked_fill(hidden(rows.query_mask), 0);
    if (rows.key_mask.defined()) {
      rows.k = rows.k.masked_fill(hidden(rows.key_mask), 0);
      rows.v = rows.v.masked_fill(hidden(rows.key_mask), 0);
    }
    const bool partly_visible =
        call_.is_causal || call_.has_pattern() || call_.dropout_p > 0;
    const bool pairwise =
        partly_visible && (bad_gradient_ || !is_finite(rows.q) ||
                           !is_finite(rows.k) || !is_finite(rows.v));
    if (group > 1) {
      rows.k = rows.k.repeat_interleave(group, 2);
      rows.v = rows.v.repeat_interleave(group, 2);
    }
    // Weights of a chunk of queries at a time.
    constexpr int64_t kPairs = int64_t{1} << 22;
    const int64_t width = pairwise ? rows.q.size(3) + rows.v.size(3) : 1;
    const int64_t chunk = std::max<int64_t>(
        1, kPairs / (rows.q.size(0) * heads * kv_len * width));
    std::vector<at::Tensor> outs, sums;
    for (int64_t first = 0; first < q_len; first += chunk) {
      auto [out, sum] =
          of_queries(rows, first, std::min(first + chunk, q_len), pairwise);
      outs.push_back(std::move(out));
      sums.push_back(std::move(sum));
    }
    return {at::cat(outs, 1), at::cat(sums, 1)};
  }

 private:
  static SoftmaxOutputs nothing(const Rows& rows) {
    at::Tensor sum = at::full({rows.q.size(0), rows.q.size(1), rows.q.size(2)},
                              -kInfinity, rows.q.options());
    // A graph, so that gradients are 0 and not absent.
    const at::Tensor none =
        rows.q.slice(-1, 0, 0).sum(-1, true) + rows.v.slice(1, 0, 0).sum() * 0;
    return {none.expand({-1, -1, -1, rows.v.size(3)}), sum};
  }

  // [batch, heads or 1, queries, kv_len] bool.
  at::Tensor visible(const Rows& rows, int64_t first, int64_t end) const {
    const at::Tensor p_q = rows.q_positions.slice(1, first, end).unsqueeze(2);
    const at::Tensor p_k = rows.k_positions.unsqueeze(1);
    const at::Tensor distance = p_k - p_q;
    at::Tensor result = at::ones_like(distance, at::kBool).unsqueeze(1);
    if (call_.has_pattern()) result = pattern(rows, first, end, p_q, p_k);
    if (call_.is_causal) result = result & (distance <= 0).unsqueeze(1);
    if (rows.key_mask.defined())
      result = result & rows.key_mask.unsqueeze(1).unsqueeze(1);
    if (rows.query_mask.defined()) {
      result = result &
               rows.query_mask.slice(1, first, end).unsqueeze(1).unsqueeze(-1);
    }
    return result;
  }

  // The union of the parts.
  at::Tensor pattern(const Rows& rows, int64_t first, int64_t end,
                     const at::Tensor& p_q, const at::Tensor& p_k) const {
    const at::Tensor distance = p_k - p_q;
    at::Tensor result = at::zeros_like(distance, at::kBool);
    if (options_.has_window) {
      const at::Tensor steps = floor_divide(distance, options_.dilation);
      at::Tensor inside = steps * options_.dilation == distance;
      if (options_.window_left >= 0)
        inside = inside & (steps >= -options_.window_left);
      if (options_.window_right >= 0)
        inside = inside & (steps <= options_.window_right);
      result = result | inside;
    }
    if (rows.global.defined()) {
      result = result | rows.global.unsqueeze(1) |
               rows.query_global.slice(1, first, end).unsqueeze(2);
    }
    result = result.unsqueeze(1);
    if (!call_.block_mask) return result;
    const at::Tensor& mask = *call_.block_mask;  // [heads or 1, A, B]
    const int64_t a_size = mask.size(1), b_size = mask.size(2);
    if (a_size == 0 || b_size == 0) return result;
    const at::Tensor a = floor_divide(p_q, *call_.block_size);
    const at::Tensor b = floor_divide(p_k, *call_.block_size);
    const at::Tensor inside = (a >= 0) & (a < a_size) & (b >= 0) & (b < b_size);
    const at::Tensor index =
        a.clamp(0, a_size - 1) * b_size + b.clamp(0, b_size - 1);
    const at::Tensor allowed =
        mask.flatten(1)
            .index_select(1, index.flatten())
            .view({mask.size(0), index.size(0), index.size(1), index.size(2)})
            .transpose(0, 1);
    return result | (allowed & inside.unsqueeze(1));
  }

  // [batch, heads, queries, kv_len].
  at::Tensor bias(const Rows& rows, int64_t first, int64_t end) const {
    const int64_t reach = (call_.relative_bias->size(1) - 1) / 2;
    const at::Tensor index =
        (rows.k_positions.unsqueeze(1) -
         rows.q_positions.slice(1, first, end).unsqueeze(2))
            .clamp(-reach, reach) +
        reach;
    return call_.relative_bias->to(rows.q.scalar_type())
        .index_select(1, index.flatten())
        .view({call_.relative_bias->size(0), index.size(0), index.size(1),
               index.size(2)})
        .transpose(0, 1);
  }

  // [batch, heads, queries, kv_len]: which weights dropout takes away.
  at::Tensor dropped(const Rows& rows, int64_t first, int64_t end) const {
    const std::vector<int64_t> q_at =
        host_integers(rows.q_positions.slice(1, first, end));
    const std::vector<int64_t> k_at = host_integers(rows.k_positions);
    const int64_t batch = rows.q.size(0), heads = rows.q.size(2);
    const int64_t q_len = end - first, kv_len = rows.k_positions.size(1);
    at::Tensor result = at::empty({batch, heads, q_len, kv_len}, at::kBool);
    bool* to = result.mutable_data_ptr<bool>();
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t i = 0; i < q_len; ++i)
          for (int64_t j = 0; j < kv_len; ++j) {
            *to++ = !softmax_dropout_keeps(
                options_.dropout_p, options_.dropout_seed, rows.first_row + b,
                h, q_at[b * q_len + i], k_at[b * kv_len + j]);
          }
    return result.to(rows.q.device());
  }

  // pairwise: [batch, queries, kv_len, heads, dim] of what sees each other,
  // zeros elsewhere; a gradient passes where they are not.
  SoftmaxOutputs of_queries(const Rows& rows, int64_t first, int64_t end,
                            bool pairwise) const {
    const at::Tensor q = rows.q.slice(1, first, end);
    const at::Tensor unseen = visible(rows, first, end).logical_not();
    const auto pairs = [](const at::Tensor& x, int64_t dim,
                          const at::Tensor& without) {
      return x.unsqueeze(dim).masked_fill(
          without.permute({0, 2, 3, 1}).unsqueeze(-1), 0);
    };
    at::Tensor scores = pairwise
                            ? (pairs(q, 2, unseen) * pairs(rows.k, 1, unseen))
                                  .sum(-1)
                                  .permute({0, 3, 1, 2})
                            : at::einsum("bihd,bjhd->bhij", {q, rows.k});
    scores = scores * scale_;
    if (call_.relative_bias) scores = scores + bias(rows, first, end);
    scores = scores.masked_fill(unseen, -kInfinity);
    const at::Tensor blind = unseen.all(-1, true);
    const at::Tensor largest = scores.detach().amax(-1, true).masked_fill(
        blind, 0);  // a constant: it cancels
    const at::Tensor powers = (scores - largest).exp();
    const at::Tensor sum = powers.sum(-1, true).masked_fill(blind, 1);
    at::Tensor weights = (powers / sum).masked_fill(unseen, 0);
    at::Tensor absent = unseen;
    if (call_.dropout_p > 0) {
      const at::Tensor taken = dropped(rows, first, end);
      absent = absent | taken;
      weights = weights.masked_fill(taken, 0) / (1 - call_.dropout_p);
    }
    const at::Tensor out =
        pairwise ? (weights.permute({0, 2, 3, 1}).unsqueeze(-1) *
                    pairs(rows.v, 1, absent))
                       .sum(2)
                 : at::einsum("bhij,bjhd->bihd", {weights, rows.v});
    // Whatever comes back for a row that sees nothing stops here.
    const at::Tensor seen = out.masked_fill(blind.permute({0, 2, 1, 3}), 0);
    const at::Tensor log_sum =
        (largest + sum.detach().log()).masked_fill(blind, -kInfinity);
    return {seen, log_sum.squeeze(-1).permute({0, 2, 1})};
  }

  const SoftmaxCall& call_;
  SoftmaxAttentionOptions options_;
  double scale_;
  bool bad_gradient_;
};

at::Tensor places(const OptionalTensor& start, int64_t rows, int64_t length,
                  const at::TensorOptions& integers) {
  const at::Tensor index = at::arange(length, integers);
  if (!start) return index.expand({rows, length});
  return start->to(integers.device()).expand({rows}).unsqueeze(1) + index;
}

// Whether a global token stands at the queries' positions: [batch, q_len].
at::Tensor global_queries(const at::Tensor& global, const at::Tensor& q_places,
                          const at::Tensor& k_places) {
  const int64_t kv_len = global.size(1);
  if (kv_len == 0) return at::zeros_like(q_places, at::kBool);
  const at::Tensor index = q_places - k_places.slice(1, 0, 1);
  return (index >= 0) & (index < kv_len) &
         global.gather(1, index.clamp(0, kv_len - 1));
}

}  // namespace

SoftmaxOutputs portable_softmax_attention(const SoftmaxCall& call,
                                          const OptionalTensor& d_out) {
  // The operator has cast its inputs; what follows keeps the accumulation
  // dtype.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
  const at::ScalarType dtype = accumulation_dtype(call.q);
  const at::TensorOptions integers = call.q.options().dtype(at::kLong);
  const bool bad_gradient =
      d_out && !is_finite(call.query_mask
                              ? d_out->masked_fill(hidden(*call.query_mask), 0)
                              : *d_out);
  const Portable portable(call, bad_gradient);
  const at::Tensor q = call.q.to(dtype), k = call.k.to(dtype),
                   v = call.v.to(dtype);
  const auto forward = [&](Rows rows, const OptionalTensor& q_start,
                           const OptionalTensor& kv_start,
                           const at::Tensor& global) {
    rows.q_positions =
        places(q_start, rows.q.size(0), rows.q.size(1), integers);
    rows.k_positions =
        places(kv_start, rows.k.size(0), rows.k.size(1), integers);
    if (global.defined()) {
      rows.global = global;
      rows.query_global =
          global_queries(global, rows.q_positions, rows.k_positions);
    }
    return portable.forward(std::move(rows));
  };
  const at::Tensor global = call.global_mask.value_or(at::Tensor());
  if (!call.cu_seqlens_q) {
    auto [out, sum] = forward({q,
                               k,
                               v,
                               {},
                               {},
                               call.key_mask.value_or(at::Tensor()),
                               call.query_mask.value_or(at::Tensor()),
                               {},
                               {}},
                              call.q_start, call.kv_start, global);
    return {out.to(call.q.scalar_type()), sum};
  }

  // Packed: one sequence after the other.
  const std::vector<int64_t> q_at = host_integers(*call.cu_seqlens_q);
  const std::vector<int64_t> k_at =
      call.cu_seqlens_k ? host_integers(*call.cu_seqlens_k) : q_at;
  const auto start_of = [](const OptionalTensor& start, int64_t s) {
    return start && start->dim() == 1
               ? OptionalTensor(start->slice(0, s, s + 1))
               : start;
  };
  std::vector<at::Tensor> outs, sums;
  for (int64_t s = 0; s + 1 < static_cast<int64_t>(q_at.size()); ++s) {
    const auto keys = [&](const at::Tensor& tensor) {
      return tensor.defined() ? tensor.slice(1, k_at[s], k_at[s + 1]) : tensor;
    };
    Rows rows{q.slice(1, q_at[s], q_at[s + 1]),
              keys(k),
              keys(v),
              {},
              {},
              {},
              {},
              {},
              {},
              s};
    auto [out, sum] = forward(std::move(rows), start_of(call.q_start, s),
                              start_of(call.kv_start, s), keys(global));
    outs.push_back(std::move(out));
    sums.push_back(std::move(sum));
  }
  if (outs.empty()) {
    return {at::zeros({1, 0, q.size(2), v.size(3)}, call.q.options()),
            at::zeros({1, 0, q.size(2)}, q.options())};
  }
  return {at::cat(outs, 1).to(call.q.scalar_type()), at::cat(sums, 1)};
}

at::Tensor portable_softmax_over(const SoftmaxCall& call,
                                 const at::Tensor& q_positions,
                                 const PlacedKeys& keys) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
  const at::ScalarType dtype = accumulation_dtype(call.q);
  const Portable portable(call, /*bad_gradient=*/false);
  const auto [out, sum] = portable.forward(
      {call.q.to(dtype), keys.keys.to(dtype), keys.values.to(dtype),
       q_positions, keys.positions, keys.mask,
       call.query_mask.value_or(at::Tensor()), keys.global, keys.query_global});
  return out.to(call.q.scalar_type());
}

}  // namespace cosformer::ops
