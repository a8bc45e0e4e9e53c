// The weights of a layer, as shown: they are what its output is made of.
#include "tests/nn/layer_cases.h"
#include "tests/nn/naive.h"

namespace cosformer {
namespace {

using namespace testing;

class LayerMatrix : public ::testing::TestWithParam<LayerCase> {};

// [batch, heads, seq, dim] of a projection, one for each query head.
torch::Tensor values_of(Projection& projection, const torch::Tensor& x,
                        const AttentionOptions& o) {
  return projection->forward(x)
      .view({x.size(0), x.size(1), o.num_kv_heads, -1})
      .transpose(1, 2)
      .repeat_interleave(o.num_heads / o.num_kv_heads, 1);
}

TEST_P(LayerMatrix, TimesTheValuesIsTheOutput) {
  torch::manual_seed(5);
  AttentionOptions options = GetParam().options;
  options.out_proj = false;
  Attention layer(options);
  layer->to(torch::kFloat64);
  const AttentionOptions& o = layer->options();
  const torch::Tensor x = torch::randn({2, 21, 24}, torch::kFloat64);
  torch::Tensor bias = GetParam().relative_bias();
  if (bias.defined()) bias = bias.to(torch::kFloat64);
  const AttentionCall call = GetParam().call(bias);

  const torch::Tensor out = layer->forward(x, {}, {}, call).out;
  const torch::Tensor matrix = layer->attention_matrix(x, call.relative_bias);
  ASSERT_EQ(matrix.sizes(), at::IntArrayRef({2, o.num_heads, 21, 21}));
  torch::Tensor expected = torch::matmul(
      matrix, values_of(layer->v_proj ? layer->v_proj : layer->k_proj, x, o));
  if (o.kind == "longformer" && o.global_tokens > 0) {
    const torch::Tensor global =
        torch::matmul(matrix, values_of(layer->v_global_proj, x, o));
    expected =
        torch::cat({global.narrow(2, 0, o.global_tokens),
                    expected.narrow(2, o.global_tokens, 21 - o.global_tokens)},
                   2);
  }
  expected = expected.transpose(1, 2);
  if (o.normalizer == "none") {
    expected = at::rms_norm(expected, {expected.size(3)}, std::nullopt, o.eps);
  }
  EXPECT_LE(((out - expected.flatten(2)).norm() / out.norm()).item<double>(),
            1e-10);
}

INSTANTIATE_TEST_SUITE_P(All, LayerMatrix, ::testing::ValuesIn(layer_cases()),
                         [](const auto& info) { return info.param.name; });

TEST(LayerMatrixError, NamesTheShape) {
  Attention layer(options_of("softmax", true));
  try {
    layer->attention_matrix(torch::randn({1, 3, 5}));
    FAIL() << "a query of another width was taken";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("expected [batch, seq, 24]"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace cosformer
