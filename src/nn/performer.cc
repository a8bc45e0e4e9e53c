// Performer: softmax attention in expectation over random features, with a
// state of constant size.
#include <utility>

#include "nn/attention_parts.h"
#include "nn/starts.h"

namespace cosformer {
namespace {

// In the type that the features are computed in.
torch::Tensor as_wide(const torch::Tensor& projection,
                      const torch::Tensor& like) {
  return projection.to(like.scalar_type() == torch::kFloat64 ? torch::kFloat64
                                                             : torch::kFloat32);
}

}  // namespace

void AttentionImpl::redraw_projection(int64_t seed) {
  TORCH_CHECK(projection.defined(),
              "attention: redraw_projection belongs to kind \"performer\", "
              "found \"",
              options_.kind, "\"");
  torch::NoGradGuard no_grad;
  projection.copy_(performer_projection(
      options_.num_features, options_.head_dim, options_.orthogonal, seed));
}

AttentionResult AttentionImpl::performer_forward(
    Heads heads, const AttentionCall& call) const {
  PerformerAttentionArgs args;
  args.state = linear_state_of(call.state, options_.kind);
  if (args.state && options_.rotary_base > 0.0) {
    const torch::Tensor at = args.state->position;
    const std::optional<torch::Tensor> q_start = call.q_start.value_or(at);
    const std::optional<torch::Tensor> k_start = call.kv_start.value_or(at);
    AttentionCall placed = call;
    placed.q_start = q_start;
    placed.kv_start = k_start;
    rotate_heads(placed, &heads);
  } else {
    rotate_heads(call, &heads);
  }
  args.is_causal = options_.is_causal;
  args.q_start = call.q_start;
  args.kv_start = call.kv_start;
  args.key_mask = call.key_mask;
  args.query_mask = call.query_mask;
  args.cu_seqlens_q = call.cu_seqlens_q;
  args.cu_seqlens_k = call.cu_seqlens_k;
  args.return_state = call.return_state;
  AttentionResult result;
  std::optional<LinearState> state;
  std::tie(result.out, state) = performer_attention(
      heads.q, heads.k, heads.v, as_wide(projection, heads.q), args);
  if (state) result.state = *std::move(state);
  return result;
}

torch::Tensor AttentionImpl::performer_step(const torch::Tensor& query,
                                            LinearState& state) const {
  Heads heads = project(query, query, query);
  if (options_.rotary_base > 0.0) {
    const torch::Tensor positions = state.position.unsqueeze(1);
    heads.q = rotate(heads.q, 0, positions);
    heads.k = rotate(heads.k, 0, positions);
  }
  return performer_attention_decode_step_(heads.q, heads.k, heads.v,
                                          as_wide(projection, heads.q), state);
}

}  // namespace cosformer
