// What the C++ models compute, for the Python tests to compare with. For each
// folder given (a model folder): reads inputs.safetensors in it (ids int64
// [batch, seq]; key_mask bool [batch, seq], maybe; weights, of the model's
// dtype [batch, seq, vocab]), writes values.safetensors (logits, and grad.NAME
// of sum(logits * weights) for each parameter that has one) and saves the
// loaded model into saved/.
#include <iostream>
#include <map>
#include <optional>
#include <string>

#include "cosformer/models.h"
#include "ops/dtypes.h"

namespace cosformer {
namespace {

torch::Tensor tensor_of(const SafetensorsFile& file, const std::string& name) {
  const auto found = file.tensors().find(name);
  if (found == file.tensors().end()) return {};
  const TensorEntry& entry = found->second;
  return torch::from_blob(const_cast<void*>(entry.data), entry.shape,
                          torch::dtype(scalar_type_of(entry.dtype).value()))
      .clone();
}

Status write_tensors(const std::string& path,
                     std::map<std::string, torch::Tensor> tensors) {
  std::map<std::string, TensorEntry> entries;
  for (auto& [name, tensor] : tensors) {
    tensor = tensor.detach().contiguous();
    entries[name] = {dtype_of(tensor.scalar_type()).value(),
                     tensor.sizes().vec(), tensor.const_data_ptr(),
                     tensor.nbytes()};
  }
  return write_safetensors(path, entries, {});
}

Status run(const std::string& folder) {
  Result<LoadedModel> loaded = load_model(folder);
  if (!loaded.ok()) return loaded.status();
  Result<SafetensorsFile> file =
      SafetensorsFile::open(folder + "/inputs.safetensors");
  if (!file.ok()) return file.status();
  Transformer& model = loaded->model;
  model->eval();  // no dropout
  std::optional<torch::Tensor> key_mask;
  if (file->tensors().count("key_mask") > 0) {
    key_mask = tensor_of(*file, "key_mask");
  }
  std::map<std::string, torch::Tensor> values;
  values["logits"] = model->forward(tensor_of(*file, "ids"), key_mask);
  (values["logits"] * tensor_of(*file, "weights")).sum().backward();
  for (const auto& parameter : model->named_parameters()) {
    if (parameter.value().grad().defined()) {
      values["grad." + parameter.key()] = parameter.value().grad();
    }
  }
  COSFORMER_RETURN_IF_ERROR(
      write_tensors(folder + "/values.safetensors", values));
  return save_model(folder + "/saved", model, loaded->tokenizer.get());
}

}  // namespace
}  // namespace cosformer

// One line a folder: "ok", or what is wrong with it.
int main(int count, char** arguments) {
  for (int i = 1; i < count; ++i) {
    try {
      const cosformer::Status status = cosformer::run(arguments[i]);
      std::cout << (status.ok() ? "ok" : status.message()) << std::endl;
    } catch (const std::exception& error) {
      std::cout << error.what() << std::endl;
    }
  }
  return 0;
}
