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

// Keys and values seen so far: grows with the sequence (the contrast to
// LinearState). keys, values: [batch, seen, kv_heads, dim]. They are views of
// buffers with room to spare, so that a token costs no copy of what came
// before. A copy of the struct shares them and stays valid: appending never
// changes what an older copy sees. Not for concurrent appends to copies.
struct KvCache {
  torch::Tensor keys, values;
  torch::Tensor key_mask;  // bool [batch, seen]; undefined = all are real
  torch::Tensor position;  // int64 [batch], of each row's next token;
                           // undefined = seen

  int64_t size() const { return keys.defined() ? keys.size(1) : 0; }
  KvCache clone() const;
  KvCache detach() const;
  // Rows by index (int64), for beam search and batching.
  KvCache select(const torch::Tensor& rows) const;
  // Device and/or dtype of keys and values.
  KvCache to(const torch::TensorOptions& options) const;
  // This cache followed by more keys and values [batch, n, kv_heads, dim].
  KvCache append(const torch::Tensor& more_keys,
                 const torch::Tensor& more_values) const;

 private:
  struct Storage;
  std::shared_ptr<Storage> storage_;
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

  std::string kind = "cosformer";  // "cosformer", "linear", "softmax"
  int64_t embed_dim;
  int64_t num_heads;
  int64_t kdim = 0;          // width of key [embed_dim]
  int64_t vdim = 0;          // width of value [kdim]
  int64_t head_dim = 0;      // [embed_dim / num_heads]
  int64_t value_dim = 0;     // of a head [head_dim]
  int64_t num_kv_heads = 0;  // grouped-query attention [num_heads]
  bool is_causal = false;
  // Linear kinds.
  std::string feature_map;   // "relu", "elu1", "identity" [cosformer: relu,
                             // linear: elu1]
  int64_t reweight_len = 0;  // M of the cosine [cosformer: must be given;
                             // linear: no cosine]
  std::string normalizer = "sum";  // "sum", or "none": an RMS norm a head,
                                   // without parameters, follows (TransNormer)
  double eps = 1e-6;               // floor of the denominator, and of that norm
  // Softmax.
  double scale = 0.0;  // [1 / sqrt(head_dim)]
  // Rotary positions: on q and k (softmax), on the numerator (linear kinds).
  double rotary_base = 0.0;  // [none]
  int64_t rotary_dim = 0;  // the first dims of a head [head_dim]; softmax only
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
};
struct AttentionResult {
  torch::Tensor out;          // [batch, q_len, embed_dim]
  AttentionState state;       // when asked
  torch::Tensor denominator;  // [batch, q_len, heads], before the floor;
                              // detached; undefined unless asked
};

// Every kind behind one call. Parameters: q_proj, k_proj, v_proj, out_proj.
// Rows that query_mask excludes are exactly 0 and have no gradient, whatever
// they hold.
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
  // embed_dim] -> out of the same shape. Updates state in place (linear kinds)
  // or appends to it; no autograd. A state of monostate starts one.
  torch::Tensor decode_step(const torch::Tensor& query, AttentionState& state);

  const AttentionOptions& options() const { return options_; }
  bool is_linear() const { return options_.kind != "softmax"; }

  Projection q_proj{nullptr}, k_proj{nullptr}, v_proj{nullptr},
      out_proj{nullptr};

 private:
  struct Heads;
  Heads project(const torch::Tensor& query, const torch::Tensor& key,
                const torch::Tensor& value) const;
  AttentionResult linear_forward(const Heads& heads,
                                 const AttentionCall& call) const;
  AttentionResult softmax_forward(Heads heads, const AttentionCall& call) const;
  LinearAttentionArgs linear_args() const;
  torch::Tensor rotate(const torch::Tensor& x, int64_t start,
                       const std::optional<torch::Tensor>& positions) const;
  torch::Tensor merge_heads(const torch::Tensor& heads) const;

  AttentionOptions options_;
};
TORCH_MODULE(Attention);

// The kinds by name, with the defaults of each (options.kind is set).
class CosformerAttentionImpl : public AttentionImpl {
 public:
  explicit CosformerAttentionImpl(AttentionOptions options);
};
TORCH_MODULE(CosformerAttention);
class LinearAttentionImpl : public AttentionImpl {
 public:
  explicit LinearAttentionImpl(AttentionOptions options);
};
TORCH_MODULE(LinearAttention);
class SoftmaxAttentionImpl : public AttentionImpl {
 public:
  explicit SoftmaxAttentionImpl(AttentionOptions options);
};
TORCH_MODULE(SoftmaxAttention);

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
  // As AttentionImpl::decode_step.
  torch::Tensor decode_step(const torch::Tensor& x, AttentionState& state);

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
