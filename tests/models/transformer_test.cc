// The Transformer by its config: parameters, forms that must agree, errors.
#include <ATen/autocast_mode.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "tests/models/model_test_util.h"

namespace cosformer {
namespace {

using namespace testing;

class EveryConfig : public ::testing::TestWithParam<ConfigCase> {
 protected:
  void SetUp() override { torch::manual_seed(13); }
  const ModelConfig& config() const { return GetParam().config; }
};

void expect_gradients_everywhere(const ModelConfig& config) {
  Transformer model(config);
  const torch::Tensor logits = model->forward(random_ids(2, 17, config));
  EXPECT_EQ(logits.sizes(), at::IntArrayRef({2, 17, 11}));
  logits.square().sum().backward();
  for (const auto& parameter : model->named_parameters()) {
    ASSERT_TRUE(parameter.value().grad().defined()) << parameter.key();
    // A shift of every score of a softmax row changes nothing.
    if (parameter.key().ends_with("k_proj.bias") ||
        parameter.key().ends_with("k_global_proj.bias")) {
      continue;
    }
    EXPECT_GT(parameter.value().grad().abs().max().item<float>(), 0.0f)
        << parameter.key();
  }
}

TEST_P(EveryConfig, GradientsReachEveryParameter) {
  expect_gradients_everywhere(config());
}

TEST_P(EveryConfig, EverySplitEqualsTheParallelForward) {
  Transformer model(config());
  const int64_t length = 15;
  const torch::Tensor ids = random_ids(2, length, config());
  const torch::Tensor whole = model->forward(ids);
  for (int64_t split = 1; split < length; ++split) {
    ModelState state;
    const torch::Tensor first =
        model->forward_with_state(ids.narrow(1, 0, split), state);
    const torch::Tensor second =
        model->forward_with_state(ids.narrow(1, split, length - split), state);
    EXPECT_EQ(state.position, length);
    EXPECT_FALSE(second.requires_grad());
    EXPECT_LE(relative_error(torch::cat({first, second}, 1), whole), 1e-5)
        << split;
  }
}

TEST_P(EveryConfig, OneTokenAtATimeEqualsTheParallelForward) {
  Transformer model(config());
  const torch::Tensor ids = random_ids(2, 15, config());
  ModelState state;
  std::vector<torch::Tensor> steps;
  for (int64_t t = 0; t < 15; ++t) {
    steps.push_back(model->forward_with_state(ids.narrow(1, t, 1), state));
  }
  EXPECT_LE(relative_error(torch::cat(steps, 1), model->forward(ids)), 1e-5);
}

void expect_padding_without_effect(ModelConfig config) {
  if (!config.is_causal) {
    // BigBird's pattern belongs to the padded length: one block for both.
    for (AttentionConfig& a : config.attention) {
      if (a.kind == "bigbird") a.block_size = 16;
    }
  }
  Transformer model(config);
  const torch::Tensor ids = random_ids(2, 12, config);
  const torch::Tensor mask =
      torch::arange(12).unsqueeze(0) <
      torch::tensor({int64_t{7}, int64_t{12}}).unsqueeze(1);
  const torch::Tensor out = model->forward(ids, mask);
  const torch::Tensor alone =
      model->forward(ids.narrow(0, 0, 1).narrow(1, 0, 7));
  EXPECT_LE(relative_error(out.narrow(0, 0, 1).narrow(1, 0, 7), alone), 1e-5);
  torch::Tensor other = ids.clone();
  other[0].narrow(0, 7, 5).fill_(3);
  EXPECT_TRUE(torch::equal(model->forward(other, mask)[0].narrow(0, 0, 7),
                           out[0].narrow(0, 0, 7)));
}

TEST_P(EveryConfig, PaddedBatchEqualsEachAlone) {
  expect_padding_without_effect(config());
}

bool has_kind(const ModelConfig& config, const std::string& kind) {
  return std::any_of(config.attention.begin(), config.attention.end(),
                     [&](const auto& each) { return each.kind == kind; });
}

TEST_P(EveryConfig, TheFutureChangesNoBitOfThePastWhenCausal) {
  for (const bool is_causal : {true, false}) {
    ModelConfig form = config();
    form.is_causal = is_causal;
    Transformer model(form);
    torch::Tensor ids = random_ids(1, 20, form);
    const torch::Tensor before = model->forward(ids).narrow(1, 0, 12);
    ids[0].narrow(0, 12, 8).copy_((ids[0].narrow(0, 12, 8) + 1) % 11);
    const torch::Tensor after = model->forward(ids).narrow(1, 0, 12);
    if (is_causal && has_kind(form, "performer")) {
      EXPECT_LE(relative_error(after, before), 1e-5);
    } else {
      EXPECT_EQ(torch::equal(after, before), is_causal);
    }
  }
}

void expect_checkpointing_without_effect(const ModelConfig& config) {
  for (const double dropout : {0.0, 0.2}) {
    ModelConfig form = config;
    form.dropout = dropout;
    for (AttentionConfig& a : form.attention) {
      if (a.kind == "softmax" || a.kind == "linformer" ||
          a.kind == "longformer" || a.kind == "bigbird") {
        a.dropout = dropout;
      }
    }
    torch::manual_seed(17);
    Transformer model(form);
    const torch::Tensor ids = random_ids(2, 9, form);
    std::vector<std::vector<torch::Tensor>> runs;
    for (const bool on : {false, true}) {
      model->set_activation_checkpointing(on);
      model->zero_grad();
      torch::manual_seed(5);
      const torch::Tensor logits = model->forward(ids);
      logits.square().sum().backward();
      runs.push_back({logits.detach()});
      for (const auto& parameter : model->parameters()) {
        runs.back().push_back(parameter.grad().clone());
      }
    }
    for (size_t i = 0; i < runs[0].size(); ++i) {
      EXPECT_TRUE(torch::equal(runs[0][i], runs[1][i])) << dropout << " " << i;
    }
  }
}

TEST_P(EveryConfig, CheckpointingChangesNoBit) {
  expect_checkpointing_without_effect(config());
}

class EveryEncoder : public EveryConfig {};

TEST_P(EveryEncoder, GradientsReachEveryParameter) {
  expect_gradients_everywhere(config());
}
TEST_P(EveryEncoder, PaddedBatchEqualsEachAlone) {
  expect_padding_without_effect(config());
}
TEST_P(EveryEncoder, CheckpointingChangesNoBit) {
  expect_checkpointing_without_effect(config());
}
TEST_P(EveryEncoder, HasNoStateToGoOnWith) {
  Transformer model(config());
  ModelState state;
  expect_contains(error_of([&] {
                    model->forward_with_state(random_ids(1, 2, config()),
                                              state);
                  }),
                  "needs is_causal");
}

INSTANTIATE_TEST_SUITE_P(Models, EveryEncoder,
                         ::testing::ValuesIn(encoder_cases()),
                         [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(Models, EveryConfig,
                         ::testing::ValuesIn(config_cases()),
                         [](const auto& info) { return info.param.name; });

std::set<std::string> names_of(const Transformer& model) {
  std::set<std::string> names;
  for (const auto& parameter : model->named_parameters()) {
    names.insert(parameter.key());
  }
  return names;
}

TEST(Transformer, ParameterNamesAreTheContract) {
  ModelConfig config = small_config("cosformer");
  config.num_layers = 1;
  std::set<std::string> expected;
  for (const char* part : {"weight", "bias"}) {
    for (const char* name :
         {"layers.0.attention_norm", "layers.0.attention.q_proj",
          "layers.0.attention.k_proj", "layers.0.attention.v_proj",
          "layers.0.attention.out_proj", "layers.0.ffn_norm",
          "layers.0.ffn.up_proj", "layers.0.ffn.down_proj", "final_norm"}) {
      expected.insert(std::string(name) + "." + part);
    }
  }
  expected.insert({"embed.weight", "position.weight"});
  EXPECT_EQ(names_of(Transformer(config)), expected);

  config.norm_bias = config.mlp_bias = false;
  config.qkv_bias = config.out_bias = false;
  config.gated = config.embed_norm = true;
  config.tie_embeddings = false;
  config.position = "sinusoidal";
  config.norm_placement = "post";
  EXPECT_EQ(
      names_of(Transformer(config)),
      (std::set<std::string>{
          "embed.weight", "embed_norm.weight", "head.weight",
          "layers.0.attention_norm.weight", "layers.0.attention.q_proj.weight",
          "layers.0.attention.k_proj.weight",
          "layers.0.attention.v_proj.weight",
          "layers.0.attention.out_proj.weight", "layers.0.ffn_norm.weight",
          "layers.0.ffn.up_proj.weight", "layers.0.ffn.gate_proj.weight",
          "layers.0.ffn.down_proj.weight"}));
}

TEST(Transformer, ParametersOfTheKindsAndPositions) {
  const auto of_attention = [](const char* kind, auto change) {
    ModelConfig config = small_config(kind);
    config.num_layers = 1;
    config.qkv_bias = config.out_bias = false;
    change(config);
    Transformer model(config);
    std::set<std::string> names;
    const std::string prefix = "layers.0.attention.";
    for (const auto& each : model->named_parameters()) {
      if (each.key().starts_with(prefix)) {
        names.insert(each.key().substr(prefix.size()));
      }
    }
    for (const auto& each : model->named_buffers()) {
      names.insert("buffer " + each.key().substr(prefix.size()));
    }
    return names;
  };
  const auto with = [](std::set<std::string> more) {
    more.insert(
        {"q_proj.weight", "k_proj.weight", "v_proj.weight", "out_proj.weight"});
    return more;
  };
  const auto as_it_is = [](ModelConfig&) {};
  EXPECT_EQ(of_attention("performer", as_it_is), with({"buffer projection"}));
  EXPECT_EQ(of_attention("performer",
                         [](ModelConfig& c) {
                           c.attention[0].trainable_projection = true;
                         }),
            with({"projection"}));
  EXPECT_EQ(of_attention("longformer",
                         [](ModelConfig& c) { c.attention[0].window = 2; }),
            with({"q_global_proj.weight", "k_global_proj.weight",
                  "v_global_proj.weight"}));
  EXPECT_EQ(
      of_attention("linformer", [](ModelConfig& c) { c.is_causal = false; }),
      with({"key_len_proj", "value_len_proj"}));
  EXPECT_EQ(of_attention("bigbird", as_it_is), with({}));

  ModelConfig config = small_config("softmax");
  config.position = "t5";
  Transformer t5(config);
  EXPECT_EQ(t5->named_parameters()["relative_bias.weight"].sizes(),
            at::IntArrayRef({32, 2}));
}

// What a layer draws by a seed differs from layer to layer, and comes back.
TEST(Transformer, LayersDrawFromTheirSeeds) {
  ModelConfig config = small_config("performer");
  config.attention[0].projection_seed = 5;
  Transformer one(config), two(config);
  const auto projection = [](Transformer& model, const char* layer) {
    return model->named_buffers()[std::string("layers.") + layer +
                                  ".attention.projection"];
  };
  EXPECT_TRUE(torch::equal(projection(one, "0"), projection(two, "0")));
  EXPECT_FALSE(torch::equal(projection(one, "0"), projection(one, "1")));
  EXPECT_TRUE(
      torch::equal(projection(one, "1"), performer_projection(32, 8, true, 6)));
}

// The bias by distance, written out.
TEST(Transformer, T5AddsItsBiasByDistance) {
  torch::manual_seed(2);
  ModelConfig config = small_config("softmax");
  config.position = "t5";
  config.relative_buckets = 4;
  config.max_distance = 6;
  config.num_layers = 1;
  Transformer model(config);
  const torch::Tensor ids = random_ids(1, 9, config);
  const torch::Tensor with = model->forward(ids);
  // A constant bias shifts every score of a row alike.
  torch::NoGradGuard no_grad;
  torch::Tensor weight = model->named_parameters()["relative_bias.weight"];
  const torch::Tensor kept = weight.clone();
  weight.zero_();
  const torch::Tensor without = model->forward(ids);
  weight.fill_(0.7);
  EXPECT_LE(relative_error(model->forward(ids), without), 1e-6);
  EXPECT_GT(relative_error(with, without), 1e-3);
  // Only the bucket of distance 0 far above the rest: each sees itself alone.
  weight.copy_(kept);
  weight.fill_(0.0);
  weight[0].fill_(100.0);
  const torch::Tensor alone = model->forward(ids);
  for (int64_t t = 0; t < 9; ++t) {
    EXPECT_LE(relative_error(model->forward(ids.narrow(1, t, 1)),
                             alone.narrow(1, t, 1)),
              1e-5);
  }
}

TEST(Transformer, StartsAtItsInitialDistribution) {
  torch::manual_seed(1);
  ModelConfig config = small_config("cosformer");
  config.vocab_size = 500;
  config.init_std = 0.02;
  Transformer model(config);
  for (const auto& parameter : model->named_parameters()) {
    const torch::Tensor& value = parameter.value();
    if (value.dim() == 2) {
      EXPECT_NEAR(value.std().item<double>(), 0.02, 0.003) << parameter.key();
    } else {
      const float expected = parameter.key().ends_with("bias") ? 0.0f : 1.0f;
      EXPECT_TRUE((value == expected).all().item<bool>()) << parameter.key();
    }
  }
  torch::manual_seed(1);
  EXPECT_TRUE(torch::equal(Transformer(config)->parameters()[0],
                           model->parameters()[0]));
}

// One layer written out with the parameters by name.
TEST(Transformer, EqualsItsFormula) {
  torch::manual_seed(2);
  ModelConfig config = small_config("softmax");
  config.num_layers = 1;
  config.embed_scale = 3.0;
  config.logit_scale = 0.7;
  config.position_offset = 1;
  Transformer model(config);
  for (auto& parameter : model->parameters()) {
    torch::NoGradGuard no_grad;
    if (parameter.dim() == 1) parameter.normal_(0.5, 0.3);
  }
  const torch::Tensor ids = random_ids(2, 6, config);
  std::map<std::string, torch::Tensor> w;
  for (const auto& parameter : model->named_parameters()) {
    w[parameter.key()] = parameter.value().detach().to(torch::kFloat64);
  }
  const auto norm = [&](const torch::Tensor& x, const std::string& name) {
    const torch::Tensor c = x - x.mean(-1, true);
    return c / torch::sqrt(c.square().mean(-1, true) + 1e-5) *
               w[name + ".weight"] +
           w[name + ".bias"];
  };
  const auto linear = [&](const torch::Tensor& x, const std::string& name) {
    return torch::matmul(x, w[name + ".weight"].t()) + w[name + ".bias"];
  };
  const auto heads = [&](const torch::Tensor& x) {
    return x.view({2, 6, 2, 8}).transpose(1, 2);
  };
  torch::Tensor x = w["embed.weight"].index({ids}) * 3.0 +
                    w["position.weight"].narrow(0, 1, 6);
  const std::string layer = "layers.0.";
  torch::Tensor y = norm(x, layer + "attention_norm");
  const torch::Tensor scores =
      torch::matmul(
          heads(linear(y, layer + "attention.q_proj")),
          heads(linear(y, layer + "attention.k_proj")).transpose(2, 3)) /
          std::sqrt(8.0) +
      torch::full({6, 6}, -INFINITY, torch::kFloat64).triu(1);
  y = torch::matmul(torch::softmax(scores, -1),
                    heads(linear(y, layer + "attention.v_proj")))
          .transpose(1, 2)
          .reshape({2, 6, 16});
  x = x + linear(y, layer + "attention.out_proj");
  y = linear(norm(x, layer + "ffn_norm"), layer + "ffn.up_proj");
  y = y * 0.5 * (1 + torch::erf(y / std::sqrt(2.0)));
  x = x + linear(y, layer + "ffn.down_proj");
  const torch::Tensor expected =
      torch::matmul(norm(x, "final_norm"), w["embed.weight"].t()) * 0.7;
  EXPECT_LE(relative_error(model->forward(ids), expected), 2e-6);
}

TEST(Transformer, LastOnlyGivesTheLastTokensLogits) {
  torch::manual_seed(2);
  Transformer model(small_config("cosformer"));
  const torch::Tensor ids = random_ids(2, 6, model->config());
  ModelState a, b;
  EXPECT_LE(relative_error(model->forward_with_state(ids, a, true),
                           model->forward_with_state(ids, b).narrow(1, 5, 1)),
            1e-6);
}

TEST(Transformer, StatesBranchAndSelect) {
  torch::manual_seed(2);
  for (const ConfigCase& each : config_cases()) {
    SCOPED_TRACE(each.name);
    Transformer model(each.config);
    const torch::Tensor ids = random_ids(2, 6, model->config());
    const torch::Tensor next = random_ids(2, 1, model->config());
    ModelState state;
    model->forward_with_state(ids, state);
    ModelState kept = state.clone();
    const torch::Tensor one = model->forward_with_state(next, state);
    model->forward_with_state((next + 1) % 11, state);
    ModelState second = kept.select(torch::tensor({int64_t{1}}));
    EXPECT_TRUE(torch::equal(model->forward_with_state(next, kept), one));
    EXPECT_LE(
        relative_error(model->forward_with_state(next.narrow(0, 1, 1), second),
                       one.narrow(0, 1, 1)),
        1e-5);
  }
}

TEST(Transformer, DenominatorsAreReported) {
  torch::manual_seed(2);
  ModelConfig config = small_config("cosformer");
  Transformer model(config);
  const torch::Tensor ids = random_ids(2, 9, config);
  model->forward(ids);
  EXPECT_TRUE(
      std::isnan(model->denominator_stats().min_denominator.item<float>()));
  model->set_track_denominators(true);
  for (const bool checkpointed : {false, true}) {
    model->set_activation_checkpointing(checkpointed);
    model->forward(ids).sum().backward();
    const DenominatorStats stats = model->denominator_stats();
    EXPECT_TRUE(std::isfinite(stats.min_denominator.item<float>()));
    EXPECT_GE(stats.clamped_share.item<float>(), 0.0f);
    EXPECT_LT(stats.clamped_share.item<float>(), 0.5f);
  }
  // Keys without any active feature: every row is clamped.
  {
    torch::NoGradGuard no_grad;
    for (const auto& parameter : model->named_parameters()) {
      if (parameter.key().ends_with("k_proj.weight")) parameter.value().zero_();
      if (parameter.key().ends_with("k_proj.bias")) parameter.value().fill_(-1);
    }
  }
  const torch::Tensor mask =
      torch::arange(9).unsqueeze(0) <
      torch::tensor({int64_t{4}, int64_t{9}}).unsqueeze(1);
  model->forward(ids, mask);
  EXPECT_EQ(model->denominator_stats().min_denominator.item<float>(), 0.0f);
  EXPECT_EQ(model->denominator_stats().clamped_share.item<float>(), 1.0f);
  {
    torch::NoGradGuard no_grad;
    for (const auto& parameter : model->named_parameters()) {
      if (parameter.key().ends_with("k_proj.bias") ||
          parameter.key().ends_with("q_proj.bias")) {
        parameter.value().fill_(5);
      }
    }
  }
  // Padding is no clamped row.
  model->forward(ids, mask);
  EXPECT_GT(model->denominator_stats().min_denominator.item<float>(), 1.0f);
  EXPECT_EQ(model->denominator_stats().clamped_share.item<float>(), 0.0f);

  Transformer softmax(small_config("softmax"));
  softmax->set_track_denominators(true);
  softmax->forward(ids);
  EXPECT_TRUE(
      std::isnan(softmax->denominator_stats().min_denominator.item<float>()));
}

TEST(Transformer, LengthsBeyondItsPositionsAreErrors) {
  ModelConfig config = small_config("softmax");
  Transformer learned(config);
  EXPECT_EQ(learned->max_positions(), 32);
  learned->forward(random_ids(1, 32, config));
  expect_contains(
      error_of([&] { learned->forward(random_ids(1, 33, config)); }),
      "the sequence has 33 tokens, the model knows 32 positions (max_len)");
  ModelState state;
  learned->forward_with_state(random_ids(1, 30, config), state);
  expect_contains(error_of([&] {
                    learned->forward_with_state(random_ids(1, 3, config),
                                                state);
                  }),
                  "has 33 tokens");
  learned->forward_with_state(random_ids(1, 2, config), state);

  config = small_config("cosformer");
  config.position = "none";
  config.attention[0].reweight_len = 40;
  Transformer cosine(config);
  EXPECT_EQ(cosine->max_positions(), 41);
  cosine->forward(random_ids(1, 41, config));
  expect_contains(
      error_of([&] { cosine->forward(random_ids(1, 42, config)); }),
      "has 42 tokens, the model knows 41 positions (reweight_len + 1)");

  for (const char* position : {"rope", "t5", "none"}) {
    config = small_config("softmax");
    config.position = position;
    Transformer relative(config);
    EXPECT_EQ(relative->max_positions(), std::nullopt);
    relative->forward(random_ids(1, 100, config));
  }

  config = small_config("linformer");
  config.position = "none";
  config.is_causal = false;
  Transformer linformer(config);
  EXPECT_EQ(linformer->max_positions(), 32);
  expect_contains(
      error_of([&] { linformer->forward(random_ids(1, 33, config)); }),
      "has 33 tokens, the model knows 32 positions (max_len)");
}

TEST(Transformer, BadInputIsAnError) {
  ModelConfig config = small_config("cosformer");
  Transformer model(config);
  expect_contains(error_of([&] {
                    model->forward(torch::tensor({{int64_t{3}, int64_t{11}}}));
                  }),
                  "id 11 is outside the vocabulary, expected 0 to 10");
  expect_contains(error_of([&] { model->forward(torch::zeros({1, 3})); }),
                  "expected int64 [batch, seq]");
  config.is_causal = false;
  Transformer encoder(config);
  ModelState state;
  expect_contains(error_of([&] {
                    encoder->forward_with_state(random_ids(1, 2, config),
                                                state);
                  }),
                  "needs is_causal");
  config.num_heads = 3;
  expect_contains(error_of([&] { Transformer bad(config); }), "num_heads");
  config = small_config("cosformer");
  config.type_vocab_size = 2;
  expect_contains(error_of([&] { Transformer bad(config); }),
                  "type_vocab_size");
  config = small_config("cosformer");
  config.position = "t5";
  expect_contains(error_of([&] { Transformer bad(config); }), "t5");
  config = small_config("linformer");
  expect_contains(error_of([&] { Transformer bad(config); }),
                  "'linformer' has no causal form");
}

TEST(Transformer, OtherDtypesAndAutocast) {
  torch::manual_seed(2);
  for (const ConfigCase& each : encoder_cases()) {
    const ModelConfig& config = each.config;
    SCOPED_TRACE(each.name);
    Transformer model(config);
    const torch::Tensor ids = random_ids(2, 9, config);
    const torch::Tensor single = model->forward(ids);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    const torch::Tensor mixed = model->forward(ids);
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    mixed.square().sum().backward();
    EXPECT_GT(relative_error(mixed, single), 1e-5);
    EXPECT_LT(relative_error(mixed, single), 5e-2);
    model->to(torch::kFloat64);
    EXPECT_LE(relative_error(single, model->forward(ids)), 5e-6);
    model->to(torch::kBFloat16);
    EXPECT_EQ(model->forward(ids).scalar_type(), torch::kBFloat16);
  }
}

}  // namespace
}  // namespace cosformer
