// Longformer's global tokens: queries, keys and values of their own.
#include "nn/attention_parts.h"
#include "nn/starts.h"

namespace cosformer {

AttentionImpl::Heads AttentionImpl::project_global(
    const torch::Tensor& query, const torch::Tensor& key,
    const torch::Tensor& value) const {
  Heads out;
  out.q = split_heads(q_global_proj->forward(query), options_.num_heads);
  out.k = split_heads(k_global_proj->forward(key), options_.num_kv_heads);
  out.v = split_heads(v_global_proj->forward(value), options_.num_kv_heads);
  return out;
}

bool AttentionImpl::has_global_tokens(const AttentionCall& call) const {
  return options_.kind == "longformer" &&
         (options_.global_tokens > 0 || call.global_mask);
}

// Of a call without a state: the first global_tokens of each sequence, and
// those of the call's own mask.
torch::Tensor AttentionImpl::global_mask_of(const Heads& heads,
                                            const AttentionCall& call) const {
  if (options_.global_tokens == 0) return *call.global_mask;
  const int64_t batch = heads.k.size(0), kv_len = heads.k.size(1);
  torch::Tensor number;  // of a key in its sequence
  if (call.cu_seqlens_q) {
    const auto& offsets =
        call.cu_seqlens_k ? *call.cu_seqlens_k : *call.cu_seqlens_q;
    checked_offsets(
        offsets, kv_len,
        call.cu_seqlens_k ? "cu_seqlens_k" : "cu_seqlens_q (for keys)");
    number = packed_positions(offsets, std::nullopt).to(heads.k.device());
  } else {
    number = torch::arange(kv_len, heads.k.device()).expand({batch, kv_len});
  }
  const torch::Tensor first = number < options_.global_tokens;
  return call.global_mask ? first.logical_or(*call.global_mask) : first;
}

// out [batch, n, heads, dim] with the rows of the first global_tokens of each
// sequence replaced by those of their own projections. Causal: they see only
// one another, so only their keys and values are kept, in `after`.
torch::Tensor AttentionImpl::with_first_tokens(const torch::Tensor& out,
                                               const Heads& global,
                                               const KvCache& before,
                                               const SoftmaxAttentionArgs& args,
                                               KvCache* after) const {
  const int64_t count = out.size(1), first = options_.global_tokens;
  const torch::Tensor done = before.keys.defined()
                                 ? before.position - before.start
                                 : torch::zeros_like(after->position);
  const int64_t least = done.numel() > 0 ? done.min().item<int64_t>() : first;
  const int64_t queries = std::min(count, first - least);
  if (queries <= 0) return out;

  // Slot s: what was kept, or the token of this call that comes there.
  const int64_t kept =
      before.first_keys.defined() ? before.first_keys.size(1) : 0;
  const int64_t slots = std::min(first, after->size());
  const torch::Tensor slot = torch::arange(slots, done.options()).unsqueeze(0);
  const torch::Tensor own = done.unsqueeze(1);
  const torch::Tensor index =
      torch::where(slot < own, slot.clamp_max(std::max<int64_t>(kept - 1, 0)),
                   (slot - own + kept).clamp_max(kept + count - 1));
  const auto joined = [&](const torch::Tensor& old, const torch::Tensor& more) {
    const torch::Tensor all = kept > 0 ? torch::cat({old, more}, 1) : more;
    return at::gather(all, 1,
                      index.unsqueeze(-1).unsqueeze(-1).expand(
                          {-1, -1, all.size(2), all.size(3)}));
  };
  after->first_keys = joined(before.first_keys, global.k);
  after->first_values = joined(before.first_values, global.v);

  SoftmaxAttentionArgs own_args = args;
  own_args.window.reset();
  own_args.dilation = 1;
  own_args.q_start = done;
  own_args.kv_start.reset();
  if (args.key_mask) {
    own_args.key_mask = args.key_mask->narrow(1, 0, slots).contiguous();
  }
  if (args.query_mask) {
    own_args.query_mask = args.query_mask->narrow(1, 0, queries).contiguous();
  }
  const torch::Tensor rows =
      softmax_attention(global.q.narrow(1, 0, queries), after->first_keys,
                        after->first_values, own_args);
  const torch::Tensor is_first =
      (positions_from(done, queries) < first).unsqueeze(-1).unsqueeze(-1);
  const torch::Tensor head =
      torch::where(is_first, rows, out.narrow(1, 0, queries));
  if (queries == count) return head;
  return torch::cat({head, out.narrow(1, queries, count - queries)}, 1);
}

}  // namespace cosformer
