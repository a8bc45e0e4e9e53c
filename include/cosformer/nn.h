// Layers as torch modules: attention kinds behind one call, positions, norms,
// feed-forward, blocks, activation checkpointing. Everything here throws
// c10::Error on bad input, with what was found and what was expected.
#ifndef COSFORMER_NN_H_
#define COSFORMER_NN_H_

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "cosformer/ops.h"

namespace cosformer {

// Keys and values seen so far: all of them, or, for attention through a window,
// the last few (and the first few, when those are global tokens). A row's token
// number t (its position is start + t) lies in slot t - dropped (is_ring: t
// modulo the slots); the first kept_first tokens stay in theirs. keys and
// values are views of buffers with room to spare, so that a token costs no copy
// of what came before. A copy of the struct shares them and stays valid:
// whoever would overwrite what another sees copies first. Not for concurrent
// use of copies.
struct KvCache {
  torch::Tensor keys, values;  // [batch, slots, kv_heads, dim]
  torch::Tensor key_mask;      // bool [batch, slots]; undefined = all are real
  torch::Tensor start;     // int64 [batch], position of each row's first token
  torch::Tensor position;  // int64 [batch], of each row's next token
  torch::Tensor dropped;   // int64 [batch]; undefined = 0
  int64_t kept_last = 0;   // tokens that are kept; 0 = all
  int64_t kept_first = 0;  // and of a row's first ones; 0 unless kept_last
  bool is_ring = false;
  // Keys and values of the first tokens for the queries of global tokens
  // (Longformer), [batch, kept_first or fewer, kv_heads, dim].
  torch::Tensor first_keys, first_values;

  // Slots in use by the longest row.
  int64_t size() const { return keys.defined() ? keys.size(1) : 0; }
  KvCache clone() const;
  KvCache detach() const;
  // Rows by index (int64), for beam search and batching.
  KvCache select(const torch::Tensor& rows) const;
  // Device and/or dtype of keys and values.
  KvCache to(const torch::TensorOptions& options) const;

  // The same tokens with slots in the order of positions: no ring.
  KvCache in_order() const;
  // This cache (no ring) followed by more tokens [batch, n, kv_heads, dim],
  // each row's behind its own last one; nothing is dropped. more_mask: bool
  // [batch, n] or undefined; what it hides at the end of a row does not move
  // the row on. first_position: int64 [batch], where an empty cache starts;
  // undefined = 0. Differentiable.
  KvCache append(const torch::Tensor& more_keys,
                 const torch::Tensor& more_values,
                 const torch::Tensor& more_mask = {},
                 const torch::Tensor& first_position = {}) const;
  // The last `last` tokens of each row, and the first `first`; 0 = all. A cache
  // that drops tokens without keeping first ones becomes a ring.
  KvCache bounded(int64_t last, int64_t first) const;
  // Position of what slot 0 would hold if no token were kept ahead of it, int64
  // [batch]: start + dropped.
  torch::Tensor slot_start() const;
  // Which slots hold a real token, bool [batch, slots]; none = all.
  std::optional<torch::Tensor> real_slots() const;
  // softmax_attention_decode_step_ over this cache, which must hold a token:
  // appends one token a row in place (bounded caches drop the oldest) and
  // answers q. args: as there; the mask of kept first tokens is added.
  torch::Tensor decode_step(const torch::Tensor& q, const torch::Tensor& k,
                            const torch::Tensor& v, SoftmaxAttentionArgs args);

