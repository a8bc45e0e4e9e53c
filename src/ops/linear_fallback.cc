// The operators on devices that have no kernels: the portable path behind the
// same checks.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/autograd.h>

#include "ops/autograd_util.h"
#include "ops/cpu_inputs.h"
#include "ops/decode_step.h"
#include "ops/errors.h"
#include "ops/linear_checks.h"
#include "ops/linear_portable.h"

namespace cosformer::ops {
namespace {

void check_values(const LinearCall& call) {
  const CpuInputs inputs(call, Content::kValuesOnly);
  throw_if_error(check_linear_attention(kernel_options(call), inputs.inputs()));
}

}  // namespace

ForwardOutputs forward_portable(const LinearCall& call, const StateSpec& spec,
                                ForwardWanted wanted) {
  check_state_spec(call, spec);
  check_linear_call(call);
  check_values(call);
  auto [out, denominator, kv_state, k_sum, start, position] =
      portable_linear_attention(call, wanted.state, std::nullopt);
  const at::TensorOptions accumulation =
      call.q.options().dtype(accumulation_dtype(call));
  if (!wanted.denominator || call.normalizer != "sum")
    denominator = at::empty({0}, accumulation);
  if (!wanted.state) {
    kv_state = at::empty({0}, accumulation);
    k_sum = at::empty({0}, accumulation);
    start = at::empty({0}, accumulation.dtype(at::kLong));
    position = at::empty({0}, accumulation.dtype(at::kLong));
  }
  return {out.contiguous(),
          denominator.contiguous(),
          kv_state.contiguous(),
          k_sum.contiguous(),
          start,
          position};
}

BackwardOutputs backward_portable(const LinearGradients& gradients,
                                  const LinearCall& call) {
  check_linear_call(call);
  check_gradients(gradients, call);
  check_values(call);
  const at::TensorOptions accumulation =
      call.q.options().dtype(accumulation_dtype(call));
  BackwardOutputs result{
      at::empty({0}, call.q.options()), at::empty({0}, call.k.options()),
      at::empty({0}, call.v.options()), at::empty({0}, accumulation),
      at::empty({0}, accumulation)};
  // The gradient of what the forward computed: in its dtypes.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
  const RecordGradients record;
  const at::Tensor q = leaf(call.q), k = leaf(call.k), v = leaf(call.v);
  const OptionalTensor kv_state = leaf(call.kv_state), k_sum = leaf(call.k_sum);
  const LinearCall traced = call.on(q, k, v, kv_state, k_sum);
  const bool state_out = gradients.d_kv_state || gradients.d_k_sum;
  const ForwardOutputs outputs =
      portable_linear_attention(traced, state_out, gradients.d_out);
  torch::autograd::variable_list roots, root_gradients;
  const auto root = [&](const at::Tensor& output, const OptionalTensor& d) {
    if (!d || !output.requires_grad()) return;
    roots.push_back(output);
    root_gradients.push_back(*d);
  };
  root(std::get<0>(outputs), gradients.d_out);
  root(std::get<2>(outputs), gradients.d_kv_state);
  root(std::get<3>(outputs), gradients.d_k_sum);

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
  if (kv_state && (gradients.needs[3] || gradients.needs[4])) {
    want(true, *kv_state, std::get<3>(result));
    want(true, *k_sum, std::get<4>(result));
  }
  torch::autograd::variable_list found(inputs.size());
  if (!roots.empty() && !inputs.empty()) {
    found = torch::autograd::grad(roots, inputs, root_gradients,
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

at::Tensor decode_step_portable(const DecodeCall& call, const StateSpec& spec) {
  const OptionalTensor none, kv_state = call.kv_state, k_sum = call.k_sum,
                             start = call.start, position = call.position;
  const LinearCall linear{call.q,
                          call.k,
                          call.v,
                          none,
                          none,
                          call.key_mask,
                          call.query_mask,
                          none,
                          none,
                          kv_state,
                          k_sum,
                          start,
                          position,
                          call.feature_map,
                          call.reweight_len,
                          /*is_causal=*/true,
                          call.normalizer,
                          call.eps,
                          call.rotary_base,
                          call.rotary_interleaved};
  check_decode_step(call, spec);
  const ForwardOutputs outputs =
      forward_portable(linear, spec, {/*state=*/true, /*denominator=*/false});
  call.kv_state.copy_(std::get<2>(outputs));
  call.k_sum.copy_(std::get<3>(outputs));
  // The position follows the last real key: a masked one leaves it.
  call.position.copy_(std::get<5>(outputs));
  return std::get<0>(outputs);
}

}  // namespace cosformer::ops
