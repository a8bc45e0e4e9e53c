// Positions of a call's tokens.
#ifndef COSFORMER_SRC_NN_STARTS_H_
#define COSFORMER_SRC_NN_STARTS_H_

#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace cosformer {

// A start as the operators take it: int64, [] or [rows]; none stays none.
// Throws c10::Error otherwise.
std::optional<torch::Tensor> checked_start(
    const std::optional<torch::Tensor>& given, int64_t rows, const char* name);

// int64 [rows]; none = 0.
torch::Tensor start_of_rows(const std::optional<torch::Tensor>& start,
                            int64_t rows, at::Device device);

// int64 [rows, count]: each row from its start (int64 [rows]) on.
torch::Tensor positions_from(const torch::Tensor& row_starts, int64_t count);

// The offsets of packed sequences on the host. Throws c10::Error unless they
// are int32 or int64 [sequences + 1], from 0, non-decreasing, up to total.
std::vector<int64_t> checked_offsets(const torch::Tensor& cu_seqlens,
                                     int64_t total, const char* name);

// Positions of packed tokens, [1, total]: they restart in each sequence, at 0
// or at its start (int64 [sequences] or one number).
torch::Tensor packed_positions(const torch::Tensor& cu_seqlens,
                               const std::optional<torch::Tensor>& starts);

// "3", or "3 to 7" where the numbers differ.
std::string range_text(const torch::Tensor& numbers);

}  // namespace cosformer

#endif  // COSFORMER_SRC_NN_STARTS_H_
