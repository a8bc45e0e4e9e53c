// cosFormer and the linear transformer: a feature map, a state of constant
// size.
#include <utility>

#include "nn/attention_parts.h"

namespace cosformer {
namespace {

// Instead of the denominator: the scale of a head's output is divided out.
torch::Tensor rms_norm_heads(const torch::Tensor& out, double eps) {
  return at::rms_norm(out, {out.size(3)}, std::nullopt, eps);
}

}  // namespace

LinearAttentionArgs AttentionImpl::linear_args() const {
  LinearAttentionArgs args;
  args.feature_map = options_.feature_map;
  if (options_.reweight_len > 0) args.reweight_len = options_.reweight_len;
  args.is_causal = options_.is_causal;
  args.normalizer = options_.normalizer;
  if (options_.rotary_base > 0.0) args.rotary_base = options_.rotary_base;
  args.rotary_interleaved = options_.rotary_interleaved;
  args.eps = options_.eps;
  return args;
}

AttentionResult AttentionImpl::linear_forward(const Heads& heads,
                                              const AttentionCall& call) const {
  LinearAttentionArgs args = linear_args();
  args.q_start = call.q_start;
  args.kv_start = call.kv_start;
  args.key_mask = call.key_mask;
  args.query_mask = call.query_mask;
  args.cu_seqlens_q = call.cu_seqlens_q;
  args.cu_seqlens_k = call.cu_seqlens_k;
  args.return_state = call.return_state;
  args.state = linear_state_of(call.state, options_.kind);
  AttentionResult result;
  std::optional<LinearState> state;
  if (call.return_denominator && options_.normalizer == "sum") {
    std::tie(result.out, state, result.denominator) =
        linear_attention_with_denominator(heads.q, heads.k, heads.v, args);
  } else {
    std::tie(result.out, state) =
        linear_attention(heads.q, heads.k, heads.v, args);
  }
  if (options_.normalizer == "none") {
    result.out = rms_norm_heads(result.out, options_.eps);
  }
  if (state) result.state = *std::move(state);
  return result;
}

torch::Tensor AttentionImpl::linear_step(const torch::Tensor& query,
                                         LinearState& state) const {
  const Heads heads = project(query, query, query);
  const torch::Tensor out = linear_attention_decode_step_(
      heads.q, heads.k, heads.v, state, linear_args());
  return options_.normalizer == "none" ? rms_norm_heads(out, options_.eps)
                                       : out;
}

std::optional<LinearState> linear_state_of(const AttentionState& state,
                                           const std::string& kind) {
  if (const auto* held = std::get_if<LinearState>(&state)) return *held;
  TORCH_CHECK(std::holds_alternative<std::monostate>(state),
              "attention: state is a KvCache, expected a LinearState: kind "
              "is \"",
              kind, "\"");
  return std::nullopt;
}

}  // namespace cosformer
