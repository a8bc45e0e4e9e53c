// The public C++ functions of Performer.
#include "cosformer/ops.h"
#include "ops/call_checks.h"
#include "ops/errors.h"
#include "ops/performer_call.h"

namespace cosformer {
namespace {

// Projections are held as states are: of a model in a half type, widened.
at::Tensor wide_projection(const at::Tensor& projection, const at::Tensor& q) {
  const at::ScalarType dtype = ops::accumulation_dtype(q);
  // Asking costs less than a call that changes nothing.
  return projection.scalar_type() == dtype ? projection : projection.to(dtype);
}

}  // namespace

std::tuple<at::Tensor, std::optional<LinearState>> performer_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& projection, const PerformerAttentionArgs& args) {
  ops::OptionalTensor kv_state, k_sum, log_scale, start, position;
  ops::PerformerSpec spec{"", ""};
  if (args.state) {
    kv_state = args.state->kv_state;
    k_sum = args.state->k_sum;
    if (args.state->log_scale.defined()) log_scale = args.state->log_scale;
    start = args.state->start;
    position = args.state->position;
    spec = {args.state->kind, args.state->feature_map};
  }
  const at::Tensor wide = wide_projection(projection, q);
  auto [out, log_denominator, kv_out, k_sum_out, log_scale_out, start_out,
        position_out] =
      ops::call_performer(
          {q, k, v, wide, args.q_start, args.kv_start, args.key_mask,
           args.query_mask, args.cu_seqlens_q, args.cu_seqlens_k, kv_state,
           k_sum, log_scale, start, position, args.is_causal},
          spec, {args.return_state, /*denominator=*/false});
  std::optional<LinearState> state;
  if (args.return_state) {
    state = LinearState{std::move(kv_out),
                        std::move(k_sum_out),
                        std::move(start_out),
                        std::move(position_out),
                        "performer",
                        "performer",
                        /*reweight_len=*/0,
                        /*rotary_base=*/0.0,
                        /*rotary_interleaved=*/false,
                        std::move(log_scale_out)};
  }
  return {std::move(out), std::move(state)};
}

at::Tensor performer_attention_decode_step_(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& projection, LinearState& state,
    const std::optional<at::Tensor>& key_mask) {
  if (!state.log_scale.defined()) {
    ops::fail("performer_attention_decode_step_: the state is of kind '",
              state.kind, "' and has no log_scale, expected kind 'performer'");
  }
  const at::Tensor wide = wide_projection(projection, q);
  return ops::call_performer_decode_step(
      {q, k, v, wide, state.kv_state, state.k_sum, state.log_scale,
       state.position, state.start, key_mask},
      {state.kind, state.feature_map});
}

at::Tensor performer_projection(int64_t num_features, int64_t head_dim,
                                bool orthogonal, int64_t seed) {
  return ops::projection_cpu(num_features, head_dim, orthogonal, seed,
                             std::nullopt);
}

}  // namespace cosformer
