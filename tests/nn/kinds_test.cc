// What single kinds promise beyond what all do.
#include <cmath>
#include <vector>

#include "tests/nn/layer_cases.h"
#include "tests/nn/naive.h"

namespace cosformer {
namespace {

using testing::error_of;
using testing::expect_contains;
using testing::naive_layer;
using testing::NaiveCall;
using testing::options_of;
using testing::relative_error;

TEST(PerformerLayer, TheProjectionComesFromItsSeedAlone) {
  AttentionOptions options = options_of("performer", false);
  options.projection_seed = 7;
  torch::manual_seed(1);
  Attention one(options);
  torch::manual_seed(2);
  Attention two(options);
  EXPECT_TRUE(torch::equal(one->projection, two->projection));
  EXPECT_TRUE(
      torch::equal(one->projection, performer_projection(24, 6, true, 7)));
  EXPECT_EQ(one->projection.sizes(), at::IntArrayRef({24, 6}));
  EXPECT_FALSE(one->projection.requires_grad());
  options.projection_seed = 8;
  EXPECT_FALSE(torch::equal(one->projection, Attention(options)->projection));
}

TEST(PerformerLayer, RedrawIsExplicitSeededAndInPlace) {
  torch::manual_seed(3);
  Attention layer(options_of("performer", false));
  const torch::Tensor x = torch::randn({1, 9, 24});
  const torch::Tensor before = layer->forward(x).out;
  const torch::Tensor next_random = torch::rand({2});
  torch::manual_seed(3);
  Attention again(options_of("performer", false));
  torch::randn({1, 9, 24});
  layer->redraw_projection(99);
  again->redraw_projection(99);
  EXPECT_TRUE(torch::equal(torch::rand({2}), next_random))
      << "redrawing leaves torch's generator alone";
  EXPECT_TRUE(torch::equal(layer->projection, again->projection));
  EXPECT_TRUE(torch::equal(layer->named_buffers()["projection"],
                           performer_projection(24, 6, true, 99)));
  EXPECT_FALSE(torch::equal(layer->forward(x).out, before));
  layer->redraw_projection(0);
  EXPECT_TRUE(torch::equal(layer->forward(x).out, before));
  expect_contains(
      error_of([] {
        Attention(options_of("softmax", false))->redraw_projection(1);
      }),
      "redraw_projection belongs to kind \"performer\", found \"softmax\"");
}

TEST(PerformerLayer, HalfPrecisionKeepsWideFeatures) {
  torch::manual_seed(3);
  Attention layer(options_of("performer", true));
  const torch::Tensor x = torch::randn({1, 30, 24});
  const torch::Tensor wide = layer->forward(x).out;
  layer->to(torch::kBFloat16);
  const torch::Tensor half = layer->forward(x.to(torch::kBFloat16)).out;
  EXPECT_EQ(half.scalar_type(), torch::kBFloat16);
  EXPECT_LE(relative_error(half, wide), 3e-2);
}

// Behaviour 19.
TEST(LinformerLayer, ShorterInputsUseTheFirstRowsOfItsProjections) {
  torch::manual_seed(5);
  Attention layer(options_of("linformer", false));
  const torch::Tensor x = torch::randn({2, 31, 24});
  const torch::Tensor before = layer->forward(x).out;
  EXPECT_LE(relative_error(before, naive_layer(*layer, x, x, x)), 2e-6);
  {
    torch::NoGradGuard no_grad;
    layer->key_len_proj.narrow(0, 31, 17).fill_(7);
    layer->value_len_proj.narrow(0, 31, 17).fill_(7);
  }
  EXPECT_TRUE(torch::equal(layer->forward(x).out, before));
  const std::string text =
      error_of([&] { layer->forward(torch::randn({2, 49, 24})); });
  expect_contains(text, "49");
  expect_contains(text, "48");
  expect_contains(
      error_of([] { Attention layer(options_of("linformer", true)); }),
      "no causal form");
}

TEST(LinformerLayer, SharedProjectionsAreOne) {
  torch::manual_seed(5);
  AttentionOptions options = options_of("linformer", false);
  options.share_kv = true;
  options.one_kv_head = true;
  Attention layer(options);
  EXPECT_EQ(layer->k_proj->weight.sizes(), at::IntArrayRef({6, 24}));
  const torch::Tensor query = torch::randn({2, 9, 24});
  const torch::Tensor key = torch::randn({2, 40, 24});
  EXPECT_LE(relative_error(layer->forward(query, key).out,
                           naive_layer(*layer, query, key, key)),
            2e-6);
}

TEST(LongformerLayer, GlobalMaskAndFirstTokensTogether) {
  torch::manual_seed(5);
  for (const bool is_causal : {false, true}) {
    Attention layer(options_of("longformer", is_causal));
    const torch::Tensor x = torch::randn({2, 40, 24});
    AttentionCall call;
    call.global_mask = torch::zeros({2, 40}, torch::kBool);
    (*call.global_mask)[0][17] = true;
    (*call.global_mask)[1][30] = true;
    (*call.global_mask)[1][0] = true;  // a first token too: counts once
    NaiveCall naive;
    naive.global_mask = *call.global_mask;
    const torch::Tensor out = layer->forward(x, {}, {}, call).out;
    EXPECT_LE(relative_error(out, naive_layer(*layer, x, x, x, naive)), 2e-6);
    EXPECT_FALSE(torch::equal(out, layer->forward(x).out));
  }
}

// Behaviour 20: any length against any window, also a shorter one.
TEST(LongformerLayer, AnyLengthAgainstAnyWindow) {
  torch::manual_seed(5);
  for (const bool is_causal : {false, true}) {
    for (const int64_t window : {1, 7, 64, 1000}) {
      for (const int64_t length : {1, 2, 8, 65}) {
        AttentionOptions options = options_of("longformer", is_causal);
        options.window = window;
        Attention layer(options);
        const torch::Tensor x = torch::randn({1, length, 24});
        EXPECT_LE(
            relative_error(layer->forward(x).out, naive_layer(*layer, x, x, x)),
            2e-6)
            << window << " " << length;
      }
    }
  }
}

// Without global tokens the layer is a plain window, and its projections for
// them take no part.
TEST(LongformerLayer, WithoutGlobalTokensItIsAWindow) {
  torch::manual_seed(5);
  AttentionOptions options = options_of("longformer", false);
  options.global_tokens = 0;
  Attention layer(options);
  options.kind = "softmax";
  Attention window(options);
  torch::NoGradGuard no_grad;
  for (auto& each : window->named_parameters()) {
    each.value().copy_(layer->named_parameters()[each.key()]);
  }
  const torch::Tensor x = torch::randn({2, 30, 24});
  EXPECT_TRUE(torch::equal(layer->forward(x).out, window->forward(x).out));
}

// Behaviour 21.
TEST(BigBirdLayer, RandomBlocksReachFarAreSeededAndOpenToInspection) {
  for (const bool is_causal : {false, true}) {
    AttentionOptions options(32, 2);
    options.kind = "bigbird";
    options.is_causal = is_causal;
    Attention layer(options);                          // blocks of 64
    const torch::Tensor mask = layer->block_mask(64);  // 4,096 tokens
    EXPECT_EQ(mask.sizes(), at::IntArrayRef({2, 64, 64}));
    EXPECT_FALSE(torch::equal(mask[0], mask[1])) << "heads draw their own";
    // Beyond the window, the global blocks, and the first 1,024 tokens.
    torch::Tensor random = mask.clone();
    for (int64_t a = 0; a < 64; ++a) {
      for (int64_t b = std::max<int64_t>(a - 1, 0);
           b <= std::min<int64_t>(a + 1, 63); ++b) {
        random.select(1, a).select(1, b).fill_(false);
      }
    }
    random = random.narrow(1, 1, 62).narrow(2, 17, 46);
    EXPECT_GT(random.sum().item<int64_t>(), 60);
    EXPECT_TRUE(torch::equal(Attention(options)->block_mask(64), mask));
    options.block_seed = 1;
    EXPECT_FALSE(torch::equal(Attention(options)->block_mask(64), mask));
    if (is_causal) {
      EXPECT_TRUE(torch::equal(layer->block_mask(20),
                               mask.narrow(1, 0, 20).narrow(2, 0, 20)));
    }
    torch::NoGradGuard no_grad;
    const torch::Tensor x = torch::randn({1, 1000, 32});
    EXPECT_LE(
        relative_error(layer->forward(x).out, naive_layer(*layer, x, x, x)),
        2e-6);
  }
  expect_contains(
      error_of([] { Attention(options_of("linear", false))->block_mask(3); }),
      "block_mask belongs to kind \"bigbird\", found \"linear\"");
}

// More lengths than masks are kept.
TEST(BigBirdLayer, ManyLengths) {
  torch::manual_seed(5);
  torch::NoGradGuard no_grad;
  Attention layer(options_of("bigbird", false));
  for (int64_t length = 1; length < 150; length += 4) {
    const torch::Tensor x = torch::randn({1, length, 24});
    EXPECT_LE(
        relative_error(layer->forward(x).out, naive_layer(*layer, x, x, x)),
        2e-6)
        << length;
  }
}

class WeightDropout : public ::testing::TestWithParam<const char*> {};

TEST_P(WeightDropout, OnlyInTrainingModeAndFromTorchsGenerator) {
  torch::manual_seed(9);
  AttentionOptions options = options_of(GetParam(), false);
  options.dropout = 0.4;
  Attention layer(options);
  options.dropout = 0.0;
  Attention plain(options);
  {
    torch::NoGradGuard no_grad;
    for (auto& each : plain->named_parameters()) {
      each.value().copy_(layer->named_parameters()[each.key()]);
    }
  }
  const torch::Tensor x = torch::randn({2, 23, 24});
  const auto seeded = [&](uint64_t seed) {
    torch::manual_seed(seed);
    return layer->forward(x).out;
  };
  EXPECT_TRUE(torch::equal(seeded(4), seeded(4)));
  EXPECT_FALSE(torch::equal(seeded(4), seeded(5)));
  EXPECT_FALSE(torch::equal(layer->forward(x).out, layer->forward(x).out));
  // Its mean is the attention without it.
  torch::Tensor mean = torch::zeros({2, 23, 24});
  const int draws = 400;
  {
    torch::NoGradGuard no_grad;
    for (int i = 0; i < draws; ++i) mean += layer->forward(x).out / draws;
  }
  EXPECT_LE(relative_error(mean, plain->forward(x).out), 0.1);
  layer->eval();
  torch::manual_seed(6);
  const torch::Tensor next = torch::rand({2});
  torch::manual_seed(6);
  EXPECT_TRUE(torch::equal(layer->forward(x).out, plain->forward(x).out));
  EXPECT_TRUE(torch::equal(torch::rand({2}), next)) << "nothing is drawn";
}

INSTANTIATE_TEST_SUITE_P(Kinds, WeightDropout,
                         ::testing::Values("softmax", "linformer", "longformer",
                                           "bigbird"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace cosformer
