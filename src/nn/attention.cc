// The attention layer: projections around the operator of a kind, and masks.
#include <cmath>
#include <utility>

#include "nn/attention_options.h"
#include "nn/attention_parts.h"
#include "nn/starts.h"

namespace cosformer {
namespace {

void check_input(const torch::Tensor& x, const char* name, int64_t width) {
  TORCH_CHECK(x.dim() == 3 && x.size(2) == width, "attention: ", name, " is ",
              x.sizes(), ", expected [batch, seq, ", width, "]");
}

void check_mask(const std::optional<torch::Tensor>& mask, const char* name,
                const torch::Tensor& x, const char* of) {
  if (!mask) return;
  TORCH_CHECK(mask->scalar_type() == torch::kBool, "attention: ", name, " is ",
              mask->scalar_type(), ", expected bool (true = takes part)");
  TORCH_CHECK(mask->dim() == 2 && mask->size(0) == x.size(0) &&
                  mask->size(1) == x.size(1),
              "attention: ", name, " is ", mask->sizes(), ", expected [",
              x.size(0), ", ", x.size(1), "] (batch and length of ", of, ")");
}

// What masked rows hold must not reach a weight's gradient (0 x NaN).
torch::Tensor without_masked(const torch::Tensor& x,
                             const std::optional<torch::Tensor>& mask) {
  if (!mask) return x;
  return torch::where(mask->unsqueeze(-1), x, torch::zeros({}, x.options()));
}

bool same(const std::optional<torch::Tensor>& a,
          const std::optional<torch::Tensor>& b) {
  return a && b ? a->is_same(*b) : !a && !b;
}

// What only some kinds can do.
void check_kind_of_call(const AttentionOptions& o, const AttentionCall& call) {
  const auto refuse = [&](bool given, const char* what, const char* why) {
    TORCH_CHECK(!given, "attention: kind \"", o.kind, "\" ", what, why);
  };
  const bool has_scores =
      o.kind == "softmax" || o.kind == "longformer" || o.kind == "bigbird";
  refuse(call.relative_bias && !has_scores, "takes no relative_bias: ",
         o.kind == "linformer" ? "a projected key has no position of its own"
                               : "it never forms the scores to add it to");
  refuse(call.global_mask && o.kind != "longformer", "takes no global_mask: ",
         "global tokens belong to kind \"longformer\"");
  if (o.kind == "cosformer" || o.kind == "linear") return;
  refuse(call.return_denominator, "has no denominators to return", "");
}

}  // namespace

AttentionImpl::AttentionImpl(AttentionOptions options, bool initialize)
    : options_(complete_options(std::move(options))) {
  const AttentionOptions& o = options_;
  const auto projection_of = [&](const char* name, int64_t in, int64_t heads,
                                 int64_t dim) {
    return register_module(name, Projection(in, heads * dim, o.qkv_bias));
  };
  q_proj = projection_of("q_proj", o.embed_dim, o.num_heads, o.head_dim);
  k_proj = projection_of("k_proj", o.kdim, o.num_kv_heads, o.head_dim);
  if (!o.share_kv) {
    v_proj = projection_of("v_proj", o.vdim, o.num_kv_heads, o.value_dim);
  }
  if (o.out_proj) {
    out_proj = register_module("out_proj", Projection(o.num_heads * o.value_dim,
                                                      o.embed_dim, o.out_bias));
  }
  if (o.kind == "longformer") {
    q_global_proj =
        projection_of("q_global_proj", o.embed_dim, o.num_heads, o.head_dim);
    k_global_proj =
        projection_of("k_global_proj", o.kdim, o.num_kv_heads, o.head_dim);
    v_global_proj =
        projection_of("v_global_proj", o.vdim, o.num_kv_heads, o.value_dim);
  }
  if (o.kind == "linformer") {
    const auto length_projection = [&](const char* name) {
      return register_parameter(name,
                                torch::empty({o.max_len, o.projected_len}));
    };
    key_len_proj = length_projection("key_len_proj");
    if (!o.share_kv) value_len_proj = length_projection("value_len_proj");
  }
  if (o.kind == "performer") {
    projection = torch::empty({o.num_features, o.head_dim});
    projection = o.trainable_projection
                     ? register_parameter("projection", projection)
                     : register_buffer("projection", projection);
  }
  if (o.kind == "bigbird") block_masks_ = std::make_shared<BlockMasks>();
  if (initialize) reset_parameters();
}

void AttentionImpl::reset_parameters() {
  for (Projection* each : {&q_proj, &k_proj, &v_proj, &out_proj, &q_global_proj,
                           &k_global_proj, &v_global_proj}) {
    if (*each) (*each)->reset_parameters();
  }
  torch::NoGradGuard no_grad;
  // Wang et al.: N(0, 1 / projected_len).
  for (const torch::Tensor& each : {key_len_proj, value_len_proj}) {
    if (!each.defined()) continue;
    each.normal_(0.0,
                 1.0 / std::sqrt(static_cast<double>(options_.projected_len)));
  }
  if (projection.defined()) redraw_projection(options_.projection_seed);
}

AttentionImpl::Heads AttentionImpl::project(const torch::Tensor& query,
                                            const torch::Tensor& key,
                                            const torch::Tensor& value) const {
  const AttentionOptions& o = options_;
  Heads out;
  out.q = split_heads(q_proj->forward(query), o.num_heads);
  out.k = split_heads(k_proj->forward(key), o.num_kv_heads);
  out.v =
      o.share_kv ? out.k : split_heads(v_proj->forward(value), o.num_kv_heads);
  return out;
}

torch::Tensor AttentionImpl::merge_heads(const torch::Tensor& heads) const {
  const torch::Tensor x = heads.reshape(
      {heads.size(0), heads.size(1), heads.size(2) * heads.size(3)});
  return out_proj ? out_proj->forward(x) : x;
}

torch::Tensor AttentionImpl::rotate(
    const torch::Tensor& x, int64_t start,
    const std::optional<torch::Tensor>& positions) const {
  const int64_t rotary_dim = options_.rotary_dim, dim = x.size(3);
  const auto rotated = [&](const torch::Tensor& part) {
    return apply_rotary(part, start, positions, options_.rotary_base,
                        options_.rotary_interleaved);
  };
  if (rotary_dim == dim) return rotated(x);
  return torch::cat({rotated(x.narrow(3, 0, rotary_dim)),
                     x.narrow(3, rotary_dim, dim - rotary_dim)},
                    3);
}

void AttentionImpl::rotate_heads(const AttentionCall& call,
                                 Heads* heads) const {
  if (options_.rotary_base == 0.0) return;
  const auto turn =
      [&](torch::Tensor& x, const std::optional<torch::Tensor>& start,
          const std::optional<torch::Tensor>& packing, const char* name) {
        if (packing) {
          checked_offsets(*packing, x.size(1), name);
          x = rotate(x, 0, packed_positions(*packing, start));
        } else if (!start || start->dim() == 0) {
          x = rotate(x, start ? start->item<int64_t>() : 0, std::nullopt);
        } else {
          x = rotate(x, 0, positions_from(*start, x.size(1)));
        }
      };
  turn(heads->q, call.q_start, call.cu_seqlens_q, "cu_seqlens_q");
  turn(heads->k, call.kv_start,
       call.cu_seqlens_k ? call.cu_seqlens_k : call.cu_seqlens_q,
       call.cu_seqlens_k ? "cu_seqlens_k" : "cu_seqlens_q (for keys)");
}

AttentionResult AttentionImpl::forward(const torch::Tensor& query,
                                       const torch::Tensor& key_or_none,
                                       const torch::Tensor& value_or_none,
                                       const AttentionCall& call) {
  const bool is_self = !key_or_none.defined() || key_or_none.is_same(query);
  const torch::Tensor& key = is_self ? query : key_or_none;
  const torch::Tensor& value = value_or_none.defined() ? value_or_none : key;
  check_input(query, "query", options_.embed_dim);
  check_input(key, "key", options_.kdim);
  check_input(value, "value", options_.vdim);
  TORCH_CHECK(key.size(0) == query.size(0) && value.size(0) == key.size(0) &&
                  value.size(1) == key.size(1),
              "attention: query is ", query.sizes(), ", key ", key.sizes(),
              ", value ", value.sizes(),
              ": the batch of all, and the length of key and value, must "
              "agree");
  TORCH_CHECK(!options_.share_kv || value.is_same(key),
              "attention: share_kv makes keys and values one, found a value "
              "beside the key: leave it out");
  check_mask(call.key_mask, "key_mask", key, "key");
  check_mask(call.query_mask, "query_mask", query, "query");
  check_mask(call.global_mask, "global_mask", key, "key");
  TORCH_CHECK(!call.cu_seqlens_q || (!call.key_mask && !call.query_mask),
              "attention: masks and cu_seqlens together; packed sequences have "
              "no padding to mask");
  TORCH_CHECK(call.cu_seqlens_q || !call.cu_seqlens_k,
              "attention: cu_seqlens_k without cu_seqlens_q");
  check_kind_of_call(options_, call);

  AttentionCall full = call;
  if (is_self && !full.query_mask) full.query_mask = full.key_mask;
  const int64_t rows =
      full.cu_seqlens_q ? full.cu_seqlens_q->numel() - 1 : query.size(0);
  full.q_start = checked_start(full.q_start, rows, "q_start");
  full.kv_start = checked_start(full.kv_start, rows, "kv_start");

  torch::Tensor q_in = without_masked(query, full.query_mask);
  const torch::Tensor k_in = is_self && same(full.query_mask, full.key_mask)
                                 ? q_in
                                 : without_masked(key, full.key_mask);
  const torch::Tensor v_in =
      value.is_same(key) ? k_in : without_masked(value, full.key_mask);
  Heads heads = project(q_in, k_in, v_in);

  AttentionResult result;
  if (is_linear()) {
    result = linear_forward(heads, full);
  } else if (options_.kind == "performer") {
    result = performer_forward(std::move(heads), full);
  } else if (options_.kind == "linformer") {
    result = linformer_forward(heads, full);
  } else {
    if (has_global_tokens(full))
      result.out = with_few_global_tokens(q_in, k_in, v_in, heads, full);
    if (!result.out.defined()) {
      Heads global;
      if (has_global_tokens(full)) global = project_global(q_in, k_in, v_in);
      result = softmax_forward(std::move(heads), std::move(global), full);
    }
  }
  result.out = merge_heads(result.out);
  if (full.query_mask) {
    result.out = without_masked(result.out, full.query_mask);
  }
  return result;
}

torch::Tensor AttentionImpl::decode_step(
    const torch::Tensor& query, AttentionState& state,
    const std::optional<torch::Tensor>& relative_bias) {
  torch::NoGradGuard no_grad;
  TORCH_CHECK(options_.is_causal,
              "attention: decode_step needs is_causal, found a layer without");
  TORCH_CHECK(query.dim() == 3 && query.size(1) == 1 &&
                  query.size(2) == options_.embed_dim,
              "attention: decode_step: query is ", query.sizes(),
              ", expected [batch, 1, ", options_.embed_dim, "]");
  AttentionCall call;
  call.relative_bias = relative_bias;
  check_kind_of_call(options_, call);
  if (auto* linear = std::get_if<LinearState>(&state)) {
    if (is_linear()) return merge_heads(linear_step(query, *linear));
    if (options_.kind == "performer") {
      return merge_heads(performer_step(query, *linear));
    }
  } else if (auto* cache = std::get_if<KvCache>(&state);
             cache != nullptr && can_step(*cache)) {
    return merge_heads(cached_step(query, *cache, relative_bias));
  }
  call.state = state;  // whole also after an error
  call.return_state = true;
  AttentionResult result = forward(query, {}, {}, call);
  state = std::move(result.state);
  return result.out;
}

namespace {

AttentionOptions with_kind(AttentionOptions options, const char* kind) {
  options.kind = kind;
  return options;
}

}  // namespace

SoftmaxAttentionImpl::SoftmaxAttentionImpl(AttentionOptions options)
    : AttentionImpl(with_kind(std::move(options), "softmax")) {}
LinearAttentionImpl::LinearAttentionImpl(AttentionOptions options)
    : AttentionImpl(with_kind(std::move(options), "linear")) {}
CosformerAttentionImpl::CosformerAttentionImpl(AttentionOptions options)
    : AttentionImpl(with_kind(std::move(options), "cosformer")) {}
PerformerAttentionImpl::PerformerAttentionImpl(AttentionOptions options)
    : AttentionImpl(with_kind(std::move(options), "performer")) {}
LinformerAttentionImpl::LinformerAttentionImpl(AttentionOptions options)
    : AttentionImpl(with_kind(std::move(options), "linformer")) {}
LongformerAttentionImpl::LongformerAttentionImpl(AttentionOptions options)
    : AttentionImpl(with_kind(std::move(options), "longformer")) {}
BigBirdAttentionImpl::BigBirdAttentionImpl(AttentionOptions options)
    : AttentionImpl(with_kind(std::move(options), "bigbird")) {}

}  // namespace cosformer
