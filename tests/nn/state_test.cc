// What layers carry from call to call: every split gives the same result.
#include <vector>

#include "tests/nn/naive.h"

namespace cosformer {
namespace {

using testing::error_of;
using testing::expect_contains;
using testing::relative_error;

struct Case {
  std::string name;
  AttentionOptions options;
};
void PrintTo(const Case& value, std::ostream* out) { *out << value.name; }

std::vector<Case> causal_cases() {
  std::vector<Case> out;
  for (const char* kind : {"cosformer", "linear", "softmax"}) {
    AttentionOptions options(24, 4);
    options.kind = kind;
    options.is_causal = true;
    if (options.kind == "cosformer") options.reweight_len = 40;
    out.push_back({kind, options});
    options.num_kv_heads = 2;
    options.head_dim = 8;
    options.value_dim = 5;
    options.rotary_base = 10000.0;
    out.push_back({std::string(kind) + "_grouped_rotary", options});
  }
  AttentionOptions norm(24, 4);
  norm.kind = "linear";
  norm.is_causal = true;
  norm.normalizer = "none";
  out.push_back({"linear_head_norm", norm});
  return out;
}

class StatefulLayer : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override { torch::manual_seed(11); }
};

AttentionCall with_state(AttentionState state) {
  AttentionCall call;
  call.state = std::move(state);
  call.return_state = true;
  return call;
}

TEST_P(StatefulLayer, EverySplitIntoTwoChunks) {
  torch::NoGradGuard no_grad;
  Attention layer(GetParam().options);
  const int64_t length = 21;
  const torch::Tensor x = torch::randn({2, length, 24});
  const torch::Tensor whole = layer->forward(x).out;
  for (int64_t split = 1; split < length; ++split) {
    const auto first =
        layer->forward(x.narrow(1, 0, split), {}, {}, with_state({}));
    const auto second = layer->forward(x.narrow(1, split, length - split), {},
                                       {}, with_state(first.state));
    EXPECT_LE(relative_error(torch::cat({first.out, second.out}, 1), whole),
              2e-6)
        << split;
  }
}

TEST_P(StatefulLayer, OneTokenAtATimeAfterEveryPrefill) {
  Attention layer(GetParam().options);
  const int64_t length = 19;
  const torch::Tensor x = torch::randn({2, length, 24});
  const torch::Tensor whole = layer->forward(x).out;
  for (const int64_t prefill : {0, 1, 7, 18}) {
    AttentionState state;
    std::vector<torch::Tensor> parts;
    if (prefill > 0) {
      auto first =
          layer->forward(x.narrow(1, 0, prefill), {}, {}, with_state({}));
      parts.push_back(first.out);
      state = detach(first.state);
    }
    for (int64_t t = prefill; t < length; ++t) {
      parts.push_back(layer->decode_step(x.narrow(1, t, 1), state));
    }
    const torch::Tensor joined = torch::cat(parts, 1);
    EXPECT_LE(relative_error(joined, whole), 2e-6) << prefill;
    EXPECT_FALSE(parts.back().requires_grad());
  }
}

TEST_P(StatefulLayer, AnOlderStateStaysAsItWas) {
  torch::NoGradGuard no_grad;
  Attention layer(GetParam().options);
  const torch::Tensor x = torch::randn({1, 12, 24});
  const auto first = layer->forward(x.narrow(1, 0, 6), {}, {}, with_state({}));
  // Two ways on from one state, and the first again.
  const auto go_on = [&](const torch::Tensor& next) {
    AttentionState state = first.state;
    if (layer->is_linear()) state = clone(state);  // decode works in place
    torch::Tensor out;
    for (int64_t t = 0; t < next.size(1); ++t) {
      out = layer->decode_step(next.narrow(1, t, 1), state);
    }
    return out;
  };
  const torch::Tensor one = go_on(x.narrow(1, 6, 6));
  const torch::Tensor two = go_on(torch::randn({1, 6, 24}));
  EXPECT_FALSE(torch::equal(one, two));
  EXPECT_TRUE(torch::equal(one, go_on(x.narrow(1, 6, 6))));
}

TEST_P(StatefulLayer, RowsSelected) {
  torch::NoGradGuard no_grad;
  Attention layer(GetParam().options);
  const torch::Tensor x = torch::randn({3, 9, 24});
  const auto first = layer->forward(x, {}, {}, with_state({}));
  const torch::Tensor next = torch::randn({3, 1, 24});
  AttentionState all = clone(first.state);
  const torch::Tensor expected = layer->decode_step(next, all);
  const torch::Tensor rows = torch::tensor({int64_t{2}, int64_t{0}});
  AttentionState some = select(first.state, rows);
  const torch::Tensor found =
      layer->decode_step(next.index_select(0, rows), some);
  EXPECT_LE(relative_error(found, expected.index_select(0, rows)), 1e-6);
}

TEST_P(StatefulLayer, RightPaddedPromptsGoOnAtTheirOwnPlaces) {
  torch::NoGradGuard no_grad;
  Attention layer(GetParam().options);
  const std::vector<int64_t> lengths{4, 9};
  const torch::Tensor x = torch::randn({2, 9, 24});
  const torch::Tensor next = torch::randn({2, 3, 24});
  AttentionCall call = with_state({});
  call.key_mask =
      torch::arange(9).unsqueeze(0) < torch::tensor(lengths).unsqueeze(1);
  AttentionState state = layer->forward(x, {}, {}, call).state;
  std::vector<torch::Tensor> steps;
  for (int64_t t = 0; t < 3; ++t) {
    steps.push_back(layer->decode_step(next.narrow(1, t, 1), state));
  }
  const torch::Tensor found = torch::cat(steps, 1);
  for (int64_t row = 0; row < 2; ++row) {
    const int64_t length = lengths[static_cast<size_t>(row)];
    const torch::Tensor alone =
        layer
            ->forward(torch::cat({x.narrow(0, row, 1).narrow(1, 0, length),
                                  next.narrow(0, row, 1)},
                                 1))
            .out.narrow(1, length, 3);
    EXPECT_LE(relative_error(found.narrow(0, row, 1), alone), 2e-6) << row;
  }
}

TEST_P(StatefulLayer, GradientsFlowThroughTheState) {
  Attention layer(GetParam().options);
  const torch::Tensor x = torch::randn({1, 10, 24});
  torch::Tensor whole_x = x.clone().requires_grad_();
  layer->forward(whole_x).out.square().sum().backward();
  torch::Tensor split_x = x.clone().requires_grad_();
  const auto first =
      layer->forward(split_x.narrow(1, 0, 4), {}, {}, with_state({}));
  const auto second =
      layer->forward(split_x.narrow(1, 4, 6), {}, {}, with_state(first.state));
  (first.out.square().sum() + second.out.square().sum()).backward();
  EXPECT_LE(relative_error(split_x.grad(), whole_x.grad()), 1e-5);
}

INSTANTIATE_TEST_SUITE_P(Layers, StatefulLayer,
                         ::testing::ValuesIn(causal_cases()),
                         [](const auto& info) { return info.param.name; });

TEST(KvCache, AppendCopiesLittleAndNeverChangesWhatOthersSee) {
  KvCache cache;
  int64_t moved = 0;
  const void* place = nullptr;
  for (int64_t t = 0; t < 1000; ++t) {
    const torch::Tensor token = torch::full({1, 1, 2, 3}, t);
    cache = cache.append(token, token);
    if (cache.keys.const_data_ptr() != place) {
      place = cache.keys.const_data_ptr();
      ++moved;
    }
  }
  EXPECT_EQ(cache.size(), 1000);
  EXPECT_LE(moved, 6);  // 64, 128, ..., 1024
  EXPECT_EQ(cache.keys[0][777][1][2].item<float>(), 777.0f);

  const KvCache at_1000 = cache;
  const torch::Tensor a = torch::full({1, 1, 2, 3}, -1.0f);
  const torch::Tensor b = torch::full({1, 1, 2, 3}, -2.0f);
  const KvCache one = at_1000.append(a, a), two = at_1000.append(b, b);
  EXPECT_EQ(one.keys[0][1000][0][0].item<float>(), -1.0f);
  EXPECT_EQ(two.keys[0][1000][0][0].item<float>(), -2.0f);
  EXPECT_EQ(at_1000.size(), 1000);
}

TEST(State, OfAnotherKindIsAnError) {
  AttentionOptions options(8, 2);
  options.is_causal = true;
  options.kind = "softmax";
  Attention softmax(options);
  options.kind = "linear";
  Attention linear(options);
  const torch::Tensor x = torch::randn({1, 3, 8});
  const auto of_softmax = softmax->forward(x, {}, {}, with_state({})).state;
  const auto of_linear = linear->forward(x, {}, {}, with_state({})).state;
  expect_contains(
      error_of([&] { linear->forward(x, {}, {}, with_state(of_softmax)); }),
      "state is a KvCache, expected a LinearState");
  expect_contains(
      error_of([&] { softmax->forward(x, {}, {}, with_state(of_linear)); }),
      "state is a LinearState, expected a KvCache");
  AttentionCall call = with_state(of_softmax);
  call.q_start = torch::tensor(int64_t{7});
  expect_contains(error_of([&] { softmax->forward(x, {}, {}, call); }),
                  "q_start contradicts the state, which continues at 3");
}

}  // namespace
}  // namespace cosformer
