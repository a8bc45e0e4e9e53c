// The C++ functions of the softmax kinds against the double reference, and the
// portable path against the kernels.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "cosformer/kernels.h"
#include "cosformer/ops.h"
#include "ops/softmax_call.h"
#include "ops/softmax_checks.h"
#include "ops/softmax_inputs.h"
#include "ops/views.h"
#include "tests/ops/testing.h"

namespace cosformer {
namespace {

using ops::OptionalTensor;
using testing::random_tensors;
using testing::relative;
using testing::Tensors;
using testing::throws_with;

// The arguments of one kind of call, for every implementation.
class Arguments {
 public:
  explicit Arguments(const std::string& name) {
    at::manual_seed(2);
    if (name == "masked") {
      key_mask_ = at::rand({2, 70}) > 0.3;
      query_mask_ = at::rand({2, 70}) > 0.3;
    } else if (name == "packed") {
      cu_seqlens_ = at::tensor({0, 20, 20, 70}, at::kInt);
      is_causal_ = true;
    } else if (name == "window") {
      window_left_ = 4;
      window_right_ = 2;
      dilation_ = 3;
      global_mask_ = at::rand({2, 70}) > 0.9;
    } else if (name == "blocks") {
      block_mask_ = at::rand({4, 9, 9}) > 0.5;
      block_size_ = 8;
    } else if (name == "bias") {
      bias_ = at::randn({4, 21}, at::kDouble);
      is_causal_ = true;
      scale_ = 1.0;
    } else if (name == "dropout") {
      seed_ = at::scalar_tensor(5, at::kLong);
      dropout_p_ = 0.3;
    }
  }

  int64_t batch() const { return cu_seqlens_ ? 1 : 2; }
  bool has_bias() const { return bias_.has_value(); }

  ops::SoftmaxCall call(const Tensors& t) const {
    return {t.q,          t.k,           t.v,         none_,       none_,
            key_mask_,    query_mask_,   cu_seqlens_, none_,       global_mask_,
            block_mask_,  bias_,         seed_,       is_causal_,  scale_,
            window_left_, window_right_, dilation_,   block_size_, dropout_p_};
  }

