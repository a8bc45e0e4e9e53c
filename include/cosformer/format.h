// A model on disk: a folder with config.json, model.safetensors and the
// tokenizer's files. Torch-free; reads with full validation, writes through a
// temporary file and rename, so that nothing is ever half-written.
#ifndef COSFORMER_FORMAT_H_
#define COSFORMER_FORMAT_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cosformer/base.h"

namespace cosformer {

// Which attention a layer uses. Keys that a kind does not read must keep their
// defaults; the comments name the kinds that read them.
struct AttentionConfig {
  std::string kind = "cosformer";  // "softmax", "linear", "cosformer",
                                   // "performer", "linformer", "longformer",
                                   // "bigbird"
  // cosformer, linear.
  std::string feature_map;  // "" = the kind's own: relu for cosformer, elu1 for
                            // linear; "relu", "elu1", "identity"
  int64_t reweight_len = 0;  // M; 0 = max_len for cosformer, none for linear
  std::string normalizer = "sum";  // "sum", "none" (with an RMS norm a head)
  double eps = 1e-6;               // floor of the denominator
  // softmax, linformer, longformer, bigbird.
  double scale = 0.0;    // 0 = 1/sqrt(head_dim)
  double dropout = 0.0;  // of a weight, in training
  // longformer; softmax, where 0 = no window.
  int64_t window = 0;    // tokens on each side (causal: to the left), in steps
  int64_t dilation = 1;  // of this many positions
  // longformer.
  int64_t global_tokens = 0;  // the first tokens that all see and that see all
  // performer.
  int64_t num_features = 0;  // 0 = 4 head_dim
  bool orthogonal = true;
  bool trainable_projection = false;
  int64_t projection_seed = 0;  // layer i draws with projection_seed + i
  // linformer.
  int64_t projected_len = 0;  // 0 = max_len / 4, at least 1
  bool share_kv = false;      // one projection for keys and values
  bool one_kv_head = false;   // num_kv_heads 1
  // bigbird.
  int64_t block_size = 64;
  int64_t num_random_blocks = 3;
  int64_t window_blocks = 3;  // odd
  int64_t first_global_blocks = 1;
  int64_t last_global_blocks = 1;  // none when causal
  int64_t block_seed = 0;          // layer i draws with block_seed + i
  bool operator==(const AttentionConfig&) const = default;
};

// What one sequence carries from token to token through one causal layer: sums
// of constant size (linear kinds, in float32), or keys and values of all tokens
// or of the last and first ones. Linformer carries nothing.
struct StateSize {
  int64_t constant_bytes = 0;
  int64_t bytes_per_token = 0;
  int64_t max_tokens = 0;  // that are kept; 0 = all
  int64_t bytes_at(int64_t tokens) const;
};
StateSize state_size(const AttentionConfig& attention, int64_t num_kv_heads,
                     int64_t head_dim, int64_t cache_element_bytes = 4);

// The generic Transformer (design: BERT-, GPT-, LLaMA- and T5-like by its
// config). Persisted as config.json, versioned.
struct ModelConfig {
  int64_t format_version = 1;
  int64_t vocab_size = 0;
  int64_t type_vocab_size = 0;  // token types (BERT); 0 = none
  int64_t embed_dim = 128;
  bool embed_norm = false;  // a norm after the embeddings
  double embed_scale = 1.0;
  int64_t num_layers = 4;
  int64_t num_decoder_layers = 0;
  bool cross_attention = false;
  int64_t num_heads = 4;
  int64_t num_kv_heads = 0;  // 0 = num_heads
  int64_t head_dim = 0;      // 0 = embed_dim / num_heads
  int64_t ffn_dim = 0;       // 0 = 4 embed_dim
  int64_t max_len = 256;     // tokens
  bool is_causal = true;
  std::string norm = "layernorm";  // "layernorm", "rmsnorm"
  double norm_eps = 1e-5;
  std::string norm_placement = "pre";  // "pre", "post"
  std::string activation = "gelu";     // "gelu", "gelu_tanh", "relu", "silu"
  bool gated = false;                  // act(gate x) * up x
  std::string position =
      "learned";  // "none", "learned", "sinusoidal", "rope", "t5"
  int64_t position_offset = 0;
  double rope_base = 10000.0;
  int64_t rope_dim = 0;  // 0 = head_dim
  bool rope_interleaved = false;
  int64_t relative_buckets = 32;
  int64_t max_distance = 128;
  std::vector<AttentionConfig> attention{
      AttentionConfig{}};  // one for all layers, or one a layer
  double dropout = 0.0;
  bool qkv_bias = true;
  bool out_bias = true;
  bool mlp_bias = true;
  bool norm_bias = true;  // the bias of layernorm
  bool tie_embeddings = true;
  double logit_scale = 1.0;
  double init_std = 0.02;
  bool operator==(const ModelConfig&) const = default;

