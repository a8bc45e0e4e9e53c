// The C++ functions against the double reference, and the portable path against
// the kernels.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "cosformer/kernels.h"
#include "cosformer/ops.h"
#include "ops/decode_step.h"
#include "ops/linear_call.h"
#include "ops/views.h"
#include "tests/ops/testing.h"

namespace cosformer {
namespace {

using ops::OptionalTensor;
using testing::random_tensors;
using testing::relative;
using testing::Tensors;
using testing::throws_with;

// What the reference kernel gives in double for a plain causal cosine call.
at::Tensor reference_out(const Tensors& t, int64_t reweight_len) {
  const at::Tensor q = t.q.to(at::kDouble), k = t.k.to(at::kDouble),
                   v = t.v.to(at::kDouble);
  at::Tensor out = at::full({q.size(0), q.size(1), q.size(2), v.size(3)},
                            std::nan(""), at::kDouble);
  LinearAttentionOptions options;
  options.is_causal = true;
  options.reweight_len = reweight_len;
  LinearAttentionInputs inputs;
  inputs.q = ops::view(q);
  inputs.k = ops::view(k);
  inputs.v = ops::view(v);
  const Status status = reference::linear_attention_forward(
      options, inputs, ops::mutable_view(out), nullptr, {});
  EXPECT_TRUE(status.ok()) << status.message();
  return out;
}

TEST(LinearAttention, EqualsTheReference) {
  const Tensors t = random_tensors(2, 130, 130, at::kFloat);
  LinearAttentionArgs args;
  args.is_causal = true;
  args.reweight_len = 200;
  const auto [out, state] = linear_attention(t.q, t.k, t.v, args);
  EXPECT_FALSE(state.has_value());
  EXPECT_EQ(out.scalar_type(), at::kFloat);
  EXPECT_LT(relative(out, reference_out(t, 200)), 3e-6);
  const auto [same, none] = cosformer_attention(t.q, t.k, t.v, args);
  EXPECT_TRUE(same.equal(out));
}

TEST(LinearAttention, DenominatorsAreReturnedWithoutGradient) {
  Tensors t = random_tensors(1, 9, 9, at::kFloat);
  t.q.requires_grad_();
  LinearAttentionArgs args;
  args.feature_map = "elu1";
  const auto [out, state, denominator] =
      linear_attention_with_denominator(t.q, t.k, t.v, args);
  EXPECT_TRUE(out.requires_grad());
  EXPECT_FALSE(denominator.requires_grad());
  EXPECT_EQ(denominator.sizes(), at::IntArrayRef({1, 9, 4}));
  EXPECT_GT(denominator.min().item<float>(), 0);
}

TEST(LinearAttention, GradientsFlowThroughTheState) {
  const Tensors t = random_tensors(1, 12, 12, at::kDouble);
  LinearAttentionArgs args;
  args.is_causal = true;
  args.reweight_len = 40;
  std::vector<at::Tensor> gradients;
  for (const int64_t split : {0, 5}) {
    const at::Tensor k = t.k.clone().requires_grad_();
    args.state.reset();
    args.return_state = true;
    auto [first, state] =
        linear_attention(t.q.slice(1, 0, split), k.slice(1, 0, split),
                         t.v.slice(1, 0, split), args);
    args.state = state;
    auto [second, end] = linear_attention(
        t.q.slice(1, split), k.slice(1, split), t.v.slice(1, split), args);
    EXPECT_EQ(end->position.item<int64_t>(), 12);
    at::cat({first, second}, 1).square().sum().backward();
    gradients.push_back(k.grad());
  }
  EXPECT_LT(relative(gradients[1], gradients[0]), 1e-12);
}

// The same arguments for the kernels and for what other devices run.
class PortableTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const std::string name = GetParam();
    if (name == "masked") {
      key_mask_ = at::rand({2, 70}) > 0.3;
      query_mask_ = at::rand({2, 70}) > 0.3;
      feature_map_ = "elu1";
    } else if (name == "state") {
      kv_state_ = at::rand({2, 2, 16, 5}, at::kDouble);
      k_sum_ = at::rand({2, 2, 16}, at::kDouble) + 1;
      state_start_ = at::zeros({2}, at::kLong);
      state_position_ = at::arange(2, at::kLong) + 3;
      reweight_len_ = 100;
    } else if (name == "packed") {
      cu_seqlens_ = at::tensor({0, 20, 20, 70}, at::kInt);
      reweight_len_ = 100;
    } else if (name == "rotary") {
      rotary_base_ = 50.0;
      feature_map_ = "elu1";
    }
  }

