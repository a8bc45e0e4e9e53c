#include "tests/nn/naive.h"

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

}  // namespace

torch::Tensor naive_layer(const AttentionImpl& layer,
                          const torch::Tensor& query, const torch::Tensor& key,
                          const torch::Tensor& value, const NaiveCall& call) {
  const AttentionOptions& o = layer.options();
  torch::Tensor q = projected(*layer.q_proj, query, o.num_heads);
  torch::Tensor k = projected(*layer.k_proj, key, o.num_kv_heads);
  torch::Tensor v = projected(*layer.v_proj, value, o.num_kv_heads);
  const int64_t group = o.num_heads / o.num_kv_heads;
  k = k.repeat_interleave(group, 1);
  v = v.repeat_interleave(group, 1);
  const auto long_type = torch::dtype(torch::kInt64);
  const torch::Tensor i =
      torch::arange(q.size(2), long_type).unsqueeze(1) + call.q_start;
  const torch::Tensor j =
      torch::arange(k.size(2), long_type).unsqueeze(0) + call.kv_start;
  torch::Tensor visible =
      o.is_causal ? j <= i : torch::ones_like(j <= i, torch::kBool);
  visible = visible.unsqueeze(0).unsqueeze(0);
  if (call.key_mask.defined()) {
    visible = visible.logical_and(call.key_mask.unsqueeze(1).unsqueeze(1));
  }

  torch::Tensor out;
  if (o.kind == "softmax") {
    if (o.rotary_base > 0) {
      q = turned(q, call.q_start, o);
      k = turned(k, call.kv_start, o);
    }
    const double scale = o.scale != 0.0
                             ? o.scale
                             : 1.0 / std::sqrt(static_cast<double>(o.head_dim));
    torch::Tensor scores = torch::matmul(q, k.transpose(2, 3)) * scale;
    scores = scores.masked_fill(visible.logical_not(), -INFINITY);
    const torch::Tensor weights =
        torch::where(visible, torch::softmax(scores, -1),
                     torch::zeros({}, scores.options()));
    out = torch::matmul(torch::nan_to_num(weights), v);
  } else {
    const torch::Tensor fq = features(q, o.feature_map);
    const torch::Tensor fk = features(k, o.feature_map);
    torch::Tensor cosine = torch::ones({1, 1}, torch::kFloat64);
    if (o.reweight_len > 0) {
      cosine = torch::cos(
          (i - j).to(torch::kFloat64) *
          (std::numbers::pi / 2 / static_cast<double>(o.reweight_len)));
    }
    const torch::Tensor weights =
        torch::matmul(fq, fk.transpose(2, 3)) * cosine * visible;
    torch::Tensor numerator = weights;
    if (o.rotary_base > 0) {  // the denominator stays unrotated
      numerator = torch::matmul(turned(fq, call.q_start, o),
                                turned(fk, call.kv_start, o).transpose(2, 3)) *
                  cosine * visible;
    }
    out = torch::matmul(numerator, v);
    if (o.normalizer == "sum") {
      out = out / weights.sum(-1, true).clamp_min(o.eps);
    } else {
      out = out * torch::rsqrt(out.square().mean(-1, true) + o.eps);
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
