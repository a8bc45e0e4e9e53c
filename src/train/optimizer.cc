#include "train/optimizer.h"

#include <cstring>
#include <utility>

namespace cosformer::train_internal {
namespace {

TensorEntry entry_of(const torch::Tensor& tensor) {
  return {DType::kFloat32, tensor.sizes().vec(), tensor.const_data_ptr(),
          static_cast<size_t>(tensor.nbytes())};
}

Status copy_from(const SafetensorsFile& file, const std::string& path,
                 const std::string& name, torch::Tensor& out) {
  const auto found = file.tensors().find(name);
  if (found == file.tensors().end()) {
    return data_loss(path, ": no tensor ", name,
                     ": the optimiser belongs to another model");
  }
  const TensorEntry& entry = found->second;
  if (entry.dtype != DType::kFloat32 || entry.shape != out.sizes().vec()) {
    std::ostringstream shape;
    shape << at::IntArrayRef(entry.shape);
    return data_loss(path, ": ", name, " is ", cosformer::name(entry.dtype),
                     " ", shape.str(), ", expected float32 ", out.sizes());
  }
  std::memcpy(out.mutable_data_ptr(), entry.data, entry.bytes);
  return {};
}

}  // namespace

AdamW::AdamW(const torch::OrderedDict<std::string, torch::Tensor>& parameters,
             const TrainConfig& config)
    : beta1_(config.beta1),
      beta2_(config.beta2),
      eps_(config.adam_eps),
      weight_decay_(config.weight_decay) {
  for (const auto& item : parameters) {
    const torch::Tensor& parameter = item.value();
    slots_.push_back(
        {item.key(), parameter,
         torch::zeros_like(parameter, at::MemoryFormat::Contiguous),
         torch::zeros_like(parameter, at::MemoryFormat::Contiguous),
         parameter.dim() >= 2});
  }
}

void AdamW::zero_grad() {
  for (Slot& slot : slots_) slot.parameter.mutable_grad().reset();
}

double AdamW::clip_grad_norm(double max_norm) {
  torch::NoGradGuard no_grad;
  std::vector<torch::Tensor> grads;
  for (const Slot& slot : slots_) {
    if (slot.parameter.grad().defined()) grads.push_back(slot.parameter.grad());
  }
  if (grads.empty()) return 0.0;
  const double norm =
      at::linalg_vector_norm(at::stack(at::_foreach_norm(grads, 2)), 2)
          .item<double>();
  if (max_norm > 0 && norm > max_norm) {
    at::_foreach_mul_(grads, max_norm / (norm + 1e-6));
  }
  return norm;
}

void AdamW::step(double lr, int64_t step) {
  torch::NoGradGuard no_grad;
  const torch::Tensor step_tensor =
      torch::scalar_tensor(static_cast<double>(step), torch::kFloat32);
  for (const bool decays : {true, false}) {
    std::vector<torch::Tensor> parameters, grads, averages, squares, steps;
    for (const Slot& slot : slots_) {
      if (slot.decays != decays || !slot.parameter.grad().defined()) continue;
      parameters.push_back(slot.parameter);
      grads.push_back(slot.parameter.grad());
      averages.push_back(slot.exp_avg);
      squares.push_back(slot.exp_avg_sq);
      steps.push_back(step_tensor);
    }
    if (parameters.empty()) continue;
    at::_fused_adamw_(parameters, grads, averages, squares,
                      /*max_exp_avg_sqs=*/{}, steps, lr, beta1_, beta2_,
                      decays ? weight_decay_ : 0.0, eps_, /*amsgrad=*/false,
                      /*maximize=*/false);
  }
}

Status AdamW::save(const std::string& path) const {
  std::map<std::string, TensorEntry> tensors;
  for (const Slot& slot : slots_) {
    tensors["exp_avg." + slot.name] = entry_of(slot.exp_avg);
    tensors["exp_avg_sq." + slot.name] = entry_of(slot.exp_avg_sq);
  }
  return write_safetensors(path, tensors, {{"format", "cosformer-optimizer"}});
}

Status AdamW::load(const std::string& path) {
  auto file = SafetensorsFile::open(path);
  if (!file.ok()) return file.status();
  for (Slot& slot : slots_) {
    COSFORMER_RETURN_IF_ERROR(
        copy_from(*file, path, "exp_avg." + slot.name, slot.exp_avg));
    COSFORMER_RETURN_IF_ERROR(
        copy_from(*file, path, "exp_avg_sq." + slot.name, slot.exp_avg_sq));
  }
  if (file->tensors().size() != 2 * slots_.size()) {
    return data_loss(path, ": ", file->tensors().size(), " tensors, expected ",
                     2 * slots_.size(),
                     ": the optimiser belongs to another model");
  }
  return {};
}

}  // namespace cosformer::train_internal
