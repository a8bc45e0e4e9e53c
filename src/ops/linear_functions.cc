// The public C++ functions of linear attention.
#include "cosformer/ops.h"
#include "ops/decode_step.h"
#include "ops/errors.h"
#include "ops/linear_call.h"

namespace cosformer {
namespace {

using ops::OptionalTensor;

struct Outputs {
  at::Tensor out;
  std::optional<LinearState> state;
  at::Tensor denominator;
};

Outputs call(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
             const LinearAttentionArgs& args, bool return_denominator) {
  OptionalTensor kv_state, k_sum, start, position;
  ops::StateSpec spec{"", "", 0, 0.0, false};
  if (args.state) {
    kv_state = args.state->kv_state;
    k_sum = args.state->k_sum;
    start = args.state->start;
    position = args.state->position;
    spec = {args.state->kind, args.state->feature_map, args.state->reweight_len,
            args.state->rotary_base, args.state->rotary_interleaved};
  }
  const ops::LinearCall linear_call{q,
                                    k,
                                    v,
                                    args.q_start,
                                    args.kv_start,
                                    args.key_mask,
                                    args.query_mask,
                                    args.cu_seqlens_q,
                                    args.cu_seqlens_k,
                                    kv_state,
                                    k_sum,
                                    start,
                                    position,
                                    args.feature_map,
                                    args.reweight_len,
                                    args.is_causal,
                                    args.normalizer,
                                    args.eps,
                                    args.rotary_base,
                                    args.rotary_interleaved};
  auto [out, denominator, kv_out, k_sum_out, start_out, position_out] =
      ops::call_forward(linear_call, spec,
                        {args.return_state, return_denominator});
  Outputs result{std::move(out), std::nullopt, std::move(denominator)};
  if (args.return_state) {
    result.state = LinearState{std::move(kv_out),
                               std::move(k_sum_out),
                               std::move(start_out),
                               std::move(position_out),
                               "linear",
                               args.feature_map,
                               args.reweight_len.value_or(0),
                               args.rotary_base.value_or(0.0),
                               args.rotary_interleaved};
  }
  return result;
}

}  // namespace

std::tuple<at::Tensor, std::optional<LinearState>> linear_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const LinearAttentionArgs& args) {
  Outputs outputs = call(q, k, v, args, false);
  return {std::move(outputs.out), std::move(outputs.state)};
}

std::tuple<at::Tensor, std::optional<LinearState>, at::Tensor>
linear_attention_with_denominator(const at::Tensor& q, const at::Tensor& k,
                                  const at::Tensor& v,
                                  const LinearAttentionArgs& args) {
  Outputs outputs = call(q, k, v, args, true);
  return {std::move(outputs.out), std::move(outputs.state),
          std::move(outputs.denominator)};
}

std::tuple<at::Tensor, std::optional<LinearState>> cosformer_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const LinearAttentionArgs& args) {
  if (!args.reweight_len) {
    ops::fail(
        "cosformer_attention: reweight_len is missing: give the model's M "
        "(by default its max_len), a constant that no call changes");
  }
  if (args.feature_map != "relu") {
    ops::fail("cosformer_attention: feature_map is '", args.feature_map,
              "', expected 'relu' (linear_attention takes others)");
  }
  return linear_attention(q, k, v, args);
}

at::Tensor linear_attention_decode_step_(const at::Tensor& q,
                                         const at::Tensor& k,
                                         const at::Tensor& v,
                                         LinearState& state,
                                         const LinearAttentionArgs& args) {
  if (args.q_start || args.kv_start || args.cu_seqlens_q || args.cu_seqlens_k ||
      args.state || args.return_state) {
    ops::fail(
        "linear_attention_decode_step_: starts, packing, state and "
        "return_state must be unset: the state is an argument of its own and "
        "gives the positions");
  }
  return ops::call_decode_step(
      {q, k, v, state.kv_state, state.k_sum, state.position, state.start,
       args.key_mask, args.query_mask, args.feature_map, args.reweight_len,
       args.normalizer, args.eps, args.rotary_base, args.rotary_interleaved},
      {state.kind, state.feature_map, state.reweight_len, state.rotary_base,
       state.rotary_interleaved});
}

}  // namespace cosformer
