// Activation checkpointing: the C++ frontend has none.
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <mutex>

#include "cosformer/nn.h"

namespace cosformer {
namespace {

thread_local bool recomputing = false;

// Autocast of one device, as it was when captured.
struct AutocastState {
  at::DeviceType device;
  bool enabled;
  at::ScalarType dtype;

  static AutocastState capture(at::DeviceType device) {
    return {device, at::autocast::is_autocast_enabled(device),
            at::autocast::get_autocast_dtype(device)};
  }
};

// Puts a captured state in place for a scope. The cache of cast weights is off
// inside: a backward often runs outside every autocast scope, where nothing
// would empty it, and the next step would find the weights of this one. Each
// weight is cast once a call anyway.
class AutocastScope {
 public:
  explicit AutocastScope(const AutocastState& state)
      : before_(AutocastState::capture(state.device)),
        cache_before_(at::autocast::is_autocast_cache_enabled()) {
    apply(state);
    at::autocast::set_autocast_cache_enabled(false);
  }
  ~AutocastScope() {
    apply(before_);
    at::autocast::set_autocast_cache_enabled(cache_before_);
  }
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;

 private:
  static void apply(const AutocastState& state) {
    at::autocast::set_autocast_enabled(state.device, state.enabled);
    at::autocast::set_autocast_dtype(state.device, state.dtype);
  }
  AutocastState before_;
  bool cache_before_;
};

torch::Tensor random_state(at::Device device) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}
void set_random_state(at::Device device, const torch::Tensor& state) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

// Puts a random-number state in place for a scope.
class RandomScope {
 public:
  RandomScope(at::Device device, const torch::Tensor& state)
      : device_(device), before_(random_state(device)) {
    set_random_state(device, state);
  }
  ~RandomScope() { set_random_state(device_, before_); }
  RandomScope(const RandomScope&) = delete;
  RandomScope& operator=(const RandomScope&) = delete;

 private:
  at::Device device_;
  torch::Tensor before_;
};

class RecomputingScope {
 public:
  RecomputingScope() { recomputing = true; }
  ~RecomputingScope() { recomputing = before_; }
  RecomputingScope(const RecomputingScope&) = delete;
  RecomputingScope& operator=(const RecomputingScope&) = delete;

 private:
  bool before_ = recomputing;
};

struct CheckpointBackward : public torch::autograd::Node {
  using torch::autograd::Node::Node;

  std::string name() const override { return "CheckpointBackward"; }

  torch::autograd::variable_list apply(
      torch::autograd::variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(function, "checkpoint: backward through the same call twice: ",
                "say retain_graph the first time");
    TORCH_CHECK(!torch::GradMode::is_enabled(),
                "checkpoint: double backward (create_graph) is not supported: "
                "turn activation checkpointing off for it");
    const size_t count = parameters.size() + 1;
    torch::autograd::variable_list out(count);
    if (!grads[0].defined()) return out;

    // Unpacking tells when a value was changed in place since the forward.
    torch::Tensor input = x.unpack().detach();
    input.set_requires_grad(task_should_compute_output(0));
    std::vector<torch::Tensor> wanted;
    std::vector<size_t> place;
    if (input.requires_grad()) {
      wanted.push_back(input);
      place.push_back(0);
    }
    for (size_t i = 0; i < parameters.size(); ++i) {
      torch::Tensor parameter = parameters[i].unpack();
      if (task_should_compute_output(i + 1)) {
        wanted.push_back(std::move(parameter));
        place.push_back(i + 1);
      }
    }
    if (wanted.empty()) return out;

    torch::Tensor y;
    {
      torch::AutoGradMode grad_mode(true);
      AutocastScope autocast_scope(autocast);
      RandomScope random_scope(input.device(), generator_state);
      RecomputingScope recomputing_scope;
      y = function(input);
    }
    const auto found = torch::autograd::grad({y}, wanted, {grads[0]},
                                             /*retain_graph=*/std::nullopt,
                                             /*create_graph=*/false,
                                             /*allow_unused=*/true);
    for (size_t i = 0; i < found.size(); ++i) out[place[i]] = found[i];
    return out;
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    function = nullptr;
    x.reset_data();
    for (auto& parameter : parameters) parameter.reset_data();
  }

  std::function<torch::Tensor(const torch::Tensor&)> function;
  torch::autograd::SavedVariable x;
  std::vector<torch::autograd::SavedVariable> parameters;
  torch::Tensor generator_state;
  AutocastState autocast{};
};

}  // namespace

bool is_recomputing() { return recomputing; }

torch::Tensor checkpoint(
    std::function<torch::Tensor(const torch::Tensor&)> function,
    const torch::Tensor& x, const std::vector<torch::Tensor>& parameters) {
  torch::autograd::variable_list inputs{x};
  inputs.insert(inputs.end(), parameters.begin(), parameters.end());
  if (!torch::autograd::compute_requires_grad(inputs)) return function(x);

  auto node = c10::make_intrusive<CheckpointBackward>(
      torch::autograd::collect_next_edges(inputs));
  node->x = torch::autograd::SavedVariable(x, /*is_output=*/false);
  node->parameters.reserve(parameters.size());
  for (const torch::Tensor& parameter : parameters) {
    node->parameters.emplace_back(parameter, /*is_output=*/false);
  }
  node->generator_state = random_state(x.device());
  node->autocast = AutocastState::capture(x.device().type());
  torch::Tensor y;
  {
    torch::NoGradGuard no_grad;
    AutocastScope autocast_scope(node->autocast);
    // An alias: the result may be an input itself, which must not get a new
    // gradient function.
    y = function(x).detach();
  }
  node->function = std::move(function);
  torch::autograd::set_history(y, node);
  return y;
}

}  // namespace cosformer
