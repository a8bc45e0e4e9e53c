// Softmax over all keys or through a pattern, with and without a cache.
#include <limits>
#include <utility>

#include "nn/attention_parts.h"
#include "nn/starts.h"

namespace cosformer {

SoftmaxAttentionArgs AttentionImpl::softmax_args(
    const std::optional<torch::Tensor>& relative_bias) const {
  SoftmaxAttentionArgs args;
  args.is_causal = options_.is_causal;
  if (options_.scale != 0.0) args.scale = options_.scale;
  if (options_.window > 0) {
    args.window = {options_.window, options_.is_causal ? 0 : options_.window};
    args.dilation = options_.dilation;
  }
  args.relative_bias = relative_bias;
  return args;
}

// From torch's generator, so that runs repeat and resume; none when nothing is
// dropped.
std::optional<int64_t> AttentionImpl::draw_dropout_seed(
    const torch::Tensor& like) const {
  if (options_.dropout == 0.0 || !is_training()) return std::nullopt;
  return torch::randint(std::numeric_limits<int64_t>::max(), {1},
                        torch::dtype(torch::kInt64).device(like.device()))
      .item<int64_t>();
}

AttentionResult AttentionImpl::softmax_forward(
    Heads heads, Heads global, const AttentionCall& call) const {
  TORCH_CHECK(!std::holds_alternative<LinearState>(call.state),
              "attention: state is a LinearState, expected a KvCache: kind is "
              "\"",
              options_.kind, "\"");
  if (call.return_state || std::holds_alternative<KvCache>(call.state)) {
    return cached_forward(std::move(heads), std::move(global), call);
  }
  rotate_heads(call, &heads);
  SoftmaxAttentionArgs args = softmax_args(call.relative_bias);
  args.dropout_seed = draw_dropout_seed(heads.q);
  if (args.dropout_seed) args.dropout_p = options_.dropout;
  args.q_start = call.q_start;
  args.kv_start = call.kv_start;
  args.key_mask = call.key_mask;
  args.query_mask = call.query_mask;
  args.cu_seqlens_q = call.cu_seqlens_q;
  args.cu_seqlens_k = call.cu_seqlens_k;
  AttentionResult result;
  if (global.q.defined()) {
    rotate_heads(call, &global);
    args.global_mask = global_mask_of(heads, call);
    result.out = longformer_attention(heads.q, heads.k, heads.v, global.q,
                                      global.k, global.v, args);
  } else if (options_.kind == "bigbird") {
    result.out = bigbird_forward(heads, std::move(args));
  } else {
    result.out = softmax_attention(heads.q, heads.k, heads.v, args);
  }
  return result;
}

// A window reaches back window x dilation tokens. With first tokens kept ahead
// of the last ones, those that are gone between them shorten the distances that
// a bias sees: never below its reach, beyond which it is constant.
std::pair<int64_t, int64_t> AttentionImpl::kept_tokens(
    const std::optional<torch::Tensor>& relative_bias) const {
  if (options_.window == 0) return {0, 0};
  int64_t last = options_.window * options_.dilation + 1;
  if (options_.global_tokens > 0 && relative_bias) {
    last = std::max(last, relative_bias->size(1) / 2 + 1);
  }
  return {last, options_.global_tokens};
}

void AttentionImpl::check_cache(
    const KvCache& cache, int64_t rows,
    const std::optional<torch::Tensor>& relative_bias) const {
  if (cache.size() == 0) return;
  const auto [last, first] = kept_tokens(relative_bias);
  const auto text = [](int64_t of_last, int64_t of_first) {
    if (of_last == 0) return std::string("all tokens");
    std::string out = "the last " + std::to_string(of_last) + " tokens";
    if (of_first > 0) out += " and the first " + std::to_string(of_first);
    return out;
  };
  TORCH_CHECK(cache.kept_last == last && cache.kept_first == first,
              "attention: the state keeps ",
              text(cache.kept_last, cache.kept_first), ", kind \"",
              options_.kind, "\" of these options needs ", text(last, first));
  const at::IntArrayRef k = cache.keys.sizes(), v = cache.values.sizes();
  TORCH_CHECK(k[0] == rows && k[2] == options_.num_kv_heads &&
                  k[3] == options_.head_dim && v[3] == options_.value_dim,
              "attention: the state holds keys ", k, " and values ", v,
              ", expected [", rows, ", slots, ", options_.num_kv_heads, ", ",
              options_.head_dim, "] and [", rows, ", slots, ",
              options_.num_kv_heads, ", ", options_.value_dim, "]");
}

AttentionResult AttentionImpl::cached_forward(Heads heads, Heads global,
                                              const AttentionCall& call) const {
  TORCH_CHECK(!call.cu_seqlens_q, "attention: kind \"", options_.kind,
              "\" keeps no state of packed sequences: give one row a "
              "sequence, with key_mask");
  TORCH_CHECK(!call.global_mask,
              "attention: global_mask with a state, which keeps the first "
              "global_tokens only: give that option instead");
  TORCH_CHECK(options_.is_causal || options_.kind == "softmax",
              "attention: kind \"", options_.kind,
              "\" keeps a state only when causal");
  TORCH_CHECK(options_.is_causal || options_.window == 0,
              "attention: a window keeps a state only when causal");
  const int64_t rows = heads.q.size(0);
  const at::Device device = heads.q.device();
  KvCache cache;
  if (const auto* given = std::get_if<KvCache>(&call.state)) cache = *given;
  check_cache(cache, rows, call.relative_bias);
  cache = cache.in_order();

  std::optional<torch::Tensor> q_start = call.q_start, kv_start = call.kv_start;
  if (cache.keys.defined()) {
    const torch::Tensor& next = cache.position;
    for (const auto* start : {&q_start, &kv_start}) {
      TORCH_CHECK(
          !*start || ((*start)->expand_as(next) == next).all().item<bool>(),
          "attention: ", start == &q_start ? "q_start" : "kv_start",
          " contradicts the state, which continues at ", range_text(next));
    }
    q_start = kv_start = next;
  }
  AttentionCall placed;
  placed.q_start = q_start;
  placed.kv_start = kv_start;
  rotate_heads(placed, &heads);
  if (global.q.defined()) rotate_heads(placed, &global);

  KvCache grown =
      cache.append(heads.k, heads.v, call.key_mask.value_or(torch::Tensor()),
                   start_of_rows(kv_start, rows, device));
  SoftmaxAttentionArgs args = softmax_args(call.relative_bias);
  args.dropout_seed = draw_dropout_seed(heads.q);
  if (args.dropout_seed) args.dropout_p = options_.dropout;
  args.q_start = q_start;
  args.kv_start = grown.slot_start();
  args.key_mask = grown.real_slots();
  args.query_mask = call.query_mask;
  AttentionResult result;
  if (options_.kind == "bigbird") {
    Heads all{heads.q, grown.keys, grown.values};
    result.out = bigbird_forward(all, std::move(args));
  } else {
    SoftmaxAttentionArgs local = args;
    if (global.q.defined()) {
      local.global_mask =
          (torch::arange(grown.size(), device) < options_.global_tokens)
              .expand({rows, grown.size()})
              .contiguous();
    }
    result.out = softmax_attention(heads.q, grown.keys, grown.values, local);
    if (global.q.defined()) {
      result.out = with_first_tokens(result.out, global, cache, args, &grown);
    }
  }
  if (call.return_state) {
    const auto [last, first] = kept_tokens(call.relative_bias);
    result.state = grown.bounded(last, first);
  }
  return result;
}

bool AttentionImpl::can_step(const KvCache& cache) const {
  if (is_linear() || options_.kind == "performer" || cache.size() == 0) {
    return false;
  }
  // The queries of global tokens are others.
  return options_.global_tokens == 0 ||
         (cache.position - cache.start).min().item<int64_t>() >=
             options_.global_tokens;
}

torch::Tensor AttentionImpl::cached_step(
    const torch::Tensor& query, KvCache& cache,
    const std::optional<torch::Tensor>& relative_bias) const {
  check_cache(cache, query.size(0), relative_bias);
  Heads heads = project(query, query, query);
  if (options_.rotary_base > 0.0) {
    const torch::Tensor positions = cache.position.unsqueeze(1);
    heads.q = rotate(heads.q, 0, positions);
    heads.k = rotate(heads.k, 0, positions);
  }
  SoftmaxAttentionArgs args = softmax_args(relative_bias);
  args.is_causal = false;  // nothing later is in the cache
  if (options_.kind == "bigbird") {
    args.block_mask =
        blocks_for(cache.position.max().item<int64_t>() + 1, query.device());
    args.block_size = options_.block_size;
  }
  return cache.decode_step(heads.q, heads.k, heads.v, std::move(args));
}

}  // namespace cosformer
