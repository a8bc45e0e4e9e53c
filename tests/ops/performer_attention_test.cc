// Performer through the C++ functions: against its definition, by steps, with a
// state on disk, in one graph with a trained projection.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <limits>
#include <string>

#include "cosformer/ops.h"
#include "tests/ops/testing.h"

namespace cosformer {
namespace {

using testing::relative;
using testing::throws_with;

struct Call {
  at::Tensor q, k, v, w;
};
Call make_call(int64_t length, at::ScalarType dtype = at::kFloat) {
  at::manual_seed(5);
  const at::TensorOptions options = at::TensorOptions().dtype(dtype);
  return {at::randn({2, length, 4, 8}, options),
          at::randn({2, length, 2, 8}, options),
          at::randn({2, length, 2, 8}, options),
          performer_projection(16, 8, true, 9).to(dtype)};
}

// Every weight in double.
at::Tensor definition(const Call& c) {
  const auto logs = [&](const at::Tensor& x) {
    const at::Tensor wide = x.to(at::kDouble) * std::pow(8.0, -0.25);
    return at::einsum("bshd,fd->bhsf", {wide, c.w.to(at::kDouble)}) -
           wide.square().sum(-1).permute({0, 2, 1}).unsqueeze(-1) / 2;
  };
  const at::Tensor k = c.k.repeat_interleave(2, 2);
  const at::Tensor v = c.v.to(at::kDouble).repeat_interleave(2, 2);
  const at::Tensor scores =
      (logs(c.q).unsqueeze(3) + logs(k).unsqueeze(2)).logsumexp(-1);
  const at::Tensor later =
      at::ones({c.q.size(1), c.q.size(1)}, at::kBool).triu(1);
  const double hidden = -std::numeric_limits<double>::infinity();
  return at::einsum("bhij,bjhd->bihd",
                    {scores.masked_fill(later, hidden).softmax(-1), v});
}

PerformerAttentionArgs causal() {
  PerformerAttentionArgs args;
  args.is_causal = true;
  args.return_state = true;
  return args;
}

TEST(PerformerAttention, MatchesItsDefinition) {
  const Call c = make_call(40);
  const auto [out, state] = performer_attention(c.q, c.k, c.v, c.w, causal());
  EXPECT_LE(relative(out, definition(c)), 3e-6);
  ASSERT_TRUE(state.has_value());
  EXPECT_EQ(state->kind, "performer");
  EXPECT_EQ(state->log_scale.sizes(), state->k_sum.sizes());
}

TEST(PerformerAttention, StepsFromASavedStateGoOnIdentically) {
  const Call c = make_call(40);
  const at::Tensor want = definition(c);
  const auto part = [&](const at::Tensor& x, int64_t from, int64_t to) {
    return x.slice(1, from, to);
  };
  const auto [head, state] = performer_attention(
      part(c.q, 0, 30), part(c.k, 0, 30), part(c.v, 0, 30), c.w, causal());
  const std::string path =
      ::testing::TempDir() + "performer_state." + std::to_string(::getpid());
  state->save(path);
  LinearState loaded = LinearState::load(path);
  std::remove(path.c_str());
  EXPECT_TRUE(loaded.log_scale.equal(state->log_scale));
  EXPECT_EQ(loaded.kind, "performer");
  LinearState copy = loaded.clone();
  for (int64_t t = 30; t < 40; ++t) {
    const at::Tensor out = performer_attention_decode_step_(
        part(c.q, t, t + 1), part(c.k, t, t + 1), part(c.v, t, t + 1), c.w,
        loaded);
    EXPECT_LE(relative(out, part(want, t, t + 1)), 1e-5) << t;
  }
  EXPECT_FALSE(copy.kv_state.equal(loaded.kv_state));
  const LinearState rows = copy.select(at::tensor({1}, at::kLong));
  EXPECT_TRUE(rows.log_scale.equal(copy.log_scale.slice(0, 1, 2)));
}

TEST(PerformerAttention, TheProjectionHasAGradient) {
  Call c = make_call(20, at::kDouble);
  c.w.requires_grad_();
  const at::Tensor out =
      std::get<0>(performer_attention(c.q, c.k, c.v, c.w, causal()));
  const at::Tensor loss = (out * out.detach().cos()).sum();
  const at::Tensor found = torch::autograd::grad({loss}, {c.w})[0];
  const at::Tensor direction = at::randn_like(c.w);
  const auto at_step = [&](double step) {
    const at::Tensor moved = std::get<0>(performer_attention(
        c.q, c.k, c.v, c.w.detach() + step * direction, causal()));
    return (moved * out.detach().cos()).sum().item<double>();
  };
  const double want = (at_step(1e-5) - at_step(-1e-5)) / 2e-5;
  EXPECT_NEAR((found * direction).sum().item<double>(), want,
              1e-6 * std::abs(want));
}

TEST(PerformerAttention, TheAttentionMatrixTimesValuesIsTheOutput) {
  const Call c = make_call(20);
  PerformerAttentionArgs args;
  args.is_causal = true;
  const at::Tensor weights = attention_matrix(c.q, c.k, c.w, args);
  EXPECT_TRUE((weights >= 0).all().item<bool>());
  const at::Tensor product =
      at::einsum("bhij,bjhd->bihd", {weights, c.v.repeat_interleave(2, 2)});
  EXPECT_LE(relative(product, std::get<0>(performer_attention(c.q, c.k, c.v,
                                                              c.w, args))),
            3e-6);
}

TEST(PerformerAttention, ErrorsNameBothKinds) {
  const Call c = make_call(4);
  PerformerAttentionArgs args = causal();
  LinearAttentionArgs linear;
  linear.is_causal = linear.return_state = true;
  args.state = std::get<1>(linear_attention(c.q, c.k, c.v, linear));
  EXPECT_TRUE(throws_with(
      [&] { performer_attention(c.q, c.k, c.v, c.w, args); },
      "the state was made with kind 'linear', feature_map 'relu'; the call has "
      "kind 'performer'"));
  linear.state = std::get<1>(performer_attention(c.q, c.k, c.v, c.w, causal()));
  EXPECT_TRUE(throws_with([&] { linear_attention(c.q, c.k, c.v, linear); },
                          "the state was made with kind 'performer'"));
  LinearState wrong = *linear.state;
  wrong.log_scale = at::Tensor();
  EXPECT_TRUE(throws_with([&] { wrong.save("nowhere"); },
                          "a state of kind 'performer' has no log_scale"));
}

}  // namespace
}  // namespace cosformer