 private:
  OptionalTensor none_, key_mask_, query_mask_, cu_seqlens_, global_mask_,
      block_mask_, bias_, seed_;
  bool is_causal_ = false;
  std::optional<double> scale_;
  std::optional<int64_t> window_left_, window_right_, block_size_;
  int64_t dilation_ = 1;
  double dropout_p_ = 0;
};

class SoftmaxPaths : public ::testing::TestWithParam<const char*> {};

TEST_P(SoftmaxPaths, ForwardAndBackwardEqualTheReference) {
  const Arguments arguments(GetParam());
  const Tensors t = random_tensors(arguments.batch(), 70, 70, at::kDouble);
  const ops::SoftmaxCall call = arguments.call(t);
  const ops::SoftmaxInputs inputs(call);
  const SoftmaxAttentionOptions options = ops::kernel_options(call);
  const at::Tensor out = at::full({t.q.size(0), 70, 4, 5}, NAN, at::kDouble);
  const at::Tensor d_out = at::randn_like(out);
  ASSERT_TRUE(reference::softmax_attention_forward(
                  options, inputs.inputs(), ops::mutable_view(out), nullptr)
                  .ok());
  const at::Tensor dq = at::full_like(t.q, NAN), dk = at::full_like(t.k, NAN),
                   dv = at::full_like(t.v, NAN),
                   d_bias = at::full({4, 21}, NAN, at::kDouble);
  ASSERT_TRUE(reference::softmax_attention_backward(
                  options, inputs.inputs(), ops::view(d_out),
                  ops::mutable_view(dq), ops::mutable_view(dk),
                  ops::mutable_view(dv),
                  arguments.has_bias() ? d_bias.mutable_data_ptr() : nullptr)
                  .ok());
  for (const bool portable : {false, true}) {
    const auto [found, log_sum_exp] = portable
                                          ? ops::softmax_portable(call, true)
                                          : ops::softmax_cpu(call, true);
    EXPECT_LT(relative(found, out), 1e-12) << portable;
    const ops::SoftmaxGradients gradients{
        d_out, found, log_sum_exp, {true, true, true, arguments.has_bias()}};
    const auto [fq, fk, fv, f_bias] =
        portable ? ops::softmax_backward_portable(gradients, call)
                 : ops::softmax_backward_cpu(gradients, call);
    EXPECT_LT(relative(fq, dq), 1e-11) << portable;
    EXPECT_LT(relative(fk, dk), 1e-11) << portable;
    EXPECT_LT(relative(fv, dv), 1e-11) << portable;
    if (arguments.has_bias()) {
      EXPECT_LT(relative(f_bias, d_bias), 1e-11) << portable;
    } else {
      EXPECT_EQ(f_bias.numel(), 0) << portable;
    }
  }
}

// 0 x NaN: what a row sends back reaches the keys that it sees, and no others.
TEST(SoftmaxAttention, NanGradientsReachWhatTheirRowSees) {
  const Tensors t = random_tensors(1, 70, 70, at::kDouble);
  const OptionalTensor none;
  const ops::SoftmaxCall call{t.q,  t.k,  t.v,  none, none,         none, none,
                              none, none, none, none, none,         none, true,
                              0.5,  3,    0,    1,    std::nullopt, 0.0};
  const auto [out, log_sum_exp] = ops::softmax_cpu(call, true);
  at::Tensor d_out = at::ones_like(out);
  const auto gradients = [&](bool portable) {
    const ops::SoftmaxGradients g{
        d_out, out, log_sum_exp, {true, true, true, false}};
    return portable ? ops::softmax_backward_portable(g, call)
                    : ops::softmax_backward_cpu(g, call);
  };
  const auto clean = gradients(false);
  d_out.select(1, 20).fill_(NAN);
  for (const bool portable : {false, true}) {
    const auto [dq, dk, dv, d_bias] = gradients(portable);
    for (int64_t p = 0; p < 70; ++p) {
      const bool seen = p >= 17 && p <= 20;
      EXPECT_EQ(dq.select(1, p).isnan().any().item<bool>(), p == 20) << p;
      EXPECT_EQ(dk.select(1, p).isnan().any().item<bool>(), seen) << p;
      EXPECT_EQ(dv.select(1, p).isnan().any().item<bool>(), seen) << p;
    }
    EXPECT_LT(relative(dk.slice(1, 21), std::get<1>(clean).slice(1, 21)),
              1e-12);
  }
}

INSTANTIATE_TEST_SUITE_P(Calls, SoftmaxPaths,
                         ::testing::Values("plain", "masked", "packed",
                                           "window", "blocks", "bias",
                                           "dropout"));

TEST(SoftmaxAttention, DecodingStepsOfBothPathsAgree) {
  const Tensors t = random_tensors(2, 1, 1, at::kDouble);
  const OptionalTensor none, start = at::tensor({0, 2}, at::kLong),
                             mask = at::rand({2, 6}) > 0.3;
  std::vector<at::Tensor> results;
  for (const bool portable : {false, true}) {
    at::manual_seed(3);
    at::Tensor keys = at::randn({2, 6, 2, 8}, at::kDouble),
               values = at::randn({2, 6, 2, 5}, at::kDouble),
               position = at::tensor({4, 13}, at::kLong);
    const ops::SoftmaxDecodeCall call{
        t.q,   t.k,  t.v,          keys,         values, position,
        start, mask, none,         none,         none,   none,
        true,  0.7,  std::nullopt, std::nullopt, 1,      std::nullopt};
    results.push_back(portable ? ops::softmax_decode_portable(call)
                               : ops::softmax_decode_cpu(call));
    EXPECT_TRUE(position.equal(at::tensor({5, 14}, at::kLong)));
    EXPECT_TRUE(keys[1][5].equal(t.k[1][0]));
    results.insert(results.end(), {keys, values});
  }
  for (size_t i = 0; i < 3; ++i)
    EXPECT_LT(relative(results[3 + i], results[i]), 1e-12);
}

TEST(SoftmaxAttention, OptionsReachTheOperator) {
  const Tensors t = random_tensors(2, 9, 12, at::kDouble);
  SoftmaxAttentionArgs args;
  const at::Tensor plain = softmax_attention(t.q, t.k, t.v, args);
  EXPECT_EQ(plain.sizes(), at::IntArrayRef({2, 9, 4, 5}));
  // Each changes something; wrong ones are errors that name it.
  args.scale = 2.0;
  EXPECT_GT(relative(softmax_attention(t.q, t.k, t.v, args), plain), 1e-3);
  args = {};
  args.window = {1, 2};
  args.dilation = 2;
  const at::Tensor window = softmax_attention(t.q, t.k, t.v, args);
  args.is_causal = true;
  args.q_start = at::scalar_tensor(3, at::kLong);
  EXPECT_GT(relative(softmax_attention(t.q, t.k, t.v, args), window), 1e-3);
  args = {};
  args.dropout_p = 0.5;
  EXPECT_TRUE(throws_with([&] { softmax_attention(t.q, t.k, t.v, args); },
                          "dropout_p is 0.5 without dropout_seed"));
  args.dropout_seed = 3;
  EXPECT_GT(relative(softmax_attention(t.q, t.k, t.v, args), plain), 1e-3);
  args = {};
  args.block_mask = at::ones({1, 1, 1}, at::kBool);
  EXPECT_TRUE(throws_with([&] { softmax_attention(t.q, t.k, t.v, args); },
                          "block_mask is given without block_size"));
  args.block_size = 12;
  EXPECT_LT(relative(softmax_attention(t.q, t.k, t.v, args), plain), 1e-12);
  at::Tensor cache = at::zeros({2, 3, 2, 8}), position;
  args = {};
  args.is_causal = true;
  EXPECT_TRUE(throws_with(
      [&] {
        softmax_attention_decode_step_(t.q, t.k, t.v, cache, cache, position,
                                       std::nullopt, std::nullopt, false, args);
      },
      "is_causal and dropout_p must be unset"));
}

TEST(SoftmaxKinds, LinformerIsAttentionOverShortenedKeys) {
  const Tensors t = random_tensors(2, 9, 12, at::kDouble);
  const at::Tensor e = at::randn({20, 3}, at::kDouble),
                   f = at::randn({20, 3}, at::kDouble);
  LinformerAttentionArgs args;
  args.scale = 0.5;
  args.key_mask = at::rand({2, 12}) > 0.3;
  const auto shortened = [&](const at::Tensor& x, const at::Tensor& p) {
    const at::Tensor real =
        args.key_mask->to(at::kDouble).unsqueeze(-1).unsqueeze(-1);
    return at::einsum("jp,bjhd->bphd", {p.slice(0, 0, 12), x * real});
  };
  SoftmaxAttentionArgs plain;
  plain.scale = 0.5;
  const at::Tensor found = linformer_attention(t.q, t.k, t.v, e, f, args);
  EXPECT_LT(relative(found, softmax_attention(t.q, shortened(t.k, e),
                                              shortened(t.v, f), plain)),
            1e-12);
  EXPECT_TRUE(throws_with(
      [&] { linformer_attention(t.q, t.k, t.v, e.slice(0, 0, 8), f, args); },
      "key has length 12, key_len_proj has max_len 8"));
}

TEST(SoftmaxKinds, LongformerHasLocalAndGlobalRows) {
  const Tensors t = random_tensors(2, 12, 12, at::kDouble);
  const Tensors g{t.q * 0.5, t.k + 1, t.v - 1};
  SoftmaxAttentionArgs args;
  args.window = {2, 2};
  args.global_mask = at::arange(12).expand({2, 12}) < 2;
  const at::Tensor local = softmax_attention(t.q, t.k, t.v, args);
  for (const bool is_causal : {false, true}) {
    args.is_causal = is_causal;
    SoftmaxAttentionArgs all;
    all.is_causal = is_causal;
    const at::Tensor found =
        longformer_attention(t.q, t.k, t.v, g.q, g.k, g.v, args);
    const at::Tensor of_globals = softmax_attention(g.q, g.k, g.v, all);
    EXPECT_LT(relative(found.slice(1, 0, 2), of_globals.slice(1, 0, 2)), 1e-12);
    EXPECT_LT(relative(found.slice(1, 2),
                       softmax_attention(t.q, t.k, t.v, args).slice(1, 2)),
              1e-12);
  }
  args.global_mask.reset();
  EXPECT_TRUE(throws_with(
      [&] { longformer_attention(t.q, t.k, t.v, g.q, g.k, g.v, args); },
      "global_mask is missing"));
}

TEST(SoftmaxKinds, BigBirdIsAttentionByItsMask) {
  const Tensors t = random_tensors(2, 45, 45, at::kDouble);
  BigBirdAttentionArgs args;
  args.block_size = 4;
  args.num_random_blocks = 2;
  args.global_blocks = {1, 2};
  args.seed = 7;
  const at::Tensor mask = bigbird_block_mask(4, 12, 2, 3, {1, 2}, false, 7);
  EXPECT_EQ(mask.sizes(), at::IntArrayRef({4, 12, 12}));
  // A row in the middle: 3 + 3 + 2 of 12 blocks.
  EXPECT_EQ(mask[0][5].sum().item<int64_t>(), 8);
  SoftmaxAttentionArgs blocks;
  blocks.block_mask = mask;
  blocks.block_size = 4;
  EXPECT_TRUE(bigbird_attention(t.q, t.k, t.v, args)
                  .equal(softmax_attention(t.q, t.k, t.v, blocks)));
  args.softmax.block_size = 8;
  EXPECT_TRUE(throws_with([&] { bigbird_attention(t.q, t.k, t.v, args); },
                          "block_size is 4, softmax.block_size is 8"));
}

TEST(SoftmaxKinds, T5BiasGoesByBuckets) {
  at::Tensor weight = at::arange(8, at::kDouble).unsqueeze(1);
  weight.requires_grad_();
  // Four exact distances back, then two a bucket and more.
  const at::Tensor table = t5_relative_bias(weight, false, 16);
  EXPECT_EQ(table.sizes(), at::IntArrayRef({1, 33}));
  for (const auto& [distance, bucket] : {std::pair{0, 0},
                                         {1, 0},
                                         {16, 0},
                                         {-3, 3},
                                         {-4, 4},
                                         {-5, 4},
                                         {-6, 5},
                                         {-8, 6},
                                         {-12, 7},
                                         {-16, 7}}) {
    EXPECT_EQ(table[0][16 + distance].item<double>(), bucket) << distance;
  }
  table.sum().backward();
  EXPECT_EQ(weight.grad().sum().item<double>(), 33);
}

TEST(AttentionMatrix, TimesTheValuesIsTheOutput) {
  const Tensors t = random_tensors(2, 9, 12, at::kDouble);
  const at::Tensor wide = t.v.repeat_interleave(2, 2);
  const auto times_values = [&](const at::Tensor& matrix) {
    return at::einsum("bhij,bjhd->bihd", {matrix, wide});
  };
  SoftmaxAttentionArgs softmax;
  softmax.window = {3, 1};
  softmax.q_start = at::scalar_tensor(2, at::kLong);
  EXPECT_LT(relative(times_values(attention_matrix(t.q, t.k, softmax)),
                     softmax_attention(t.q, t.k, t.v, softmax)),
            1e-12);
  LinearAttentionArgs linear;
  linear.feature_map = "elu1";
  linear.is_causal = true;
  EXPECT_LT(relative(times_values(attention_matrix(t.q, t.k, linear)),
                     std::get<0>(linear_attention(t.q, t.k, t.v, linear))),
            1e-12);
  EXPECT_EQ(attention_matrix(t.q, t.k.slice(1, 0, 0), linear).sizes(),
            at::IntArrayRef({2, 4, 9, 0}));
  softmax.dropout_p = 0.1;
  EXPECT_TRUE(throws_with([&] { attention_matrix(t.q, t.k, softmax); },
                          "dropout_p is set, expected a plain call"));
  linear.return_state = true;
  EXPECT_TRUE(throws_with([&] { attention_matrix(t.q, t.k, linear); },
                          "state is set, expected a plain call"));
  const at::Tensor large = at::zeros({1, 8200, 1, 1});
  EXPECT_TRUE(throws_with(
      [&] { attention_matrix(large, large, LinearAttentionArgs{}); },
      "has more than 67108864 weights"));
}

}  // namespace
}  // namespace cosformer
