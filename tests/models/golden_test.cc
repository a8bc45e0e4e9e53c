// The attention layer against the reference implementation's own module
// (files of tests/golden): output, input gradients, parameter gradients.
#include "tests/models/model_test_util.h"

namespace cosformer {
namespace {

using testing::relative_error;

// [seq, batch, embed] on disk.
torch::Tensor batch_first(const torch::Tensor& x) {
  return x.transpose(0, 1).contiguous();
}

class GoldenModule : public ::testing::TestWithParam<int> {};

TEST_P(GoldenModule, OutputsAndGradients) {
  auto file = SafetensorsFile::open(str_cat(COSFORMER_SOURCE_DIR,
                                            "/tests/golden/cosformer_module_",
                                            GetParam(), ".safetensors"));
  ASSERT_TRUE(file.ok()) << file.status().message();
  const auto tensor = [&](const std::string& name) {
    const TensorEntry& entry = file->tensors().at(name);
    return torch::from_blob(const_cast<void*>(entry.data), entry.shape,
                            torch::kFloat32)
        .clone();
  };
  const torch::Tensor query = tensor("query");
  AttentionOptions options(24, 3);
  options.is_causal = GetParam() == 1;
  options.reweight_len = GetParam() == 0 ? 34 : 29;
  // float64 as the file was computed, and float32.
  for (const auto type : {torch::kFloat64, torch::kFloat32}) {
    CosformerAttention layer(options);
    layer->to(type);
    for (auto& parameter : layer->named_parameters()) {
      torch::NoGradGuard no_grad;
      parameter.value().copy_(tensor(parameter.key()));
    }
    std::map<std::string, torch::Tensor> inputs;
    for (const char* name : {"query", "key", "value"}) {
      inputs[name] =
          batch_first(tensor(name)).to(type).detach().requires_grad_();
    }
    const torch::Tensor out =
        layer->forward(inputs["query"], inputs["key"], inputs["value"]).out;
    const bool wide = type == torch::kFloat64;
    EXPECT_LE(relative_error(out, batch_first(tensor("out"))),
              wide ? 3e-7 : 3e-6);
    out.backward(batch_first(tensor("grad_out")).to(type));
    const double most = wide ? 1e-6 : 1e-5;
    for (const auto& [name, input] : inputs) {
      EXPECT_LE(relative_error(input.grad(), batch_first(tensor("d" + name))),
                most)
          << name;
    }
    for (const auto& parameter : layer->named_parameters()) {
      const torch::Tensor expected = tensor("d" + parameter.key());
      EXPECT_LE(relative_error(parameter.value().grad(), expected), most)
          << parameter.key();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Layers, GoldenModule, ::testing::Values(0, 1));

}  // namespace
}  // namespace cosformer
