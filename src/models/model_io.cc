// A model folder to and from a Transformer.
#include <filesystem>
#include <system_error>

#include "cosformer/models.h"

namespace cosformer {
namespace {

constexpr const char* kConfigFile = "config.json";
constexpr const char* kWeightsFile = "model.safetensors";

std::string joined(const std::string& folder, const char* file) {
  return (std::filesystem::path(folder) / file).string();
}

std::optional<DType> dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kHalf:
      return DType::kFloat16;
    default:
      return std::nullopt;
  }
}

std::optional<at::ScalarType> scalar_type_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return at::kFloat;
    case DType::kFloat64:
      return at::kDouble;
    case DType::kBFloat16:
      return at::kBFloat16;
    case DType::kFloat16:
      return at::kHalf;
    default:
      return std::nullopt;
  }
}

std::string shape_text(at::IntArrayRef shape) {
  return str_cat(shape);  // "[2, 3]"
}

// Every name, shape and dtype of the file against those of the model.
Status check_tensors(const std::string& path, const SafetensorsFile& file,
                     const torch::OrderedDict<std::string, torch::Tensor>& want,
                     at::ScalarType& type) {
  const auto& have = file.tensors();
  std::vector<std::string> spare;
  for (const auto& [name, entry] : have) {
    if (want.find(name) == nullptr) spare.push_back(name);
  }
  bool first = true;
  std::string first_name;
  for (const auto& parameter : want) {
    const std::string& name = parameter.key();
    const auto expected = parameter.value().sizes();
    const auto found = have.find(name);
    if (found == have.end()) {
      const std::string near = nearest_key(name, spare);
      return data_loss(path, ": tensor '", name,
                       "' is missing, expected with shape ",
                       shape_text(expected), " from config.json",
                       near.empty() ? "" : "; found '" + near + "'");
    }
    const TensorEntry& entry = found->second;
    if (expected != at::IntArrayRef(entry.shape)) {
      return data_loss(path, ": tensor '", name, "' has shape ",
                       shape_text(entry.shape), ", expected ",
                       shape_text(expected), " from config.json");
    }
    const auto entry_type = scalar_type_of(entry.dtype);
    if (!entry_type) {
      return data_loss(path, ": tensor '", name, "' is ",
                       cosformer::name(entry.dtype),
                       ", expected a floating-point type");
    }
    if (first) {
      type = *entry_type;
      first_name = name;
      first = false;
    } else if (type != *entry_type) {
      return data_loss(path, ": tensor '", name, "' is ",
                       cosformer::name(entry.dtype), ", '", first_name, "' is ",
                       cosformer::name(*dtype_of(type)),
                       ": expected one type for all");
    }
  }
  if (!spare.empty()) {
    return data_loss(path, ": tensor '", spare.front(), "' with shape ",
                     shape_text(have.at(spare.front()).shape),
                     " is not part of the model that config.json describes",
                     spare.size() == 1
                         ? ""
                         : str_cat(" (nor are ", spare.size() - 1, " others)"));
  }
  return {};
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
  for (const auto& parameter : model->named_parameters()) {
    const torch::Tensor value =
        parameter.value().detach().to(torch::kCPU).contiguous();
    const auto dtype = dtype_of(value.scalar_type());
    if (!dtype) {
      return not_supported(folder, ": parameter '", parameter.key(), "' is ",
                           value.scalar_type(),
                           ", expected float32, float64, bfloat16 or float16");
    }
    entries[parameter.key()] = {*dtype, value.sizes().vec(),
                                value.const_data_ptr(), value.nbytes()};
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

  LoadedModel out;
  try {
    out.model = Transformer(*config, /*initialize=*/false);
  } catch (const c10::Error& e) {
    return invalid_argument(folder, ": ", e.what_without_backtrace());
  }
  const auto parameters = out.model->named_parameters();
  at::ScalarType type = at::kFloat;
  COSFORMER_RETURN_IF_ERROR(
      check_tensors(weights_path, *file, parameters, type));
  out.model->to(type);
  torch::NoGradGuard no_grad;
  for (const auto& parameter : out.model->named_parameters()) {
    const TensorEntry& entry = file->tensors().at(parameter.key());
    torch::Tensor value = parameter.value();
    value.copy_(torch::from_blob(const_cast<void*>(entry.data), value.sizes(),
                                 torch::dtype(type)));
  }

  Result<std::unique_ptr<Tokenizer>> tokenizer = load_tokenizer(folder);
  if (tokenizer.ok()) {
    if ((*tokenizer)->vocab_size() > config->vocab_size) {
      return data_loss(folder, ": the tokenizer has ",
                       (*tokenizer)->vocab_size(),
                       " tokens, expected at most vocab_size ",
                       config->vocab_size, " of config.json");
    }
    out.tokenizer = std::move(*tokenizer);
  } else if (tokenizer.status().code() != StatusCode::kNotFound) {
    return tokenizer.status();
  }
  return out;
}

}  // namespace cosformer
