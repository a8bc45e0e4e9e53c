// Attention layers against their formulas, masks, gradients, errors.
#include <limits>
#include <vector>

#include "tests/nn/naive.h"

namespace cosformer {
namespace {

using testing::error_of;
using testing::expect_contains;
using testing::naive_layer;
using testing::NaiveCall;
using testing::relative_error;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

AttentionOptions options_of(const std::string& kind, bool is_causal) {
  AttentionOptions options(24, 4);
  options.kind = kind;
  options.is_causal = is_causal;
  if (kind == "cosformer") options.reweight_len = 64;
  return options;
}

struct Case {
  std::string name;
  AttentionOptions options;
};
void PrintTo(const Case& value, std::ostream* out) { *out << value.name; }

std::vector<Case> cases() {
  std::vector<Case> out;
  for (const bool is_causal : {false, true}) {
    const std::string form = is_causal ? "_causal" : "_full";
    for (const char* kind : {"cosformer", "linear", "softmax"}) {
      out.push_back({kind + form, options_of(kind, is_causal)});
      AttentionOptions grouped = options_of(kind, is_causal);
      grouped.num_kv_heads = 2;
      grouped.head_dim = 10;
      grouped.value_dim = 7;
      grouped.out_bias = false;
      out.push_back({kind + form + "_grouped", grouped});
      AttentionOptions rotary = options_of(kind, is_causal);
      rotary.head_dim = 8;
      rotary.rotary_base = 10000.0;
      rotary.rotary_interleaved = is_causal;
      rotary.qkv_bias = false;
      out.push_back({kind + form + "_rotary", rotary});
    }
    AttentionOptions part = options_of("softmax", is_causal);
    part.head_dim = 8;
    part.rotary_base = 500.0;
    part.rotary_dim = 4;
    part.scale = 0.3;
    out.push_back({"softmax" + form + "_part_rotary", part});
    AttentionOptions norm = options_of("cosformer", is_causal);
    norm.normalizer = "none";
    out.push_back({"cosformer" + form + "_head_norm", norm});
    AttentionOptions elu = options_of("cosformer", is_causal);
    elu.feature_map = "elu1";
    elu.out_proj = false;
    out.push_back({"cosformer" + form + "_elu1", elu});
  }
  return out;
}

class AttentionKinds : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override { torch::manual_seed(7); }
};

TEST_P(AttentionKinds, SelfAttentionEqualsTheFormula) {
  Attention layer(GetParam().options);
  const torch::Tensor x = torch::randn({2, 33, 24});
  const torch::Tensor out = layer->forward(x).out;
  EXPECT_LE(relative_error(out, naive_layer(*layer, x, x, x)), 2e-6);
}

TEST_P(AttentionKinds, CrossAttentionWithStartsEqualsTheFormula) {
  AttentionOptions options = GetParam().options;
  options.kdim = 16;
  options.vdim = 20;
  Attention layer(options);
  const torch::Tensor query = torch::randn({2, 9, 24});
  const torch::Tensor key = torch::randn({2, 21, 16});
  const torch::Tensor value = torch::randn({2, 21, 20});
  AttentionCall call;
  call.q_start = torch::tensor(int64_t{15});
  call.kv_start = torch::tensor(int64_t{3});
  NaiveCall naive;
  naive.q_start = 15;
  naive.kv_start = 3;
  const torch::Tensor out = layer->forward(query, key, value, call).out;
  EXPECT_LE(relative_error(out, naive_layer(*layer, query, key, value, naive)),
            2e-6);
}

TEST_P(AttentionKinds, GradientsEqualTheFormulasAndReachEveryParameter) {
  Attention layer(GetParam().options);
  const torch::Tensor x = torch::randn({2, 19, 24});
  torch::Tensor input = x.clone().requires_grad_();
  const torch::Tensor out = layer->forward(input).out;
  const torch::Tensor weight = torch::randn_like(out);
  (out * weight).sum().backward();
  std::vector<torch::Tensor> leaves{input};
  for (const auto& parameter : layer->parameters()) leaves.push_back(parameter);
  const auto expected = torch::autograd::grad(
      {(naive_layer(*layer, input, input, input) * weight).sum()}, leaves);
  for (size_t i = 0; i < leaves.size(); ++i) {
    ASSERT_TRUE(leaves[i].grad().defined()) << i;
    // k_proj.bias shifts every softmax score of a row alike: its gradient is 0.
    if (expected[i].norm().item<double>() < 1e-5) {
      EXPECT_LE(leaves[i].grad().norm().item<double>(), 1e-4) << i;
      continue;
    }
    EXPECT_GT(leaves[i].grad().norm().item<double>(), 0.0) << i;
    EXPECT_LE(relative_error(leaves[i].grad(), expected[i]), 1e-5) << i;
  }
}

TEST_P(AttentionKinds, PaddedBatchEqualsEachAloneWhateverPaddingHolds) {
  Attention layer(GetParam().options);
  const std::vector<int64_t> lengths{5, 17, 11};
  const int64_t longest = 17;
  torch::Tensor x = torch::randn({3, longest, 24});
  const torch::Tensor mask =
      torch::arange(longest).unsqueeze(0) < torch::tensor(lengths).unsqueeze(1);
  x = x.masked_fill(mask.logical_not().unsqueeze(-1), kNaN).requires_grad_();
  AttentionCall call;
  call.key_mask = mask;
  const torch::Tensor out = layer->forward(x, {}, {}, call).out;
  EXPECT_EQ(out.masked_select(mask.logical_not().unsqueeze(-1))
                .abs()
                .sum()
                .item<float>(),
            0.0f);
  for (int64_t row = 0; row < 3; ++row) {
    const int64_t length = lengths[static_cast<size_t>(row)];
    const torch::Tensor alone =
        layer->forward(x.detach().narrow(0, row, 1).narrow(1, 0, length)).out;
    EXPECT_LE(relative_error(out.narrow(0, row, 1).narrow(1, 0, length), alone),
              2e-6)
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
  const torch::Tensor out = layer->forward(x).out;
  torch::Tensor changed = x.clone();
  changed.narrow(1, 23, 17).uniform_(-9, 9);
  const torch::Tensor other = layer->forward(changed).out;
  EXPECT_EQ(torch::equal(out.narrow(1, 0, 23), other.narrow(1, 0, 23)),
            GetParam().options.is_causal);
  EXPECT_FALSE(torch::equal(out.narrow(1, 23, 17), other.narrow(1, 23, 17)));
}

TEST_P(AttentionKinds, PackedSequencesEqualEachAlone) {
  Attention layer(GetParam().options);
  const torch::Tensor x = torch::randn({1, 20, 24});
  AttentionCall call;
  call.cu_seqlens_q = torch::tensor({0, 5, 5, 6, 20}, torch::kInt32);
  const torch::Tensor out = layer->forward(x, {}, {}, call).out;
  for (const auto& [begin, end] :
       std::vector<std::pair<int64_t, int64_t>>{{0, 5}, {5, 6}, {6, 20}}) {
    const torch::Tensor alone =
        layer->forward(x.narrow(1, begin, end - begin)).out;
    EXPECT_LE(relative_error(out.narrow(1, begin, end - begin), alone), 2e-6);
  }
}

INSTANTIATE_TEST_SUITE_P(Layers, AttentionKinds, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

// A row that sees no key is 0 before the projection, with no gradient.
TEST(Attention, RowsWithoutKeysAreZero) {
  for (const char* kind : {"cosformer", "linear", "softmax"}) {
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

TEST(Attention, ClassesByNameSetTheirKind) {
  AttentionOptions options(16, 2);
  options.reweight_len = 8;
  EXPECT_EQ(CosformerAttention(options)->options().feature_map, "relu");
  options.reweight_len = 0;
  EXPECT_EQ(LinearAttention(options)->options().feature_map, "elu1");
  EXPECT_FALSE(SoftmaxAttention(options)->is_linear());
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
      "expected 0 to 5");
}

}  // namespace
}  // namespace cosformer
