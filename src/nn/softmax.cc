#include "nn/softmax.h"

#include <vector>

namespace cosformer {
namespace {

torch::Tensor dense(const torch::Tensor& q, const torch::Tensor& k,
                    const torch::Tensor& v, const SoftmaxArgs& args) {
  const int64_t q_len = q.size(1), kv_len = k.size(1);
  if (q.numel() == 0 || kv_len == 0) {
    return q.new_zeros({q.size(0), q_len, q.size(2), v.size(3)});
  }
  std::optional<double> scale;
  if (args.scale != 0.0) scale = args.scale;
  const bool grouped = q.size(2) != k.size(2);
  const auto run = [&](const std::optional<torch::Tensor>& mask,
                       bool is_causal) {
    return at::scaled_dot_product_attention(
               q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask,
               /*dropout_p=*/0.0, is_causal, scale, grouped)
        .transpose(1, 2);
  };
  // A query at or beyond the last key sees all of them.
  const bool causal =
      args.is_causal && (args.row_offset || args.offset < kv_len - 1);
  if (!args.key_mask && !causal) return run(std::nullopt, false);
  if (!args.key_mask && !args.row_offset && args.offset == 0) {
    return run(std::nullopt, true);
  }

  torch::Tensor visible;  // [batch or 1, q_len or 1, kv_len]
  if (args.key_mask) visible = args.key_mask->unsqueeze(1);
  if (causal) {
    const auto options = torch::dtype(torch::kInt64).device(q.device());
    torch::Tensor last = torch::arange(q_len, options).unsqueeze(0);
    last = args.row_offset ? last + args.row_offset->unsqueeze(1)
                           : last + args.offset;
    const torch::Tensor earlier =
        torch::arange(kv_len, options).view({1, 1, kv_len}) <=
        last.unsqueeze(2);
    visible = visible.defined() ? visible.logical_and(earlier) : earlier;
  }
  // Kernels differ in what they give for a row without keys, NaN included: let
  // it see everything, then put 0 there, which also stops its gradient.
  const torch::Tensor blind = visible.any(-1, /*keepdim=*/true).logical_not();
  torch::Tensor mask = visible.logical_or(blind).unsqueeze(1);
  if (mask.size(2) == 1) mask = mask.expand({-1, -1, q_len, -1});
  return run(mask, false).masked_fill(blind.unsqueeze(-1), 0.0);
}

std::vector<int64_t> offsets(const torch::Tensor& cu_seqlens, int64_t total,
                             const char* name) {
  TORCH_CHECK(cu_seqlens.dim() == 1 && cu_seqlens.numel() >= 1 &&
                  (cu_seqlens.scalar_type() == torch::kInt32 ||
                   cu_seqlens.scalar_type() == torch::kInt64),
              "softmax attention: ", name, " is ", cu_seqlens.scalar_type(),
              " ", cu_seqlens.sizes(),
              ", expected int32 or int64 [sequences + 1]");
  const torch::Tensor list = cu_seqlens.to(torch::kCPU, torch::kInt64);
  const auto* data = list.const_data_ptr<int64_t>();
  std::vector<int64_t> out(data, data + list.numel());
  for (size_t i = 1; i < out.size(); ++i) {
    TORCH_CHECK(out[i] >= out[i - 1], "softmax attention: ", name,
                " falls from ", out[i - 1], " to ", out[i],
                ": offsets must not decrease");
  }
  TORCH_CHECK(out.front() == 0 && out.back() == total,
              "softmax attention: ", name, " runs from ", out.front(), " to ",
              out.back(), ", expected 0 to ", total, " (the number of tokens)");
  return out;
}

}  // namespace

torch::Tensor packed_positions(const torch::Tensor& cu_seqlens,
                               const std::optional<torch::Tensor>& starts) {
  const torch::Tensor bounds = cu_seqlens.to(torch::kInt64);
  torch::Tensor shift = -bounds.narrow(0, 0, bounds.size(0) - 1);
  if (starts) shift = shift + starts->flatten();
  const torch::Tensor of_token = shift.repeat_interleave(bounds.diff());
  return (torch::arange(of_token.size(0), of_token.options()) + of_token)
      .unsqueeze(0);
}

torch::Tensor softmax_over_keys(const torch::Tensor& q, const torch::Tensor& k,
                                const torch::Tensor& v,
                                const SoftmaxArgs& args) {
  if (!args.cu_seqlens_q) return dense(q, k, v, args);
  TORCH_CHECK(q.size(0) == 1 && k.size(0) == 1, "softmax attention: batch is ",
              q.size(0), ", expected 1 with cu_seqlens_q");
  const auto of_q = offsets(*args.cu_seqlens_q, q.size(1), "cu_seqlens_q");
  const auto of_k =
      offsets(args.cu_seqlens_k.value_or(*args.cu_seqlens_q), k.size(1),
              args.cu_seqlens_k ? "cu_seqlens_k" : "cu_seqlens_q (for keys)");
  TORCH_CHECK(of_q.size() == of_k.size(),
              "softmax attention: cu_seqlens_q has ", of_q.size() - 1,
              " sequences, cu_seqlens_k has ", of_k.size() - 1);
  std::vector<torch::Tensor> parts;
  SoftmaxArgs part = args;
  part.cu_seqlens_q.reset();
  part.cu_seqlens_k.reset();
  for (size_t i = 0; i + 1 < of_q.size(); ++i) {
    const int64_t q_len = of_q[i + 1] - of_q[i];
    const int64_t kv_len = of_k[i + 1] - of_k[i];
    if (q_len == 0) continue;
    if (args.row_offset) {
      part.row_offset = args.row_offset->narrow(0, static_cast<int64_t>(i), 1);
    }
    parts.push_back(dense(q.narrow(1, of_q[i], q_len),
                          k.narrow(1, of_k[i], kv_len),
                          v.narrow(1, of_k[i], kv_len), part));
  }
  if (parts.empty()) {
    return q.new_zeros({1, 0, q.size(2), v.size(3)});
  }
  return torch::cat(parts, 1);
}

}  // namespace cosformer
