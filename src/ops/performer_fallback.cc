// The Performer operators on devices that have no kernels: the portable path
// behind the same checks.
#include <ATen/Functions.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "ops/autograd_util.h"
#include "ops/cpu_inputs.h"
#include "ops/errors.h"
#include "ops/performer_checks.h"
#include "ops/performer_portable.h"

namespace cosformer::ops {
namespace {

// Positions, offsets and starts, which the kernels look at themselves.
void check_values(const PerformerCall& call) {
  const LinearCall linear =
      call.linear(call.q, call.k, call.v, call.kv_state, call.k_sum, /*eps=*/1);
  const CpuInputs inputs(linear, Content::kValuesOnly);
  PerformerAttentionInputs performer;
  performer.call = inputs.inputs();
  performer.state.sums = performer.call.state;
  performer.call.state = {};
  performer.state.log_scale = performer.state.sums.kv_state;
  performer.projection = &performer;
  performer.num_features = call.projection.size(0);
  throw_if_error(check_performer_attention({call.is_causal}, performer));
}

}  // namespace

PerformerOutputs performer_fallback(const PerformerCall& call,
                                    const PerformerSpec& spec,
                                    ForwardWanted wanted) {
  check_performer_call(call, spec);
  check_values(call);
  auto [out, log_denominator, kv_state, k_sum, log_scale, start, position] =
      portable_performer_attention(call, wanted.state, std::nullopt);
  const at::TensorOptions accumulation =
      call.q.options().dtype(accumulation_dtype(call.q));
  log_denominator = wanted.denominator
                        ? log_denominator.to(at::kDouble).contiguous()
                        : at::empty({0}, accumulation.dtype(at::kDouble));
  if (!wanted.state) {
    kv_state = at::empty({0}, accumulation);
    k_sum = at::empty({0}, accumulation);
    log_scale = at::empty({0}, accumulation);
    start = at::empty({0}, accumulation.dtype(at::kLong));
    position = at::empty({0}, accumulation.dtype(at::kLong));
  }
  return {out.contiguous(),   log_denominator,        kv_state.contiguous(),
          k_sum.contiguous(), log_scale.contiguous(), start.clone(),
          position.clone()};
}

PerformerBackwardOutputs performer_backward_fallback(
    const PerformerGradients& gradients, const PerformerCall& call) {
  check_performer_call(call);
  check_performer_gradients(gradients, call);
  check_values(call);
  // The gradient of what the forward computed: in its dtypes.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
  const RecordGradients record;
  const at::Tensor q = leaf(call.q), k = leaf(call.k), v = leaf(call.v),
                   projection = leaf(call.projection);
  const OptionalTensor kv_state = leaf(call.kv_state), k_sum = leaf(call.k_sum);
  const PerformerCall traced = call.on(q, k, v, projection, kv_state, k_sum);
  const std::vector<at::Tensor> found = portable_performer_gradients(
      traced, gradients.d_out, gradients.d_kv_state, gradients.d_k_sum,
      /*create_graph=*/false);
  const bool needs_state =
      call.kv_state && (gradients.needs[4] || gradients.needs[5]);
  const at::TensorOptions accumulation =
      call.q.options().dtype(accumulation_dtype(call.q));
  const auto gradient = [&](size_t i, bool needed, const at::Tensor& input) {
    if (!needed) return at::empty({0}, input.options());
    return found[i].defined() ? found[i].detach().contiguous()
                              : at::zeros(input.sizes(), input.options());
  };
  const at::Tensor none = at::empty({0}, accumulation);
  return {gradient(0, gradients.needs[0], call.q),
          gradient(1, gradients.needs[1], call.k),
          gradient(2, gradients.needs[2], call.v),
          gradient(3, gradients.needs[3], call.projection),
          needs_state ? gradient(4, true, *call.kv_state) : none,
          needs_state ? gradient(5, true, *call.k_sum) : none.clone()};
}

at::Tensor performer_decode_fallback(const PerformerDecodeCall& call,
                                     const PerformerSpec& spec) {
  check_performer_decode(call, spec);
  const AsPerformerCall with_state(call, /*with_state=*/true);
  const PerformerOutputs outputs = performer_fallback(with_state.get(), spec,
                                                      {/*state=*/true,
                                                       /*denominator=*/false});
  call.kv_state.copy_(std::get<2>(outputs));
  call.k_sum.copy_(std::get<3>(outputs));
  call.log_scale.copy_(std::get<4>(outputs));
  // The position follows the last real key: a masked one leaves it.
  call.position.copy_(std::get<6>(outputs));
  return std::get<0>(outputs);
}

}  // namespace cosformer::ops
