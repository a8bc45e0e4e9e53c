// The generic Transformer by its config.
#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>

#include "cosformer/models.h"

namespace cosformer {
namespace {

// A matrix of rows by index: embeddings.
class TableImpl : public torch::nn::Module {
 public:
  TableImpl(int64_t rows, int64_t dim) {
    weight = register_parameter("weight", torch::empty({rows, dim}));
  }
  torch::Tensor weight;
};
TORCH_MODULE(Table);

// How far a sequence may reach, and the config key that says so.
struct Limit {
  int64_t positions = std::numeric_limits<int64_t>::max();
  std::string key;

  bool none() const { return key.empty(); }
  void at_most(int64_t count, const std::string& because) {
    if (count < positions) {
      positions = count;
      key = because;
    }
  }
};

int64_t cosine_reach(const ModelConfig& config, int64_t layer) {
  const AttentionConfig& a = config.layer_attention(layer);
  if (a.kind == "cosformer" && a.reweight_len == 0) return config.max_len;
  return a.reweight_len;
}

Limit limit_of(const ModelConfig& config) {
  Limit limit;
  if (config.position == "learned" || config.position == "sinusoidal") {
    limit.at_most(config.max_len, "max_len");
  }
  for (int64_t i = 0; i < config.num_layers; ++i) {
    if (config.layer_attention(i).kind == "linformer") {
      limit.at_most(config.max_len, "max_len");
    }
    const int64_t reach = cosine_reach(config, i);
    // The first and the last token may be `reach` apart.
    if (reach > 0) limit.at_most(reach + 1, "reweight_len + 1");
  }
  return limit;
}

BlockOptions block_options(const ModelConfig& c, int64_t layer) {
  const AttentionConfig& a = c.layer_attention(layer);
  AttentionOptions attention(c.embed_dim, c.num_heads);
  attention.kind = a.kind;
  attention.head_dim = c.head_size();
  attention.num_kv_heads = a.one_kv_head ? 1 : c.kv_heads();
  attention.is_causal = c.is_causal;
  attention.feature_map = a.feature_map;
  attention.reweight_len = cosine_reach(c, layer);
  attention.normalizer = a.normalizer;
  attention.eps = a.eps;
  attention.scale = a.scale;
  attention.dropout = a.dropout;
  attention.window = a.window;
  attention.dilation = a.dilation;
  attention.global_tokens = a.global_tokens;
  attention.num_features = a.num_features;
  attention.orthogonal = a.orthogonal;
  attention.trainable_projection = a.trainable_projection;
  attention.projected_len = a.projected_len;
  attention.share_kv = a.share_kv;
  attention.one_kv_head = a.one_kv_head;
  attention.block_size = a.block_size;
  attention.num_random_blocks = a.num_random_blocks;
  attention.window_blocks = a.window_blocks;
  attention.first_global_blocks = a.first_global_blocks;
  attention.last_global_blocks = a.last_global_blocks;
  // Layers differ in what they draw.
  if (a.kind == "performer") {
    attention.projection_seed = a.projection_seed + layer;
  }
  if (a.kind == "bigbird") attention.block_seed = a.block_seed + layer;
  if (a.kind == "linformer") attention.max_len = c.max_len;
  if (c.position == "rope") {
    attention.rotary_base = c.rope_base;
    attention.rotary_dim = c.rope_dim;
    attention.rotary_interleaved = c.rope_interleaved;
  }
  attention.qkv_bias = c.qkv_bias;
  attention.out_bias = c.out_bias;
  BlockOptions block{attention,
                     FeedForwardOptions{c.embed_dim, c.ffn_size(), c.activation,
                                        c.gated, c.mlp_bias}};
  block.norm = c.norm;
  block.norm_eps = c.norm_eps;
  block.norm_bias = c.norm_bias;
  block.pre_norm = c.norm_placement == "pre";
  block.dropout = c.dropout;
  return block;
}

const ModelConfig& checked(const ModelConfig& config) {
  const Status status = validate(config);
  TORCH_CHECK(status.ok(), status.message());
  return config;
}

}  // namespace

ModelState ModelState::clone() const {
  ModelState out{{}, position};
  for (const AttentionState& layer : layers) {
    out.layers.push_back(cosformer::clone(layer));
  }
  return out;
}

ModelState ModelState::select(const torch::Tensor& rows) const {
  ModelState out{{}, position};
  for (const AttentionState& layer : layers) {
    out.layers.push_back(cosformer::select(layer, rows));
  }
  return out;
}

struct TransformerImpl::Parts {
  Table embed{nullptr}, position{nullptr}, head{nullptr};
  Table relative_bias{nullptr};  // [buckets, heads], of all layers
  Norm embed_norm{nullptr}, final_norm{nullptr};
  std::vector<Block> layers;
  // The first rows of the sinusoidal table, as many as were needed so far.
  torch::Tensor sinusoids;
  std::mutex sinusoids_mutex;
  Limit limit;
  bool checkpointing = false;
  bool track_denominators = false;
  // Of the last forward, one a linear layer.
  std::vector<torch::Tensor> min_denominators, clamped_shares;

