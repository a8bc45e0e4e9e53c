// What a call of any kind of attention must satisfy whatever the device: shapes
// and dtypes. Shared by every implementation, so C++, Python, eager and
// compiled code give the same errors. All throw; values of tensors are not
// looked at.
#ifndef COSFORMER_OPS_CALL_CHECKS_H_
#define COSFORMER_OPS_CALL_CHECKS_H_

#include <c10/core/SymInt.h>
#include <c10/core/SymIntArrayRef.h>

#include <string>
#include <string_view>

#include "ops/call.h"

namespace cosformer::ops {

void check_queries_keys_values(const AttentionCall& call);
// Packing, masks and starts. mask_note goes behind "expected bool ..., true =
// takes part" where a mask has another dtype: what to do with additive masks.
void check_layout(const AttentionCall& call, std::string_view mask_note);
// bool [batch, length]; name and length_name for the error.
void check_mask(const AttentionCall& call, const at::Tensor& mask,
                std::string_view name, const c10::SymInt& length,
                std::string_view length_name, std::string_view note);
void check_same_device(const AttentionCall& call, const at::Tensor& tensor,
                       std::string_view name);
// int64 [rows].
void check_positions(const AttentionCall& call, const at::Tensor& positions,
                     std::string_view name, const c10::SymInt& rows);
void check_tensor(std::string_view where, const at::Tensor& tensor,
                  std::string_view name, at::ScalarType dtype,
                  c10::SymIntArrayRef size);

// Batch rows, or packed sequences.
c10::SymInt num_rows(const AttentionCall& call);
// float64 for float64 inputs, else float32: of states and sums.
at::ScalarType accumulation_dtype(const at::Tensor& q);
// "[2, 37, 3, 16]"
std::string shape(const at::Tensor& tensor);

}  // namespace cosformer::ops

#endif  // COSFORMER_OPS_CALL_CHECKS_H_
