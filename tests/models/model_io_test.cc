// Model folders: round trips to the bit, errors that name the tensor.
#include <fstream>
#include <map>

#include "models/parameter_shapes.h"
#include "tests/models/model_test_util.h"

namespace cosformer {
namespace {

using namespace testing;

// Parameters and buffers.
std::map<std::string, torch::Tensor> tensors_of(const Transformer& model) {
  std::map<std::string, torch::Tensor> out;
  for (const auto& each : model->named_parameters()) {
    out[each.key()] = each.value();
  }
  for (const auto& each : model->named_buffers()) {
    out[each.key()] = each.value();
  }
  return out;
}

void expect_same_bits(const Transformer& a, const Transformer& b) {
  const auto x = tensors_of(a), y = tensors_of(b);
  ASSERT_EQ(x.size(), y.size());
  for (const auto& [name, tensor] : x) {
    EXPECT_TRUE(torch::equal(tensor, y.at(name))) << name;
    EXPECT_EQ(tensor.scalar_type(), y.at(name).scalar_type());
  }
}

class RoundTrip : public ::testing::TestWithParam<ConfigCase> {};

TEST_P(RoundTrip, GivesTheSameBitsAndLogits) {
  torch::manual_seed(23);
  ScratchFolder scratch;
  Transformer model(GetParam().config);
  const std::string folder = scratch / "deep/model";
  const Status saved = save_model(folder, model, nullptr);
  ASSERT_TRUE(saved.ok()) << saved.message();
  const torch::Tensor next_random = [] {
    const torch::Tensor state =
        at::globalContext().defaultGenerator(at::kCPU).get_state();
    return state;
  }();
  const auto loaded = load_model(folder);
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  EXPECT_TRUE(torch::equal(
      at::globalContext().defaultGenerator(at::kCPU).get_state(), next_random))
      << "loading draws no random number";
  EXPECT_EQ(loaded->model->config(), model->config());
  EXPECT_EQ(loaded->tokenizer, nullptr);
  expect_same_bits(model, loaded->model);
  const torch::Tensor ids = random_ids(2, 9, model->config());
  Transformer again = loaded->model;
  EXPECT_TRUE(torch::equal(model->forward(ids), again->forward(ids)));
}

INSTANTIATE_TEST_SUITE_P(Models, RoundTrip, ::testing::ValuesIn(config_cases()),
                         [](const auto& info) { return info.param.name; });
INSTANTIATE_TEST_SUITE_P(Encoders, RoundTrip,
                         ::testing::ValuesIn(encoder_cases()),
                         [](const auto& info) { return info.param.name; });

TEST_P(RoundTrip, TheShapesByConfigAreThoseOfTheModel) {
  std::map<std::string, std::vector<int64_t>> found, expected;
  const Status status = for_each_parameter(
      GetParam().config,
      [&](const std::string& name, const std::vector<int64_t>& shape) {
        found[name] = shape;
        return Status();
      });
  ASSERT_TRUE(status.ok());
  const Transformer model(GetParam().config, false);
  for (const auto& [name, tensor] : tensors_of(model)) {
    expected[name] = tensor.sizes().vec();
  }
  EXPECT_EQ(found, expected);
}

TEST(ModelFolder, KeepsTheDtype) {
  torch::manual_seed(23);
  for (const auto type : {torch::kBFloat16, torch::kFloat16, torch::kFloat64}) {
    ScratchFolder scratch;
    Transformer model(small_config("cosformer"));
    model->to(type);
    ASSERT_TRUE(save_model(scratch / "m", model, nullptr).ok());
    const auto loaded = load_model(scratch / "m");
    ASSERT_TRUE(loaded.ok()) << loaded.status().message();
    expect_same_bits(model, loaded->model);
  }
}

// A projection drawn anew after the model was made is the one that is kept.
TEST(ModelFolder, KeepsAProjectionAsItIs) {
  ScratchFolder scratch;
  Transformer model(small_config("performer"));
  for (const auto& module : model->modules()) {
    if (auto* attention = module->as<AttentionImpl>()) {
      attention->redraw_projection(77);
    }
  }
  ASSERT_TRUE(save_model(scratch / "m", model, nullptr).ok());
  const auto loaded = load_model(scratch / "m");
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  expect_same_bits(model, loaded->model);
  EXPECT_TRUE(torch::equal(
      loaded->model->named_buffers()["layers.1.attention.projection"],
      performer_projection(32, 8, true, 77)));
}

TEST(ModelFolder, TheTiedHeadIsStoredOnce) {
  ScratchFolder scratch;
  Transformer model(small_config("cosformer"));
  ASSERT_TRUE(save_model(scratch / "m", model, nullptr).ok());
  const auto file = SafetensorsFile::open(scratch / "m/model.safetensors");
  ASSERT_TRUE(file.ok());
  EXPECT_EQ(file->tensors().count("head.weight"), 0u);
  EXPECT_EQ(file->tensors().count("embed.weight"), 1u);
}

TEST(ModelFolder, CarriesItsTokenizer) {
  ScratchFolder scratch;
  auto tokenizer = train_character_tokenizer("hello world, a");
  ASSERT_TRUE(tokenizer.ok());
  ModelConfig config = small_config("cosformer");
  config.vocab_size = (*tokenizer)->vocab_size();
  Transformer model(config);
  ASSERT_TRUE(save_model(scratch / "m", model, tokenizer->get()).ok());
  const auto loaded = load_model(scratch / "m");
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  ASSERT_NE(loaded->tokenizer, nullptr);
  EXPECT_EQ(*loaded->tokenizer->encode("hold"), *(*tokenizer)->encode("hold"));

  config.vocab_size -= 1;
  ASSERT_TRUE(save_model(scratch / "m", Transformer(config), nullptr).ok());
  expect_contains(load_model(scratch / "m").status().message(),
                  "expected at most vocab_size");
}

// Rewrites the weights of a folder.
class BadWeights : public ::testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(23);
    model_ = Transformer(small_config("cosformer"));
    for (const auto& parameter : model_->named_parameters()) {
      tensors_[parameter.key()] = parameter.value().detach().clone();
    }
  }
  std::string message() {
    EXPECT_TRUE(save_model(scratch_ / "m", model_, nullptr).ok());
    std::map<std::string, TensorEntry> entries;
    for (auto& [name, tensor] : tensors_) {
      const DType dtype =
          tensor.scalar_type() == torch::kInt64
              ? DType::kInt64
              : (tensor.scalar_type() == torch::kFloat64 ? DType::kFloat64
                                                         : DType::kFloat32);
      entries[name] = {dtype, tensor.sizes().vec(), tensor.const_data_ptr(),
                       tensor.nbytes()};
    }
    EXPECT_TRUE(
        write_safetensors(scratch_ / "m/model.safetensors", entries, {}).ok());
    const auto loaded = load_model(scratch_ / "m");
    EXPECT_FALSE(loaded.ok());
    return loaded.status().message();
  }
  ScratchFolder scratch_;
  Transformer model_{nullptr};
  std::map<std::string, torch::Tensor> tensors_;
};

