// The Transformer by its config: parameters, forms that must agree, errors.
#include <ATen/autocast_mode.h>

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

TEST_P(EveryConfig, GradientsReachEveryParameter) {
  Transformer model(config());
  const torch::Tensor logits = model->forward(random_ids(2, 17, config()));
  EXPECT_EQ(logits.sizes(), at::IntArrayRef({2, 17, 11}));
  logits.square().sum().backward();
  for (const auto& parameter : model->named_parameters()) {
    ASSERT_TRUE(parameter.value().grad().defined()) << parameter.key();
    // A shift of every score of a softmax row changes nothing.
    if (parameter.key().ends_with("k_proj.bias")) continue;
    EXPECT_GT(parameter.value().grad().abs().max().item<float>(), 0.0f)
        << parameter.key();
  }
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

TEST_P(EveryConfig, PaddedBatchEqualsEachAlone) {
  for (const bool is_causal : {true, false}) {
    ModelConfig form = config();
    form.is_causal = is_causal;
    Transformer model(form);
    const torch::Tensor ids = random_ids(2, 12, form);
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
}

TEST_P(EveryConfig, TheFutureChangesNoBitOfThePastWhenCausal) {
  for (const bool is_causal : {true, false}) {
    ModelConfig form = config();
    form.is_causal = is_causal;
    Transformer model(form);
    torch::Tensor ids = random_ids(1, 20, form);
    const torch::Tensor before = model->forward(ids);
    ids[0].narrow(0, 12, 8).copy_((ids[0].narrow(0, 12, 8) + 1) % 11);
    EXPECT_EQ(torch::equal(model->forward(ids).narrow(1, 0, 12),
                           before.narrow(1, 0, 12)),
              is_causal);
  }
}

TEST_P(EveryConfig, CheckpointingChangesNoBit) {
  for (const double dropout : {0.0, 0.2}) {
    ModelConfig form = config();
    form.dropout = dropout;
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
  for (const char* kind : {"cosformer", "softmax"}) {
    Transformer model(small_config(kind));
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

  config = small_config("softmax");
  config.position = "rope";
  Transformer relative(config);
  EXPECT_EQ(relative->max_positions(), std::nullopt);
  relative->forward(random_ids(1, 100, config));
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
}

TEST(Transformer, OtherDtypesAndAutocast) {
  torch::manual_seed(2);
  for (const char* kind : {"cosformer", "softmax"}) {
    ModelConfig config = small_config(kind);
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
