#include "train/optimizer.h"

#include "tests/train/train_test_util.h"

namespace cosformer::train_internal {
namespace {

using cosformer::testing::TempFolder;

torch::OrderedDict<std::string, torch::Tensor> make_parameters() {
  torch::manual_seed(3);
  torch::OrderedDict<std::string, torch::Tensor> parameters;
  parameters.insert("matrix", torch::randn({37, 19}).set_requires_grad(true));
  parameters.insert("vector", torch::randn({21}).set_requires_grad(true));
  return parameters;
}

void set_gradients(torch::OrderedDict<std::string, torch::Tensor>& parameters,
                   int64_t step) {
  torch::manual_seed(100 + static_cast<uint64_t>(step));
  for (auto& item : parameters) {
    item.value().mutable_grad() = torch::randn_like(item.value());
  }
}

TrainConfig some_config() {
  TrainConfig config;
  config.beta1 = 0.9;
  config.beta2 = 0.95;
  config.weight_decay = 0.3;
  return config;
}

// The definition, one scalar at a time in double.
TEST(AdamW, IsTheDefinition) {
  auto parameters = make_parameters();
  const TrainConfig config = some_config();
  AdamW optimizer(parameters, config);
  std::vector<std::vector<double>> weight, m, v;
  for (const auto& item : parameters) {
    const torch::Tensor flat =
        item.value().detach().to(torch::kFloat64).flatten();
    weight.emplace_back(flat.data_ptr<double>(),
                        flat.data_ptr<double>() + flat.numel());
    m.emplace_back(weight.back().size(), 0.0);
    v.emplace_back(weight.back().size(), 0.0);
  }
  for (int64_t step = 1; step <= 20; ++step) {
    const double lr = 0.01 * static_cast<double>(step % 5 + 1);
    set_gradients(parameters, step);
    for (size_t p = 0; p < 2; ++p) {
      const double decay = p == 0 ? config.weight_decay : 0.0;  // matrices only
      const torch::Tensor grad =
          parameters.values()[p].grad().to(torch::kFloat64).flatten();
      for (size_t i = 0; i < weight[p].size(); ++i) {
        const double g = grad.data_ptr<double>()[i];
        m[p][i] = config.beta1 * m[p][i] + (1 - config.beta1) * g;
        v[p][i] = config.beta2 * v[p][i] + (1 - config.beta2) * g * g;
        const auto t = static_cast<double>(step);
        const double m_hat = m[p][i] / (1 - std::pow(config.beta1, t));
        const double v_hat = v[p][i] / (1 - std::pow(config.beta2, t));
        weight[p][i] -= lr * decay * weight[p][i];
        weight[p][i] -= lr * m_hat / (std::sqrt(v_hat) + config.adam_eps);
      }
    }
    optimizer.step(lr, step);
  }
  for (size_t p = 0; p < 2; ++p) {
    const torch::Tensor flat = parameters.values()[p].detach().flatten();
    for (size_t i = 0; i < weight[p].size(); ++i) {
      ASSERT_NEAR(flat.data_ptr<float>()[i], weight[p][i], 3e-6);
    }
  }
}

TEST(AdamW, GoesOnFromItsFileBitForBit) {
  TempFolder folder;
  const TrainConfig config = some_config();
  auto straight = make_parameters(), resumed = make_parameters();
  AdamW one(straight, config);
  AdamW first(resumed, config);
  for (int64_t step = 1; step <= 6; ++step) {
    set_gradients(straight, step);
    one.step(0.01, step);
  }
  for (int64_t step = 1; step <= 3; ++step) {
    set_gradients(resumed, step);
    first.step(0.01, step);
  }
  ASSERT_TRUE(first.save(folder / "optimizer.safetensors").ok());
  AdamW second(resumed, config);
  const Status loaded = second.load(folder / "optimizer.safetensors");
  ASSERT_TRUE(loaded.ok()) << loaded.message();
  for (int64_t step = 4; step <= 6; ++step) {
    set_gradients(resumed, step);
    second.step(0.01, step);
  }
  EXPECT_TRUE(torch::equal(straight["matrix"], resumed["matrix"]));
  EXPECT_TRUE(torch::equal(straight["vector"], resumed["vector"]));
}

TEST(AdamW, RefusesTheFileOfAnotherModel) {
  TempFolder folder;
  auto parameters = make_parameters();
  AdamW optimizer(parameters, TrainConfig{});
  ASSERT_TRUE(optimizer.save(folder / "o.safetensors").ok());
  torch::OrderedDict<std::string, torch::Tensor> other;
  other.insert("matrix", torch::zeros({19, 37}));
  const Status misshapen =
      AdamW(other, TrainConfig{}).load(folder / "o.safetensors");
  EXPECT_NE(misshapen.message().find("exp_avg.matrix"), std::string::npos);
  other.clear();
  other.insert("tensor", torch::zeros({3}));
  const Status missing =
      AdamW(other, TrainConfig{}).load(folder / "o.safetensors");
  EXPECT_NE(missing.message().find("exp_avg.tensor"), std::string::npos);
}

TEST(AdamW, ClipsByTheNormOfAllGradients) {
  auto parameters = make_parameters();
  AdamW optimizer(parameters, TrainConfig{});
  set_gradients(parameters, 1);
  double squares = 0;
  for (const auto& item : parameters) {
    squares +=
        item.value().grad().to(torch::kFloat64).square().sum().item<double>();
  }
  const double norm = std::sqrt(squares);
  EXPECT_NEAR(optimizer.clip_grad_norm(0), norm, 1e-5 * norm);
  EXPECT_NEAR(optimizer.clip_grad_norm(1.5), norm, 1e-5 * norm);
  EXPECT_NEAR(optimizer.clip_grad_norm(0), 1.5, 1e-5);
  optimizer.clip_grad_norm(100);  // below: left alone
  EXPECT_NEAR(optimizer.clip_grad_norm(0), 1.5, 1e-5);
}

}  // namespace
}  // namespace cosformer::train_internal
