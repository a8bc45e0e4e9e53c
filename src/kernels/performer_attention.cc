// The entry points of Performer: check, then walk (simd/performer.h).
#include <algorithm>
#include <string>

#include "cosformer/kernels.h"
#include "kernels/call_check.h"
#include "kernels/simd/flush_tiny.h"
#include "kernels/simd/performer.h"

namespace cosformer {
namespace {

constexpr std::string_view kWhere = "performer_attention";

// The call as the linear engine has it, with the state's places.
LinearAttentionInputs with_state(const PerformerAttentionInputs& inputs) {
  LinearAttentionInputs linear = inputs.call;
  linear.state = inputs.state.sums;
  return linear;
}

// The linear engine's checks speak of linear_attention.
Status renamed(const Status& status) {
  constexpr std::string_view kEngine = "linear_attention";
  if (status.ok() || !status.message().starts_with(kEngine)) return status;
  return Status(status.code(),
                str_cat(kWhere, status.message().substr(kEngine.size())));
}

std::array<int64_t, 4> out_size(const PerformerAttentionInputs& inputs) {
  const LinearAttentionInputs& call = inputs.call;
  return {call.q.size[0], call.q.size[1], call.q.size[2], call.v.size[3]};
}

Status check_state_out(std::string_view name, const PerformerStateView& state) {
  if (state.sums.kv_state == nullptr) return Status();
  if (state.sums.k_sum == nullptr || state.log_scale == nullptr) {
    return invalid_argument(
        kWhere, ": ", name, " has kv_state but no ",
        state.sums.k_sum == nullptr ? "k_sum" : "log_scale");
  }
  return Status();
}

}  // namespace

Status check_performer_attention(const PerformerAttentionOptions& options,
                                 const PerformerAttentionInputs& inputs) {
  if (inputs.call.state.kv_state != nullptr) {
    return invalid_argument(kWhere,
                            ": call.state is given, expected nothing there: "
                            "state stands instead");
  }
  if (inputs.num_features < 1) {
    return invalid_argument(kWhere, ": the projection has ",
                            inputs.num_features,
                            " features, expected at least 1");
  }
  if (inputs.projection == nullptr)
    return invalid_argument(kWhere, ": the projection has no data (nullptr)");
  LinearAttentionOptions linear;
  linear.feature_map = FeatureMap::kIdentity;
  linear.is_causal = options.is_causal;
  const LinearAttentionInputs call = with_state(inputs);
  COSFORMER_RETURN_IF_ERROR(renamed(check_linear_attention(linear, call)));
  if (!memory_can_hold(std::max<int64_t>(num_rows(call), 1), call.k.size[2],
                       inputs.num_features,
                       std::max(call.v.size[3], call.q.size[3]))) {
    return invalid_argument(
        kWhere, ": a state of size [", num_rows(call), ", ", call.k.size[2],
        ", ", inputs.num_features, ", ", call.v.size[3],
        "] [rows, kv_heads, features, value_dim] has more elements than memory "
        "can hold");
  }
  if (inputs.state.sums.kv_state != nullptr &&
      inputs.state.log_scale == nullptr && num_rows(call) > 0) {
    return invalid_argument(kWhere, ": state has kv_state but no log_scale");
  }
  return Status();
}

Status performer_attention_forward(const PerformerAttentionOptions& options,
                                   const PerformerAttentionInputs& inputs,
                                   const View4& out, double* log_denominator,
                                   const PerformerStateView& state_out,
                                   Executor& executor) {
  COSFORMER_RETURN_IF_ERROR(check_performer_attention(options, inputs));
  COSFORMER_RETURN_IF_ERROR(check_output_view(
      kWhere, "out", out, out_size(inputs), inputs.call.q.dtype));
  COSFORMER_RETURN_IF_ERROR(check_state_out("state_out", state_out));
  const Result<Isa> isa = chosen_isa();
  COSFORMER_RETURN_IF_ERROR(isa.status());
  simd::FlushingExecutor flushing(executor);
  COSFORMER_RETURN_IF_ERROR(renamed(simd::run_performer_forward(
      options, inputs, {out, log_denominator, state_out}, *isa, flushing)));
  if (state_out.sums.kv_state != nullptr)
    write_state_places(with_state(inputs), state_out.sums);
  return Status();
}

Status performer_attention_backward(
    const PerformerAttentionOptions& options,
    const PerformerAttentionInputs& inputs, const ConstView4& out,
    const double* log_denominator, const ConstView4& d_out,
    const ConstLinearStateView& d_state_out, const View4& dq, const View4& dk,
    const View4& dv, void* d_projection, const LinearStateView& d_state_in,
    Executor& executor) {
  COSFORMER_RETURN_IF_ERROR(check_performer_attention(options, inputs));
  const LinearAttentionInputs& call = inputs.call;
  const std::array<int64_t, 4> size = out_size(inputs);
  COSFORMER_RETURN_IF_ERROR(
      check_view(kWhere, "d_out", d_out, size, call.q.dtype));
  COSFORMER_RETURN_IF_ERROR(check_gradient(kWhere, "dq", dq, call.q));
  COSFORMER_RETURN_IF_ERROR(check_gradient(kWhere, "dk", dk, call.k));
  COSFORMER_RETURN_IF_ERROR(check_gradient(kWhere, "dv", dv, call.v));
  if (size[0] * size[1] * size[2] > 0) {
    COSFORMER_RETURN_IF_ERROR(
        check_view(kWhere, "out", out, size, call.q.dtype));
    if (log_denominator == nullptr) {
      return invalid_argument(kWhere,
                              ": the backward needs the forward's "
                              "log_denominator, got none");
    }
  }
  if ((d_state_in.kv_state != nullptr || d_state_in.k_sum != nullptr) &&
      inputs.state.sums.kv_state == nullptr && num_rows(call) > 0) {
    return invalid_argument(kWhere,
                            ": d_state_in is wanted, but no state was given");
  }
  const Result<Isa> isa = chosen_isa();
  COSFORMER_RETURN_IF_ERROR(isa.status());
  simd::FlushingExecutor flushing(executor);
  return renamed(
      simd::run_performer_backward(options, inputs,
                                   {out, d_out, log_denominator, d_state_out,
                                    dq, dk, dv, d_projection, d_state_in},
                                   *isa, flushing));
}

Status performer_attention_decode_step(const PerformerAttentionInputs& inputs,
                                       const PerformerStateView& state,
                                       const View4& out, Executor& executor) {
  constexpr std::string_view kStep = "performer_attention_decode_step";
  const LinearAttentionInputs& call = inputs.call;
  if (inputs.state.sums.kv_state != nullptr || call.q_start != nullptr ||
      call.kv_start != nullptr || call.cu_seqlens_q != nullptr ||
      call.cu_seqlens_k != nullptr) {
    return invalid_argument(
        kStep,
        ": inputs.state, starts and packing must be empty: the state is passed "
        "on its own and gives the positions");
  }
  if (call.q.size[1] != 1 || call.k.size[1] != 1) {
    return invalid_argument(kStep, ": query has length ", call.q.size[1],
                            ", key has ", call.k.size[1],
                            ", expected 1: one token a row");
  }
  if (state.sums.kv_state == nullptr && call.q.size[0] > 0) {
    return invalid_argument(
        kStep, ": state has no kv_state: a step needs a state to add to");
  }
  COSFORMER_RETURN_IF_ERROR(check_state_out("state", state));
  PerformerAttentionOptions causal;
  causal.is_causal = true;
  PerformerAttentionInputs given = inputs;
  given.state = {{state.sums.kv_state, state.sums.k_sum, state.sums.start,
                  state.sums.position},
                 state.log_scale};
  COSFORMER_RETURN_IF_ERROR(check_performer_attention(causal, given));
  COSFORMER_RETURN_IF_ERROR(
      check_output_view(kStep, "out", out, out_size(inputs), call.q.dtype));
  const Result<Isa> isa = chosen_isa();
  COSFORMER_RETURN_IF_ERROR(isa.status());
  if (call.q.size[0] == 0) return Status();
  simd::FlushingExecutor flushing(executor);
  return renamed(
      simd::run_performer_decode(inputs, state, out, *isa, flushing));
}

}  // namespace cosformer
