// The gradient of a backward operator, which the autograd functions share.
#ifndef COSFORMER_OPS_SECOND_ORDER_H_
#define COSFORMER_OPS_SECOND_ORDER_H_

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>

#include <initializer_list>
#include <optional>

namespace cosformer::ops {

// The second order of a backward operator: gradients of the first-order
// gradients that somebody used (those whose own gradient in grads is defined)
// with respect to what the operator was given. inputs: its differentiable
// arguments in order, absent ones included. -> `results` gradients, undefined
// where nobody asked.
torch::autograd::variable_list second_order(
    torch::autograd::AutogradContext* ctx,
    const torch::autograd::variable_list& first,
    const torch::autograd::variable_list& grads,
    std::initializer_list<std::optional<at::Tensor>> inputs, size_t results,
    bool create_graph);

}  // namespace cosformer::ops

#endif  // COSFORMER_OPS_SECOND_ORDER_H_