 private:
  struct Storage;
  void reserve(int64_t slots);
  std::shared_ptr<Storage> storage_;
  int64_t version_ = 0;
};
// Of one attention layer: nothing yet, constant size, or a cache.
using AttentionState = std::variant<std::monostate, LinearState, KvCache>;
AttentionState clone(const AttentionState& state);
AttentionState detach(const AttentionState& state);
AttentionState select(const AttentionState& state, const torch::Tensor& rows);

// y = x W^T + b; weight [out, in], bias [out] or none.
class ProjectionImpl : public torch::nn::Module {
 public:
  // Values are uninitialised until reset_parameters (torch.nn.Linear's
  // distribution) or an assignment.
  ProjectionImpl(int64_t in, int64_t out, bool bias);
  void reset_parameters();
  torch::Tensor forward(const torch::Tensor& x) const {
    return at::linear(x, weight, bias);
  }
  torch::Tensor weight, bias;  // bias: undefined when there is none
};
TORCH_MODULE(Projection);

// A multi-head attention layer. Zeros stand for the default in brackets.
struct AttentionOptions {
  AttentionOptions(int64_t embed_dim, int64_t num_heads)
      : embed_dim(embed_dim), num_heads(num_heads) {}

  std::string kind = "cosformer";  // "softmax", "linear", "cosformer",
                                   // "performer", "linformer", "longformer",
                                   // "bigbird"
  int64_t embed_dim;
  int64_t num_heads;
  int64_t kdim = 0;          // width of key [embed_dim]
  int64_t vdim = 0;          // width of value [kdim]
  int64_t head_dim = 0;      // [embed_dim / num_heads]
  int64_t value_dim = 0;     // of a head [head_dim]
  int64_t num_kv_heads = 0;  // grouped-query attention [num_heads]
  bool is_causal = false;
  // Linear kinds (cosformer, linear).
  std::string feature_map;   // "relu", "elu1", "identity" [cosformer: relu,
                             // linear: elu1]
  int64_t reweight_len = 0;  // M of the cosine [cosformer: must be given;
                             // linear: no cosine]
  std::string normalizer = "sum";  // "sum", or "none": an RMS norm a head,
                                   // without parameters, follows (TransNormer)
  double eps = 1e-6;               // floor of the denominator, and of that norm
  // Kinds that form weights one by one (softmax, linformer, longformer,
  // bigbird).
  double scale = 0.0;    // [1 / sqrt(head_dim)]
  double dropout = 0.0;  // of a weight, in training mode
  // A window (longformer; softmax, none by default): `window` tokens on each
  // side (causal: to the left), `dilation` positions apart.
  int64_t window = 0;
  int64_t dilation = 1;
  // Longformer: the first tokens of a sequence that see all and that all see,
  // beside those of AttentionCall::global_mask.
  int64_t global_tokens = 0;
  // Performer.
  int64_t num_features = 0;  // [4 head_dim]
  bool orthogonal = true;    // rows of the projection, in blocks of head_dim
  bool trainable_projection = false;
  int64_t projection_seed = 0;
  // Linformer.
  int64_t max_len = 0;        // rows of the length projections
  int64_t projected_len = 0;  // [max_len / 4, at least 1]
  bool share_kv = false;      // keys and values (and their projections) are one
  bool one_kv_head = false;   // num_kv_heads 1
  // BigBird.
  int64_t block_size = 64;  // tokens
  int64_t num_random_blocks = 3;
  int64_t window_blocks = 3;  // odd
  int64_t first_global_blocks = 1;
  int64_t last_global_blocks = 1;  // causal: none
  int64_t block_seed = 0;
  // Rotary positions: on q and k (softmax, performer, longformer, bigbird), on
  // the numerator (linear kinds); linformer has none.
  double rotary_base = 0.0;  // [none]
  int64_t rotary_dim = 0;    // the first dims of a head [head_dim]; the linear
                             // kinds turn whole heads
  bool rotary_interleaved = false;
  bool qkv_bias = true;
  bool out_bias = true;
  bool out_proj = true;  // false: the heads, side by side, are the output
};

// What a call of an attention layer may say beside its inputs.
struct AttentionCall {
  // bool [batch, kv_len] and [batch, q_len], true = takes part. In self
  // attention query_mask is key_mask unless given.
  std::optional<torch::Tensor> key_mask, query_mask;
  AttentionState state;  // what earlier calls left; not changed
  bool return_state = false;
  // int64, one number or one a row; none = 0, or the state's position.
  std::optional<torch::Tensor> q_start, kv_start;
  // Packed sequences (batch 1): int32 or int64 [sequences + 1].
  std::optional<torch::Tensor> cu_seqlens_q, cu_seqlens_k;
  bool return_denominator = false;  // linear kinds with normalizer "sum"
  // Longformer: bool [batch, kv_len], true = a global token. Not with a state,
  // which keeps only the first global_tokens.
  std::optional<torch::Tensor> global_mask;
  // [heads, 2 reach + 1], added to the scores by distance: see
  // SoftmaxAttentionArgs. Softmax, longformer, bigbird.
  std::optional<torch::Tensor> relative_bias;
};
struct AttentionResult {
  torch::Tensor out;          // [batch, q_len, embed_dim]
  AttentionState state;       // when asked
  torch::Tensor denominator;  // [batch, q_len, heads], before the floor;
                              // detached; undefined unless asked
};

// Every kind behind one call. Parameters: q_proj, k_proj, v_proj, out_proj;
// longformer: q_global_proj, k_global_proj, v_global_proj; linformer:
// key_len_proj and value_len_proj [max_len, projected_len] (share_kv: no
// value_len_proj and no v_proj). Performer: projection [num_features,
// head_dim], a buffer unless trainable. Rows that query_mask excludes are
// exactly 0 and have no gradient, whatever they hold.
class AttentionImpl : public torch::nn::Module {
 public:
  // initialize false leaves the parameters uninitialised (they are about to be
  // loaded) and draws no random number.
  explicit AttentionImpl(AttentionOptions options, bool initialize = true);
  void reset_parameters();

