// Recomputing in the backward changes no bit.
#include <ATen/autocast_mode.h>

#include "tests/nn/naive.h"

namespace cosformer {
namespace {

using testing::error_of;
using testing::expect_contains;

BlockOptions options_of(const std::string& kind, double dropout) {
  AttentionOptions attention(16, 2);
  attention.kind = kind;
  attention.is_causal = true;
  if (kind == "cosformer") attention.reweight_len = 32;
  if (kind == "softmax") attention.dropout = dropout;  // of the weights too
  BlockOptions options{attention, FeedForwardOptions{16, 40}};
  options.dropout = dropout;
  return options;
}

struct Gradients {
  torch::Tensor out, x, next_random;
  std::vector<torch::Tensor> parameters;
};

Gradients run(Block& block, const torch::Tensor& input, bool checkpointed,
              int* calls = nullptr) {
  block->zero_grad();
  torch::manual_seed(21);
  torch::Tensor x = input.clone().requires_grad_();
  const auto function = [&](const torch::Tensor& y) {
    if (calls != nullptr) ++*calls;
    return block->forward(y).out;
  };
  // Twice, so that random numbers of the second call follow those of the first.
  torch::Tensor y = x;
  for (int i = 0; i < 2; ++i) {
    y = checkpointed ? checkpoint(function, y, block->parameters())
                     : function(y);
  }
  Gradients out;
  (y.square().sum()).backward();
  out.out = y.detach();
  out.x = x.grad();
  for (const auto& parameter : block->parameters()) {
    out.parameters.push_back(parameter.grad().clone());
  }
  out.next_random = torch::rand({3});
  return out;
}

void expect_same(const Gradients& a, const Gradients& b) {
  EXPECT_TRUE(torch::equal(a.out, b.out));
  EXPECT_TRUE(torch::equal(a.x, b.x));
  EXPECT_TRUE(torch::equal(a.next_random, b.next_random));
  ASSERT_EQ(a.parameters.size(), b.parameters.size());
  for (size_t i = 0; i < a.parameters.size(); ++i) {
    EXPECT_TRUE(torch::equal(a.parameters[i], b.parameters[i])) << i;
  }
}

TEST(Checkpoint, BitIdenticalWithAndWithoutDropout) {
  for (const char* kind : {"cosformer", "softmax"}) {
    for (const double dropout : {0.0, 0.3}) {
      torch::manual_seed(4);
      Block block(options_of(kind, dropout));
      const torch::Tensor x = torch::randn({3, 9, 16});
      int calls = 0;
      const Gradients plain = run(block, x, false);
      const Gradients again = run(block, x, true, &calls);
      expect_same(again, plain);
      EXPECT_EQ(calls, 4) << "twice forward, twice in the backward";
    }
  }
}

// Whether the backward runs outside the scope where autocast was on, or inside
// it, where casts of weights made without gradients might still be cached.
TEST(Checkpoint, KeepsAutocast) {
  torch::manual_seed(4);
  Block block(options_of("cosformer", 0.2));
  const torch::Tensor x = torch::randn({3, 9, 16});
  const auto with_autocast = [&](bool checkpointed, bool backward_inside) {
    torch::manual_seed(8);
    block->zero_grad();
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::increment_nesting();
    const auto function = [&](const torch::Tensor& z) {
      return block->forward(z).out;
    };
    const torch::Tensor y = checkpointed
                                ? checkpoint(function, x, block->parameters())
                                : function(x);
    if (backward_inside) y.square().sum().backward();
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    if (!backward_inside) y.square().sum().backward();
    std::vector<torch::Tensor> out{y.detach()};
    for (const auto& parameter : block->parameters()) {
      EXPECT_TRUE(parameter.grad().defined());
      out.push_back(parameter.grad().defined() ? parameter.grad().clone()
                                               : torch::Tensor());
    }
    return out;
  };
  for (const bool inside : {false, true}) {
    const auto plain = with_autocast(false, inside);
    const auto again = with_autocast(true, inside);
    ASSERT_EQ(plain.size(), again.size());
    for (size_t i = 0; i < plain.size(); ++i) {
      ASSERT_TRUE(plain[i].defined() && again[i].defined()) << i;
      EXPECT_TRUE(torch::equal(plain[i], again[i])) << inside << i;
    }
    // bfloat16 was in use at all.
    EXPECT_FALSE(torch::equal(plain[0], block->forward(x).out));
  }
  // No cast weight outlives the backward: the next step has new weights.
  with_autocast(true, false);
  {
    torch::NoGradGuard no_grad;
    for (auto& parameter : block->parameters()) parameter.mul_(1.5);
  }
  const auto again = with_autocast(true, false);
  at::autocast::clear_cache();
  EXPECT_TRUE(torch::equal(again[0], with_autocast(false, false)[0]));
}

TEST(Checkpoint, FrozenParametersAndInputs) {
  torch::manual_seed(4);
  Block block(options_of("linear", 0.0));
  block->attention->q_proj->weight.set_requires_grad(false);
  const auto function = [&](const torch::Tensor& y) {
    return block->forward(y).out;
  };
  const torch::Tensor x = torch::randn({2, 5, 16});
  checkpoint(function, x, block->parameters()).sum().backward();
  EXPECT_FALSE(block->attention->q_proj->weight.grad().defined());
  EXPECT_TRUE(block->attention->k_proj->weight.grad().defined());
  {
    torch::NoGradGuard no_grad;
    EXPECT_FALSE(checkpoint(function, x, block->parameters()).requires_grad());
  }
}

TEST(Checkpoint, Misuse) {
  Block block(options_of("linear", 0.0));
  const auto function = [&](const torch::Tensor& y) {
    return block->forward(y).out;
  };
  const torch::Tensor x = torch::randn({2, 5, 16}, torch::requires_grad());
  torch::Tensor loss = checkpoint(function, x, block->parameters()).sum();
  loss.backward();
  EXPECT_NE(error_of([&] { loss.backward(); }), "");

  loss = checkpoint(function, x, block->parameters()).sum();
  expect_contains(error_of([&] {
                    torch::autograd::grad({loss}, {x}, {}, true,
                                          /*create_graph=*/true);
                  }),
                  "double backward (create_graph) is not supported");

  loss = checkpoint(function, x, block->parameters()).sum();
  {
    torch::NoGradGuard no_grad;
    block->ffn->up_proj->weight.add_(1.0);
  }
  expect_contains(error_of([&] { loss.backward(); }),
                  "modified by an inplace operation");
}

}  // namespace
}  // namespace cosformer
