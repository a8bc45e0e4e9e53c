// Norms, feed-forward, blocks against torch's own modules and formulas.
#include <cmath>

#include "tests/nn/naive.h"

namespace cosformer {
namespace {

using testing::error_of;
using testing::expect_contains;
using testing::relative_error;

TEST(Norm, LayerNormWithAndWithoutBias) {
  torch::manual_seed(3);
  const torch::Tensor x = torch::randn({2, 5, 12}) * 3 + 1;
  Norm with("layernorm", 12, 1e-5, true), without("layernorm", 12, 1e-5, false);
  EXPECT_EQ(with->parameters().size(), 2u);
  EXPECT_EQ(without->parameters().size(), 1u);
  torch::NoGradGuard no_grad;
  with->weight.normal_();
  with->bias.normal_();
  without->weight.normal_();
  const torch::Tensor d = x.to(torch::kFloat64);
  const torch::Tensor centred = d - d.mean(-1, true);
  const torch::Tensor unit =
      centred / torch::sqrt(centred.square().mean(-1, true) + 1e-5);
  EXPECT_LE(relative_error(with->forward(x), unit * with->weight + with->bias),
            1e-6);
  EXPECT_LE(relative_error(without->forward(x), unit * without->weight), 1e-6);
}

TEST(Norm, RmsNorm) {
  torch::manual_seed(3);
  const torch::Tensor x = torch::randn({2, 5, 12}) * 3 + 1;
  Norm norm("rmsnorm", 12, 1e-6, true);
  EXPECT_EQ(norm->parameters().size(), 1u);
  torch::NoGradGuard no_grad;
  norm->weight.normal_();
  const torch::Tensor d = x.to(torch::kFloat64);
  EXPECT_LE(relative_error(norm->forward(x),
                           d / torch::sqrt(d.square().mean(-1, true) + 1e-6) *
                               norm->weight),
            1e-6);
  expect_contains(error_of([] { Norm("batchnorm", 4, 1e-5, true); }),
                  "found \"batchnorm\"");
}

torch::Tensor activated(const torch::Tensor& x, const std::string& name) {
  if (name == "relu") return x.clamp_min(0);
  if (name == "silu") return x / (1 + torch::exp(-x));
  if (name == "gelu") return x * 0.5 * (1 + torch::erf(x / std::sqrt(2.0)));
  return x * 0.5 *
         (1 + torch::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
}

TEST(FeedForward, EveryActivationGatedAndNot) {
  torch::manual_seed(5);
  const torch::Tensor x = torch::randn({2, 3, 8});
  const torch::Tensor d = x.to(torch::kFloat64);
  for (const char* name : {"gelu", "gelu_tanh", "relu", "silu"}) {
    for (const bool gated : {false, true}) {
      FeedForward ffn(FeedForwardOptions{8, 20, name, gated, !gated});
      const auto linear = [](const torch::Tensor& in, const Projection& p) {
        torch::Tensor y = torch::matmul(in, p->weight.to(torch::kFloat64).t());
        return p->bias.defined() ? y + p->bias : y;
      };
      const torch::Tensor up = linear(d, ffn->up_proj);
      const torch::Tensor hidden =
          gated ? activated(linear(d, ffn->gate_proj), name) * up
                : activated(up, name);
      EXPECT_LE(relative_error(ffn->forward(x), linear(hidden, ffn->down_proj)),
                2e-6)
          << name << gated;
      EXPECT_EQ(ffn->parameters().size(), gated ? 3u : 4u);
    }
  }
  expect_contains(
      error_of([] { FeedForward(FeedForwardOptions{8, 8, "mish"}); }),
      "activation is \"mish\"");
}

BlockOptions block_options(bool pre_norm) {
  AttentionOptions attention(16, 2);
  attention.reweight_len = 32;
  attention.is_causal = true;
  BlockOptions options{attention, FeedForwardOptions{16, 40}};
  options.pre_norm = pre_norm;
  return options;
}

TEST(Block, PreAndPostNormPlaceTheirNorms) {
  torch::manual_seed(9);
  const torch::Tensor x = torch::randn({2, 7, 16});
  Block pre(block_options(true));
  torch::Tensor y =
      x + pre->attention->forward(pre->attention_norm->forward(x)).out;
  y = y + pre->ffn->forward(pre->ffn_norm->forward(y));
  EXPECT_TRUE(torch::equal(pre->forward(x).out, y));

  Block post(block_options(false));
  y = post->attention_norm->forward(x + post->attention->forward(x).out);
  y = post->ffn_norm->forward(y + post->ffn->forward(y));
  EXPECT_TRUE(torch::equal(post->forward(x).out, y));
}

TEST(Block, DropoutOnlyWhileTraining) {
  BlockOptions options = block_options(true);
  options.dropout = 0.5;
  Block block(options);
  const torch::Tensor x = torch::randn({2, 7, 16});
  EXPECT_FALSE(torch::equal(block->forward(x).out, block->forward(x).out));
  block->eval();
  EXPECT_TRUE(torch::equal(block->forward(x).out, block->forward(x).out));
}

TEST(Projection, DrawsNothingUntilAsked) {
  torch::manual_seed(1);
  const torch::Tensor expected = torch::rand({4});
  torch::manual_seed(1);
  Block block(block_options(true), /*initialize=*/false);
  EXPECT_TRUE(torch::equal(torch::rand({4}), expected));
}

}  // namespace
}  // namespace cosformer