  // query [batch, q_len, embed_dim], key [batch, kv_len, kdim] (undefined =
  // query), value [batch, kv_len, vdim] (undefined = key).
  AttentionResult forward(const torch::Tensor& query,
                          const torch::Tensor& key = {},
                          const torch::Tensor& value = {},
                          const AttentionCall& call = {});
  // The next token of each row in causal self attention: query [batch, 1,
  // embed_dim] -> out of the same shape. Updates state in place (a KvCache
  // leaves its copies as they are); no autograd. A state of monostate starts
  // one. relative_bias: as in AttentionCall.
  torch::Tensor decode_step(
      const torch::Tensor& query, AttentionState& state,
      const std::optional<torch::Tensor>& relative_bias = std::nullopt);

  // The weights w_ij / norm_i of self attention without state or mask, [batch,
  // heads, seq, seq], for inspection; see attention_matrix in ops.h. Linformer:
  // of the sequence's own values. relative_bias: as in AttentionCall.
  torch::Tensor attention_matrix(
      const torch::Tensor& query,
      const std::optional<torch::Tensor>& relative_bias = std::nullopt) const;

  const AttentionOptions& options() const { return options_; }
  // A feature map, a state of constant size and denominators: "cosformer" and
  // "linear".
  bool is_linear() const {
    return options_.kind == "cosformer" || options_.kind == "linear";
  }
  // Performer: another projection, from seed alone. States made with the
  // former one do not go with it.
  void redraw_projection(int64_t seed);
  // BigBird: bool [heads, blocks, blocks], which block sees which in a sequence
  // of that many blocks.
  torch::Tensor block_mask(int64_t blocks) const;

  Projection q_proj{nullptr}, k_proj{nullptr}, v_proj{nullptr},
      out_proj{nullptr};
  Projection q_global_proj{nullptr}, k_global_proj{nullptr},
      v_global_proj{nullptr};
  torch::Tensor key_len_proj, value_len_proj, projection;

 private:
  struct Heads;
  struct BlockMasks;
  Heads project(const torch::Tensor& query, const torch::Tensor& key,
                const torch::Tensor& value) const;
  // The same inputs through the projections of global tokens.
  Heads project_global(const torch::Tensor& query, const torch::Tensor& key,
                       const torch::Tensor& value) const;
  torch::Tensor merge_heads(const torch::Tensor& heads) const;
  torch::Tensor rotate(const torch::Tensor& x, int64_t start,
                       const std::optional<torch::Tensor>& positions) const;
  // Queries and keys of a call without state turned to their positions.
  void rotate_heads(const AttentionCall& call, Heads* heads) const;

