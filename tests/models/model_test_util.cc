#include "tests/models/model_test_util.h"

#include <unistd.h>

#include <cstdlib>

namespace cosformer::testing {

namespace {

// A list of cases that grows by changes to a small config.
struct Cases {
  std::vector<ConfigCase> list;
  template <typename Change>
  void operator()(const std::string& name, const std::string& kind,
                  const Change& change) {
    ModelConfig config = small_config(kind);
    change(config);
    list.push_back({name, config});
  }
};

}  // namespace

std::vector<ConfigCase> config_cases() {
  Cases add;
  const auto plain = [](ModelConfig&) {};
  add("cosformer", "cosformer", plain);
  add("linear", "linear", plain);
  add("softmax", "softmax", plain);
  add("no_biases_untied", "cosformer", [](ModelConfig& c) {
    c.qkv_bias = c.out_bias = c.mlp_bias = c.norm_bias = false;
    c.tie_embeddings = false;
    c.logit_scale = 0.5;
  });
  add("post_norm_embed_norm", "cosformer", [](ModelConfig& c) {
    c.norm_placement = "post";
    c.embed_norm = true;
    c.embed_scale = 4.0;
    c.activation = "relu";
  });
  add("sinusoidal_offset", "linear", [](ModelConfig& c) {
    c.position = "sinusoidal";
    c.position_offset = 2;
    c.activation = "gelu_tanh";
  });
  add("learned_offset", "softmax",
      [](ModelConfig& c) { c.position_offset = 2; });
  add("llama", "softmax", [](ModelConfig& c) {
    c.position = "rope";
    c.num_heads = 4;
    c.num_kv_heads = 2;
    c.head_dim = 6;
    c.norm = "rmsnorm";
    c.activation = "silu";
    c.gated = true;
    c.qkv_bias = c.out_bias = c.mlp_bias = false;
  });
  add("part_rope", "softmax", [](ModelConfig& c) {
    c.position = "rope";
    c.rope_dim = 4;
    c.rope_base = 500.0;
    c.rope_interleaved = true;
    c.attention[0].scale = 0.4;
  });
  add("linear_rope_grouped", "linear", [](ModelConfig& c) {
    c.position = "rope";
    c.num_kv_heads = 1;
  });
  add("cosformer_rope_head_norm", "cosformer", [](ModelConfig& c) {
    c.position = "rope";
    c.attention[0].normalizer = "none";
    c.attention[0].reweight_len = 50;
  });
  add("relu_linear", "linear", [](ModelConfig& c) {
    c.attention[0].feature_map = "relu";
    c.position = "none";
  });
  add("performer", "performer", plain);
  add("performer_rope_trainable", "performer", [](ModelConfig& c) {
    c.position = "rope";
    c.rope_dim = 4;
    c.attention[0].num_features = 20;
    c.attention[0].orthogonal = false;
    c.attention[0].trainable_projection = true;
    c.attention[0].projection_seed = 4;
  });
  add("softmax_window", "softmax", [](ModelConfig& c) {
    c.position = "none";
    c.attention[0].window = 2;
    c.attention[0].dilation = 2;
  });
  add("softmax_t5", "softmax", [](ModelConfig& c) {
    c.position = "t5";
    c.relative_buckets = 8;
    c.max_distance = 10;
  });
  add("softmax_sinusoidal", "softmax",
      [](ModelConfig& c) { c.position = "sinusoidal"; });
  add("longformer", "longformer", [](ModelConfig& c) {
    c.attention[0].window = 3;
    c.attention[0].global_tokens = 2;
  });
  add("longformer_t5", "longformer", [](ModelConfig& c) {
    c.position = "t5";
    c.relative_buckets = 6;
    c.max_distance = 8;
    c.num_kv_heads = 1;
    c.attention[0].window = 2;
    c.attention[0].global_tokens = 3;
  });
  add("bigbird", "bigbird", [](ModelConfig& c) {
    c.attention[0].block_size = 3;
    c.attention[0].num_random_blocks = 1;
    c.attention[0].window_blocks = 1;
    c.attention[0].block_seed = 2;
  });
  add("bigbird_t5", "bigbird", [](ModelConfig& c) {
    c.position = "t5";
    c.relative_buckets = 8;
    c.max_distance = 9;
    c.attention[0].block_size = 4;
    c.attention[0].num_random_blocks = 0;
  });
  add("every_kind_a_layer", "cosformer", [](ModelConfig& c) {
    c.position = "rope";
    c.num_layers = 7;
    c.attention.assign(7, AttentionConfig{});
    const char* kinds[] = {"softmax",    "linear",  "cosformer", "performer",
                           "longformer", "bigbird", "softmax"};
    for (size_t i = 0; i < 7; ++i) c.attention[i].kind = kinds[i];
    c.attention[4].window = 4;
    c.attention[4].global_tokens = 2;
    c.attention[5].block_size = 4;
    c.attention[6].window = 5;
  });
  add("no_positions_mixed_kinds", "cosformer", [](ModelConfig& c) {
    c.position = "none";
    AttentionConfig linear;
    linear.kind = "linear";
    linear.feature_map = "relu";
    AttentionConfig cosine;
    cosine.feature_map = "elu1";
    c.attention = {linear, cosine};
  });
  return add.list;
}

std::vector<ConfigCase> encoder_cases() {
  Cases add;
  add("linformer", "linformer", [](ModelConfig& c) { c.is_causal = false; });
  add("linformer_shared", "linformer", [](ModelConfig& c) {
    c.is_causal = false;
    c.position = "sinusoidal";
    c.attention[0].projected_len = 5;
    c.attention[0].share_kv = true;
  });
  add("linformer_one_kv_head_and_softmax", "linformer", [](ModelConfig& c) {
    c.is_causal = false;
    c.position = "none";
    c.attention.assign(2, c.attention[0]);
    c.attention[0].one_kv_head = true;
    c.attention[1].kind = "softmax";
  });
  for (ConfigCase each : config_cases()) {
    each.name += "_encoder";
    each.config.is_causal = false;
    add.list.push_back(each);
  }
  return add.list;
}

double relative_error(const torch::Tensor& a, const torch::Tensor& b) {
  EXPECT_EQ(a.sizes(), b.sizes());
  const torch::Tensor x = a.detach().to(torch::kFloat64);
  const torch::Tensor y = b.detach().to(torch::kFloat64);
  return ((x - y).norm() / y.norm()).item<double>();
}

ScratchFolder::ScratchFolder() {
  std::string pattern =
      (std::filesystem::temp_directory_path() / "cosformer_XXXXXX").string();
  path_ = mkdtemp(pattern.data());
}
ScratchFolder::~ScratchFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace cosformer::testing