  // What the zeros stand for.
  int64_t kv_heads() const {
    return num_kv_heads > 0 ? num_kv_heads : num_heads;
  }
  int64_t head_size() const {
    return head_dim > 0 ? head_dim
                        : (num_heads > 0 ? embed_dim / num_heads : 0);
  }
  int64_t ffn_size() const { return ffn_dim > 0 ? ffn_dim : 4 * embed_dim; }
  const AttentionConfig& layer_attention(int64_t layer) const {
    return attention.size() == 1 ? attention[0]
                                 : attention[static_cast<size_t>(layer)];
  }
};

// Every contradiction: heads that do not divide, an unknown kind, a dimension
// of 0, an option that a kind or a position lacks. Names the key. What is
// well-formed but that no model of this version can do is kNotSupported.
Status validate(const ModelConfig& config);
// JSON text <-> config. An unknown key is an error that names the nearest known
// one; a wrong type names key, found, expected; a number out of its key's range
// names the range; keys that are missing keep their defaults. Keys against each
// other (and a vocab_size of 0) are validate()'s: call it before using the
// config.
std::string to_json(const ModelConfig& config);
Result<ModelConfig> model_config_from_json(std::string_view json);
// The keys that config.json, and the objects under `attention`, may have.
const std::vector<std::string>& model_config_keys();
const std::vector<std::string>& attention_config_keys();
// The key in `known` nearest to `key` by edit distance (case does not count),
// or "" when none is near.
std::string nearest_key(std::string_view key,
                        const std::vector<std::string>& known);

// A tensor inside a safetensors file, row-major. data is valid as long as the
// SafetensorsFile and aligned to its element (a file that does not align it is
// copied); null when bytes is 0.
struct TensorEntry {
  DType dtype;
  std::vector<int64_t> shape;
  const void* data;
  size_t bytes;
};

// A safetensors file, mapped read-only and validated whole: header length,
// JSON, dtype names, sizes against shapes (overflow too), offsets in range, no
// overlap, no gap, no duplicate names. Errors name the file and the tensor. A
// dtype of the format that DType lacks (F8_E4M3, I16, ...) is kNotSupported.
class SafetensorsFile {
 public:
  static Result<SafetensorsFile> open(const std::string& path);
  SafetensorsFile(SafetensorsFile&&) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) noexcept;
  ~SafetensorsFile();
  const std::map<std::string, TensorEntry>& tensors() const;
  const std::map<std::string, std::string>& metadata() const;

 private:
  struct Impl;
  explicit SafetensorsFile(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Streams into a temporary neighbour, fsyncs, renames: the file is there whole
// or not at all, and an older one survives an error. The data begins at a
// multiple of 64; tensors follow by falling element size, then by name, so that
// each is aligned to its element without gaps. data may be null when bytes is
// 0. Peak memory: the header.
Status write_safetensors(const std::string& path,
                         const std::map<std::string, TensorEntry>& tensors,
                         const std::map<std::string, std::string>& metadata);

// Whole small files. Errors name the path and the system's reason: kNotFound
// for a missing file, kInvalidArgument for a folder, a device or a file above
// max_bytes, kIoError otherwise (permissions).
Result<std::string> read_file(const std::string& path,
                              size_t max_bytes = size_t{1} << 30);
// To a temporary neighbour, fsync, rename, fsync of the folder. After an error
// (full disk, file size limit, permissions) the old file is as it was and no
// temporary is left; the message says how much was written.
Status write_file_atomically(const std::string& path, std::string_view content);
// fsync of a folder, so that renames in it are durable.
Status sync_folder(const std::string& path);

}  // namespace cosformer

#endif  // COSFORMER_FORMAT_H_
