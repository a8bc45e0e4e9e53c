#include "ops/linear_portable.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <limits>
#include <numbers>
#include <vector>

#include "ops/cpu_call.h"
#include "ops/linear_checks.h"
#include "ops/rotary.h"

namespace cosformer::ops {
namespace {

constexpr int64_t kChunk = 64;

// A batch of rows in the accumulation dtype: no packing, no defaults left.
struct Rows {
  at::Tensor q, k, v;
  at::Tensor q_start, kv_start;  // int64 [batch]
  OptionalTensor key_mask, query_mask;
  at::Tensor kv_state, k_sum, start, position;  // undefined: no state
};

// [batch, seq] true = takes part -> true = does not, with `trailing` more
// dimensions.
at::Tensor hidden(const at::Tensor& mask, int trailing) {
  at::Tensor result = mask.logical_not();
  for (int i = 0; i < trailing; ++i) result = result.unsqueeze(-1);
  return result;
}

bool is_finite(const at::Tensor& tensor) {
  return tensor.isfinite().all().item<bool>();
}

class Portable {
 public:
  Portable(const LinearCall& call, bool return_state, bool bad_gradient)
      : call_(call),
        dtype_(accumulation_dtype(call)),
        return_state_(return_state),
        bad_gradient_(bad_gradient) {}

  // out (of the accumulation dtype), denominator, state.
  ForwardOutputs forward(Rows rows) const {
    const int64_t kv_heads = rows.k.size(2);
    const int64_t group = rows.q.size(2) / kv_heads;
    rows.query_mask = seeing(rows);
    if (rows.query_mask)
      rows.q = rows.q.masked_fill(hidden(*rows.query_mask, 2), 0);
    at::Tensor q = phi(rows.q).unflatten(2, {kv_heads, group});
    at::Tensor k = rows.k, v = rows.v;
    if (rows.key_mask) {
      const at::Tensor masked = hidden(*rows.key_mask, 2);
      k = phi(k.masked_fill(masked, 0)).masked_fill(masked, 0);
      v = v.masked_fill(masked, 0);
    } else {
      k = phi(k);
    }
    auto [numerator, denominator] =
        call_.is_causal ? causal(rows, q, k, v) : full(rows, q, k, v);
    numerator = numerator.flatten(2, 3);
    denominator = denominator.flatten(2, 3);
    at::Tensor out = numerator;
    if (call_.normalizer == "sum") {
      // No gradient passes through the constant eps; a NaN stays.
      out = numerator /
            denominator.masked_fill(denominator < call_.eps, call_.eps)
                .unsqueeze(-1);
    }
    if (rows.query_mask) {
      out = out.masked_fill(hidden(*rows.query_mask, 2), 0);
      denominator = denominator.masked_fill(hidden(*rows.query_mask, 1), 0);
    }
    if (!return_state_) return {out, denominator, {}, {}, {}, {}};
    const at::Tensor positions = places(rows.kv_start, k.size(1));
    at::Tensor kv_state = outer(features(k, positions, true), v);
    at::Tensor k_sum = features(k, positions, false).sum(1);
    at::Tensor start = rows.kv_start, position = rows.kv_start;
    if (rows.kv_state.defined()) {
      kv_state = kv_state + rows.kv_state;
      k_sum = k_sum + rows.k_sum;
      start = rows.start;
      position = rows.position;
    }
    if (k.size(1) > 0) {
      at::Tensor after = positions + 1;
      if (rows.key_mask) {
        after = at::where(*rows.key_mask, after, position.unsqueeze(1));
      }
      position = std::get<0>(after.max(1));
    }
    return {out, denominator, kv_state, k_sum, start.clone(), position.clone()};
  }

 private:
  // query_mask without the queries that see no key; whatever they hold, their
  // output is 0.
  OptionalTensor seeing(const Rows& rows) const {
    const at::Tensor places_q = places(rows.q_start, rows.q.size(1));
    const at::Tensor places_k = places(rows.kv_start, rows.k.size(1));
    at::Tensor sees = at::zeros_like(places_q, at::kBool);
    if (rows.k.size(1) > 0) {
      at::Tensor real =
          rows.key_mask ? *rows.key_mask : at::ones_like(places_k, at::kBool);
      const int64_t never = std::numeric_limits<int64_t>::max();
      const at::Tensor first =
          places_k.masked_fill(real.logical_not(), never).amin(1, true);
      sees = call_.is_causal ? places_q >= first
                             : (first != never).expand_as(places_q);
    }
    if (rows.kv_state.defined())
      sees = sees | (rows.position > rows.start).unsqueeze(1);
    return rows.query_mask ? *rows.query_mask & sees : sees;
  }

