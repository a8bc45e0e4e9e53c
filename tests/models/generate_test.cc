// Sampling and generation.
#include <cmath>
#include <limits>

#include "models/sampling.h"
#include "tests/models/model_test_util.h"

namespace cosformer {
namespace {

using namespace testing;

TEST(Sample, GreedyTakesTheFirstGreatest) {
  SamplingOptions options;
  options.temperature = 0.0;
  EXPECT_EQ(sample(std::vector<float>{1, 5, 5, 2}, options, 0), 1);
  EXPECT_EQ(sample(std::vector<float>{std::nanf(""), -3, -2}, options, 0), 2);
}

std::vector<double> frequencies(const std::vector<float>& logits,
                                const SamplingOptions& options) {
  const int draws = 20000;
  std::vector<double> out(logits.size());
  for (int step = 0; step < draws; ++step) {
    out[static_cast<size_t>(
        sample(logits, options, static_cast<uint64_t>(step)))] += 1.0 / draws;
  }
  return out;
}

TEST(Sample, FollowsTheSoftmaxOfItsTemperature) {
  const std::vector<float> logits{1.0f, 0.0f, 2.0f, -1.0f};
  for (const double temperature : {0.5, 1.0, 2.0}) {
    SamplingOptions options;
    options.temperature = temperature;
    double total = 0;
    for (const float logit : logits) total += std::exp(logit / temperature);
    const auto found = frequencies(logits, options);
    for (size_t i = 0; i < logits.size(); ++i) {
      EXPECT_NEAR(found[i], std::exp(logits[i] / temperature) / total, 0.012);
    }
  }
}

TEST(Sample, TopKAndTopPCutTheTail) {
  const std::vector<float> logits{1.0f, 0.0f, 2.0f, -1.0f, 2.0f};
  SamplingOptions options;
  options.top_k = 2;
  auto found = frequencies(logits, options);
  EXPECT_NEAR(found[2], 0.5, 0.012);
  EXPECT_NEAR(found[4], 0.5, 0.012);
  options.top_k = 0;
  options.top_p = 0.85;  // 0.392 + 0.392 < 0.85 <= + 0.144
  found = frequencies(logits, options);
  EXPECT_GT(found[0], 0.1);
  EXPECT_EQ(found[1] + found[3], 0.0);
  options.top_p = 1e-9;
  EXPECT_NEAR(frequencies(logits, options)[2], 1.0, 1e-9);
}

TEST(Sample, InfinitiesAndSeeds) {
  const float inf = std::numeric_limits<float>::infinity();
  SamplingOptions options;
  EXPECT_EQ(sample(std::vector<float>{0, inf, 0}, options, 0), 1);
  EXPECT_EQ(sample(std::vector<float>{-inf, -inf, 3}, options, 9), 2);
  const std::vector<float> flat(1000, 0.0f);
  const int32_t first = sample(flat, options, 4);
  EXPECT_EQ(sample(flat, options, 4), first);
  EXPECT_NE(sample(flat, options, 5), first);
  options.seed = 2;
  EXPECT_NE(sample(flat, options, 4), first);
}

class Generate : public ::testing::TestWithParam<ConfigCase> {
 protected:
  void SetUp() override { torch::manual_seed(19); }
};

// The whole sequence through forward for every token.
std::vector<int32_t> greedy_by_forward(Transformer& model,
                                       std::vector<int32_t> tokens,
                                       int64_t count) {
  torch::NoGradGuard no_grad;
  const size_t prompt = tokens.size();
  for (int64_t i = 0; i < count; ++i) {
    const torch::Tensor ids =
        torch::tensor(std::vector<int64_t>(tokens.begin(), tokens.end()))
            .unsqueeze(0);
    tokens.push_back(static_cast<int32_t>(
        model->forward(ids)[0][-1].argmax().item<int64_t>()));
  }
  return {tokens.begin() + static_cast<ptrdiff_t>(prompt), tokens.end()};
}

TEST_P(Generate, GreedyTokensEqualThoseOfTheFullForward) {
  Transformer model(GetParam().config);
  GenerateOptions options;
  options.temperature = 0.0;
  options.tokens = 20;
  const std::vector<int32_t> prompt{3, 1, 4, 1, 5};
  std::vector<int32_t> streamed;
  const auto found = generate(model, prompt, options, [&](int32_t token) {
    streamed.push_back(token);
    return true;
  });
  ASSERT_TRUE(found.ok()) << found.status().message();
  EXPECT_EQ(*found, greedy_by_forward(model, prompt, 20));
  EXPECT_EQ(streamed, *found);
}

INSTANTIATE_TEST_SUITE_P(Models, Generate, ::testing::ValuesIn(config_cases()),
                         [](const auto& info) { return info.param.name; });

TEST(GenerateText, SeedsDecide) {
  torch::manual_seed(19);
  Transformer model(small_config("cosformer"));
  GenerateOptions options;
  options.tokens = 20;
  const auto with_seed = [&](uint64_t seed) {
    options.seed = seed;
    torch::rand({3});  // torch's generator plays no part
    return *generate(model, {1, 2}, options, {});
  };
  EXPECT_EQ(with_seed(1), with_seed(1));
  EXPECT_NE(with_seed(1), with_seed(2));
}

TEST(GenerateText, DropoutIsOffAndTheModeReturns) {
  torch::manual_seed(19);
  ModelConfig config = small_config("cosformer");
  config.dropout = 0.5;
  Transformer model(config);
  GenerateOptions options;
  options.tokens = 10;
  EXPECT_EQ(*generate(model, {1, 2}, options, {}),
            *generate(model, {1, 2}, options, {}));
  EXPECT_TRUE(model->is_training());
}

TEST(GenerateText, StopsWhenToldTo) {
  Transformer model(small_config("cosformer"));
  int calls = 0;
  const auto found =
      generate(model, {1}, {}, [&](int32_t) { return ++calls < 4; });
  ASSERT_TRUE(found.ok());
  EXPECT_EQ(found->size(), 4u);
}

TEST(GenerateText, PastThePositionsIsAnErrorAfterWhatFits) {
  torch::manual_seed(19);
  for (const char* kind : {"cosformer", "softmax"}) {
    Transformer model(small_config(kind));
    GenerateOptions options;
    options.tokens = 40;
    int64_t streamed = 0;
    const auto found = generate(model, {1, 2}, options, [&](int32_t) {
      ++streamed;
      return true;
    });
    ASSERT_FALSE(found.ok());
    // 2 of the prompt, 30 fed back, and one that is not.
    EXPECT_EQ(streamed, 31);
    expect_contains(found.status().message(), "stopped after 31 of 40 tokens");
    expect_contains(found.status().message(), "knows 32 positions");
    expect_contains(found.status().message(), "--rolling");
  }
}

TEST(GenerateText, RollingGoesOnFromTheLatterHalf) {
  torch::manual_seed(19);
  for (const char* kind : {"cosformer", "softmax"}) {
    Transformer model(small_config(kind));
    GenerateOptions options;
    options.temperature = 0.0;
    options.rolling = true;
    options.tokens = 70;
    const std::vector<int32_t> prompt{1, 2};
    const auto found = generate(model, prompt, options, {});
    ASSERT_TRUE(found.ok()) << found.status().message();
    // By hand: up to 32 tokens of context; then the last 16 begin anew.
    std::vector<int32_t> history = prompt, context = prompt, expected;
    while (expected.size() < 70) {
      if (context.size() > 32) {
        context.assign(history.end() - 16, history.end());
      }
      const int32_t token = greedy_by_forward(model, context, 1)[0];
      context.push_back(token);
      history.push_back(token);
      expected.push_back(token);
    }
    EXPECT_EQ(*found, expected);

    const std::vector<int32_t> long_prompt(50, 3);
    EXPECT_TRUE(generate(model, long_prompt, options, {}).ok());
    options.rolling = false;
    const auto refused = generate(model, long_prompt, options, {});
    expect_contains(refused.status().message(),
                    "the prompt has 50 tokens, the model knows 32 positions");
  }
}

TEST(GenerateText, RelativePositionsHaveNoEnd) {
  torch::manual_seed(19);
  ModelConfig config = small_config("softmax");
  config.position = "rope";
  Transformer model(config);
  GenerateOptions options;
  options.tokens = 100;
  EXPECT_EQ(generate(model, {1}, options, {})->size(), 100u);
}

// Behaviour 27: far past a window, with the ring full many times over.
TEST(GenerateText, AWindowGoesOnFarPastItself) {
  torch::manual_seed(19);
  for (const int64_t global_tokens : {0, 2}) {
    ModelConfig config = small_config("longformer");
    config.position = "rope";
    config.attention[0].window = 3;
    config.attention[0].global_tokens = global_tokens;
    Transformer model(config);
    GenerateOptions options;
    options.temperature = 0.0;
    options.tokens = 60;
    const std::vector<int32_t> prompt{3, 1, 4};
    const auto found = generate(model, prompt, options, {});
    ASSERT_TRUE(found.ok()) << found.status().message();
    EXPECT_EQ(*found, greedy_by_forward(model, prompt, 60));
  }
}

TEST(GenerateText, BadOptionsAreErrors) {
  Transformer model(small_config("cosformer"));
  const auto message = [&](const std::vector<int32_t>& prompt, auto change) {
    GenerateOptions options;
    change(options);
    return generate(model, prompt, options, {}).status().message();
  };
  const auto same = [](GenerateOptions&) {};
  expect_contains(message({}, same), "the prompt is empty");
  expect_contains(message({1, 11}, same), "holds id 11, expected 0 to 10");
  expect_contains(message({1}, [](auto& o) { o.temperature = -1; }),
                  "temperature is -1");
  expect_contains(message({1}, [](auto& o) { o.temperature = std::nan(""); }),
                  "temperature is nan");
  expect_contains(message({1}, [](auto& o) { o.top_p = 0; }), "top_p is 0");
  expect_contains(message({1}, [](auto& o) { o.top_k = -2; }), "top_k is -2");
  expect_contains(message({1}, [](auto& o) { o.tokens = -1; }), "tokens is -1");
  ModelConfig config = small_config("cosformer");
  config.is_causal = false;
  Transformer encoder(config);
  expect_contains(generate(encoder, {1}, {}, {}).status().message(),
                  "is not causal");
}

}  // namespace
}  // namespace cosformer
