// Models: one generic Transformer by its ModelConfig, saved and loaded as a
// model folder, and text generation with it.
#ifndef COSFORMER_MODELS_H_
#define COSFORMER_MODELS_H_

#include <torch/torch.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cosformer/base.h"
#include "cosformer/format.h"
#include "cosformer/nn.h"
#include "cosformer/text.h"

namespace cosformer {

// What a causal model carries from token to token: one state a layer. Linear
// kinds and performer have constant size, a window a ring of it, softmax and
// bigbird a KV cache.
// A copy shares tensors that a decode step writes to: clone() to branch off.
struct ModelState {
  std::vector<AttentionState> layers;
  int64_t position = 0;  // tokens seen

  ModelState clone() const;
  // Rows of the batch by index (int64), for beam search and batching.
  ModelState select(const torch::Tensor& rows) const;
  // One safetensors file, tensors by layer and what made them as metadata; it
  // appears whole or not at all. load checks everything, names what it found
  // and expected, and gives the same bits, on the CPU.
  Status save(const std::string& path) const;
  static Result<ModelState> load(const std::string& path);
};

// Smallest denominator of the linear layers' last forward and the share of rows
// below eps, as 0-dim tensors (no synchronisation until read); NaN and 0 when
// the model has no linear layer.
struct DenominatorStats {
  torch::Tensor min_denominator;
  torch::Tensor clamped_share;
};

// The language model of a ModelConfig: causal, or (is_causal false) an encoder
// with a head. Parameter names are the contract of model.safetensors:
// embed.weight, position.weight (learned), relative_bias.weight (t5, [buckets,
// heads], shared by the layers), embed_norm (when asked),
// layers.N.{attention_norm,attention.{q,k,v,out}_proj,ffn_norm,ffn.{up,gate,down}_proj},
// attention.{q,k,v}_global_proj (longformer), attention.{key,value}_len_proj
// (linformer), attention.projection (performer; a buffer unless trainable),
// final_norm (norm_placement "pre" only: "post" ends in a norm anyway),
// head.weight (when not tied). position.weight has position_offset + max_len
// rows; token t stands at row position_offset + t.
// Matrices start at N(0, init_std), biases at 0, norms at 1; projections along
// the length and of performer as their layer draws them.
class TransformerImpl : public torch::nn::Module {
 public:
  // Throws c10::Error with validate()'s message for a bad config. initialize
  // false leaves the parameters uninitialised (they are about to be loaded) and
  // draws no random number.
  explicit TransformerImpl(const ModelConfig& config, bool initialize = true);

  // ids: int64 [batch, seq], key_mask: bool [batch, seq] or none -> logits
  // [batch, seq, vocab]. Beyond max_len (where positions are learned or M would
  // be exceeded): an error that names both numbers and what to do.
  torch::Tensor forward(
      const torch::Tensor& ids,
      const std::optional<torch::Tensor>& key_mask = std::nullopt);
  // The next seq tokens after state (prefill, chunk or single token); updates
  // state; no gradient. Logits [batch, seq, vocab], or [batch, 1, vocab] of the
  // last token alone. Equal to forward over the whole sequence, in evaluation
  // mode. A fresh ModelState{} starts a sequence.
  torch::Tensor forward_with_state(const torch::Tensor& ids, ModelState& state,
                                   bool last_only = false);

  // The weights of every layer on ids, each [batch, heads, seq, seq], for
  // inspection (nn.h); no gradient. Small inputs only.
  std::vector<torch::Tensor> attention_matrices(const torch::Tensor& ids);

  const ModelConfig& config() const { return config_; }
  // Tokens that a sequence may have: max_len where positions come from a table
  // (learned, sinusoidal) or a layer is linformer, the smallest reweight_len +
  // 1 of the cosine layers; none where every position is relative (rope, t5,
  // none) and no layer has the cosine.
  std::optional<int64_t> max_positions() const;
  // Trades time for memory: layers recompute their activations in the backward.
  void set_activation_checkpointing(bool on);
  // Collect DenominatorStats during forward (off by default).
  void set_track_denominators(bool on);
  DenominatorStats denominator_stats() const;

 private:
  torch::Tensor embed(const torch::Tensor& ids, int64_t start) const;
  torch::Tensor logits(torch::Tensor x) const;
  // T5's bias by distance, for every layer; none for other positions.
  std::optional<torch::Tensor> relative_bias() const;

  ModelConfig config_;
  struct Parts;
  std::shared_ptr<Parts> parts_;
};
TORCH_MODULE(Transformer);

// Writes config.json and model.safetensors (and the tokenizer's files) into
// folder, which must exist or be creatable; files appear whole or not at all.
Status save_model(const std::string& folder, const Transformer& model,
                  const Tokenizer* tokenizer);
struct LoadedModel {
  Transformer model{nullptr};
  std::shared_ptr<const Tokenizer> tokenizer;  // null: the folder has none
};
// A missing, extra or misshapen tensor is an error with expected, found and the
// tensor's name. The model has the file's dtype and is in training mode, as a
// new one; no random number is drawn.
Result<LoadedModel> load_model(const std::string& folder);

struct GenerateOptions {
  int64_t tokens = 200;
  double temperature = 1.0;  // 0 = greedy
  int64_t top_k = 0;         // 0 = all
  double top_p = 1.0;
  uint64_t seed = 1;
  bool rolling = false;  // past the last position: prefill again from the
                         // latter half of the context, and go on
};
// Calls on_token for each new token; stops early when it returns false.
// Sampling by Philox from (seed, step): the same on every machine. An error
// past the positions that the model knows (max_positions), unless rolling:
// after what fits was streamed. An empty prompt is an error: there is nothing
// to continue. The model runs in evaluation mode and returns to its own.
Result<std::vector<int32_t>> generate(
    Transformer& model, const std::vector<int32_t>& prompt,
    const GenerateOptions& options,
    const std::function<bool(int32_t token)>& on_token);

}  // namespace cosformer

#endif  // COSFORMER_MODELS_H_