  ops::LinearCall call(const Tensors& t) const {
    return {t.q,
            t.k,
            t.v,
            none_,
            none_,
            key_mask_,
            query_mask_,
            cu_seqlens_,
            none_,
            kv_state_,
            k_sum_,
            state_start_,
            state_position_,
            feature_map_,
            reweight_len_,
            true,
            "sum",
            1e-6,
            rotary_base_,
            false};
  }
  ops::StateSpec spec() const {
    return {"linear", feature_map_, reweight_len_.value_or(0),
            rotary_base_.value_or(0), false};
  }

  OptionalTensor none_, key_mask_, query_mask_, cu_seqlens_, kv_state_, k_sum_,
      state_start_, state_position_;
  std::string feature_map_ = "relu";
  std::optional<int64_t> reweight_len_;
  std::optional<double> rotary_base_;
};

TEST_P(PortableTest, ForwardAndBackwardEqualTheKernels) {
  const Tensors t = random_tensors(cu_seqlens_ ? 1 : 2, 70, 70, at::kDouble);
  const ops::ForwardOutputs expected =
      ops::forward_cpu(call(t), spec(), {true, true});
  const ops::ForwardOutputs found =
      ops::forward_portable(call(t), spec(), {true, true});
  const auto [out, denominator, kv_state, k_sum, start, position] = found;
  EXPECT_LT(relative(out, std::get<0>(expected)), 1e-12);
  EXPECT_LT(relative(denominator, std::get<1>(expected)), 1e-12);
  EXPECT_LT(relative(kv_state, std::get<2>(expected)), 1e-12);
  EXPECT_LT(relative(k_sum, std::get<3>(expected)), 1e-12);
  EXPECT_TRUE(start.equal(std::get<4>(expected)));
  EXPECT_TRUE(position.equal(std::get<5>(expected)));

  const OptionalTensor d_out = at::randn_like(out),
                       d_kv = at::randn_like(kv_state),
                       d_k_sum = at::randn_like(k_sum);
  const bool state = kv_state_.has_value();
  const ops::LinearGradients gradients{
      d_out, d_kv, d_k_sum, out, denominator, {true, true, true, state, state}};
  const ops::BackwardOutputs a = ops::backward_cpu(gradients, call(t));
  const ops::BackwardOutputs b = ops::backward_portable(gradients, call(t));
  EXPECT_LT(relative(std::get<0>(b), std::get<0>(a)), 1e-10);
  EXPECT_LT(relative(std::get<1>(b), std::get<1>(a)), 1e-10);
  EXPECT_LT(relative(std::get<2>(b), std::get<2>(a)), 1e-10);
  EXPECT_LT(relative(std::get<3>(b), std::get<3>(a)), 1e-10);
  EXPECT_LT(relative(std::get<4>(b), std::get<4>(a)), 1e-10);
}

using PortableDecodeTest = PortableTest;
TEST_P(PortableDecodeTest, StepEqualsTheKernels) {
  const Tensors t = random_tensors(2, 1, 1, at::kDouble);
  // The second row's key is masked: its position stays.
  const OptionalTensor key_mask = at::tensor({1, 0}).view({2, 1}) > 0;
  const at::Tensor after = *state_position_ + at::tensor({1, 0}, at::kLong);
  std::vector<at::Tensor> results;
  for (const bool portable : {false, true}) {
    at::Tensor kv = kv_state_->clone(), sum = k_sum_->clone(),
               position = state_position_->clone();
    const ops::DecodeCall step{t.q,   t.k,          t.v,           kv,
                               sum,   position,     *state_start_, key_mask,
                               none_, feature_map_, reweight_len_, "sum",
                               1e-6,  rotary_base_, false};
    const at::Tensor out = portable ? ops::decode_step_portable(step, spec())
                                    : ops::decode_step_cpu(step, spec());
    EXPECT_TRUE(position.equal(after));
    results.insert(results.end(), {out, kv, sum});
  }
  for (int i = 0; i < 3; ++i)
    EXPECT_LT(relative(results[3 + i], results[i]), 1e-12);
}