  // Rows [begin, begin + count) of a table that never exceeds `most` rows.
  torch::Tensor sinusoidal_rows(int64_t begin, int64_t count,
                                const torch::TensorOptions& options,
                                int64_t most);
  void record(const torch::Tensor& denominator, double eps,
              const torch::Tensor& mask);
};

torch::Tensor TransformerImpl::Parts::sinusoidal_rows(
    int64_t begin, int64_t count, const torch::TensorOptions& options,
    int64_t most) {
  const std::lock_guard<std::mutex> lock(sinusoids_mutex);
  const int64_t end = begin + count;
  const int64_t have = sinusoids.defined() ? sinusoids.size(0) : 0;
  if (have < end) {
    sinusoids = sinusoidal_positions(std::min(most, std::max(end, 2 * have)),
                                     embed->weight.size(1));
  }
  return sinusoids.narrow(0, begin, count).to(options);
}

void TransformerImpl::Parts::record(const torch::Tensor& denominator,
                                    double eps, const torch::Tensor& mask) {
  if (!denominator.defined() || denominator.numel() == 0) return;
  torch::NoGradGuard no_grad;
  torch::Tensor least, share;
  if (mask.defined()) {  // padding has no denominator
    const torch::Tensor real = mask.unsqueeze(-1);
    least = denominator
                .masked_fill(real.logical_not(),
                             std::numeric_limits<double>::infinity())
                .amin();
    share = (denominator.lt(eps).logical_and(real).sum().to(torch::kFloat) /
             (mask.sum() * denominator.size(2)).clamp_min(1));
  } else {
    least = denominator.amin();
    share = denominator.lt(eps).sum().to(torch::kFloat) /
            static_cast<double>(denominator.numel());
  }
  min_denominators.push_back(least.to(torch::kFloat));
  clamped_shares.push_back(share);
}

TransformerImpl::TransformerImpl(const ModelConfig& config, bool initialize)
    : config_(checked(config)), parts_(std::make_shared<Parts>()) {
  const ModelConfig& c = config_;
  Parts& p = *parts_;
  const auto norm = [&] {
    return Norm(c.norm, c.embed_dim, c.norm_eps, c.norm_bias);
  };
  p.limit = limit_of(c);
  p.embed = register_module("embed", Table(c.vocab_size, c.embed_dim));
  const int64_t rows = c.position_offset + c.max_len;
  if (c.position == "learned") {
    p.position = register_module("position", Table(rows, c.embed_dim));
  }
  if (c.position == "t5") {
    p.relative_bias = register_module("relative_bias",
                                      Table(c.relative_buckets, c.num_heads));
  }
  if (c.embed_norm) p.embed_norm = register_module("embed_norm", norm());
  torch::nn::ModuleList list;
  for (int64_t i = 0; i < c.num_layers; ++i) {
    p.layers.emplace_back(block_options(c, i), /*initialize=*/false);
    list->push_back(p.layers.back());
  }
  register_module("layers", list);
  if (c.norm_placement == "pre") {
    p.final_norm = register_module("final_norm", norm());
  }
  if (!c.tie_embeddings) {
    p.head = register_module("head", Table(c.vocab_size, c.embed_dim));
  }
  if (!initialize) return;
  torch::NoGradGuard no_grad;
  for (Block& layer : p.layers) {
    const AttentionOptions& attention = layer->attention->options();
    if (attention.kind != "performer") continue;
    layer->attention->redraw_projection(attention.projection_seed);
  }
  for (auto& parameter : named_parameters()) {
    if (parameter.key().ends_with("attention.projection")) continue;
    if (parameter.key().ends_with("_len_proj")) {  // Wang et al. 2020
      parameter.value().normal_(
          0.0, 1.0 / std::sqrt(static_cast<double>(parameter.value().size(1))));
      continue;
    }
    if (parameter.value().dim() == 2) {
      parameter.value().normal_(0.0, c.init_std);
    } else if (parameter.key().ends_with("bias")) {
      parameter.value().zero_();
    }
  }
}

std::optional<torch::Tensor> TransformerImpl::relative_bias() const {
  if (!parts_->relative_bias) return std::nullopt;
  return t5_relative_bias(parts_->relative_bias->weight,
                          /*bidirectional=*/!config_.is_causal,
                          config_.max_distance);
}

std::optional<int64_t> TransformerImpl::max_positions() const {
  if (parts_->limit.none()) return std::nullopt;
  return parts_->limit.positions;
}

torch::Tensor TransformerImpl::embed(const torch::Tensor& ids,
                                     int64_t start) const {
  Parts& p = *parts_;
  TORCH_CHECK(ids.dim() == 2 && ids.scalar_type() == torch::kInt64,
              "transformer: ids are ", ids.scalar_type(), " ", ids.sizes(),
              ", expected int64 [batch, seq]");
  const int64_t end = start + ids.size(1);
  TORCH_CHECK(end <= p.limit.positions, "transformer: the sequence has ", end,
              " tokens, the model knows ", p.limit.positions, " positions (",
              p.limit.key,
              "): shorten it, or go on from its latter half (--rolling)");
  if (ids.is_cpu() && ids.numel() > 0) {
    const auto [least, greatest] = ids.aminmax();
    const auto low = least.item<int64_t>(), high = greatest.item<int64_t>();
    TORCH_CHECK(low >= 0 && high < config_.vocab_size, "transformer: id ",
                low < 0 ? low : high,
                " is outside the vocabulary, expected 0 to ",
                config_.vocab_size - 1);
  }
  torch::Tensor x = at::embedding(p.embed->weight, ids);
  if (config_.embed_scale != 1.0) x = x * config_.embed_scale;
  const int64_t first = config_.position_offset + start;
  if (p.position) {
    x = x + p.position->weight.narrow(0, first, ids.size(1));
  } else if (config_.position == "sinusoidal") {
    x = x + p.sinusoidal_rows(first, ids.size(1), x.options(),
                              config_.position_offset + config_.max_len);
  }
  if (p.embed_norm) x = p.embed_norm->forward(x);
  if (config_.dropout > 0.0) {
    x = at::dropout(x, config_.dropout, is_training());
  }
  return x;
}

torch::Tensor TransformerImpl::logits(torch::Tensor x) const {
  const Parts& p = *parts_;
  if (p.final_norm) x = p.final_norm->forward(x);
  x = at::linear(x, p.head ? p.head->weight : p.embed->weight);
  return config_.logit_scale == 1.0 ? x : x * config_.logit_scale;
}

torch::Tensor TransformerImpl::forward(
    const torch::Tensor& ids, const std::optional<torch::Tensor>& key_mask) {
  Parts& p = *parts_;
  p.min_denominators.clear();
  p.clamped_shares.clear();
  torch::Tensor x = embed(ids, 0);
  const std::optional<torch::Tensor> bias = relative_bias();
  for (Block& layer : p.layers) {
    AttentionCall call;
    call.key_mask = key_mask;
    // Of its own, so that a layer's gradients of it are added up first, as
    // checkpointing does.
    if (bias) call.relative_bias = at::alias(*bias);
    const bool tracked = p.track_denominators &&
                         layer->attention->is_linear() &&
                         layer->attention->options().normalizer == "sum";
    auto run = [parts = parts_, layer, call,
                tracked](const torch::Tensor& input) mutable {
      call.return_denominator = tracked && !is_recomputing();
      AttentionResult result = layer->forward(input, call);
      if (call.return_denominator) {
        parts->record(result.denominator, layer->attention->options().eps,
                      call.key_mask.value_or(torch::Tensor()));
      }
      return result.out;
    };
    if (!p.checkpointing) {
      x = run(x);
      continue;
    }
    std::vector<torch::Tensor> used = layer->parameters();
    if (bias) used.push_back(*call.relative_bias);
    x = checkpoint(run, x, used);
  }
  return logits(x);
}

torch::Tensor TransformerImpl::forward_with_state(const torch::Tensor& ids,
                                                  ModelState& state,
                                                  bool last_only) {
  torch::NoGradGuard no_grad;
  Parts& p = *parts_;
  TORCH_CHECK(config_.is_causal,
              "transformer: forward_with_state needs is_causal: true, found "
              "false: a model that sees the future cannot go token by token");
  if (state.layers.empty()) state.layers.resize(p.layers.size());
  TORCH_CHECK(state.layers.size() == p.layers.size(), "transformer: state has ",
              state.layers.size(), " layers, expected ", p.layers.size());
  torch::Tensor x = embed(ids, state.position);
  const int64_t count = ids.size(1);
  if (count > 0) {
    const std::optional<torch::Tensor> bias = relative_bias();
    for (size_t i = 0; i < p.layers.size(); ++i) {
      AttentionState& held = state.layers[i];
      if (count == 1 && !std::holds_alternative<std::monostate>(held)) {
        x = p.layers[i]->decode_step(x, held, bias);
        continue;
      }
      AttentionCall call;
      call.state = held;  // whole also after an error
      call.return_state = true;
      call.relative_bias = bias;
      AttentionResult result = p.layers[i]->forward(x, call);
      held = std::move(result.state);
      x = std::move(result.out);
    }
    state.position += count;
  }
  if (last_only && count > 1) x = x.narrow(1, count - 1, 1);
  return logits(std::move(x));
}

std::vector<torch::Tensor> TransformerImpl::attention_matrices(
    const torch::Tensor& ids) {
  torch::NoGradGuard no_grad;
  torch::Tensor x = embed(ids, 0);
  const std::optional<torch::Tensor> bias = relative_bias();
  std::vector<torch::Tensor> out;
  for (Block& layer : parts_->layers) {
    out.push_back(layer->attention_matrix(x, bias));
    AttentionCall call;
    call.relative_bias = bias;
    x = layer->forward(x, call).out;
  }
  return out;
}

void TransformerImpl::set_activation_checkpointing(bool on) {
  parts_->checkpointing = on;
}

void TransformerImpl::set_track_denominators(bool on) {
  parts_->track_denominators = on;
  parts_->min_denominators.clear();
  parts_->clamped_shares.clear();
}

DenominatorStats TransformerImpl::denominator_stats() const {
  const Parts& p = *parts_;
  if (p.min_denominators.empty()) {
    return {torch::tensor(std::numeric_limits<float>::quiet_NaN()),
            torch::tensor(0.0f)};
  }
  // Every layer has the same rows, so the mean of shares is the share.
  return {torch::stack(p.min_denominators).amin(),
          torch::stack(p.clamped_shares).mean()};
}

}  // namespace cosformer