  at::Tensor phi(const at::Tensor& x) const {
    if (call_.feature_map == "relu") return x.relu();
    // elu(x) + 1 without its cancellation for small x.
    if (call_.feature_map == "elu1") return x.clamp_max(0).exp() + x.relu();
    return x;
  }

  static at::Tensor places(const at::Tensor& start, int64_t length) {
    return start.unsqueeze(1) + at::arange(length, start.options());
  }

  at::Tensor angles(const at::Tensor& positions) const {
    const at::ScalarType exact =
        positions.device().is_mps() ? at::kFloat : at::kDouble;
    // The period first, in exact integers.
    return positions.remainder(4 * call_.cosine()).to(exact) *
           (std::numbers::pi / 2 / static_cast<double>(call_.cosine()));
  }

  // x [batch, seq, ..., dim] at positions [batch, seq]: rotated where asked.
  at::Tensor turned(const at::Tensor& x, const at::Tensor& positions) const {
    auto [cos, sin] =
        rotary_tables(positions, x.size(-1), call_.rotary(), dtype_);
    for (int64_t d = 3; d < x.dim(); ++d) {
      cos = cos.unsqueeze(2);
      sin = sin.unsqueeze(2);
    }
    return rotate_pairs(x, cos, sin, call_.rotary_interleaved);
  }

  at::Tensor features(const at::Tensor& x, const at::Tensor& positions,
                      bool of_numerator) const {
    at::Tensor result =
        of_numerator && call_.rotary() > 0 ? turned(x, positions) : x;
    if (call_.cosine() == 0) return result;
    at::Tensor angle = angles(positions);
    for (int64_t d = 2; d < x.dim(); ++d) angle = angle.unsqueeze(-1);
    return at::cat(
        {result * angle.cos().to(dtype_), result * angle.sin().to(dtype_)}, -1);
  }

  // sum_j k_j v_j^T: [batch, heads, features, value_dim].
  static at::Tensor outer(const at::Tensor& k, const at::Tensor& v) {
    return at::einsum("bjhf,bjhd->bhfd", {k, v});
  }

  using NumeratorDenominator = std::pair<at::Tensor, at::Tensor>;

  // Every query sees every key.
  NumeratorDenominator full(const Rows& rows, const at::Tensor& q,
                            const at::Tensor& k, const at::Tensor& v) const {
    const at::Tensor q_positions = places(rows.q_start, q.size(1));
    const at::Tensor k_positions = places(rows.kv_start, k.size(1));
    at::Tensor kv = outer(features(k, k_positions, true), v);
    at::Tensor k_sum = features(k, k_positions, false).sum(1);
    if (rows.kv_state.defined()) {
      kv = kv + rows.kv_state;
      k_sum = k_sum + rows.k_sum;
    }
    return {
        at::einsum("bihgf,bhfd->bihgd", {features(q, q_positions, true), kv}),
        at::einsum("bihgf,bhf->bihg",
                   {features(q, q_positions, false), k_sum})};
  }

