// Linformer: attention over keys and values shortened along the sequence.
#include "nn/attention_parts.h"

namespace cosformer {

AttentionResult AttentionImpl::linformer_forward(
    const Heads& heads, const AttentionCall& call) const {
  const auto refuse = [](bool given, const char* what, const char* why) {
    TORCH_CHECK(!given, "attention: kind \"linformer\" ", what, why);
  };
  refuse(
      call.return_state || !std::holds_alternative<std::monostate>(call.state),
      "has no state: ", "each projected key mixes all positions");
  refuse(call.cu_seqlens_q.has_value(), "takes no packed sequences: ",
         "its projections count the keys of a row from 0; give one row a "
         "sequence, with key_mask");
  refuse(call.q_start || call.kv_start, "takes no q_start or kv_start: ",
         "its projections count the keys of a row from 0");
  LinformerAttentionArgs args;
  if (options_.scale != 0.0) args.scale = options_.scale;
  args.dropout_seed = draw_dropout_seed(heads.q);
  if (args.dropout_seed) args.dropout_p = options_.dropout;
  args.key_mask = call.key_mask;
  args.query_mask = call.query_mask;
  AttentionResult result;
  result.out = linformer_attention(
      heads.q, heads.k, heads.v, key_len_proj,
      options_.share_kv ? key_len_proj : value_len_proj, args);
  return result;
}

}  // namespace cosformer
