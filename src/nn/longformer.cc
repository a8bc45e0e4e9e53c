// Longformer's global tokens: queries, keys and values of their own.
#include <algorithm>
#include <cmath>
#include <variant>

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

// A key's place must not matter to a global token, and values must be there to
// look at. With more tokens the products below are larger than the projections.
torch::Tensor AttentionImpl::with_few_global_tokens(
    const torch::Tensor& query, const torch::Tensor& key,
    const torch::Tensor& value, const Heads& heads,
    const AttentionCall& call) const {
  const AttentionOptions& o = options_;
  const bool by_place = o.is_causal || o.rotary_base != 0.0 ||
                        call.relative_bias || call.cu_seqlens_q ||
                        call.q_start || call.kv_start;
  const bool keeps_state =
      call.return_state || !std::holds_alternative<std::monostate>(call.state);
  const bool drops = o.dropout > 0.0 && is_training();
  if (by_place || keeps_state || drops || !query.is_cpu() ||
      query.size(0) == 0 || query.size(1) == 0 || query.size(1) != key.size(1))
    return {};
  const torch::Tensor mask = global_mask_of(heads, call);
  const torch::Tensor rows =
      call.query_mask ? mask.logical_and(*call.query_mask) : mask;
  // At least one, perhaps masked: so that each parameter has a gradient.
  const int64_t count = std::max<int64_t>(rows.sum(1).max().item<int64_t>(), 1);
  if (count * 2 > o.head_dim) return {};

  const torch::Tensor index = rows.to(torch::kByte)
                                  .argsort(/*stable=*/true, 1,
                                           /*descending=*/true)
                                  .narrow(1, 0, count);
  const torch::Tensor tokens =
      query.gather(1, index.unsqueeze(-1).expand({-1, -1, query.size(2)}));
  const torch::Tensor own =
      attend_contracted(tokens, rows.gather(1, index), key, value, call);
  SoftmaxAttentionArgs args = softmax_args(std::nullopt);
  args.global_mask = mask;
  args.key_mask = call.key_mask;
  args.query_mask = mask.logical_not();
  if (call.query_mask)
    args.query_mask = args.query_mask->logical_and(*call.query_mask);
  // Rows of global tokens are 0 so far.
  const torch::Tensor local =
      softmax_attention(heads.q, heads.k, heads.v, args);
  return local.scatter_add(1, index.unsqueeze(-1).unsqueeze(-1).expand_as(own),
                           own.to(local.scalar_type()));
}

// With W and U the projections of keys and values, and x and y what they are
// applied to: q . (W x_j) = (W^T q) . x_j and sum_j w_j U y_j = U sum_j w_j
// y_j, so that a global token attends to x and y themselves. A bias of the keys
// adds the same to all scores of a row, and cancels; that of the values is
// added once, as weights sum to 1.
torch::Tensor AttentionImpl::attend_contracted(
    const torch::Tensor& tokens, const torch::Tensor& real,
    const torch::Tensor& key, const torch::Tensor& value,
    const AttentionCall& call) const {
  const AttentionOptions& o = options_;
  const int64_t kv = o.num_kv_heads, group = o.num_heads / kv;
  const torch::Tensor q =
      q_global_proj->forward(tokens).unflatten(-1, {kv, group, o.head_dim});
  const torch::Tensor key_weight =
      k_global_proj->weight.unflatten(0, {kv, o.head_dim});
  const torch::Tensor value_weight =
      v_global_proj->weight.unflatten(0, {kv, o.value_dim});
  SoftmaxAttentionArgs args;
  args.scale = o.scale != 0.0
                   ? o.scale
                   : 1.0 / std::sqrt(static_cast<double>(o.head_dim));
  args.key_mask = call.key_mask;
  args.query_mask = real.repeat_interleave(o.num_heads, 1);
  // One head of (tokens x heads) rows: all heads see the same keys.
  const torch::Tensor summed =
      softmax_attention(torch::einsum("bgkrd,kde->bgkre", {q, key_weight})
                            .flatten(1, 3)
                            .unsqueeze(2),
                        key.unsqueeze(2), value.unsqueeze(2), args);
  torch::Tensor out =
      torch::einsum("bgkre,kde->bgkrd", {summed.squeeze(2).unflatten(
                                             1, {tokens.size(1), kv, group}),
                                         value_weight})
          .flatten(2, 3);
  if (!o.qkv_bias) return out;
  torch::Tensor sees = real;
  if (call.key_mask) sees = sees.logical_and(call.key_mask->any(1, true));
  const torch::Tensor bias =
      v_global_proj->bias.unflatten(0, {kv, 1, o.value_dim})
          .expand({-1, group, -1})
          .flatten(0, 1);
  out = torch::where(sees.unsqueeze(-1).unsqueeze(-1), out + bias, out);
  // So that it has its gradient, which is 0.
  return out + 0 * k_global_proj->bias.sum();
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
