#include "ops/second_order.h"

#include <torch/csrc/autograd/autograd.h>

#include <vector>

namespace cosformer::ops {

torch::autograd::variable_list second_order(
    torch::autograd::AutogradContext* ctx,
    const torch::autograd::variable_list& first,
    const torch::autograd::variable_list& grads,
    std::initializer_list<std::optional<at::Tensor>> inputs, size_t results,
    bool create_graph) {
  using torch::autograd::variable_list;
  variable_list roots, root_gradients;
  for (size_t i = 0; i < first.size(); ++i) {
    if (!grads[i].defined() || !first[i].defined() ||
        !first[i].requires_grad()) {
      continue;
    }
    roots.push_back(first[i]);
    root_gradients.push_back(grads[i]);
  }
  variable_list wanted;
  std::vector<size_t> places;
  size_t edge = 0;  // an absent argument has none
  size_t place = 0;
  for (const std::optional<at::Tensor>& input : inputs) {
    if (input && ctx->needs_input_grad(edge++)) {
      wanted.push_back(*input);
      places.push_back(place);
    }
    ++place;
  }
  variable_list result(results);
  if (roots.empty() || wanted.empty()) return result;
  const variable_list second = torch::autograd::grad(
      roots, wanted, root_gradients, /*retain_graph=*/create_graph,
      create_graph, /*allow_unused=*/true);
  for (size_t i = 0; i < places.size(); ++i) result[places[i]] = second[i];
  return result;
}

}  // namespace cosformer::ops
