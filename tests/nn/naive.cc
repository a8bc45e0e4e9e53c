#include "tests/nn/naive.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace cosformer::testing {
namespace {

torch::Tensor wide(const torch::Tensor& x) { return x.to(torch::kFloat64); }

torch::Tensor projected(const ProjectionImpl& projection,
                        const torch::Tensor& x, int64_t heads) {
  torch::Tensor y = torch::matmul(wide(x), wide(projection.weight).t());
  if (projection.bias.defined()) y = y + wide(projection.bias);
  return y.view({x.size(0), x.size(1), heads, -1}).transpose(1, 2);
}

// [batch, heads, seq, dim], the first rotary_dim of each head turned.
torch::Tensor turned(const torch::Tensor& x, int64_t start,
                     const AttentionOptions& o) {
  const int64_t half = o.rotary_dim / 2, seq = x.size(2);
  torch::Tensor y = x.clone();
  for (int64_t t = 0; t < seq; ++t) {
    for (int64_t i = 0; i < half; ++i) {
      const double angle =
          static_cast<double>(start + t) *
          std::pow(o.rotary_base,
                   -static_cast<double>(i) / static_cast<double>(half));
      const int64_t a = o.rotary_interleaved ? 2 * i : i;
      const int64_t b = o.rotary_interleaved ? 2 * i + 1 : i + half;
      const torch::Tensor xa = x.select(2, t).select(2, a);
      const torch::Tensor xb = x.select(2, t).select(2, b);
      y.select(2, t).select(2, a).copy_(xa * std::cos(angle) -
                                        xb * std::sin(angle));
      y.select(2, t).select(2, b).copy_(xa * std::sin(angle) +
                                        xb * std::cos(angle));
    }
  }
  return y;
}

torch::Tensor features(const torch::Tensor& x, const std::string& map) {
  if (map == "relu") return torch::relu(x);
  if (map == "elu1") return torch::elu(x) + 1;
  return x;
}

// Scores of every pair, softmax over the visible ones; a row without any is 0.
torch::Tensor softmax_over(const torch::Tensor& q, const torch::Tensor& k,
                           const torch::Tensor& v, double scale,
                           const torch::Tensor& bias,
                           const torch::Tensor& visible) {
  torch::Tensor scores = torch::matmul(q, k.transpose(2, 3)) * scale;
  if (bias.defined()) scores = scores + bias;
  // Large negative, not infinite: a row of nothing else has a gradient, of 0.
  scores = scores.masked_fill(visible.logical_not(), -1e30);
  const torch::Tensor weights = torch::softmax(scores, -1) * visible;
  return torch::matmul(weights, v);
}

// What one part of a call sees: [batch or 1, heads or 1, q_len, kv_len].
struct Sight {
  torch::Tensor all;   // real and, when causal, not later
  torch::Tensor i, j;  // positions, [q_len, 1] and [1, kv_len]
};

// The pattern of the kind over it; is_global: bool [batch, kv_len].
torch::Tensor pattern_of(const AttentionImpl& layer, const Sight& sight,
                         const torch::Tensor& is_global) {
  const AttentionOptions& o = layer.options();
  torch::Tensor allowed;
  if (o.window > 0) {
    const torch::Tensor t = sight.j - sight.i;
    allowed = t.remainder(o.dilation)
                  .eq(0)
                  .logical_and(t.abs() <= o.window * o.dilation);
    allowed = allowed.unsqueeze(0).unsqueeze(0);
  }
  if (is_global.defined()) {
    const torch::Tensor key = is_global.unsqueeze(1).unsqueeze(1);
    const torch::Tensor row =
        (sight.i == sight.j).logical_and(key).any(-1, /*keepdim=*/true);
    allowed = allowed.logical_or(key).logical_or(row);
  }
  if (o.kind == "bigbird") {
    const int64_t end =
        std::max(sight.i.max().item<int64_t>(), sight.j.max().item<int64_t>());
    const torch::Tensor mask = layer.block_mask(end / o.block_size + 1);
    const torch::Tensor a = sight.i.div(o.block_size, "floor");
    const torch::Tensor b = sight.j.div(o.block_size, "floor");
    allowed = mask.index({torch::indexing::Slice(), a, b}).unsqueeze(0);
  }
  return allowed.defined() ? sight.all.logical_and(allowed) : sight.all;
}

torch::Tensor random_features(const torch::Tensor& x, const torch::Tensor& w) {
  const torch::Tensor y = x / std::pow(static_cast<double>(x.size(3)), 0.25);
  return torch::exp(torch::matmul(y, w.t()) - y.square().sum(-1, true) / 2) /
         std::sqrt(static_cast<double>(w.size(0)));
}

torch::Tensor linear_kind(const AttentionOptions& o, const torch::Tensor& q,
                          const torch::Tensor& k, const torch::Tensor& v,
                          const Sight& sight, const NaiveCall& call) {
  const torch::Tensor fq = features(q, o.feature_map);
  const torch::Tensor fk = features(k, o.feature_map);
  torch::Tensor cosine = torch::ones({1, 1}, torch::kFloat64);
  if (o.reweight_len > 0) {
    cosine = torch::cos(
        (sight.i - sight.j).to(torch::kFloat64) *
        (std::numbers::pi / 2 / static_cast<double>(o.reweight_len)));
  }
  const torch::Tensor weights =
      torch::matmul(fq, fk.transpose(2, 3)) * cosine * sight.all;
  torch::Tensor numerator = weights;
  if (o.rotary_base > 0) {  // the denominator stays unrotated
    numerator = torch::matmul(turned(fq, call.q_start, o),
                              turned(fk, call.kv_start, o).transpose(2, 3)) *
                cosine * sight.all;
  }
  const torch::Tensor out = torch::matmul(numerator, v);
  if (o.normalizer == "sum") {
    return out / weights.sum(-1, true).clamp_min(o.eps);
  }
  return out * torch::rsqrt(out.square().mean(-1, true) + o.eps);
}

torch::Tensor linformer(const AttentionImpl& layer, const torch::Tensor& q,
                        const torch::Tensor& k, const torch::Tensor& v,
                        double scale, const torch::Tensor& key_mask) {
  const int64_t kv_len = k.size(2);
  const auto shortened = [&](const torch::Tensor& x, const torch::Tensor& e) {
    torch::Tensor real = x;
    if (key_mask.defined()) real = x * key_mask.unsqueeze(1).unsqueeze(-1);
    return torch::matmul(wide(e).narrow(0, 0, kv_len).t(), real);
  };
  const torch::Tensor& e = layer.key_len_proj;
  const torch::Tensor& f = layer.options().share_kv ? e : layer.value_len_proj;
  torch::Tensor visible = torch::ones({1, 1, 1, e.size(1)}, torch::kBool);
  if (key_mask.defined()) {  // of no real key at all, nothing is seen
    visible = key_mask.any(1).view({-1, 1, 1, 1}).logical_and(visible);
  }
  return softmax_over(q, shortened(k, e), shortened(v, f), scale, {}, visible);
}

}  // namespace

