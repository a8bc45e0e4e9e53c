// A model folder to and from a Transformer.
#include <filesystem>
#include <set>
#include <system_error>

#include "cosformer/models.h"
#include "models/parameter_shapes.h"
#include "ops/dtypes.h"

namespace cosformer {
namespace {

constexpr const char* kConfigFile = "config.json";
constexpr const char* kWeightsFile = "model.safetensors";
constexpr const char* kTokenizerFile = "tokenizer.json";

std::string joined(const std::string& folder, const char* file) {
  return (std::filesystem::path(folder) / file).string();
}

std::string shape_text(at::IntArrayRef shape) {
  return str_cat(shape);  // "[2, 3]"
}

// Every name, shape and dtype of the file against what the config asks for.
// Gives the type that all have.
Result<at::ScalarType> check_tensors(const std::string& path,
                                     const SafetensorsFile& file,
                                     const ModelConfig& config) {
  const auto& have = file.tensors();
  std::set<std::string> spare;
  for (const auto& [name, entry] : have) spare.insert(name);
  COSFORMER_RETURN_IF_ERROR(for_each_parameter(
      config, [&](const std::string& name, const std::vector<int64_t>&) {
        spare.erase(name);
        return Status();
      }));
  std::optional<at::ScalarType> type;
  std::string first_name;
  const auto check = [&](const std::string& name,
                         const std::vector<int64_t>& shape) -> Status {
    const auto found = have.find(name);
    if (found == have.end()) {
      const std::string near = nearest_key(name, {spare.begin(), spare.end()});
      return data_loss(
          path, ": tensor '", name, "' is missing, expected with shape ",
          shape_text(shape), " from config.json",
          near.empty() ? "" : "; the nearest found is '" + near + "'");
    }
    const TensorEntry& entry = found->second;
    if (entry.shape != shape) {
      return data_loss(path, ": tensor '", name, "' has shape ",
                       shape_text(entry.shape), ", expected ",
                       shape_text(shape), " from config.json");
    }
    const auto entry_type = scalar_type_of(entry.dtype);
    if (!entry_type || !at::isFloatingType(*entry_type)) {
      return data_loss(path, ": tensor '", name, "' is ",
                       cosformer::name(entry.dtype),
                       ", expected a floating-point type");
    }
    if (!type) {
      type = entry_type;
      first_name = name;
    } else if (type != entry_type) {
      return data_loss(path, ": tensor '", name, "' is ",
                       cosformer::name(entry.dtype), ", '", first_name, "' is ",
                       cosformer::name(*dtype_of(*type)),
                       ": expected one type for all");
    }
    return {};
  };
  COSFORMER_RETURN_IF_ERROR(for_each_parameter(config, check));
  if (spare.empty()) return *type;
  const std::string& extra = *spare.begin();
  return data_loss(path, ": tensor '", extra, "' with shape ",
                   shape_text(have.at(extra).shape),
                   " is not part of the model that config.json describes",
                   spare.size() == 1
                       ? ""
                       : str_cat(" (nor are ", spare.size() - 1, " others)"));
}

// What a model file holds: parameters and buffers.
std::vector<std::pair<std::string, torch::Tensor>> tensors_of(
    const Transformer& model) {
  std::vector<std::pair<std::string, torch::Tensor>> out;
  for (const auto& each : model->named_parameters()) {
    out.emplace_back(each.key(), each.value());
  }
  for (const auto& each : model->named_buffers()) {
    out.emplace_back(each.key(), each.value());
  }
  return out;
}

}  // namespace

Status save_model(const std::string& folder, const Transformer& model,
                  const Tokenizer* tokenizer) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) {
    return io_error(folder, ": cannot create the folder: ", error.message());
  }
  std::map<std::string, TensorEntry> entries;
  std::vector<torch::Tensor> alive;  // what the entries point into
  for (const auto& [name, tensor] : tensors_of(model)) {
    const torch::Tensor value = tensor.detach().to(torch::kCPU).contiguous();
    const auto dtype = dtype_of(value.scalar_type());
    if (!dtype || !value.is_floating_point()) {
      return not_supported(folder, ": tensor '", name, "' is ",
                           value.scalar_type(),
                           ", expected float32, float64, bfloat16 or float16");
    }
    entries[name] = {*dtype, value.sizes().vec(), value.const_data_ptr(),
                     value.nbytes()};
    alive.push_back(value);
  }
  // config.json last: a folder that has it is whole.
  COSFORMER_RETURN_IF_ERROR(write_safetensors(joined(folder, kWeightsFile),
                                              entries, {{"format", "pt"}}));
  if (tokenizer != nullptr) {
    COSFORMER_RETURN_IF_ERROR(tokenizer->save(folder));
  }
  return write_file_atomically(joined(folder, kConfigFile),
                               to_json(model->config()));
}

Result<LoadedModel> load_model(const std::string& folder) {
  const std::string config_path = joined(folder, kConfigFile);
  Result<std::string> json = read_file(config_path);
  if (!json.ok()) return json.status();
  Result<ModelConfig> config = model_config_from_json(*json);
  if (!config.ok()) {
    return Status(config.status().code(),
                  str_cat(config_path, ": ", config.status().message()));
  }
  if (Status status = validate(*config); !status.ok()) {
    return Status(status.code(), str_cat(config_path, ": ", status.message()));
  }
  const std::string weights_path = joined(folder, kWeightsFile);
  Result<SafetensorsFile> file = SafetensorsFile::open(weights_path);
  if (!file.ok()) return file.status();

  const Result<at::ScalarType> type =
      check_tensors(weights_path, *file, *config);
  if (!type.ok()) return type.status();

  LoadedModel out;
  try {
    out.model = Transformer(*config, /*initialize=*/false);
    out.model->to(*type);
  } catch (const c10::Error& e) {
    return Status(StatusCode::kOutOfMemory,
                  str_cat(folder, ": ", e.what_without_backtrace()));
  }
  torch::NoGradGuard no_grad;
  for (auto& [name, value] : tensors_of(out.model)) {
    const TensorEntry& entry = file->tensors().at(name);
    value.copy_(torch::from_blob(const_cast<void*>(entry.data), value.sizes(),
                                 torch::dtype(*type)));
  }

  std::error_code ignored;
  if (std::filesystem::exists(joined(folder, kTokenizerFile), ignored)) {
    Result<std::unique_ptr<Tokenizer>> tokenizer = load_tokenizer(folder);
    if (!tokenizer.ok()) return tokenizer.status();
    if ((*tokenizer)->vocab_size() > config->vocab_size) {
      return data_loss(folder, ": the tokenizer has ",
                       (*tokenizer)->vocab_size(),
                       " tokens, expected at most vocab_size ",
                       config->vocab_size, " of config.json");
    }
    out.tokenizer = std::move(*tokenizer);
  }
  return out;
}

}  // namespace cosformer
