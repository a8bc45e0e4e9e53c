// Attention layers against the modules of public implementations (files of
// tests/golden): outputs, input gradients, parameter gradients.
#include <map>
#include <nlohmann/json.hpp>

#include "tests/models/model_test_util.h"

namespace cosformer {
namespace {

using testing::relative_error;

class GoldenFile {
 public:
  explicit GoldenFile(const std::string& name)
      : file_(SafetensorsFile::open(str_cat(
            COSFORMER_SOURCE_DIR, "/tests/golden/", name, ".safetensors"))) {
    EXPECT_TRUE(file_.ok()) << file_.status().message();
  }
  bool has(const std::string& name) const {
    return file_->tensors().count(name) > 0;
  }
  torch::Tensor tensor(const std::string& name) const {
    const TensorEntry& entry = file_->tensors().at(name);
    const auto type =
        entry.dtype == DType::kFloat32 ? torch::kFloat32 : torch::kBool;
    EXPECT_EQ(entry.bytes, torch::empty(entry.shape, type).nbytes());
    return torch::from_blob(const_cast<void*>(entry.data), entry.shape, type)
        .clone();
  }
  nlohmann::json meta(const std::string& key) const {
    return nlohmann::json::parse(file_->metadata().at(key));
  }

 private:
  Result<SafetensorsFile> file_;
};

struct Precision {
  at::ScalarType type;
  double out, grad;  // relative norm of the difference, at most
};
constexpr Precision kPrecisions[] = {{torch::kFloat64, 3e-7, 1e-6},
                                     {torch::kFloat32, 3e-6, 1e-5}};

// A layer with the file's parameters; in_file: the layer's name -> the file's.
template <typename Layer>
void load(Layer& layer, const GoldenFile& file, at::ScalarType type,
          const std::map<std::string, std::string>& in_file) {
  layer->to(type);
  torch::NoGradGuard no_grad;
  size_t found = 0;
  for (auto& parameter : layer->named_parameters()) {
    ASSERT_EQ(in_file.count(parameter.key()), 1u) << parameter.key();
    parameter.value().copy_(file.tensor(in_file.at(parameter.key())));
    ++found;
  }
  EXPECT_EQ(found, in_file.size()) << "the layer has every parameter";
}

template <typename Layer>
void expect_gradients(const Layer& layer, const GoldenFile& file, double most,
                      const std::map<std::string, std::string>& in_file) {
  for (const auto& parameter : layer->named_parameters()) {
    const std::string name = "d" + in_file.at(parameter.key());
    const torch::Tensor& grad = parameter.value().grad();
    if (!file.has(name)) {  // it takes no part in this file
      EXPECT_TRUE(!grad.defined() || grad.abs().max().item<double>() == 0)
          << name;
      continue;
    }
    const torch::Tensor expected = file.tensor(name);
    if (expected.norm().item<double>() < 1e-5) {  // 0, but for rounding
      EXPECT_LE(grad.norm().item<double>(), 1e-4) << name;
      continue;
    }
    EXPECT_LE(relative_error(grad, expected), most) << name;
  }
}

// [seq, batch, embed] on disk.
torch::Tensor batch_first(const torch::Tensor& x) {
  return x.transpose(0, 1).contiguous();
}

class GoldenCosformer : public ::testing::TestWithParam<int> {};

TEST_P(GoldenCosformer, OutputsAndGradients) {
  const GoldenFile file(str_cat("cosformer_module_", GetParam()));
  AttentionOptions options(24, 3);
  options.is_causal = file.meta("is_causal").get<bool>();
  options.reweight_len = file.meta("reweight_len").get<int64_t>();
  std::map<std::string, std::string> in_file;
  for (const char* projection : {"q_proj", "k_proj", "v_proj", "out_proj"}) {
    for (const char* part : {".weight", ".bias"}) {
      in_file[std::string(projection) + part] = std::string(projection) + part;
    }
  }
  for (const Precision& precision : kPrecisions) {
    CosformerAttention layer(options);
    load(layer, file, precision.type, in_file);
    std::map<std::string, torch::Tensor> inputs;
    for (const char* name : {"query", "key", "value"}) {
      inputs[name] = batch_first(file.tensor(name))
                         .to(precision.type)
                         .detach()
                         .requires_grad_();
    }
    const torch::Tensor out =
        layer->forward(inputs["query"], inputs["key"], inputs["value"]).out;
    EXPECT_LE(relative_error(out, batch_first(file.tensor("out"))),
              precision.out);
    out.backward(batch_first(file.tensor("grad_out")).to(precision.type));
    for (const auto& [name, input] : inputs) {
      EXPECT_LE(
          relative_error(input.grad(), batch_first(file.tensor("d" + name))),
          precision.grad)
          << name;
    }
    expect_gradients(layer, file, precision.grad, in_file);
  }
}

INSTANTIATE_TEST_SUITE_P(Layers, GoldenCosformer, ::testing::Values(0, 1));

// Self attention of x, [batch, seq, embed].
template <typename Layer>
void expect_self_attention(Layer& layer, const GoldenFile& file,
                           const Precision& precision,
                           const AttentionCall& call,
                           const std::map<std::string, std::string>& in_file) {
  load(layer, file, precision.type, in_file);
  const torch::Tensor x =
      file.tensor("x").to(precision.type).detach().requires_grad_();
  const torch::Tensor out = layer->forward(x, {}, {}, call).out;
  EXPECT_LE(relative_error(out, file.tensor("out")), precision.out);
  out.backward(file.tensor("grad_out").to(precision.type));
  EXPECT_LE(relative_error(x.grad(), file.tensor("dx")), precision.grad);
  expect_gradients(layer, file, precision.grad, in_file);
}

class GoldenLinformer : public ::testing::TestWithParam<int> {};

TEST_P(GoldenLinformer, OutputsAndGradients) {
  const GoldenFile file(str_cat("linformer_module_", GetParam()));
  AttentionOptions options(24, file.meta("num_heads").get<int64_t>());
  options.max_len = file.meta("max_len").get<int64_t>();
  options.projected_len = file.meta("projected_len").get<int64_t>();
  options.share_kv = file.meta("share_kv").get<bool>();
  options.one_kv_head = file.meta("one_kv_head").get<bool>();
  options.qkv_bias = false;
  std::map<std::string, std::string> in_file{
      {"q_proj.weight", "to_q.weight"},
      {"k_proj.weight", "to_k.weight"},
      {"out_proj.weight", "to_out.weight"},
      {"out_proj.bias", "to_out.bias"},
      {"key_len_proj", "proj_k"}};
  if (!options.share_kv) {
    in_file.insert(
        {{"v_proj.weight", "to_v.weight"}, {"value_len_proj", "proj_v"}});
  }
  for (const Precision& precision : kPrecisions) {
    LinformerAttention layer(options);
    expect_self_attention(layer, file, precision, {}, in_file);
  }
}

INSTANTIATE_TEST_SUITE_P(Layers, GoldenLinformer, ::testing::Range(0, 4));

class GoldenLongformer : public ::testing::TestWithParam<int> {};

TEST_P(GoldenLongformer, OutputsAndGradients) {
  const GoldenFile file(str_cat("longformer_module_", GetParam()));
  AttentionOptions options(24, file.meta("num_heads").get<int64_t>());
  options.window = file.meta("one_sided_window").get<int64_t>();
  options.out_proj = false;
  std::map<std::string, std::string> in_file;
  for (const char* part : {".weight", ".bias"}) {
    for (const auto& [name, theirs] : std::map<std::string, std::string>{
             {"q", "query"}, {"k", "key"}, {"v", "value"}}) {
      in_file[name + "_proj" + part] = theirs + part;
      in_file[name + "_global_proj" + part] = theirs + "_global" + part;
    }
  }
  AttentionCall call;
  call.key_mask = file.tensor("key_mask");
  call.global_mask = file.tensor("global_mask");
  for (const Precision& precision : kPrecisions) {
    LongformerAttention layer(options);
    expect_self_attention(layer, file, precision, call, in_file);
  }
}

INSTANTIATE_TEST_SUITE_P(Layers, GoldenLongformer, ::testing::Range(0, 3));

}  // namespace
}  // namespace cosformer