torch::Tensor naive_layer(const AttentionImpl& layer,
                          const torch::Tensor& query, const torch::Tensor& key,
                          const torch::Tensor& value, const NaiveCall& call) {
  const AttentionOptions& o = layer.options();
  const int64_t group = o.num_heads / o.num_kv_heads;
  const auto of_queries = [&](const ProjectionImpl& projection) {
    return projected(projection, query, o.num_heads);
  };
  const auto of_keys = [&](const ProjectionImpl& projection,
                           const torch::Tensor& x) {
    return projected(projection, x, o.num_kv_heads).repeat_interleave(group, 1);
  };
  torch::Tensor q = of_queries(*layer.q_proj);
  torch::Tensor k = of_keys(*layer.k_proj, key);
  const torch::Tensor v = o.share_kv ? k : of_keys(*layer.v_proj, value);
  const int64_t q_len = q.size(2), kv_len = k.size(2);
  Sight sight;
  sight.i = torch::arange(q_len, torch::kInt64).unsqueeze(1) + call.q_start;
  sight.j = torch::arange(kv_len, torch::kInt64).unsqueeze(0) + call.kv_start;
  sight.all = o.is_causal ? sight.j <= sight.i
                          : torch::ones({q_len, kv_len}, torch::kBool);
  sight.all = sight.all.unsqueeze(0).unsqueeze(0);
  if (call.key_mask.defined()) {
    sight.all = sight.all.logical_and(call.key_mask.unsqueeze(1).unsqueeze(1));
  }
  const double scale = o.scale != 0.0
                           ? o.scale
                           : 1.0 / std::sqrt(static_cast<double>(o.head_dim));
  torch::Tensor bias;
  if (call.relative_bias.defined()) {
    const int64_t reach = call.relative_bias.size(1) / 2;
    bias = wide(call.relative_bias)
               .index({torch::indexing::Slice(),
                       (sight.j - sight.i).clamp(-reach, reach) + reach});
  }

  torch::Tensor out;
  if (layer.is_linear()) {
    out = linear_kind(o, q, k, v, sight, call);
  } else if (o.kind == "linformer") {
    out = linformer(layer, q, k, v, scale, call.key_mask);
  } else {
    const auto turn = [&](torch::Tensor& x, int64_t start) {
      if (o.rotary_base > 0) x = turned(x, start, o);
    };
    turn(q, call.q_start);
    turn(k, call.kv_start);
    if (o.kind == "performer") {
      const torch::Tensor w = wide(layer.projection);
      const torch::Tensor weights =
          torch::matmul(random_features(q, w),
                        random_features(k, w).transpose(2, 3)) *
          sight.all;
      // A row that sees nothing is 0 / 1.
      const torch::Tensor sum = weights.sum(-1, true);
      out = torch::matmul(weights, v) / sum.masked_fill(sum == 0, 1.0);
    } else {
      torch::Tensor is_global;
      if (o.global_tokens > 0) {
        is_global = (sight.j - call.kv_start < o.global_tokens)
                        .expand({key.size(0), kv_len});
      }
      if (call.global_mask.defined()) {
        is_global = is_global.defined() ? is_global.logical_or(call.global_mask)
                                        : call.global_mask;
      }
      out = softmax_over(q, k, v, scale, bias,
                         pattern_of(layer, sight, is_global));
      if (is_global.defined()) {
        torch::Tensor qg = of_queries(*layer.q_global_proj);
        torch::Tensor kg = of_keys(*layer.k_global_proj, key);
        turn(qg, call.q_start);
        turn(kg, call.kv_start);
        const torch::Tensor own =
            softmax_over(qg, kg, of_keys(*layer.v_global_proj, value), scale,
                         bias, sight.all);
        const torch::Tensor row = (sight.i == sight.j)
                                      .logical_and(is_global.unsqueeze(1))
                                      .any(-1, /*keepdim=*/true)
                                      .unsqueeze(1);
        out = torch::where(row, own, out);
      }
    }
  }
  out = out.transpose(1, 2);
  const auto zero_padding = [&](torch::Tensor x) {
    if (!call.query_mask.defined()) return x;
    torch::Tensor real = call.query_mask.unsqueeze(-1);
    if (x.dim() == 4) real = real.unsqueeze(-1);
    return x * real;
  };
  out = zero_padding(out).reshape({query.size(0), query.size(1), -1});
  if (layer.out_proj) {
    out = torch::matmul(out, wide(layer.out_proj->weight).t());
    if (layer.out_proj->bias.defined()) {
      out = out + wide(layer.out_proj->bias);
    }
  }
  return zero_padding(out);
}

double relative_error(const torch::Tensor& a, const torch::Tensor& b) {
  const torch::Tensor x = wide(a.detach()), y = wide(b.detach());
  EXPECT_EQ(x.sizes(), y.sizes());
  const double size = y.norm().item<double>();
  return (x - y).norm().item<double>() / (size > 0 ? size : 1.0);
}

}  // namespace cosformer::testing
