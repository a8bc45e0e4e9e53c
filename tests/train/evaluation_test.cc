#include "train/evaluation.h"

#include "tests/train/train_test_util.h"

namespace cosformer::train_internal {
namespace {

constexpr int64_t kVocab = 11;

Transformer tiny_model(int64_t max_len) {
  ModelConfig config;
  config.vocab_size = kVocab;
  config.embed_dim = 8;
  config.num_layers = 1;
  config.num_heads = 2;
  config.max_len = max_len;
  config.dropout = 0.5;  // must be off in evaluation
  torch::manual_seed(5);
  return Transformer(config);
}

TokenSource source_of(const torch::Tensor& ids) {
  TokenSource source;
  source.tokens = ids.numel();
  source.token_bytes = torch::full({kVocab}, 2, torch::kInt64);
  source.read = [ids](int64_t begin, int64_t count) {
    EXPECT_GE(begin, 0);
    EXPECT_LE(begin + count, ids.numel());
    return ids.slice(0, begin, begin + count);
  };
  return source;
}

TEST(Evaluation, PredictsEveryTokenOnce) {
  Transformer model = tiny_model(8);
  for (const int64_t n : {2, 3, 8, 9, 10, 16, 17, 50, 65}) {
    for (const int64_t batch : {1, 3, 100}) {
      const torch::Tensor ids = torch::randint(kVocab, {n}, torch::kInt64);
      TokenSource source = source_of(ids);
      std::vector<int> predicted(static_cast<size_t>(n), 0);
      const auto read = source.read;
      source.read = [&](int64_t begin, int64_t count) {
        for (int64_t i = begin + 1; i < begin + count; ++i) {
          ++predicted[static_cast<size_t>(i)];
        }
        return read(begin, count);
      };
      const auto result = evaluate_tokens(model, source, 8, batch, nullptr);
      ASSERT_TRUE(result.has_value());
      EXPECT_EQ(result->tokens, n - 1);
      EXPECT_EQ(predicted[0], 0);
      for (int64_t i = 1; i < n; ++i) {
        EXPECT_EQ(predicted[static_cast<size_t>(i)], 1)
            << "token " << i << " of " << n;
      }
    }
  }
}

TEST(Evaluation, IsTheMeanOverWindowsTakenOneByOne) {
  Transformer model = tiny_model(8);
  const torch::Tensor ids = torch::randint(kVocab, {45}, torch::kInt64);
  const auto result = evaluate_tokens(model, source_of(ids), 8, 3, nullptr);
  ASSERT_TRUE(result.has_value());
  EXPECT_TRUE(model->is_training());  // as it was
  model->eval();
  torch::NoGradGuard no_grad;
  double nats = 0;
  for (int64_t begin = 0; begin < 44; begin += 8) {
    const int64_t end = std::min<int64_t>(begin + 8, 44);
    const torch::Tensor log_p = torch::log_softmax(
        model->forward(ids.slice(0, begin, end).unsqueeze(0))[0], -1);
    for (int64_t i = begin; i < end; ++i) {
      nats -= log_p[i - begin][ids[i + 1].item<int64_t>()].item<double>();
    }
  }
  EXPECT_NEAR(result->loss, nats / 44, 1e-5);
  EXPECT_NEAR(result->perplexity, std::exp(nats / 44), 1e-3);
  // Two bytes a token.
  EXPECT_NEAR(result->bits_per_byte, nats / 44 / std::log(2.0) / 2, 1e-5);
}

TEST(Evaluation, StopsWhenAsked) {
  Transformer model = tiny_model(8);
  const torch::Tensor ids = torch::randint(kVocab, {100}, torch::kInt64);
  std::atomic<bool> stop{true};
  EXPECT_FALSE(evaluate_tokens(model, source_of(ids), 8, 1, &stop).has_value());
  EXPECT_TRUE(model->is_training());
}

TEST(Evaluation, BatchesFitTheLogits) {
  EXPECT_EQ(evaluation_batch(64, 65), 128);
  EXPECT_EQ(evaluation_batch(256, 4096), 16);
  EXPECT_EQ(evaluation_batch(65536, 100000), 1);
}

}  // namespace
}  // namespace cosformer::train_internal
