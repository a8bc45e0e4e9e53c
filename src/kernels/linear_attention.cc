// The entry points of the linear engine: check, then compute.
#include <algorithm>
#include <cstring>

#include "cosformer/kernels.h"
#include "kernels/check.h"
#include "kernels/dispatch.h"

namespace cosformer {

Status linear_attention_forward(const LinearAttentionOptions& options,
                                const LinearAttentionInputs& inputs,
                                const View4& out, void* denominator,
                                const LinearStateView& state_out, Executor&) {
  COSFORMER_RETURN_IF_ERROR(check_linear_attention(options, inputs));
  COSFORMER_RETURN_IF_ERROR(chosen_isa().status());
  return reference::linear_attention_forward(options, inputs, out, denominator,
                                             state_out);
}

Status linear_attention_backward(
    const LinearAttentionOptions& options, const LinearAttentionInputs& inputs,
    const ConstView4&, const void*, const ConstView4& d_out,
    const ConstLinearStateView& d_state_out, const View4& dq, const View4& dk,
    const View4& dv, const LinearStateView& d_state_in, Executor&) {
  COSFORMER_RETURN_IF_ERROR(check_linear_attention(options, inputs));
  COSFORMER_RETURN_IF_ERROR(chosen_isa().status());
  return reference::linear_attention_backward(
      options, inputs, d_out, d_state_out, dq, dk, dv, d_state_in);
}

Status linear_attention_decode_step(const LinearAttentionOptions& options,
                                    const LinearAttentionInputs& inputs,
                                    const LinearStateView& state,
                                    const View4& out, Executor& executor) {
  if (inputs.state.kv_state != nullptr || inputs.q_start != nullptr ||
      inputs.kv_start != nullptr || inputs.cu_seqlens_q != nullptr ||
      inputs.cu_seqlens_k != nullptr) {
    return invalid_argument(
        "linear_attention_decode_step: inputs.state, starts and packing must "
        "be empty: the state is passed on its own and gives the positions");
  }
  if (inputs.q.size[1] != 1 || inputs.k.size[1] != 1) {
    return invalid_argument("linear_attention_decode_step: query has length ",
                            inputs.q.size[1], ", key has ", inputs.k.size[1],
                            ", expected 1: one token a row");
  }
  LinearAttentionOptions causal = options;
  causal.is_causal = true;
  LinearAttentionInputs with_state = inputs;
  with_state.state = {state.kv_state, state.k_sum, state.start, state.position};
  const int64_t rows = num_rows(inputs);
  const size_t width = inputs.q.dtype == DType::kFloat64 ? 8 : 4;
  const size_t sums =
      static_cast<size_t>(rows * inputs.k.size[2] * inputs.k.size[3]) *
      (options.reweight_len > 0 ? 2 : 1) * width;
  const size_t kvs = sums * static_cast<size_t>(inputs.v.size[3]);
  AlignedBuffer kv_state(kvs), k_sum(sums), places(16 * rows);
  LinearStateView next{kv_state.data(), k_sum.data(), places.as<int64_t>(),
                       places.as<int64_t>() + rows};
  COSFORMER_RETURN_IF_ERROR(linear_attention_forward(causal, with_state, out,
                                                     nullptr, next, executor));
  std::memcpy(state.kv_state, next.kv_state, kvs);
  std::memcpy(state.k_sum, next.k_sum, sums);
  std::copy_n(next.start, rows, state.start);
  // The position advances with every token, masked or not.
  for (int64_t row = 0; row < rows; ++row) ++state.position[row];
  return Status();
}

}  // namespace cosformer
