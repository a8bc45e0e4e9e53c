#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "cosformer/format.h"

namespace cosformer {
namespace {

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

ModelConfig valid() {
  ModelConfig c;
  c.vocab_size = 65;
  return c;
}

TEST(ModelConfigJson, RoundTrip) {
  EXPECT_EQ(*model_config_from_json(to_json(ModelConfig{})), ModelConfig{});
  ModelConfig c = valid();
  c.type_vocab_size = 2;
  c.embed_dim = 96;
  c.embed_norm = true;
  c.embed_scale = std::sqrt(96.0);
  c.num_layers = 2;
  c.num_decoder_layers = 3;
  c.cross_attention = true;
  c.num_heads = 6;
  c.num_kv_heads = 3;
  c.head_dim = 24;
  c.ffn_dim = 100;
  c.max_len = 1'000'000;
  c.is_causal = false;
  c.norm = "rmsnorm";
  c.norm_eps = 1.0 / 3.0;
  c.norm_placement = "post";
  c.activation = "silu";
  c.gated = true;
  c.position = "rope";
  c.position_offset = 2;
  c.rope_base = 500000.0;
  c.rope_dim = 8;
  c.rope_interleaved = true;
  c.relative_buckets = 16;
  c.max_distance = 64;
  c.dropout = 0.1;
  c.qkv_bias = c.out_bias = c.mlp_bias = c.norm_bias = false;
  c.tie_embeddings = false;
  c.logit_scale = 0.125;
  c.init_std = 0.02;
  AttentionConfig linear;
  linear.kind = "linear";
  linear.feature_map = "elu1";
  linear.reweight_len = 2'000'000;
  linear.normalizer = "none";
  linear.eps = 1e-9;
  AttentionConfig softmax;
  softmax.kind = "softmax";
  softmax.scale = 0.3;
  softmax.dropout = 0.1;
  softmax.window = 7;
  softmax.dilation = 3;
  // A value of each key, whether its kind reads it or not.
  softmax.global_tokens = 2;
  softmax.num_features = 40;
  softmax.orthogonal = false;
  softmax.trainable_projection = true;
  softmax.projection_seed = int64_t{1} << 61;
  softmax.projected_len = 12;
  softmax.share_kv = true;
  softmax.one_kv_head = true;
  softmax.block_size = 16;
  softmax.num_random_blocks = 5;
  softmax.window_blocks = 7;
  softmax.first_global_blocks = 2;
  softmax.last_global_blocks = 0;
  softmax.block_seed = 11;
  c.attention = {linear, softmax};
  const Result<ModelConfig> back = model_config_from_json(to_json(c));
  ASSERT_TRUE(back.ok()) << back.status().message();
  EXPECT_EQ(*back, c);
  EXPECT_EQ(to_json(*back), to_json(c));
  // Each key of the struct is in the text: a field forgotten in the table would
  // be lost in silence.
  EXPECT_EQ(model_config_keys().size(), 36u);
  EXPECT_EQ(attention_config_keys().size(), 23u);
  for (const std::string& key : model_config_keys()) {
    EXPECT_TRUE(has(to_json(c), "\"" + key + "\"")) << key;
  }
}

TEST(ModelConfigJson, Errors) {
  const struct {
    const char* json;
    std::vector<const char*> parts;
  } kCases[] = {
      {"", {"config.json", "empty"}},
      {"[]", {"found an array of 0", "expected an object"}},
      {"{\"embed_dim\": 128", {"not JSON", "byte"}},
      {"{\"embed_dim\": 128} x", {"not JSON"}},
      {"{\"embed_dim\": 128, \"embed_dim\": 64}", {"'embed_dim' twice"}},
      {"{\"emed_dim\": 128}", {"'emed_dim'", "did you mean 'embed_dim'?"}},
      {"{\"Num_Layers\": 1}", {"did you mean 'num_layers'?"}},
      {"{\"layers\": 1}", {"did you mean 'num_layers'?"}},
      {"{\"zzzzzz\": 1}", {"unknown key 'zzzzzz'"}},
      {"{\"embed_dim\": \"128\"}",
       {"embed_dim: found the string '128'", "expected an integer"}},
      {"{\"embed_dim\": 128.5}", {"embed_dim: found the number 128.5"}},
      {"{\"embed_dim\": true}", {"embed_dim: found true"}},
      {"{\"embed_dim\": null}", {"embed_dim: found null"}},
      {"{\"embed_dim\": 0}", {"embed_dim: found 0, expected 1 to"}},
      {"{\"embed_dim\": -4}", {"embed_dim: found -4"}},
      {"{\"embed_dim\": 18446744073709551615}",
       {"embed_dim", "expected an integer of 64 bits"}},
      {"{\"embed_dim\": 1e400}", {"out of range"}},
      {"{\"max_len\": 99999999999999}", {"max_len: found 99999999999999"}},
      {"{\"gated\": 1}", {"gated: found the number 1, expected true or false"}},
      {"{\"dropout\": 1.5}", {"dropout: found 1.5"}},
      {"{\"norm\": \"layer_norm\"}",
       {"norm: found 'layer_norm'", "did you mean 'layernorm'?"}},
      {"{\"norm\": 3}", {"norm: found the number 3, expected a string"}},
      {"{\"format_version\": 2, \"new_key\": 1}",
       {"format_version: found 2", "newer"}},
      {"{\"format_version\": 0}", {"format_version: found 0, expected 1"}},
      {"{\"format_version\": \"1\"}", {"format_version", "an integer"}},
      {"{\"attention\": 3}", {"attention: found the number 3"}},
      {"{\"attention\": []}", {"attention: found an array of 0"}},
      {"{\"attention\": {\"kinds\": \"softmax\"}}",
       {"'attention.kinds'", "did you mean 'attention.kind'?"}},
      {"{\"attention\": [{\"kind\": \"softmax\"}, {\"kind\": \"sofmax\"}]}",
       {"attention[1].kind: found 'sofmax'", "did you mean 'softmax'?"}},
      {"{\"attention\": {\"eps\": 0}}", {"attention.eps: found 0"}},
      {"{\"norm\": \"\xff\"}", {"not JSON"}},
  };
  for (const auto& test : kCases) {
    const Result<ModelConfig> r = model_config_from_json(test.json);
    ASSERT_FALSE(r.ok()) << test.json;
    for (const char* part : test.parts) {
      EXPECT_TRUE(has(r.status().message(), part))
          << test.json << " -> " << r.status().message();
    }
  }
  // Nesting without end is an error, not a stack overflow.
  for (const char* open : {"[", "{\"a\":"}) {
    std::string deep;
    for (int i = 0; i < 1'000'000; ++i) deep += open;
    const Result<ModelConfig> r = model_config_from_json(deep);
    ASSERT_FALSE(r.ok());
    EXPECT_TRUE(has(r.status().message(), "nests deeper"));
  }
}

TEST(ValidateConfig, AcceptsTheModelsOfThisVersion) {
  EXPECT_TRUE(validate(valid()).ok()) << validate(valid()).message();
  for (const char* kind : {"cosformer", "linear", "softmax", "performer",
                           "linformer", "longformer", "bigbird"}) {
    for (const char* position :
         {"none", "learned", "sinusoidal", "rope", "t5"}) {
      for (const bool is_causal : {false, true}) {
        ModelConfig c = valid();
        c.is_causal = is_causal;
        c.position = position;
        AttentionConfig& a = c.attention[0];
        a.kind = kind;
        if (a.kind == "longformer") a.window = 32;
        const bool has_scores = a.kind == "softmax" || a.kind == "longformer" ||
                                a.kind == "bigbird";
        bool expected = c.position != "t5" || has_scores;
        if (a.kind == "linformer") {
          expected = !is_causal && c.position != "rope" && c.position != "t5";
        }
        EXPECT_EQ(validate(c).ok(), expected)
            << kind << " " << position << " " << validate(c).message();
        if (!expected) {
          EXPECT_EQ(validate(c).code(), StatusCode::kInvalidArgument);
          EXPECT_TRUE(has(validate(c).message(),
                          std::string("attention.kind: '") + kind + "'"));
        }
      }
    }
  }
  ModelConfig c = valid();
  c.attention.assign(4, AttentionConfig{});
  c.attention[1].kind = "softmax";
  c.attention[2].kind = "linear";
  c.attention[2].reweight_len = c.max_len - 1;
  EXPECT_TRUE(validate(c).ok()) << validate(c).message();
  c.attention[3].feature_map = "identity";
  c.attention[3].normalizer = "none";
  EXPECT_TRUE(validate(c).ok()) << validate(c).message();
}

TEST(ValidateConfig, NamesEachContradiction) {
  const struct {
    void (*change)(ModelConfig&);
    StatusCode code;
    std::vector<const char*> parts;
  } kCases[] = {
      {[](ModelConfig& c) { c.vocab_size = 0; },
       StatusCode::kInvalidArgument,
       {"vocab_size"}},
      {[](ModelConfig& c) { c.embed_dim = 0; },
       StatusCode::kInvalidArgument,
       {"embed_dim: found 0"}},
      {[](ModelConfig& c) { c.num_layers = 0; },
       StatusCode::kInvalidArgument,
       {"num_layers"}},
      {[](ModelConfig& c) { c.max_len = 0; },
       StatusCode::kInvalidArgument,
       {"max_len"}},
      {[](ModelConfig& c) { c.num_heads = 5; },
       StatusCode::kInvalidArgument,
       {"num_heads: 5", "embed_dim 128"}},
      {[](ModelConfig& c) { c.num_kv_heads = 3; },
       StatusCode::kInvalidArgument,
       {"num_kv_heads: 3", "num_heads 4"}},
      {[](ModelConfig& c) { c.num_kv_heads = 8; },
       StatusCode::kInvalidArgument,
       {"num_kv_heads: 8"}},
      {[](ModelConfig& c) { c.num_kv_heads = -1; },
       StatusCode::kInvalidArgument,
       {"num_kv_heads: found -1"}},
      {[](ModelConfig& c) { c.norm = "batchnorm"; },
       StatusCode::kInvalidArgument,
       {"norm: found 'batchnorm'", "'layernorm', 'rmsnorm'"}},
      {[](ModelConfig& c) { c.norm_eps = std::nan(""); },
       StatusCode::kInvalidArgument,
       {"norm_eps: found nan"}},
      {[](ModelConfig& c) { c.embed_scale = INFINITY; },
       StatusCode::kInvalidArgument,
       {"embed_scale: found inf"}},
      {[](ModelConfig& c) { c.dropout = 1; },
       StatusCode::kInvalidArgument,
       {"dropout"}},
      {[](ModelConfig& c) { c.attention.clear(); },
       StatusCode::kInvalidArgument,
       {"attention: found 0", "4"}},
      {[](ModelConfig& c) { c.attention.resize(3); },
       StatusCode::kInvalidArgument,
       {"attention: found 3", "4"}},
      {[](ModelConfig& c) { c.attention[0].kind = "flash"; },
       StatusCode::kInvalidArgument,
       {"attention.kind: found 'flash'"}},
      {[](ModelConfig& c) { c.attention[0].scale = 0.5; },
       StatusCode::kInvalidArgument,
       {"attention.scale", "'cosformer'"}},
      {[](ModelConfig& c) { c.attention[0].reweight_len = 100; },
       StatusCode::kInvalidArgument,
       {"attention.reweight_len: found 100", "max_len is 256", "255"}},
      {[](ModelConfig& c) { c.attention[0].feature_map = "identity"; },
       StatusCode::kInvalidArgument,
       {"attention.feature_map", "negative"}},
      {[](ModelConfig& c) {
         c.attention[0].kind = "softmax";
         c.attention[0].feature_map = "relu";
       },
       StatusCode::kInvalidArgument,
       {"attention.feature_map", "'softmax'"}},
      {[](ModelConfig& c) {
         c.attention[0].kind = "softmax";
         c.attention[0].reweight_len = 500;
       },
       StatusCode::kInvalidArgument,
       {"attention.reweight_len", "'softmax'"}},
      {[](ModelConfig& c) {
         c.attention[0].kind = "softmax";
         c.attention[0].normalizer = "none";
       },
       StatusCode::kInvalidArgument,
       {"attention.normalizer"}},
      {[](ModelConfig& c) {
         c.attention.assign(4, AttentionConfig{});
         c.attention[2].kind = "softmax";
         c.attention[2].eps = 1e-3;
       },
       StatusCode::kInvalidArgument,
       {"attention[2].eps"}},
      {[](ModelConfig& c) { c.rope_base = 500; },
       StatusCode::kInvalidArgument,
       {"rope_base", "'learned'"}},
      {[](ModelConfig& c) { c.rope_interleaved = true; },
       StatusCode::kInvalidArgument,
       {"rope_interleaved"}},
      {[](ModelConfig& c) { c.max_distance = 5; },
       StatusCode::kInvalidArgument,
       {"max_distance"}},
      {[](ModelConfig& c) {
         c.position = "rope";
         c.position_offset = 2;
       },
       StatusCode::kInvalidArgument,
       {"position_offset", "'rope'"}},
      {[](ModelConfig& c) {
         c.position = "rope";
         c.head_dim = 33;
       },
       StatusCode::kInvalidArgument,
       {"head_dim is 33", "even"}},
      {[](ModelConfig& c) {
         c.position = "rope";
         c.rope_dim = 64;
       },
       StatusCode::kInvalidArgument,
       {"rope_dim: found 64", "32"}},
      {[](ModelConfig& c) { c.attention[0].dropout = 0.1; },
       StatusCode::kInvalidArgument,
       {"attention.dropout", "'cosformer'", "never formed one by one",
        "'softmax', 'linformer', 'longformer' and 'bigbird' do"}},
      {[](ModelConfig& c) {
         c.attention[0].eps = 1.0000001e-6;
         c.attention[0].kind = "softmax";
       },
       StatusCode::kInvalidArgument,
       {"attention.eps", "'cosformer' and 'linear' do"}},
      {[](ModelConfig& c) {
         c.attention[0].kind = "performer";
         c.attention[0].dropout = 0.1;
       },
       StatusCode::kInvalidArgument,
       {"attention.dropout", "'performer'", "never formed one by one"}},
      {[](ModelConfig& c) {
         c.attention[0].kind = "bigbird";
         c.attention[0].window = 4;
       },
       StatusCode::kInvalidArgument,
       {"attention.window: kind 'bigbird' has no such option",
        "'softmax' and 'longformer' do"}},
      {[](ModelConfig& c) {
         c.attention[0].kind = "softmax";
         c.attention[0].global_tokens = 4;
       },
       StatusCode::kInvalidArgument,
       {"attention.global_tokens", "'longformer' does"}},
      {[](ModelConfig& c) { c.attention[0].orthogonal = false; },
       StatusCode::kInvalidArgument,
       {"attention.orthogonal", "'performer' does"}},
      {[](ModelConfig& c) { c.attention[0].num_features = 64; },
       StatusCode::kInvalidArgument,
       {"attention.num_features", "'performer' does"}},
      {[](ModelConfig& c) { c.attention[0].block_seed = 3; },
       StatusCode::kInvalidArgument,
       {"attention.block_seed", "'bigbird' does"}},
      {[](ModelConfig& c) { c.attention[0].share_kv = true; },
       StatusCode::kInvalidArgument,
       {"attention.share_kv", "'linformer' does"}},
      {[](ModelConfig& c) {
         c.attention[0].kind = "softmax";
         c.attention[0].dilation = 2;
       },
       StatusCode::kInvalidArgument,
       {"attention.dilation: found 2 without a window"}},
      {[](ModelConfig& c) { c.attention[0].kind = "longformer"; },
       StatusCode::kInvalidArgument,
       {"attention.window: found 0", "'longformer'"}},
      {[](ModelConfig& c) {
         c.attention[0].kind = "bigbird";
         c.attention[0].window_blocks = 2;
       },
       StatusCode::kInvalidArgument,
       {"attention.window_blocks: found 2", "odd"}},
      {[](ModelConfig& c) { c.attention[0].kind = "linformer"; },
       StatusCode::kInvalidArgument,
       {"'linformer' has no causal form", "mixes all positions"}},
      {[](ModelConfig& c) {
         c.is_causal = false;
         c.attention[0].kind = "linformer";
         c.attention[0].projected_len = 257;
       },
       StatusCode::kInvalidArgument,
       {"attention.projected_len: found 257", "max_len is 256"}},
      {[](ModelConfig& c) {
         c.is_causal = false;
         c.num_kv_heads = 2;
         c.attention[0].kind = "linformer";
         c.attention[0].one_kv_head = true;
       },
       StatusCode::kInvalidArgument,
       {"attention.one_kv_head: true, num_kv_heads is 2"}},
      {[](ModelConfig& c) {
         c.is_causal = false;
         c.position = "t5";
         c.relative_buckets = 7;
         c.attention[0].kind = "softmax";
       },
       StatusCode::kInvalidArgument,
       {"relative_buckets: found 7", "even"}},
      {[](ModelConfig& c) {
         c.position = "t5";
         c.max_distance = 16;
         c.attention[0].kind = "softmax";
       },
       StatusCode::kInvalidArgument,
       {"max_distance: found 16", "relative_buckets is 32", "16 distances"}},
      // Known, and for a later version.
      {[](ModelConfig& c) { c.cross_attention = true; },
       StatusCode::kNotSupported,
       {"cross_attention", "not supported by this version"}},
      {[](ModelConfig& c) { c.num_decoder_layers = 2; },
       StatusCode::kNotSupported,
       {"num_decoder_layers: 2", "not supported by this version"}},
      {[](ModelConfig& c) { c.type_vocab_size = 2; },
       StatusCode::kNotSupported,
       {"type_vocab_size: 2", "not supported by this version"}},
      {[](ModelConfig& c) {
         c.position = "rope";
         c.rope_dim = 16;
       },
       StatusCode::kNotSupported,
       {"rope_dim: 16", "not supported by this version"}},
  };
  int index = 0;
  for (const auto& test : kCases) {
    ModelConfig c = valid();
    test.change(c);
    const Status s = validate(c);
    EXPECT_EQ(s.code(), test.code) << index << ": " << s.message();
    for (const char* part : test.parts) {
      EXPECT_TRUE(has(s.message(), part)) << index << ": " << s.message();
    }
    ++index;
  }
}

TEST(NearestKey, SuggestsWhatWasMeant) {
  const std::vector<std::string> known{
      "lr", "min_lr", "warmup_steps", "batch_size", "weight_decay", "steps"};
  EXPECT_EQ(nearest_key("batchsize", known), "batch_size");
  EXPECT_EQ(nearest_key("BATCH-SIZE", known), "batch_size");
  EXPECT_EQ(nearest_key("wieght_decay", known), "weight_decay");
  EXPECT_EQ(nearest_key("warmup", known), "warmup_steps");
  EXPECT_EQ(nearest_key("stpes", known), "steps");
  EXPECT_EQ(nearest_key("LR", known), "lr");
  EXPECT_EQ(nearest_key("completely_else", known), "");
  EXPECT_EQ(nearest_key("", known), "");
  EXPECT_EQ(nearest_key("lr", {}), "");
  EXPECT_EQ(nearest_key(std::string(1 << 20, 'x'), known), "");
}

}  // namespace
}  // namespace cosformer
