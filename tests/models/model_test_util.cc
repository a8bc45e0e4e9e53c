#include "tests/models/model_test_util.h"

#include <unistd.h>

#include <cstdlib>

namespace cosformer::testing {

std::vector<ConfigCase> config_cases() {
  std::vector<ConfigCase> out;
  const auto add = [&](const std::string& name, const std::string& kind,
                       auto change) {
    ModelConfig config = small_config(kind);
    change(config);
    out.push_back({name, config});
  };
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
  add("no_positions_mixed_kinds", "cosformer", [](ModelConfig& c) {
    c.position = "none";
    AttentionConfig linear;
    linear.kind = "linear";
    linear.feature_map = "relu";
    AttentionConfig cosine;
    cosine.feature_map = "elu1";
    c.attention = {linear, cosine};
  });
  return out;
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