  LinearAttentionArgs linear_args() const;
  AttentionResult linear_forward(const Heads& heads,
                                 const AttentionCall& call) const;
  torch::Tensor linear_step(const torch::Tensor& query,
                            LinearState& state) const;
  AttentionResult performer_forward(Heads heads,
                                    const AttentionCall& call) const;
  torch::Tensor performer_step(const torch::Tensor& query,
                               LinearState& state) const;
  AttentionResult linformer_forward(const Heads& heads,
                                    const AttentionCall& call) const;

  // Softmax, longformer, bigbird. global: the heads of global tokens, undefined
  // where there are none.
  SoftmaxAttentionArgs softmax_args(
      const std::optional<torch::Tensor>& relative_bias) const;
  std::optional<int64_t> draw_dropout_seed(const torch::Tensor& like) const;
  AttentionResult softmax_forward(Heads heads, Heads global,
                                  const AttentionCall& call) const;
  AttentionResult cached_forward(Heads heads, Heads global,
                                 const AttentionCall& call) const;
  // Whether cached_step goes on from it; forward does in any case.
  bool can_step(const KvCache& cache) const;
  torch::Tensor cached_step(
      const torch::Tensor& query, KvCache& cache,
      const std::optional<torch::Tensor>& relative_bias) const;
  // How many of the last and the first tokens a cache must keep; 0 = all.
  std::pair<int64_t, int64_t> kept_tokens(
      const std::optional<torch::Tensor>& relative_bias) const;
  void check_cache(const KvCache& cache, int64_t rows,
                   const std::optional<torch::Tensor>& relative_bias) const;
  bool has_global_tokens(const AttentionCall& call) const;
  torch::Tensor global_mask_of(const Heads& heads,
                               const AttentionCall& call) const;
  // Longformer's output where its global tokens are few, without projecting all
  // keys and values for them; undefined where that cannot be, or does not pay.
  // query, key, value: what `heads` are the projections of.
  torch::Tensor with_few_global_tokens(const torch::Tensor& query,
                                       const torch::Tensor& key,
                                       const torch::Tensor& value,
                                       const Heads& heads,
                                       const AttentionCall& call) const;
  // Of global tokens [batch, count, embed_dim]; real: those that are ones.
  torch::Tensor attend_contracted(const torch::Tensor& tokens,
                                  const torch::Tensor& real,
                                  const torch::Tensor& key,
                                  const torch::Tensor& value,
                                  const AttentionCall& call) const;
  torch::Tensor with_first_tokens(const torch::Tensor& out, const Heads& global,
                                  const KvCache& before,
                                  const SoftmaxAttentionArgs& args,
                                  KvCache* after) const;
  torch::Tensor bigbird_forward(const Heads& heads,
                                SoftmaxAttentionArgs args) const;
  // A mask of exactly (causal: at least) the blocks of that many positions.
  torch::Tensor blocks_for(int64_t positions, at::Device device) const;

