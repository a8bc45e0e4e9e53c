// Attention layers against their formulas, masks, gradients, errors.
#include <limits>
#include <set>
#include <vector>

#include "tests/nn/layer_cases.h"
#include "tests/nn/naive.h"

namespace cosformer {
namespace {

using testing::error_of;
using testing::expect_contains;
using testing::kKinds;
using testing::layer_cases;
using testing::LayerCase;
using testing::naive_layer;
using testing::NaiveCall;
using testing::options_of;
using testing::relative_error;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

class AttentionKinds : public ::testing::TestWithParam<LayerCase> {
 protected:
  void SetUp() override {
    torch::manual_seed(7);
    bias_ = GetParam().relative_bias();
  }
  AttentionCall call() const { return GetParam().call(bias_); }
  NaiveCall naive() const {
    NaiveCall out;
    out.relative_bias = bias_;
    return out;
  }
  torch::Tensor bias_;
};

TEST_P(AttentionKinds, SelfAttentionEqualsTheFormula) {
  Attention layer(GetParam().options);
  const torch::Tensor x = torch::randn({2, 33, 24});
  const torch::Tensor out = layer->forward(x, {}, {}, call()).out;
  EXPECT_LE(relative_error(out, naive_layer(*layer, x, x, x, naive())),
            GetParam().out_tolerance());
}

TEST_P(AttentionKinds, DoublePrecisionEqualsTheFormulaClosely) {
  Attention layer(GetParam().options);
  layer->to(torch::kFloat64);
  bias_ = bias_.defined() ? bias_.to(torch::kFloat64) : bias_;
  const torch::Tensor x = torch::randn({2, 17, 24}, torch::kFloat64);
  const torch::Tensor out = layer->forward(x, {}, {}, call()).out;
  EXPECT_EQ(out.scalar_type(), torch::kFloat64);
  // Rotary tables are rounded to float32's neighbourhood once.
  EXPECT_LE(relative_error(out, naive_layer(*layer, x, x, x, naive())), 1e-7);
}

TEST_P(AttentionKinds, CrossAttentionWithStartsEqualsTheFormula) {
  AttentionOptions options = GetParam().options;
  options.kdim = 16;
  options.vdim = options.share_kv ? 16 : 20;
  Attention layer(options);
  const torch::Tensor query = torch::randn({2, 9, 24});
  const torch::Tensor key = torch::randn({2, 21, 16});
  const torch::Tensor value =
      options.share_kv ? key : torch::randn({2, 21, 20});
  AttentionCall with = call();
  NaiveCall formula = naive();
  if (options.kind != "linformer") {  // which has no positions
    with.q_start = torch::tensor(int64_t{15});
    with.kv_start = torch::tensor(int64_t{3});
    formula.q_start = 15;
    formula.kv_start = 3;
  }
  const torch::Tensor out = layer->forward(query, key, value, with).out;
  EXPECT_LE(
      relative_error(out, naive_layer(*layer, query, key, value, formula)),
      GetParam().out_tolerance());
}

TEST_P(AttentionKinds, GradientsEqualTheFormulasAndReachEveryParameter) {
  Attention layer(GetParam().options);
  const torch::Tensor x = torch::randn({2, 19, 24});
  torch::Tensor input = x.clone().requires_grad_();
  if (bias_.defined()) bias_.requires_grad_();
  const torch::Tensor out = layer->forward(input, {}, {}, call()).out;
  const torch::Tensor weight = torch::randn_like(out);
  (out * weight).sum().backward();
  std::vector<torch::Tensor> leaves{input};
  for (const auto& parameter : layer->parameters()) leaves.push_back(parameter);
  if (bias_.defined()) leaves.push_back(bias_);
  const auto expected = torch::autograd::grad(
      {(naive_layer(*layer, input, input, input, naive()) * weight).sum()},
      leaves);
  for (size_t i = 0; i < leaves.size(); ++i) {
    ASSERT_TRUE(leaves[i].grad().defined()) << i;
    // k_proj.bias shifts every softmax score of a row alike: its gradient is 0.
    if (expected[i].norm().item<double>() < 1e-5) {
      EXPECT_LE(leaves[i].grad().norm().item<double>(), 1e-4) << i;
      continue;
    }
    EXPECT_GT(leaves[i].grad().norm().item<double>(), 0.0) << i;
    EXPECT_LE(relative_error(leaves[i].grad(), expected[i]),
              GetParam().grad_tolerance())
        << i;
  }
}

TEST_P(AttentionKinds, PaddedBatchEqualsEachAloneWhateverPaddingHolds) {
  Attention layer(GetParam().options);
  const std::vector<int64_t> lengths{5, 17, 11};
  const int64_t longest = 17;
  torch::Tensor x = torch::randn({3, longest, 24});
  const torch::Tensor mask =
      torch::arange(longest).unsqueeze(0) < torch::tensor(lengths).unsqueeze(1);
  const torch::Tensor clean = x;
  x = x.masked_fill(mask.logical_not().unsqueeze(-1), kNaN).requires_grad_();
  AttentionCall with = call();
  with.key_mask = mask;
  const torch::Tensor out = layer->forward(x, {}, {}, with).out;
  EXPECT_EQ(out.masked_select(mask.logical_not().unsqueeze(-1))
                .abs()
                .sum()
                .item<float>(),
            0.0f);
  // BigBird's last blocks are those of the padded length when not causal.
  const bool by_length =
      GetParam().is("bigbird") && !GetParam().options.is_causal;
  NaiveCall padded = naive();
  padded.key_mask = padded.query_mask = mask;
  const torch::Tensor formula =
      naive_layer(*layer, clean, clean, clean, padded);
  for (int64_t row = 0; row < 3; ++row) {
    const int64_t length = lengths[static_cast<size_t>(row)];
    const auto part = [&](const torch::Tensor& whole) {
      return whole.narrow(0, row, 1).narrow(1, 0, length);
    };
    const torch::Tensor alone =
        by_length ? part(formula)
                  : layer->forward(part(x.detach()), {}, {}, call()).out;
    EXPECT_LE(relative_error(part(out), alone), GetParam().out_tolerance())
        << row;
  }
  out.square().sum().backward();
  for (const auto& parameter : layer->named_parameters()) {
    EXPECT_TRUE(parameter.value().grad().isfinite().all().item<bool>())
        << parameter.key();
  }
  EXPECT_EQ(x.grad()
                .masked_select(mask.logical_not().unsqueeze(-1))
                .abs()
                .sum()
                .item<float>(),
            0.0f);
}

TEST_P(AttentionKinds, TheFutureChangesNoBitOfThePastWhenCausal) {
  Attention layer(GetParam().options);
  const torch::Tensor x = torch::randn({1, 40, 24});
  const torch::Tensor out = layer->forward(x, {}, {}, call()).out;
  torch::Tensor changed = x.clone();
  changed.narrow(1, 23, 17).uniform_(-9, 9);
  const torch::Tensor other = layer->forward(changed, {}, {}, call()).out;
  const torch::Tensor past = out.narrow(1, 0, 23);
  const torch::Tensor other_past = other.narrow(1, 0, 23);
  if (GetParam().is("performer") && GetParam().options.is_causal) {
    EXPECT_LE(relative_error(other_past, past), 1e-5);
  } else {
    EXPECT_EQ(torch::equal(past, other_past), GetParam().options.is_causal);
  }
  EXPECT_FALSE(torch::equal(out.narrow(1, 23, 17), other.narrow(1, 23, 17)));
}

TEST_P(AttentionKinds, PackedSequencesEqualEachAlone) {
  Attention layer(GetParam().options);
  const torch::Tensor x = torch::randn({1, 20, 24});
  AttentionCall with = call();
  with.cu_seqlens_q = torch::tensor({0, 5, 5, 6, 20}, torch::kInt32);
  if (GetParam().is("linformer")) {
    expect_contains(error_of([&] { layer->forward(x, {}, {}, with); }),
                    "kind \"linformer\" takes no packed sequences");
    return;
  }
  const torch::Tensor out = layer->forward(x, {}, {}, with).out;
  for (const auto& [begin, end] :
       std::vector<std::pair<int64_t, int64_t>>{{0, 5}, {5, 6}, {6, 20}}) {
    const torch::Tensor alone =
        layer->forward(x.narrow(1, begin, end - begin), {}, {}, call()).out;
    EXPECT_LE(relative_error(out.narrow(1, begin, end - begin), alone),
              GetParam().out_tolerance());
  }
}

// Behaviours 30 and 10: twice the same, and lengths 1 and 3.
TEST_P(AttentionKinds, TwiceIsIdenticalAndShortSequencesWork) {
  Attention layer(GetParam().options);
  layer->eval();
  for (const int64_t length : {1, 3, 20}) {
    const torch::Tensor x = torch::randn({2, length, 24});
    const torch::Tensor out = layer->forward(x, {}, {}, call()).out;
    EXPECT_TRUE(torch::equal(out, layer->forward(x, {}, {}, call()).out));
    EXPECT_LE(relative_error(out, naive_layer(*layer, x, x, x, naive())),
              GetParam().out_tolerance())
        << length;
  }
  EXPECT_EQ(
      layer->forward(torch::randn({2, 0, 24}), {}, {}, call()).out.size(1), 0);
}

INSTANTIATE_TEST_SUITE_P(Layers, AttentionKinds,
                         ::testing::ValuesIn(layer_cases()),
                         [](const auto& info) { return info.param.name; });

// A row that sees no key is 0 before the projection, with no gradient.
TEST(Attention, RowsWithoutKeysAreZero) {
  for (const char* kind : {"softmax", "linear", "cosformer", "performer",
                           "longformer", "bigbird"}) {
    AttentionOptions options = options_of(kind, true);
    options.out_proj = false;
    Attention layer(options);
    torch::Tensor query = torch::randn({2, 6, 24}, torch::requires_grad());
    const torch::Tensor key = torch::randn({2, 6, 24});
    AttentionCall call;
    call.kv_start = torch::tensor({int64_t{3}, int64_t{9}});
    const torch::Tensor out = layer->forward(query, key, {}, call).out;
    EXPECT_EQ(out[0].narrow(0, 0, 3).abs().sum().item<float>(), 0.0f) << kind;
    EXPECT_GT(out[0].narrow(0, 3, 3).abs().sum().item<float>(), 0.0f) << kind;
    EXPECT_EQ(out[1].abs().sum().item<float>(), 0.0f) << kind;
    out.sum().backward();
    EXPECT_TRUE(query.grad().isfinite().all().item<bool>()) << kind;
    EXPECT_EQ(query.grad()[1].abs().sum().item<float>(), 0.0f) << kind;
  }
}

// Behaviours 7 and 9: also where a whole row of the batch is padding, and where
// a window lies inside it.
TEST(Attention, SequencesOfPaddingAreZero) {
  for (const char* kind : kKinds) {
    for (const bool is_causal : {false, true}) {
      if (kind == std::string("linformer") && is_causal) continue;
      AttentionOptions options = options_of(kind, is_causal);
      options.out_proj = false;
      Attention layer(options);
      torch::Tensor query = torch::randn({2, 12, 24}, torch::requires_grad());
      torch::Tensor key = torch::randn({2, 12, 24}, torch::requires_grad());
      AttentionCall call;
      call.key_mask = torch::ones({2, 12}, torch::kBool);
      (*call.key_mask)[0].fill_(false);
      const torch::Tensor out = layer->forward(query, key, {}, call).out;
      EXPECT_EQ(out[0].abs().sum().item<float>(), 0.0f) << kind;
      EXPECT_GT(out[1].abs().sum().item<float>(), 0.0f) << kind;
      out.square().sum().backward();
      for (const torch::Tensor& x : {query, key}) {
        EXPECT_TRUE(x.grad().isfinite().all().item<bool>()) << kind;
        EXPECT_EQ(x.grad()[0].abs().sum().item<float>(), 0.0f) << kind;
      }
    }
  }
  // Keys 4 to 19 hidden: windows of 3 around 8 to 15 hold padding alone.
  AttentionOptions options = options_of("softmax", false);
  options.window = 3;
  options.out_proj = false;
  Attention layer(options);
  const torch::Tensor x = torch::randn({1, 24, 24});
  AttentionCall call;
  call.key_mask = torch::ones({1, 24}, torch::kBool);
  call.key_mask->narrow(1, 4, 16).fill_(false);
  call.query_mask = torch::ones({1, 24}, torch::kBool);
  const torch::Tensor out = layer->forward(x, {}, {}, call).out;
  EXPECT_TRUE(out.isfinite().all().item<bool>());
  EXPECT_EQ(out.narrow(1, 8, 8).abs().sum().item<float>(), 0.0f);
  EXPECT_GT(out.narrow(1, 4, 3).abs().sum().item<float>(), 0.0f);
}

TEST(Attention, ClassesByNameSetTheirKind) {
  AttentionOptions options(16, 2);
  options.reweight_len = 8;
  EXPECT_EQ(CosformerAttention(options)->options().feature_map, "relu");
  options.reweight_len = 0;
  EXPECT_EQ(LinearAttention(options)->options().feature_map, "elu1");
  EXPECT_FALSE(SoftmaxAttention(options)->is_linear());
  EXPECT_EQ(PerformerAttention(options)->options().num_features, 32);
  EXPECT_EQ(BigBirdAttention(options)->options().block_size, 64);
  options.window = 2;
  EXPECT_EQ(LongformerAttention(options)->options().kind, "longformer");
  options.window = 0;
  options.max_len = 34;
  EXPECT_EQ(LinformerAttention(options)->options().projected_len, 8);
}

std::set<std::string> names_of(const AttentionOptions& options) {
  std::set<std::string> names;
  Attention layer(options);
  for (const auto& each : layer->named_parameters()) names.insert(each.key());
  for (const auto& each : layer->named_buffers()) {
    names.insert("buffer " + each.key());
  }
  return names;
}

TEST(Attention, ParameterNamesAreTheContract) {
  const std::set<std::string> shared{
      "q_proj.weight", "q_proj.bias", "k_proj.weight",   "k_proj.bias",
      "v_proj.weight", "v_proj.bias", "out_proj.weight", "out_proj.bias"};
  const auto with = [&](std::set<std::string> more) {
    more.insert(shared.begin(), shared.end());
    return more;
  };
  for (const char* kind : {"softmax", "linear", "cosformer", "bigbird"}) {
    EXPECT_EQ(names_of(options_of(kind, false)), shared) << kind;
  }
  AttentionOptions performer = options_of("performer", false);
  EXPECT_EQ(names_of(performer), with({"buffer projection"}));
  performer.trainable_projection = true;
  EXPECT_EQ(names_of(performer), with({"projection"}));
  EXPECT_EQ(names_of(options_of("longformer", false)),
            with({"q_global_proj.weight", "q_global_proj.bias",
                  "k_global_proj.weight", "k_global_proj.bias",
                  "v_global_proj.weight", "v_global_proj.bias"}));
  AttentionOptions linformer = options_of("linformer", false);
  EXPECT_EQ(names_of(linformer), with({"key_len_proj", "value_len_proj"}));
  linformer.share_kv = true;
  std::set<std::string> expected = with({"key_len_proj"});
  expected.erase("v_proj.weight");
  expected.erase("v_proj.bias");
  EXPECT_EQ(names_of(linformer), expected);
}

TEST(Attention, DenominatorsOnRequest) {
  Attention layer(options_of("linear", true));
  AttentionCall call;
  call.return_denominator = true;
  const torch::Tensor x = torch::randn({2, 5, 24});
  const torch::Tensor denominator = layer->forward(x, {}, {}, call).denominator;
  EXPECT_EQ(denominator.sizes(), at::IntArrayRef({2, 5, 4}));
  EXPECT_FALSE(denominator.requires_grad());
  EXPECT_FALSE(layer->forward(x).denominator.defined());
}

TEST(Attention, ErrorsSayFoundAndExpected) {
  const auto build = [](auto change) {
    AttentionOptions options = options_of("cosformer", false);
    change(options);
    return error_of([&] { Attention layer(options); });
  };
  expect_contains(build([](auto& o) { o.num_heads = 5; }),
                  "embed_dim is 24, expected a multiple of num_heads (5)");
  expect_contains(build([](auto& o) { o.num_kv_heads = 3; }),
                  "num_heads is 4, expected a multiple of num_kv_heads (3)");
  expect_contains(build([](auto& o) { o.reweight_len = 0; }),
                  "reweight_len is 0, expected M > 0");
  expect_contains(build([](auto& o) { o.kind = "softmax"; }),
                  "belong to the linear kinds");
  expect_contains(build([](auto& o) { o.dropout = 0.1; }),
                  "dropout belongs to kinds that form each weight");
  expect_contains(build([](auto& o) { o.window = 4; }),
                  "window and dilation belong to kind");
  expect_contains(build([](auto& o) { o.global_tokens = 4; }),
                  "global_tokens belongs to kind \"longformer\", found with "
                  "kind \"cosformer\"");
  expect_contains(build([](auto& o) { o.num_features = 4; }),
                  "belong to kind \"performer\"");
  expect_contains(build([](auto& o) { o.share_kv = true; }),
                  "belong to kind \"linformer\"");
  expect_contains(build([](auto& o) { o.block_size = 4; }),
                  "belong to kind \"bigbird\"");
  const auto build_of = [](const char* kind, auto change) {
    AttentionOptions options = options_of(kind, false);
    change(options);
    return error_of([&] { Attention layer(options); });
  };
  expect_contains(build_of("performer", [](auto& o) { o.dropout = 0.1; }),
                  "dropout belongs to kinds that form each weight");
  expect_contains(build_of("linformer", [](auto& o) { o.is_causal = true; }),
                  "\"linformer\" has no causal form");
  expect_contains(build_of("linformer", [](auto& o) { o.rotary_base = 10; }),
                  "\"linformer\" has no rotary positions");
  expect_contains(build_of("linformer", [](auto& o) { o.max_len = 0; }),
                  "max_len is 0, expected the greatest number of keys");
  expect_contains(build_of("linformer", [](auto& o) { o.projected_len = 49; }),
                  "projected_len is 49, expected 1 to max_len (48)");
  expect_contains(build_of("linformer",
                           [](auto& o) {
                             o.one_kv_head = true;
                             o.num_kv_heads = 2;
                           }),
                  "one_kv_head with num_kv_heads 2");
  expect_contains(build_of("linformer",
                           [](auto& o) {
                             o.share_kv = true;
                             o.value_dim = 5;
                           }),
                  "share_kv makes keys and values one, found head_dim 6 and "
                  "value_dim 5");
  expect_contains(build_of("longformer", [](auto& o) { o.window = 0; }),
                  "window is 0, expected at least 1");
  expect_contains(build_of("softmax", [](auto& o) { o.dilation = 2; }),
                  "dilation is 2 without a window");
  expect_contains(build_of("softmax", [](auto& o) { o.dropout = 1.0; }),
                  "dropout is 1, expected 0 or more, below 1");
  expect_contains(build_of("bigbird", [](auto& o) { o.window_blocks = 2; }),
                  "window_blocks is 2, expected an odd number");
  expect_contains(build([](auto& o) { o.kind = "nystrom"; }),
                  "kind is \"nystrom\"");
  expect_contains(build([](auto& o) { o.scale = 2.0; }),
                  "scale belongs to kind \"softmax\"");
  expect_contains(build([](auto& o) {
                    o.rotary_base = 10.0;
                    o.rotary_dim = 2;
                  }),
                  "rotates whole heads");

  Attention layer(options_of("softmax", false));
  const torch::Tensor x = torch::randn({2, 5, 24});
  const auto call_with = [&](auto change) {
    AttentionCall call;
    change(call);
    return error_of([&] { layer->forward(x, {}, {}, call); });
  };
  expect_contains(error_of([&] { layer->forward(x.narrow(2, 0, 8)); }),
                  "query is [2, 5, 8], expected [batch, seq, 24]");
  expect_contains(call_with([](auto& c) {
                    c.key_mask = torch::ones({2, 4}, torch::kBool);
                  }),
                  "key_mask is [2, 4], expected [2, 5]");
  expect_contains(call_with([](auto& c) { c.key_mask = torch::ones({2, 5}); }),
                  "expected bool (true = takes part)");
  expect_contains(call_with([](auto& c) {
                    c.key_mask = torch::ones({2, 5}, torch::kBool);
                    c.cu_seqlens_q = torch::tensor({0, 5}, torch::kInt32);
                  }),
                  "masks and cu_seqlens together");
  expect_contains(call_with([](auto& c) { c.return_denominator = true; }),
                  "no denominators");
  AttentionCall packed;
  packed.cu_seqlens_q = torch::tensor({0, 4}, torch::kInt32);
  expect_contains(
      error_of([&] { layer->forward(x.narrow(0, 0, 1), {}, {}, packed); }),
      "cu_seqlens_q ends with 4, expected the number of tokens, 5");
}

// What a kind cannot do is refused by its name.
TEST(Attention, CallsThatAKindLacksAreErrors) {
  const torch::Tensor x = torch::randn({2, 5, 24});
  const auto message = [&](const char* kind, auto change) {
    Attention layer(options_of(kind, false));
    AttentionCall call;
    change(call);
    return error_of([&] { layer->forward(x, {}, {}, call); });
  };
  for (const char* kind : kKinds) {
    const std::string name = std::string("kind \"") + kind + "\" ";
    const bool has_scores = kind == std::string("softmax") ||
                            kind == std::string("longformer") ||
                            kind == std::string("bigbird");
    if (!has_scores) {
      expect_contains(
          message(kind,
                  [](auto& c) { c.relative_bias = torch::zeros({4, 3}); }),
          name + "takes no relative_bias");
    }
    if (kind != std::string("longformer")) {
      expect_contains(message(kind,
                              [](auto& c) {
                                c.global_mask =
                                    torch::ones({2, 5}, torch::kBool);
                              }),
                      name + "takes no global_mask");
    }
    if (kind != std::string("linear") && kind != std::string("cosformer")) {
      expect_contains(
          message(kind, [](auto& c) { c.return_denominator = true; }),
          name + "has no denominators to return");
    }
  }
  for (const char* kind : {"linformer", "longformer", "bigbird"}) {
    expect_contains(
        message(kind, [](auto& c) { c.return_state = true; }),
        kind == std::string("linformer") ? "has no state" : "only when causal");
  }
  expect_contains(
      message("linformer",
              [](auto& c) { c.q_start = torch::tensor(int64_t{2}); }),
      "takes no q_start or kv_start");
  expect_contains(message("longformer",
                          [](auto& c) {
                            c.global_mask = torch::ones({2, 4}, torch::kBool);
                          }),
                  "global_mask is [2, 4], expected [2, 5]");
  AttentionOptions shared = options_of("linformer", false);
  shared.share_kv = true;
  Attention layer(shared);
  expect_contains(
      error_of([&] { layer->forward(x, x, torch::randn({2, 5, 24})); }),
      "found a value beside the key");
}

}  // namespace
}  // namespace cosformer