  // Query i sees the keys up to index i + q_start - kv_start. Those that the
  // first query sees go into the incoming state; the others are moved so that
  // key i is the one that query i is the first to see; then chunks: products
  // inside, running sums between.
  NumeratorDenominator causal(const Rows& rows, const at::Tensor& q,
                              const at::Tensor& k, const at::Tensor& v) const {
    const bool elementwise =
        bad_gradient_ || !is_finite(q) || !is_finite(k) || !is_finite(v);
    const int64_t q_len = q.size(1), kv_len = k.size(1);
    const at::TensorOptions integers = rows.q_start.options();
    const at::Tensor shift = (rows.q_start - rows.kv_start).unsqueeze(1);

    const at::Tensor k_positions = places(rows.kv_start, kv_len);
    const at::Tensor later = (at::arange(kv_len, integers).unsqueeze(0) > shift)
                                 .unsqueeze(-1)
                                 .unsqueeze(-1);
    const at::Tensor k_before = k.masked_fill(later, 0);
    at::Tensor kv =
        outer(features(k_before, k_positions, true), v.masked_fill(later, 0));
    at::Tensor k_sum = features(k_before, k_positions, false).sum(1);
    if (rows.kv_state.defined()) {
      kv = kv + rows.kv_state;
      k_sum = k_sum + rows.k_sum;
    }

    const at::Tensor index = at::arange(q_len, integers);
    const at::Tensor from = index.unsqueeze(0) + shift;
    const at::Tensor absent = ((index < 1) | (from < 0) | (from >= kv_len))
                                  .unsqueeze(-1)
                                  .unsqueeze(-1);
    const auto moved = [&](const at::Tensor& x) {
      if (kv_len == 0) {
        return at::zeros({x.size(0), q_len, x.size(2), x.size(3)}, x.options());
      }
      const at::Tensor place = from.clamp(0, kv_len - 1)
                                   .unsqueeze(-1)
                                   .unsqueeze(-1)
                                   .expand({-1, -1, x.size(2), x.size(3)});
      return x.gather(1, place).masked_fill(absent, 0);
    };
    const at::Tensor positions = places(rows.q_start, q_len);
    return chunks(positions, q, moved(k), moved(v), kv, k_sum,
                  elementwise ? 1 : kChunk);
  }

  // Query i sees the keys 0 to i, all at the same positions, and the state.
  NumeratorDenominator chunks(const at::Tensor& positions, const at::Tensor& q,
                              const at::Tensor& k, const at::Tensor& v,
                              const at::Tensor& kv, const at::Tensor& k_sum,
                              int64_t max_chunk) const {
    const int64_t q_len = q.size(1);
    const int64_t chunk = std::clamp<int64_t>(q_len, 1, max_chunk);
    const int64_t count = (q_len + chunk - 1) / chunk;
    const auto cut = [&](const at::Tensor& x) {
      std::vector<int64_t> padding(2 * (x.dim() - 1), 0);
      padding.back() = count * chunk - q_len;
      return at::constant_pad_nd(x, padding).unflatten(1, {count, chunk});
    };
    const bool rotary = call_.rotary() > 0;
    const auto products = [&](const at::Tensor& left, const at::Tensor& right) {
      at::Tensor scores =
          at::einsum("bnihgd,bnjhd->bnhgij", {cut(left), cut(right)});
      if (call_.cosine() > 0) {
        const at::Tensor index = at::arange(chunk, positions.options());
        scores = scores * angles(index.unsqueeze(1) - index).cos().to(dtype_);
      }
      return scores.tril();
    };
    // Sums of all chunks before each one, and the state.
    const auto before = [&](const at::Tensor& first, const at::Tensor& sums) {
      return at::cat({first.unsqueeze(1), sums.slice(1, 0, count - 1)}, 1)
          .cumsum(1);
    };
    if (count == 0) {
      return {at::zeros({q.size(0), 0, q.size(2), q.size(3), v.size(3)},
                        v.options()),
              at::zeros({q.size(0), 0, q.size(2), q.size(3)}, v.options())};
    }
    const at::Tensor scores =
        rotary ? products(turned(q, positions), turned(k, positions))
               : products(q, k);
    const at::Tensor denominator_scores = rotary ? products(q, k) : scores;
    const at::Tensor values = cut(v);
    const at::Tensor kv_before =
        before(kv, at::einsum("bnjhf,bnjhd->bnhfd",
                              {cut(features(k, positions, true)), values}));
    const at::Tensor k_before =
        before(k_sum, cut(features(k, positions, false)).sum(2));
    const at::Tensor numerator =
        at::einsum("bnhgij,bnjhd->bnihgd", {scores, values}) +
        at::einsum("bnihgf,bnhfd->bnihgd",
                   {cut(features(q, positions, true)), kv_before});
    const at::Tensor denominator =
        denominator_scores.sum(-1).permute({0, 1, 4, 2, 3}) +
        at::einsum("bnihgf,bnhf->bnihg",
                   {cut(features(q, positions, false)), k_before});
    return {numerator.flatten(1, 2).slice(1, 0, q_len),
            denominator.flatten(1, 2).slice(1, 0, q_len)};
  }

