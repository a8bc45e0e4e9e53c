// What the softmax engine checks, and where its rows lie.
#include <cmath>

#include "kernels/call_check.h"

namespace cosformer {
namespace {

constexpr std::string_view kWhere = "softmax_attention";

Status check_window(const SoftmaxAttentionOptions& options) {
  if (!options.has_window) {
    if (options.dilation == 1) return Status();
    return invalid_argument(kWhere, ": dilation is ", options.dilation,
                            " without a window, expected 1: it spaces the keys "
                            "of a window");
  }
  if (options.dilation < 1 || options.dilation > kMaxPosition) {
    return invalid_argument(kWhere, ": dilation is ", options.dilation,
                            ", expected 1 to 2^53");
  }
  const auto check_side = [&](std::string_view side, int64_t reach) {
    if (reach < -1) {
      return invalid_argument(kWhere, ": window reaches ", reach, " keys to ",
                              side, ", expected 0 or more, or -1 for all");
    }
    // So positions plus a reach are exact, and never overflow.
    if (reach > kMaxPosition / options.dilation) {
      return invalid_argument(
          kWhere, ": window reaches ", reach, " keys to ", side,
          " at dilation ", options.dilation,
          ", expected a reach within 2^53 positions, or -1 for all");
    }
    return Status();
  };
  COSFORMER_RETURN_IF_ERROR(check_side("the left", options.window_left));
  return check_side("the right", options.window_right);
}

Status check_options(const SoftmaxAttentionOptions& options) {
  if (!std::isfinite(options.scale)) {
    return invalid_argument(
        kWhere, ": scale is ", options.scale,
        ", expected a finite number, or 0 for 1 / sqrt(head_dim)");
  }
  if (!(options.dropout_p >= 0 && options.dropout_p < 1)) {
    return invalid_argument(kWhere, ": dropout_p is ", options.dropout_p,
                            ", expected at least 0 and below 1");
  }
  return check_window(options);
}

Status check_block_mask(const SoftmaxAttentionInputs& inputs) {
  const int64_t heads = inputs.q.size[2];
  if (inputs.block_mask == nullptr && inputs.block_size == 0) return Status();
  if (inputs.block_size < 1 || inputs.block_size > kMaxPosition) {
    return invalid_argument(kWhere, ": block_size is ", inputs.block_size,
                            " with a block_mask, expected 1 to 2^53");
  }
  const std::string size =
      str_cat("[", inputs.block_mask_heads, ", ", inputs.q_blocks, ", ",
              inputs.kv_blocks, "] [heads, q_blocks, kv_blocks]");
  if (inputs.block_mask_heads != 1 && inputs.block_mask_heads != heads) {
    return invalid_argument(
        kWhere, ": block_mask has size ", size, ", query has ", heads,
        " heads: expected a mask for each head, or 1 for all of them");
  }
  if (inputs.q_blocks < 0 || inputs.kv_blocks < 0) {
    return invalid_argument(kWhere, ": block_mask has size ", size,
                            ": sizes must not be negative");
  }
  if (!memory_can_hold(inputs.block_mask_heads, inputs.q_blocks,
                       inputs.kv_blocks)) {
    return invalid_argument(kWhere, ": block_mask has size ", size,
                            ": more elements than memory can hold");
  }
  // A mask of no blocks would let nothing be seen; without data it would read
  // as no mask at all.
  const bool any_pair = inputs.q.size[1] > 0 && inputs.k.size[1] > 0;
  if (any_pair && (inputs.q_blocks == 0 || inputs.kv_blocks == 0)) {
    return invalid_argument(kWhere, ": block_mask has size ", size,
                            ": expected at least 1 block of each");
  }
  if (any_pair && inputs.block_mask == nullptr) {
    return invalid_argument(kWhere, ": block_size is ", inputs.block_size,
                            ", but block_mask has no data (nullptr)");
  }
  return Status();
}

Status check_relative_bias(const SoftmaxAttentionInputs& inputs) {
  if (inputs.relative_bias == nullptr) {
    if (inputs.relative_reach == 0) return Status();
    return invalid_argument(kWhere, ": relative_reach is ",
                            inputs.relative_reach,
                            ", but relative_bias has no data (nullptr)");
  }
  if (inputs.relative_reach < 0 || inputs.relative_reach > kMaxPosition ||
      !memory_can_hold(inputs.q.size[2], 2 * inputs.relative_reach + 1)) {
    return invalid_argument(
        kWhere, ": relative_reach is ", inputs.relative_reach,
        ", expected 0 or more, and a table [heads, 2 reach + 1] that memory "
        "can hold");
  }
  return Status();
}

std::array<int64_t, 4> out_size(const SoftmaxAttentionInputs& inputs) {
  return {inputs.q.size[0], inputs.q.size[1], inputs.q.size[2],
          inputs.v.size[3]};
}

}  // namespace

int64_t num_rows(const SoftmaxAttentionInputs& inputs) {
  return num_rows(CallInputs(inputs));
}

AttentionRow attention_row(const SoftmaxAttentionInputs& inputs, int64_t row) {
  return attention_row(CallInputs(inputs), row);
}

Status check_softmax_attention(const SoftmaxAttentionOptions& options,
                               const SoftmaxAttentionInputs& inputs) {
  COSFORMER_RETURN_IF_ERROR(check_call(kWhere, CallInputs(inputs)));
  COSFORMER_RETURN_IF_ERROR(check_options(options));
  COSFORMER_RETURN_IF_ERROR(
      check_mask(kWhere, "global_mask", inputs.global_mask,
                 inputs.global_mask_stride, inputs.q.size[0]));
  COSFORMER_RETURN_IF_ERROR(check_block_mask(inputs));
  COSFORMER_RETURN_IF_ERROR(check_relative_bias(inputs));
  const int64_t rows = num_rows(inputs);
  for (int64_t row = 0; row < rows; ++row) {
    COSFORMER_RETURN_IF_ERROR(
        check_positions(kWhere, attention_row(inputs, row), row));
  }
  return Status();
}

Status check_softmax_forward(const SoftmaxAttentionInputs& inputs,
                             const ConstView4& out) {
  return check_output_view(kWhere, "out", out, out_size(inputs),
                           inputs.q.dtype);
}

Status check_softmax_backward(const SoftmaxAttentionInputs& inputs,
                              const ConstView4& d_out, const View4& dq,
                              const View4& dk, const View4& dv,
                              const void* d_relative_bias) {
  COSFORMER_RETURN_IF_ERROR(
      check_view(kWhere, "d_out", d_out, out_size(inputs), inputs.q.dtype));
  COSFORMER_RETURN_IF_ERROR(check_gradient(kWhere, "dq", dq, inputs.q));
  COSFORMER_RETURN_IF_ERROR(check_gradient(kWhere, "dk", dk, inputs.k));
  COSFORMER_RETURN_IF_ERROR(check_gradient(kWhere, "dv", dv, inputs.v));
  if (d_relative_bias != nullptr && inputs.relative_bias == nullptr) {
    return invalid_argument(
        kWhere, ": d_relative_bias is wanted, but there is no relative_bias");
  }
  return Status();
}

Status check_softmax_saved(const SoftmaxAttentionInputs& inputs,
                           const ConstView4& out, const void* log_sum_exp) {
  const std::array<int64_t, 4> size = out_size(inputs);
  COSFORMER_RETURN_IF_ERROR(
      check_view(kWhere, "out", out, size, inputs.q.dtype));
  if (log_sum_exp == nullptr && size[0] * size[1] * size[2] > 0) {
    return invalid_argument(
        kWhere, ": the backward needs the forward's log_sum_exp, got none");
  }
  return Status();
}

}  // namespace cosformer
