// A model's state on disk: behaviour 26.
#include <fstream>
#include <map>

#include "tests/models/model_test_util.h"

namespace cosformer {
namespace {

using namespace testing;

class SavedState : public ::testing::TestWithParam<ConfigCase> {};

TEST_P(SavedState, GoesOnBitByBit) {
  torch::manual_seed(31);
  ScratchFolder scratch;
  Transformer model(GetParam().config);
  const torch::Tensor ids = random_ids(2, 9, model->config());
  const torch::Tensor next = random_ids(2, 6, model->config());
  // Prefilled alone, and after steps.
  for (const int64_t steps : {0, 3}) {
    ModelState state;
    model->forward_with_state(ids, state);
    for (int64_t t = 0; t < steps; ++t) {
      model->forward_with_state(next.narrow(1, t, 1), state);
    }
    const Status saved = state.save(scratch / "state");
    ASSERT_TRUE(saved.ok()) << saved.message();
    auto loaded = ModelState::load(scratch / "state");
    ASSERT_TRUE(loaded.ok()) << loaded.status().message();
    EXPECT_EQ(loaded->position, 9 + steps);
    for (int64_t t = steps; t < 6; ++t) {
      const torch::Tensor id = next.narrow(1, t, 1);
      const torch::Tensor expected = model->forward_with_state(id, state);
      EXPECT_TRUE(
          torch::equal(model->forward_with_state(id, *loaded), expected))
          << t;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models, SavedState,
                         ::testing::ValuesIn(config_cases()),
                         [](const auto& info) { return info.param.name; });

TEST(StateFile, AnEmptyStateIsOne) {
  ScratchFolder scratch;
  ASSERT_TRUE(ModelState{}.save(scratch / "state").ok());
  const auto loaded = ModelState::load(scratch / "state");
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  EXPECT_TRUE(loaded->layers.empty());
}

// A file with one thing changed.
class BadState : public ::testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(31);
    ModelConfig config = small_config("longformer");
    config.num_layers = 2;
    config.attention.assign(2, config.attention[0]);
    config.attention[0].window = 2;
    config.attention[1].kind = "linear";
    Transformer model(config);
    ModelState state;
    model->forward_with_state(random_ids(1, 9, config), state);
    ASSERT_TRUE(state.save(scratch_ / "state").ok());
  }
  template <typename Change>
  std::string message(const Change& change) {
    auto file = SafetensorsFile::open(scratch_ / "state");
    EXPECT_TRUE(file.ok());
    auto tensors = file->tensors();
    auto metadata = file->metadata();
    change(tensors, metadata);
    EXPECT_TRUE(write_safetensors(scratch_ / "bad", tensors, metadata).ok());
    const auto loaded = ModelState::load(scratch_ / "bad");
    EXPECT_FALSE(loaded.ok());
    return loaded.status().message();
  }
  ScratchFolder scratch_;
};

TEST_F(BadState, SaysWhatIsWrong) {
  using Tensors = std::map<std::string, TensorEntry>;
  using Texts = std::map<std::string, std::string>;
  expect_contains(
      message([](Tensors&, Texts& m) { m["format"] = "something"; }),
      "is format 'something'");
  expect_contains(message([](Tensors&, Texts& m) { m["layers"] = "-3"; }),
                  "layers is '-3', expected an integer");
  expect_contains(message([](Tensors&, Texts& m) { m["layers"] = "1"; }),
                  "is part of no state");
  expect_contains(
      message([](Tensors&, Texts& m) { m["layers.1.is"] = "magic"; }),
      "layers.1.is 'magic', expected 'linear'");
  expect_contains(
      message([](Tensors&, Texts& m) { m["layers.0.kept_last"] = "7"; }),
      "is a ring of another size");
  expect_contains(
      message([](Tensors& t, Texts&) { t.erase("layers.0.values"); }),
      "layers.0. has keys and values that do not match");
  expect_contains(
      message([](Tensors& t, Texts&) { t.erase("layers.1.k_sum"); }),
      "layers.1. has no sums");
  expect_contains(message([](Tensors& t, Texts&) {
                    std::swap(t["layers.0.position"], t["layers.0.start"]);
                  }),
                  "positions that its slots cannot hold");
  expect_contains(message([](Tensors& t, Texts&) {
                    t["layers.0.keys"] = t["layers.1.k_sum"];
                  }),
                  "layers.0.keys is float32 of 3 dimensions, expected 4");
  expect_contains(
      message([](Tensors&, Texts& m) { m.erase("layers.1.rotary_base"); }),
      "layers.1.rotary_base is missing");
  EXPECT_EQ(ModelState::load(scratch_ / "none").status().code(),
            StatusCode::kNotFound);
  std::ofstream(scratch_ / "noise") << "nothing of a state";
  EXPECT_FALSE(ModelState::load(scratch_ / "noise").ok());
}

}  // namespace
}  // namespace cosformer
