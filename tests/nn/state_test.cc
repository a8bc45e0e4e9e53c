// What layers carry from call to call: every split gives the same result.
#include <algorithm>
#include <vector>

#include "tests/nn/layer_cases.h"
#include "tests/nn/naive.h"

namespace cosformer {
namespace {

using testing::error_of;
using testing::expect_contains;
using testing::LayerCase;
using testing::options_of;
using testing::relative_error;
using testing::stateful_cases;

AttentionCall with_state(AttentionState state) {
  AttentionCall call;
  call.state = std::move(state);
  call.return_state = true;
  return call;
}

class StatefulLayer : public ::testing::TestWithParam<LayerCase> {
 protected:
  void SetUp() override {
    torch::manual_seed(11);
    bias_ = GetParam().relative_bias();
  }
  AttentionCall call() const { return GetParam().call(bias_); }
  AttentionCall with_state(AttentionState state) const {
    AttentionCall out = call();
    out.state = std::move(state);
    out.return_state = true;
    return out;
  }
  torch::Tensor step(Attention& layer, const torch::Tensor& x,
                     AttentionState& state) const {
    return layer->decode_step(x, state, call().relative_bias);
  }
  // Its steps over x, one token at a time.
  torch::Tensor steps(Attention& layer, const torch::Tensor& x,
                      AttentionState& state) const {
    std::vector<torch::Tensor> parts;
    for (int64_t t = 0; t < x.size(1); ++t) {
      parts.push_back(step(layer, x.narrow(1, t, 1), state));
    }
    return torch::cat(parts, 1);
  }
  torch::Tensor whole(Attention& layer, const torch::Tensor& x) const {
    return layer->forward(x, {}, {}, call()).out;
  }
  double tolerance() const { return GetParam().out_tolerance(); }
  torch::Tensor bias_;
};

TEST_P(StatefulLayer, EverySplitIntoTwoChunks) {
  torch::NoGradGuard no_grad;
  Attention layer(GetParam().options);
  const int64_t length = 21;
  const torch::Tensor x = torch::randn({2, length, 24});
  const torch::Tensor whole = this->whole(layer, x);
  for (int64_t split = 1; split < length; ++split) {
    const auto first =
        layer->forward(x.narrow(1, 0, split), {}, {}, with_state({}));
    const auto second = layer->forward(x.narrow(1, split, length - split), {},
                                       {}, with_state(first.state));
    EXPECT_LE(relative_error(torch::cat({first.out, second.out}, 1), whole),
              tolerance())
        << split;
  }
}

TEST_P(StatefulLayer, OneTokenAtATimeAfterEveryPrefill) {
  Attention layer(GetParam().options);
  const int64_t length = 19;
  const torch::Tensor x = torch::randn({2, length, 24});
  const torch::Tensor whole = this->whole(layer, x);
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
      parts.push_back(step(layer, x.narrow(1, t, 1), state));
    }
    const torch::Tensor joined = torch::cat(parts, 1);
    EXPECT_LE(relative_error(joined, whole), tolerance()) << prefill;
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
    if (std::holds_alternative<LinearState>(state)) {
      state = clone(state);  // decode works in place
    }
    return steps(layer, next, state);
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
  const torch::Tensor expected = step(layer, next, all);
  const torch::Tensor rows = torch::tensor({int64_t{2}, int64_t{0}});
  AttentionState some = select(first.state, rows);
  const torch::Tensor found = step(layer, next.index_select(0, rows), some);
  EXPECT_LE(relative_error(found, expected.index_select(0, rows)), 1e-6);
}

TEST_P(StatefulLayer, RightPaddedPromptsGoOnAtTheirOwnPlaces) {
  torch::NoGradGuard no_grad;
  Attention layer(GetParam().options);
  const std::vector<int64_t> lengths{4, 9, 1};
  const torch::Tensor x = torch::randn({3, 9, 24});
  const torch::Tensor next = torch::randn({3, 9, 24});
  AttentionCall call = with_state({});
  call.key_mask =
      torch::arange(9).unsqueeze(0) < torch::tensor(lengths).unsqueeze(1);
  const AttentionState prompt = layer->forward(x, {}, {}, call).state;
  // Steps alone, and a chunk between steps.
  AttentionState state = clone(prompt);
  const torch::Tensor stepped = steps(layer, next, state);
  state = clone(prompt);
  std::vector<torch::Tensor> parts{steps(layer, next.narrow(1, 0, 2), state)};
  auto chunk = layer->forward(next.narrow(1, 2, 4), {}, {}, with_state(state));
  parts.push_back(chunk.out);
  parts.push_back(steps(layer, next.narrow(1, 6, 3), chunk.state));
  const torch::Tensor chunked = torch::cat(parts, 1);
  for (int64_t row = 0; row < 3; ++row) {
    const int64_t length = lengths[static_cast<size_t>(row)];
    const torch::Tensor alone =
        whole(layer, torch::cat({x.narrow(0, row, 1).narrow(1, 0, length),
                                 next.narrow(0, row, 1)},
                                1))
            .narrow(1, length, 9);
    EXPECT_LE(relative_error(stepped.narrow(0, row, 1), alone), tolerance())
        << row;
    EXPECT_LE(relative_error(chunked.narrow(0, row, 1), alone), tolerance())
        << row;
  }
}

// A hole in a prompt keeps its position and stays hidden.
TEST_P(StatefulLayer, MaskedTokensStayHidden) {
  torch::NoGradGuard no_grad;
  Attention layer(GetParam().options);
  const torch::Tensor x = torch::randn({2, 20, 24});
  torch::Tensor mask = torch::ones({2, 20}, torch::kBool);
  mask[0][2] = mask[0][0] = mask[1][5] = mask[1][6] = false;
  AttentionCall padded = call();
  padded.key_mask = mask;
  const torch::Tensor expected = layer->forward(x, {}, {}, padded).out;
  padded = with_state({});
  padded.key_mask = mask.narrow(1, 0, 8);
  AttentionState state =
      layer->forward(x.narrow(1, 0, 8), {}, {}, padded).state;
  EXPECT_LE(relative_error(steps(layer, x.narrow(1, 8, 12), state),
                           expected.narrow(1, 8, 12)),
            tolerance());
}

TEST_P(StatefulLayer, RowsMayStartAnywhere) {
  torch::NoGradGuard no_grad;
  Attention layer(GetParam().options);
  const torch::Tensor x = torch::randn({2, 16, 24});
  AttentionCall placed = call();
  placed.q_start = placed.kv_start = torch::tensor({int64_t{3}, int64_t{11}});
  const torch::Tensor expected = layer->forward(x, {}, {}, placed).out;
  placed.return_state = true;
  auto first = layer->forward(x.narrow(1, 0, 7), {}, {}, placed);
  const torch::Tensor rest = steps(layer, x.narrow(1, 7, 9), first.state);
  EXPECT_LE(relative_error(torch::cat({first.out, rest}, 1), expected),
            tolerance());
}

// Behaviour 26: a state goes on, and is not cut back.
TEST_P(StatefulLayer, AnEarlierStartIsRefused) {
  torch::NoGradGuard no_grad;
  Attention layer(GetParam().options);
  const torch::Tensor x = torch::randn({2, 6, 24});
  AttentionCall call =
      with_state(layer->forward(x, {}, {}, with_state({})).state);
  call.q_start = call.kv_start = torch::tensor(int64_t{4});
  const std::string text = error_of([&] { layer->forward(x, {}, {}, call); });
  expect_contains(text, "start");
  expect_contains(text, "6");
}

TEST_P(StatefulLayer, OtherPlacesAndTypes) {
  torch::NoGradGuard no_grad;
  Attention layer(GetParam().options);
  layer->to(torch::kFloat64);
  bias_ = bias_.defined() ? bias_.to(torch::kFloat64) : bias_;
  const torch::Tensor x = torch::randn({2, 14, 24}, torch::kFloat64);
  auto first = layer->forward(x.narrow(1, 0, 5), {}, {}, with_state({}));
  AttentionState state = std::visit(
      [](const auto& held) -> AttentionState {
        if constexpr (std::is_same_v<std::decay_t<decltype(held)>,
                                     std::monostate>) {
          return held;
        } else {
          return held.to(torch::dtype(torch::kFloat64).device(torch::kCPU));
        }
      },
      first.state);
  EXPECT_LE(
      relative_error(
          torch::cat({first.out, steps(layer, x.narrow(1, 5, 9), state)}, 1),
          whole(layer, x)),
      1e-7);
}

TEST_P(StatefulLayer, GradientsFlowThroughTheState) {
  Attention layer(GetParam().options);
  const torch::Tensor x = torch::randn({1, 10, 24});
  torch::Tensor whole_x = x.clone().requires_grad_();
  whole(layer, whole_x).square().sum().backward();
  torch::Tensor split_x = x.clone().requires_grad_();
  const auto first =
      layer->forward(split_x.narrow(1, 0, 4), {}, {}, with_state({}));
  const auto second =
      layer->forward(split_x.narrow(1, 4, 4), {}, {}, with_state(first.state));
  const auto third =
      layer->forward(split_x.narrow(1, 8, 2), {}, {}, with_state(second.state));
  (first.out.square().sum() + second.out.square().sum() +
   third.out.square().sum())
      .backward();
  EXPECT_LE(relative_error(split_x.grad(), whole_x.grad()),
            GetParam().grad_tolerance());
}

INSTANTIATE_TEST_SUITE_P(Layers, StatefulLayer,
                         ::testing::ValuesIn(stateful_cases()),
                         [](const auto& info) { return info.param.name; });

TEST(KvCache, AppendCopiesLittleAndNeverChangesWhatOthersSee) {
  KvCache cache;
  int64_t moved = 0;
  const void* place = nullptr;
  for (int64_t t = 0; t < 1000; ++t) {
    const torch::Tensor token =
        torch::full({1, 1, 2, 3}, static_cast<float>(t));
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

// Behaviour 27: far past its window, with bounded memory, also for rows at
// different places and for what copies see.
TEST(BoundedCache, DecodesFarPastItsWindow) {
  torch::NoGradGuard no_grad;
  torch::manual_seed(12);
  const int64_t length = 400;
  for (const int64_t global_tokens : {0, 3}) {
    AttentionOptions options = options_of("longformer", true);
    options.window = 4;
    options.dilation = 2;
    options.global_tokens = global_tokens;
    Attention layer(options);
    const torch::Tensor x = torch::randn({2, length, 24});
    const torch::Tensor expected = layer->forward(x).out;
    AttentionState state;
    std::vector<torch::Tensor> parts;
    int64_t most = 0, most_bytes = 0;
    for (int64_t t = 0; t < length; ++t) {
      parts.push_back(layer->decode_step(x.narrow(1, t, 1), state));
      const auto& cache = std::get<KvCache>(state);
      most = std::max(most, cache.size());
      most_bytes = std::max(
          most_bytes, static_cast<int64_t>(cache.keys.storage().nbytes()));
    }
    EXPECT_LE(relative_error(torch::cat(parts, 1), expected), 2e-6);
    const auto& cache = std::get<KvCache>(state);
    // A ring of the window; first tokens beside twice as much.
    EXPECT_LE(most, global_tokens == 0 ? 9 : 3 + 2 * 9);
    EXPECT_LE(most_bytes, 2 * 64 * 24 * 4);  // the least buffer, not the length
    EXPECT_EQ(cache.is_ring, global_tokens == 0);
    EXPECT_TRUE((cache.position == length).all().item<bool>());
  }
}

TEST(BoundedCache, CopiesOfARingStayAsTheyWere) {
  torch::NoGradGuard no_grad;
  torch::manual_seed(12);
  AttentionOptions options = options_of("softmax", true);
  options.window = 3;
  Attention layer(options);
  const torch::Tensor x = torch::randn({1, 30, 24});
  AttentionState state = layer->forward(x, {}, {}, with_state({})).state;
  ASSERT_TRUE(std::get<KvCache>(state).is_ring);
  layer->decode_step(x.narrow(1, 0, 1), state);
  const AttentionState copy = state;
  const torch::Tensor next = torch::randn({1, 1, 24});
  const torch::Tensor one = layer->decode_step(next, state);
  for (int64_t t = 0; t < 6; ++t) {
    layer->decode_step(x.narrow(1, t, 1), state);
  }
  AttentionState again = copy;
  EXPECT_TRUE(torch::equal(layer->decode_step(next, again), one));
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
  options.kind = "performer";
  Attention performer(options);
  const auto of_performer = performer->forward(x, {}, {}, with_state({})).state;
  std::string text =
      error_of([&] { linear->forward(x, {}, {}, with_state(of_performer)); });
  expect_contains(text, "performer");
  expect_contains(text, "linear");
  text =
      error_of([&] { performer->forward(x, {}, {}, with_state(of_linear)); });
  expect_contains(text, "performer");
  expect_contains(text, "linear");
  const auto step_with = [&](Attention& layer, AttentionState other) {
    const std::string message =
        error_of([&] { layer->decode_step(x.narrow(1, 0, 1), other); });
    EXPECT_FALSE(std::holds_alternative<std::monostate>(other));
    return message;
  };
  expect_contains(step_with(linear, of_softmax), "expected a LinearState");
  expect_contains(step_with(performer, of_softmax), "expected a LinearState");
  expect_contains(step_with(softmax, of_linear), "expected a KvCache");
  expect_contains(step_with(performer, of_linear), "performer");
  expect_contains(step_with(linear, of_performer), "performer");

  options.kind = "softmax";
  options.window = 4;
  Attention four(options);
  options.window = 6;
  Attention six(options);
  AttentionState of_four = four->forward(x, {}, {}, with_state({})).state;
  expect_contains(
      error_of([&] { six->forward(x, {}, {}, with_state(of_four)); }),
      "the state keeps the last 5 tokens, kind \"softmax\" of these options "
      "needs the last 7 tokens");
  expect_contains(
      error_of([&] { softmax->decode_step(x.narrow(1, 0, 1), of_four); }),
      "needs all tokens");
  options.window = 0;
  options.num_kv_heads = 1;
  expect_contains(error_of([&] {
                    Attention(options)->forward(x, {}, {},
                                                with_state(of_softmax));
                  }),
                  "the state holds keys [1, 3, 2, 4]");
  const torch::Tensor two = torch::randn({2, 3, 8});
  expect_contains(
      error_of([&] { softmax->forward(two, {}, {}, with_state(of_softmax)); }),
      "expected [2, slots, 2, 4]");

  AttentionOptions global = options_of("longformer", true);
  Attention longformer(global);
  AttentionCall masked = with_state({});
  masked.global_mask = torch::ones({1, 3}, torch::kBool);
  expect_contains(error_of([&] {
                    longformer->forward(torch::randn({1, 3, 24}), {}, {},
                                        masked);
                  }),
                  "global_mask with a state");
  AttentionCall packed = with_state({});
  packed.cu_seqlens_q = torch::tensor({0, 3}, torch::kInt32);
  expect_contains(error_of([&] { softmax->forward(x, {}, {}, packed); }),
                  "keeps no state of packed sequences");

  AttentionCall call = with_state(of_softmax);
  call.q_start = torch::tensor(int64_t{7});
  expect_contains(error_of([&] { softmax->forward(x, {}, {}, call); }),
                  "q_start contradicts the state, which continues at 3");
}

}  // namespace
}  // namespace cosformer