  const LinearCall& call_;
  at::ScalarType dtype_;
  bool return_state_, bad_gradient_;
};

// int64 [rows]: what is given, repeated if 0-dim, or the default.
at::Tensor start_of(const OptionalTensor& start, const OptionalTensor& fallback,
                    int64_t rows, const at::TensorOptions& integers) {
  const OptionalTensor& chosen = start ? start : fallback;
  if (!chosen) return at::zeros({rows}, integers);
  return chosen->to(integers.device()).expand({rows});
}

}  // namespace

ForwardOutputs portable_linear_attention(const LinearCall& call,
                                         bool return_state,
                                         const OptionalTensor& d_out) {
  // The operator has cast its inputs; what follows keeps the accumulation
  // dtype.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
  const at::ScalarType dtype = accumulation_dtype(call);
  const at::TensorOptions integers = call.q.options().dtype(at::kLong);
  const int64_t count =
      call.cu_seqlens_q ? call.cu_seqlens_q->size(0) - 1 : call.q.size(0);
  Rows all{call.q.to(dtype),
           call.k.to(dtype),
           call.v.to(dtype),
           start_of(call.q_start, call.state_position, count, integers),
           start_of(call.kv_start, call.state_position, count, integers),
           call.key_mask,
           call.query_mask,
           call.kv_state.value_or(at::Tensor()),
           call.k_sum.value_or(at::Tensor()),
           call.state_start.value_or(at::Tensor()),
           call.state_position.value_or(at::Tensor())};
  const bool bad_gradient =
      call.is_causal && d_out &&
      !is_finite(call.query_mask
                     ? d_out->masked_fill(hidden(*call.query_mask, 2), 0)
                     : *d_out);
  const Portable portable(call, return_state, bad_gradient);
  const auto finish = [&](ForwardOutputs outputs) {
    std::get<0>(outputs) = std::get<0>(outputs).to(call.q.scalar_type());
    return outputs;
  };
  if (!call.cu_seqlens_q) return finish(portable.forward(all));

  // Packed: one sequence after the other.
  const std::vector<int64_t> q_at = host_integers(*call.cu_seqlens_q);
  const std::vector<int64_t> k_at =
      call.cu_seqlens_k ? host_integers(*call.cu_seqlens_k) : q_at;
  std::vector<std::vector<at::Tensor>> parts(6);
  for (int64_t s = 0; s < count; ++s) {
    const auto row = [s](const at::Tensor& tensor) {
      return tensor.defined() ? tensor.slice(0, s, s + 1) : tensor;
    };
    Rows one{all.q.slice(1, q_at[s], q_at[s + 1]),
             all.k.slice(1, k_at[s], k_at[s + 1]),
             all.v.slice(1, k_at[s], k_at[s + 1]),
             row(all.q_start),
             row(all.kv_start),
             std::nullopt,
             std::nullopt,
             row(all.kv_state),
             row(all.k_sum),
             row(all.start),
             row(all.position)};
    const auto [out, denominator, kv_state, k_sum, start, position] =
        portable.forward(one);
    const at::Tensor outputs[] = {out,   denominator, kv_state,
                                  k_sum, start,       position};
    for (size_t i = 0; i < 6; ++i) parts[i].push_back(outputs[i]);
  }
  if (count == 0) {
    // The same shapes with no rows in them.
    all.q = all.q.slice(0, 0, 0);
    all.k = all.k.slice(0, 0, 0);
    all.v = all.v.slice(0, 0, 0);
    auto [out, denominator, kv_state, k_sum, start, position] =
        portable.forward(all);
    return finish({out.reshape({1, 0, out.size(2), out.size(3)}),
                   denominator.reshape({1, 0, denominator.size(2)}), kv_state,
                   k_sum, start, position});
  }
  const auto join = [&](size_t i, int64_t dim) {
    return i >= 2 && !return_state ? at::Tensor() : at::cat(parts[i], dim);
  };
  return finish(
      {join(0, 1), join(1, 1), join(2, 0), join(3, 0), join(4, 0), join(5, 0)});
}

}  // namespace cosformer::ops
