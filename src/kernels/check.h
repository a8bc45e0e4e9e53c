// What every entry point of the linear engine checks before it touches memory,
// and where the rows of a call lie once it has been checked.
#ifndef COSFORMER_SRC_KERNELS_CHECK_H_
#define COSFORMER_SRC_KERNELS_CHECK_H_

#include <array>
#include <cstdint>
#include <string_view>

#include "cosformer/kernels.h"

namespace cosformer {

// Positions beyond this are not exact in double, which the angles are computed
// in.
inline constexpr int64_t kMaxPosition = int64_t{1} << 53;

// One row of a call (a batch row, or a packed sequence). Index t of the row is
// element [batch, q_offset + t] of q and [batch, kv_offset + t] of k and v.
struct AttentionRow {
  int64_t batch = 0;
  int64_t q_offset = 0, q_len = 0;
  int64_t kv_offset = 0, kv_len = 0;
  int64_t q_start = 0, kv_start = 0;  // positions, defaults filled in
  // Keys that the state brings stand in [state_start, state_position); equal
  // where there are none.
  int64_t state_start = 0, state_position = 0;
};
// Precondition: check_linear_attention(options, inputs) is ok, row < num_rows.
AttentionRow attention_row(const LinearAttentionInputs& inputs, int64_t row);

// The places of the state that a forward returns: its start, and the position
// after its last real key.
void write_state_places(const LinearAttentionInputs& inputs,
                        const LinearStateView& state_out);

// A tensor that a kernel writes or reads beside its inputs: its size and dtype
// are given by the call. where: "linear_attention"; name: "out", "dq", ...
Status check_view(std::string_view where, std::string_view name,
                  const ConstView4& view, const std::array<int64_t, 4>& size,
                  DType dtype);
// As check_view, and no two elements may share memory.
Status check_output_view(std::string_view where, std::string_view name,
                         const ConstView4& view,
                         const std::array<int64_t, 4>& size, DType dtype);

}  // namespace cosformer

#endif  // COSFORMER_SRC_KERNELS_CHECK_H_
