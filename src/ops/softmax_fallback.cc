// The softmax attention operators on devices that have no kernels: the portable
// path behind the same checks.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/autograd.h>

#include <vector>

#include "ops/autograd_util.h"
#include "ops/call_checks.h"
#include "ops/errors.h"
#include "ops/softmax_checks.h"
#include "ops/softmax_inputs.h"
#include "ops/softmax_portable.h"

namespace cosformer::ops {
namespace {

void check_values(const SoftmaxCall& call) {
  const SoftmaxInputs inputs(call, Content::kValuesOnly);
  throw_if_error(
      check_softmax_attention(kernel_options(call), inputs.inputs()));
}

}  // namespace

SoftmaxOutputs softmax_portable(const SoftmaxCall& call,
                                bool return_log_sum_exp) {
  check_softmax_call(call);
  check_values(call);
  auto [out, log_sum_exp] = portable_softmax_attention(call, std::nullopt);
  if (!return_log_sum_exp) log_sum_exp = at::empty({0}, log_sum_exp.options());
  return {out.contiguous(), log_sum_exp.contiguous()};
}

SoftmaxBackwardOutputs softmax_backward_portable(
    const SoftmaxGradients& gradients, const SoftmaxCall& call) {
  check_softmax_call(call);
  check_softmax_gradients(gradients, call);
  check_values(call);
  const at::TensorOptions same = call.q.options();
  SoftmaxBackwardOutputs result{
      at::empty({0}, same), at::empty({0}, same), at::empty({0}, same),
      at::empty({0},
                call.relative_bias ? call.relative_bias->options() : same)};
  // The gradient of what the forward computed: in its dtypes.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
  const RecordGradients record;
  const at::Tensor q = leaf(call.q), k = leaf(call.k), v = leaf(call.v);
  const OptionalTensor bias = leaf(call.relative_bias);
  const at::Tensor out = std::get<0>(
      portable_softmax_attention(call.on(q, k, v, bias), gradients.d_out));

  torch::autograd::variable_list inputs;
  std::vector<at::Tensor*> targets;
  const auto want = [&](bool needed, const at::Tensor& input, at::Tensor& to) {
    if (!needed) return;
    inputs.push_back(input);
    targets.push_back(&to);
  };
  want(gradients.needs[0], q, std::get<0>(result));
  want(gradients.needs[1], k, std::get<1>(result));
  want(gradients.needs[2], v, std::get<2>(result));
  if (bias) want(gradients.needs[3], *bias, std::get<3>(result));
  torch::autograd::variable_list found(inputs.size());
  if (out.requires_grad() && !inputs.empty()) {
    found = torch::autograd::grad({out}, inputs, {gradients.d_out},
                                  /*retain_graph=*/false,
                                  /*create_graph=*/false,
                                  /*allow_unused=*/true);
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    *targets[i] = found[i].defined()
                      ? found[i].detach().contiguous()
                      : at::zeros(inputs[i].sizes(), inputs[i].options());
  }
  return result;
}

at::Tensor softmax_decode_portable(const SoftmaxDecodeCall& call) {
  check_softmax_decode(call);
  const int64_t rows = call.q.size(0), capacity = call.keys.size(1);
  if (rows == 0)
    return call.v.new_zeros({0, 1, call.q.size(2), call.v.size(3)});
  const at::Tensor position = call.position.unsqueeze(1);  // [rows, 1]
  const at::Tensor start =
      call.start ? call.start->unsqueeze(1) : at::zeros_like(position);
  const at::Tensor behind = position - start;
  if (behind.min().item<int64_t>() < 0) {
    fail(
        "softmax_attention_decode_step_: a row's position lies before its "
        "start");
  }
  if (capacity == 0 ||
      (!call.is_ring && behind.max().item<int64_t>() >= capacity)) {
    fail("softmax_attention_decode_step_: the cache has capacity ", capacity,
         ", a row's next token would be its ", behind.max().item<int64_t>() + 1,
         "th: expected room for it (or a ring)");
  }
  const at::Tensor slot = behind.remainder(capacity);
  const auto write = [&](const at::Tensor& cache, const at::Tensor& token) {
    cache.scatter_(1, slot.unsqueeze(-1).unsqueeze(-1).expand_as(token), token);
  };
  write(call.keys, call.k);
  write(call.values, call.v);

  // A slot holds the last position up to the token's that falls on it.
  PlacedKeys placed;
  placed.keys = call.keys;
  placed.values = call.values;
  placed.positions =
      position -
      (behind - at::arange(capacity, position.options())).remainder(capacity);
  placed.mask = placed.positions >= start;
  if (call.cache_mask) placed.mask = placed.mask & *call.cache_mask;
  if (call.global_mask) {
    placed.global = *call.global_mask;
    placed.query_global = call.global_mask->gather(1, slot);
  }
  const OptionalTensor none;
  const SoftmaxCall softmax{call.q,
                            call.k,
                            call.v,
                            none,
                            none,
                            none,
                            call.query_mask,
                            none,
                            none,
                            call.global_mask,
                            call.block_mask,
                            call.relative_bias,
                            none,
                            /*is_causal=*/true,
                            call.scale,
                            call.window_left,
                            call.window_right,
                            call.dilation,
                            call.block_size,
                            /*dropout_p=*/0.0};
  const at::Tensor out = portable_softmax_over(softmax, position, placed);
  call.position.add_(1);
  return out.contiguous();
}

}  // namespace cosformer::ops