  AttentionOptions options_;
  std::shared_ptr<BlockMasks> block_masks_;
};
TORCH_MODULE(Attention);

// The kinds by name, with the defaults of each (options.kind is set).
class SoftmaxAttentionImpl : public AttentionImpl {
 public:
  explicit SoftmaxAttentionImpl(AttentionOptions options);
};
TORCH_MODULE(SoftmaxAttention);
class LinearAttentionImpl : public AttentionImpl {
 public:
  explicit LinearAttentionImpl(AttentionOptions options);
};
TORCH_MODULE(LinearAttention);
class CosformerAttentionImpl : public AttentionImpl {
 public:
  explicit CosformerAttentionImpl(AttentionOptions options);
};
TORCH_MODULE(CosformerAttention);
class PerformerAttentionImpl : public AttentionImpl {
 public:
  explicit PerformerAttentionImpl(AttentionOptions options);
};
TORCH_MODULE(PerformerAttention);
class LinformerAttentionImpl : public AttentionImpl {
 public:
  explicit LinformerAttentionImpl(AttentionOptions options);
};
TORCH_MODULE(LinformerAttention);
class LongformerAttentionImpl : public AttentionImpl {
 public:
  explicit LongformerAttentionImpl(AttentionOptions options);
};
TORCH_MODULE(LongformerAttention);
class BigBirdAttentionImpl : public AttentionImpl {
 public:
  explicit BigBirdAttentionImpl(AttentionOptions options);
};
TORCH_MODULE(BigBirdAttention);

// "layernorm" (bias optional) or "rmsnorm" over the last dimension; weight
// [dim] starts at 1, bias at 0.
class NormImpl : public torch::nn::Module {
 public:
  NormImpl(std::string kind, int64_t dim, double eps, bool bias);
  torch::Tensor forward(const torch::Tensor& x) const;
  torch::Tensor weight, bias;

 private:
  bool is_rms_;
  double eps_;
};
TORCH_MODULE(Norm);

struct FeedForwardOptions {
  int64_t embed_dim;
  int64_t ffn_dim;
  std::string activation = "gelu";  // "gelu" (exact), "gelu_tanh", "relu",
                                    // "silu"
  bool gated = false;               // act(gate x) * up x
  bool bias = true;
};
// down_proj(act(up_proj x)), or down_proj(act(gate_proj x) * up_proj x).
class FeedForwardImpl : public torch::nn::Module {
 public:
  explicit FeedForwardImpl(const FeedForwardOptions& options,
                           bool initialize = true);
  torch::Tensor forward(const torch::Tensor& x) const;
  Projection up_proj{nullptr}, gate_proj{nullptr}, down_proj{nullptr};

 private:
  enum class Activation { kGelu, kGeluTanh, kRelu, kSilu };
  Activation activation_;
};
TORCH_MODULE(FeedForward);

struct BlockOptions {
  AttentionOptions attention;
  FeedForwardOptions ffn;
  std::string norm = "layernorm";
  double norm_eps = 1e-5;
  bool norm_bias = true;
  bool pre_norm = true;  // x + f(norm(x)), else norm(x + f(x))
  double dropout = 0.0;  // on what is added to the residual stream
};
// Attention and feed-forward with norms and residuals. Children:
// attention_norm, attention, ffn_norm, ffn.
class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const BlockOptions& options, bool initialize = true);
  // As AttentionImpl::forward in self attention.
  AttentionResult forward(const torch::Tensor& x,
                          const AttentionCall& call = {});
  // As AttentionImpl::attention_matrix, of the input x of the block.
  torch::Tensor attention_matrix(
      const torch::Tensor& x,
      const std::optional<torch::Tensor>& relative_bias = std::nullopt) const;
  // As AttentionImpl::decode_step.
  torch::Tensor decode_step(
      const torch::Tensor& x, AttentionState& state,
      const std::optional<torch::Tensor>& relative_bias = std::nullopt);

  Norm attention_norm{nullptr}, ffn_norm{nullptr};
  Attention attention{nullptr};
  FeedForward ffn{nullptr};

 private:
  torch::Tensor feed_forward(const torch::Tensor& x) const;
  bool pre_norm_;
  double dropout_;
};
TORCH_MODULE(Block);

// function(x) without keeping what its backward needs: the backward calls
// function again, with the random-number and autocast state of this call, and
// differentiates that (Chen et al. 2016). parameters: every tensor beside x
// that function uses and that may need a gradient. Gradients are those of the
// plain call, bit for bit where the operators are deterministic. Without
// gradient mode it is the plain call. No double backward (an error says so).
torch::Tensor checkpoint(
    std::function<torch::Tensor(const torch::Tensor&)> function,
    const torch::Tensor& x, const std::vector<torch::Tensor>& parameters);
// True inside the repeated call: what should happen once (statistics) skips it.
bool is_recomputing();

}  // namespace cosformer

#endif  // COSFORMER_NN_H_
