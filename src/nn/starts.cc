#include "nn/starts.h"

namespace cosformer {

std::optional<torch::Tensor> checked_start(
    const std::optional<torch::Tensor>& given, int64_t rows, const char* name) {
  if (!given) return given;
  TORCH_CHECK(given->scalar_type() == torch::kInt64 &&
                  (given->numel() == 1 ||
                   (given->dim() == 1 && given->size(0) == rows)),
              "attention: ", name, " is ", given->scalar_type(), " ",
              given->sizes(), ", expected int64, one number or [", rows, "]");
  return given->numel() == 1 ? given->reshape({}) : *given;
}

torch::Tensor start_of_rows(const std::optional<torch::Tensor>& start,
                            int64_t rows, at::Device device) {
  if (!start) {
    return torch::zeros({rows}, torch::dtype(torch::kInt64).device(device));
  }
  return start->to(device).expand({rows});
}

torch::Tensor positions_from(const torch::Tensor& row_starts, int64_t count) {
  return row_starts.unsqueeze(1) +
         torch::arange(count, row_starts.options()).unsqueeze(0);
}

std::vector<int64_t> checked_offsets(const torch::Tensor& cu_seqlens,
                                     int64_t total, const char* name) {
  TORCH_CHECK(cu_seqlens.dim() == 1 && cu_seqlens.numel() >= 1 &&
                  (cu_seqlens.scalar_type() == torch::kInt32 ||
                   cu_seqlens.scalar_type() == torch::kInt64),
              "attention: ", name, " is ", cu_seqlens.scalar_type(), " ",
              cu_seqlens.sizes(), ", expected int32 or int64 [sequences + 1]");
  const torch::Tensor list =
      cu_seqlens.to(torch::kCPU, torch::kInt64).contiguous();
  const auto* data = list.const_data_ptr<int64_t>();
  std::vector<int64_t> out(data, data + list.numel());
  for (size_t i = 1; i < out.size(); ++i) {
    TORCH_CHECK(out[i] >= out[i - 1], "attention: ", name, " falls from ",
                out[i - 1], " to ", out[i], ": offsets must not decrease");
  }
  TORCH_CHECK(out.front() == 0 && out.back() == total, "attention: ", name,
              " runs from ", out.front(), " to ", out.back(),
              ", expected 0 to ", total, " (the number of tokens)");
  return out;
}

torch::Tensor packed_positions(const torch::Tensor& cu_seqlens,
                               const std::optional<torch::Tensor>& starts) {
  const torch::Tensor bounds = cu_seqlens.to(torch::kInt64);
  torch::Tensor shift = -bounds.narrow(0, 0, bounds.size(0) - 1);
  if (starts) shift = shift + starts->flatten();
  const torch::Tensor of_token = shift.repeat_interleave(bounds.diff());
  return (torch::arange(of_token.size(0), of_token.options()) + of_token)
      .unsqueeze(0);
}

std::string range_text(const torch::Tensor& numbers) {
  const auto low = numbers.min().item<int64_t>();
  const auto high = numbers.max().item<int64_t>();
  return low == high ? std::to_string(low)
                     : std::to_string(low) + " to " + std::to_string(high);
}

}  // namespace cosformer