TEST(Portable, RowsThatSeeNoKeyAreZeroWhateverTheyHold) {
  Tensors t = random_tensors(2, 6, 6, at::kFloat);
  t.q.select(1, 0).fill_(std::nan(""));
  const OptionalTensor none,
      key_mask = (at::arange(6) > 1).expand({2, 6}).contiguous();
  // The state of a call whose keys were all masked holds none either.
  const OptionalTensor kv_state = at::zeros({2, 2, 8, 5}),
                       k_sum = at::zeros({2, 2, 8}),
                       place = at::zeros({2}, at::kLong);
  const ops::StateSpec spec{"linear", "relu", 0, 0, false};
  for (const bool with_state : {false, true}) {
    const OptionalTensor& at = with_state ? place : none;
    const ops::LinearCall call{t.q,
                               t.k,
                               t.v,
                               none,
                               none,
                               key_mask,
                               none,
                               none,
                               none,
                               with_state ? kv_state : none,
                               with_state ? k_sum : none,
                               at,
                               at,
                               "relu",
                               std::nullopt,
                               true,
                               "sum",
                               1e-6,
                               std::nullopt,
                               false};
    const at::Tensor found =
        std::get<0>(ops::forward_portable(call, spec, {false, false}));
    EXPECT_TRUE(found.slice(1, 0, 2).eq(0).all().item<bool>());
    EXPECT_LT(relative(found, std::get<0>(ops::forward_cpu(call, spec, {}))),
              1e-5);
  }
}

INSTANTIATE_TEST_SUITE_P(Options, PortableTest,
                         ::testing::Values("plain", "masked", "state", "packed",
                                           "rotary"));

INSTANTIATE_TEST_SUITE_P(Options, PortableDecodeTest,
                         ::testing::Values("state"));

TEST(Errors, OfThePortablePathCoverValues) {
  const Tensors t = random_tensors(2, 70, 70, at::kFloat);
  const OptionalTensor none;
  const ops::LinearCall far{t.q,  t.k,  t.v,   none, none,         none, none,
                            none, none, none,  none, none,         none, "relu",
                            10,   true, "sum", 1e-6, std::nullopt, false};
  EXPECT_TRUE(
      throws_with([&] { ops::forward_portable(far, {}, {false, false}); },
                  "69 apart, but reweight_len is 10"));
}

TEST(Errors, SayWhatWasFoundAndExpected) {
  const Tensors t = random_tensors(2, 5, 6, at::kFloat);
  LinearAttentionArgs args;
  args.key_mask = at::ones({2, 5}, at::kBool);
  EXPECT_TRUE(
      throws_with([&] { linear_attention(t.q, t.k, t.v, args); },
                  "key_mask has shape [2, 5], expected [batch, kv_len] = "
                  "[2, 6]"));
  args = {};
  EXPECT_TRUE(throws_with([&] { cosformer_attention(t.q, t.k, t.v, args); },
                          "reweight_len is missing"));
  args.reweight_len = 9;
  args.feature_map = "elu1";
  EXPECT_TRUE(throws_with([&] { cosformer_attention(t.q, t.k, t.v, args); },
                          "feature_map is 'elu1', expected 'relu'"));
  args = {};
  args.return_state = true;
  LinearState state = *std::get<1>(linear_attention(t.q, t.k, t.v, args));
  EXPECT_TRUE(throws_with(
      [&] { linear_attention_decode_step_(t.q, t.k, t.v, state, args); },
      "starts, packing, state and return_state must be unset"));
  EXPECT_TRUE(throws_with([&] { state.select(at::ones({2})); },
                          "rows are Float with 1 dimensions"));
  EXPECT_TRUE(throws_with([&] { state.to(at::kHalf); },
                          "dtype is Half, expected float32 or float64"));
}

}  // namespace
}  // namespace cosformer
