// The entry points of the linear engine: check, then compute.
#include <algorithm>
#include <cstring>

#include "cosformer/kernels.h"
#include "kernels/call_check.h"
#include "kernels/dispatch.h"
#include "kernels/simd/decode.h"
#include "kernels/simd/pass.h"

namespace cosformer {

namespace {

constexpr std::string_view kWhere = "linear_attention";

// Outputs that will not fit into the caches anyway are written past them.
bool too_large_for_cache(const ConstView4& out) {
  constexpr int64_t kBytes = 1 << 20;
  return out.size[0] * out.size[1] * out.size[2] * out.size[3] *
             static_cast<int64_t>(size_of(out.dtype)) >=
         kBytes;
}

}  // namespace

Status linear_attention_forward(const LinearAttentionOptions& options,
                                const LinearAttentionInputs& inputs,
                                const View4& out, void* denominator,
                                const LinearStateView& state_out,
                                Executor& executor) {
  COSFORMER_RETURN_IF_ERROR(check_linear_attention(options, inputs));
  COSFORMER_RETURN_IF_ERROR(check_output_view(
      kWhere, "out", out,
      {inputs.q.size[0], inputs.q.size[1], inputs.q.size[2], inputs.v.size[3]},
      inputs.q.dtype));
  if (state_out.kv_state != nullptr && state_out.k_sum == nullptr) {
    return invalid_argument(kWhere, ": state_out has kv_state but no k_sum");
  }
  const Result<Isa> isa = chosen_isa();
  COSFORMER_RETURN_IF_ERROR(isa.status());
  simd::LinearCall call(options, inputs);
  call.out = out;
  call.denominator = denominator;
  call.state_out = state_out;
  call.stream = too_large_for_cache(out);
  COSFORMER_RETURN_IF_ERROR(simd::run_pass(call,
                                           inputs.q.dtype == DType::kFloat64
                                               ? simd::forward_f64(*isa)
                                               : simd::forward_f32(*isa),
                                           executor));
  if (state_out.kv_state != nullptr) write_state_places(inputs, state_out);
  return Status();
}

Status linear_attention_backward(
    const LinearAttentionOptions& options, const LinearAttentionInputs& inputs,
    const ConstView4& out, const void* denominator, const ConstView4& d_out,
    const ConstLinearStateView& d_state_out, const View4& dq, const View4& dk,
    const View4& dv, const LinearStateView& d_state_in, Executor& executor) {
  COSFORMER_RETURN_IF_ERROR(check_linear_attention(options, inputs));
  const std::array<int64_t, 4> out_size = {inputs.q.size[0], inputs.q.size[1],
                                           inputs.q.size[2], inputs.v.size[3]};
  COSFORMER_RETURN_IF_ERROR(
      check_view(kWhere, "d_out", d_out, out_size, inputs.q.dtype));
  COSFORMER_RETURN_IF_ERROR(check_gradient(kWhere, "dq", dq, inputs.q));
  COSFORMER_RETURN_IF_ERROR(check_gradient(kWhere, "dk", dk, inputs.k));
  COSFORMER_RETURN_IF_ERROR(check_gradient(kWhere, "dv", dv, inputs.v));
  const bool any_output = out_size[0] * out_size[1] * out_size[2] > 0;
  if (options.normalizer == Normalizer::kSum && any_output) {
    COSFORMER_RETURN_IF_ERROR(
        check_view(kWhere, "out", out, out_size, inputs.q.dtype));
    if (denominator == nullptr) {
      return invalid_argument(
          kWhere, ": the backward needs the forward's denominator, got none");
    }
  }
  const Result<Isa> isa = chosen_isa();
  COSFORMER_RETURN_IF_ERROR(isa.status());
  simd::LinearCall call(options, inputs);
  call.saved_out = out;
  call.saved_denominator = denominator;
  call.d_out = d_out;
  call.d_state_out = d_state_out;
  call.dq = dq;
  call.dk = dk;
  call.dv = dv;
  call.d_state_in = d_state_in;
  call.stream = too_large_for_cache(d_out);
  const bool is_double = inputs.q.dtype == DType::kFloat64;
  AlignedBuffer notes;  // without them dq takes longer
  if (dk.data != nullptr || dv.data != nullptr || call.wants_d_state()) {
    const simd::Pass& keys =
        is_double ? simd::d_keys_f64(*isa) : simd::d_keys_f32(*isa);
    const size_t bytes = dq.data != nullptr && keys.note_bytes != nullptr
                             ? keys.note_bytes(call)
                             : 0;
    if (bytes > 0) {
      notes = AlignedBuffer(bytes);
      call.query_notes = notes.data();
    }
    COSFORMER_RETURN_IF_ERROR(simd::run_pass(call, keys, executor));
  }
  if (dq.data != nullptr) {
    COSFORMER_RETURN_IF_ERROR(simd::run_pass(
        call, is_double ? simd::d_queries_f64(*isa) : simd::d_queries_f32(*isa),
        executor));
  }
  return Status();
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
  if (state.kv_state == nullptr && inputs.q.size[0] > 0) {
    return invalid_argument(
        "linear_attention_decode_step: state has no kv_state: a step needs a "
        "state to add to");
  }
  LinearAttentionOptions causal = options;
  causal.is_causal = true;
  LinearAttentionInputs with_state = inputs;
  with_state.state = {state.kv_state, state.k_sum, state.start, state.position};
  COSFORMER_RETURN_IF_ERROR(check_linear_attention(causal, with_state));
  COSFORMER_RETURN_IF_ERROR(check_output_view(
      "linear_attention_decode_step", "out", out,
      {inputs.q.size[0], 1, inputs.q.size[2], inputs.v.size[3]},
      inputs.q.dtype));
  const Result<Isa> isa = chosen_isa();
  COSFORMER_RETURN_IF_ERROR(isa.status());
  simd::LinearCall call(causal, with_state);
  call.out = out;
  COSFORMER_RETURN_IF_ERROR(simd::run_decode(call,
                                             inputs.q.dtype == DType::kFloat64
                                                 ? simd::decode_f64(*isa)
                                                 : simd::decode_f32(*isa),
                                             state, executor));
  // The position follows the last real key, as in a call with a sequence.
  for (int64_t row = 0; row < num_rows(inputs); ++row) {
    const bool real = inputs.key_mask == nullptr ||
                      inputs.key_mask[row * inputs.key_mask_stride] != 0;
    if (real) ++state.position[row];
  }
  return Status();
}

}  // namespace cosformer