TEST_F(BadWeights, Missing) {
  tensors_.erase("layers.1.ffn.up_proj.weight");
  const std::string text = message();
  expect_contains(text, "tensor 'layers.1.ffn.up_proj.weight' is missing");
  expect_contains(text, "[24, 16]");
}

TEST_F(BadWeights, MisspeltNamesTheNearest) {
  tensors_["layers.1.ffn.up_prj.weight"] =
      tensors_["layers.1.ffn.up_proj.weight"];
  tensors_.erase("layers.1.ffn.up_proj.weight");
  expect_contains(message(),
                  "the nearest found is 'layers.1.ffn.up_prj.weight'");
}

TEST_F(BadWeights, Extra) {
  tensors_["layers.2.ffn.up_proj.weight"] = torch::zeros({2, 3});
  const std::string text = message();
  expect_contains(text, "'layers.2.ffn.up_proj.weight' with shape [2, 3]");
  expect_contains(text, "not part of the model");
}

TEST_F(BadWeights, Misshapen) {
  tensors_["embed.weight"] = torch::zeros({10, 16});
  expect_contains(
      message(), "tensor 'embed.weight' has shape [10, 16], expected [11, 16]");
}

TEST_F(BadWeights, OfAnotherType) {
  tensors_["embed.weight"] = torch::zeros({11, 16}, torch::kInt64);
  expect_contains(message(), "'embed.weight' is int64, expected a floating");
  tensors_["embed.weight"] = torch::zeros({11, 16}, torch::kFloat64);
  expect_contains(message(), "expected one type for all");
}

TEST_F(BadWeights, MissingAndMalformedFiles) {
  const std::string folder = scratch_ / "none";
  EXPECT_EQ(load_model(folder).status().code(), StatusCode::kNotFound);
  expect_contains(load_model(folder).status().message(), "config.json");

  ASSERT_TRUE(save_model(scratch_ / "m", model_, nullptr).ok());
  std::filesystem::remove(scratch_ / "m/model.safetensors");
  expect_contains(load_model(scratch_ / "m").status().message(),
                  "model.safetensors");
  std::ofstream(scratch_ / "m/model.safetensors") << "nonsense";
  EXPECT_FALSE(load_model(scratch_ / "m").ok());
  std::ofstream(scratch_ / "m/config.json") << "{\"embed_dimm\": 3}";
  expect_contains(load_model(scratch_ / "m").status().message(), "config.json");
  expect_contains(load_model(scratch_ / "m").status().message(), "embed_dim");
}

// A config that asks for a huge model beside a small file is refused before
// anything of that size is touched.
TEST_F(BadWeights, HugeConfig) {
  ASSERT_TRUE(save_model(scratch_ / "m", model_, nullptr).ok());
  ModelConfig config = small_config("cosformer");
  config.vocab_size = int64_t{1} << 30;
  config.embed_dim = 1 << 14;
  ASSERT_TRUE(
      write_file_atomically(scratch_ / "m/config.json", to_json(config)).ok());
  expect_contains(load_model(scratch_ / "m").status().message(),
                  "tensor 'embed.weight' has shape [11, 16]");
}

TEST(ModelFolder, CannotBeMadeUnderAFile) {
  ScratchFolder scratch;
  std::ofstream(scratch / "file") << "x";
  const Status status = save_model(
      scratch / "file/m", Transformer(small_config("linear")), nullptr);
  EXPECT_FALSE(status.ok());
  expect_contains(status.message(), "file/m");
}

}  // namespace
}  // namespace cosformer
