// Sizes and dtypes of what the Performer operators return, for meta and fake
// tensors (torch.compile, export).
#include <ATen/ops/empty.h>

#include "ops/performer_checks.h"

namespace cosformer::ops {

PerformerOutputs performer_meta(const PerformerCall& call,
                                const PerformerSpec& spec,
                                ForwardWanted wanted) {
  check_performer_call(call, spec);
  const at::TensorOptions same = call.q.options();
  const at::TensorOptions accumulation = same.dtype(accumulation_dtype(call.q));
  const at::TensorOptions integers = same.dtype(at::kLong);
  const at::TensorOptions wide = same.dtype(at::kDouble);
  const auto q = call.q.sym_sizes();
  const c10::SymInt kv_heads = call.k.sym_size(2),
                    value_dim = call.v.sym_size(3);
  at::Tensor out = at::empty_symint({q[0], q[1], q[2], value_dim}, same);
  at::Tensor log_denominator = wanted.denominator
                                   ? at::empty_symint({q[0], q[1], q[2]}, wide)
                                   : at::empty({0}, wide);
  if (!wanted.state) {
    return {out,
            log_denominator,
            at::empty({0}, accumulation),
            at::empty({0}, accumulation),
            at::empty({0}, accumulation),
            at::empty({0}, integers),
            at::empty({0}, integers)};
  }
  const c10::SymInt rows = num_rows(attention_call("", call)),
                    features = call.projection.sym_size(0);
  return {out,
          log_denominator,
          at::empty_symint({rows, kv_heads, features, value_dim}, accumulation),
          at::empty_symint({rows, kv_heads, features}, accumulation),
          at::empty_symint({rows, kv_heads, features}, accumulation),
          at::empty_symint({rows}, integers),
          at::empty_symint({rows}, integers)};
}

PerformerBackwardOutputs performer_backward_meta(
    const PerformerGradients& gradients, const PerformerCall& call) {
  check_performer_call(call);
  check_performer_gradients(gradients, call);
  const at::TensorOptions accumulation =
      call.q.options().dtype(accumulation_dtype(call.q));
  const auto gradient_of = [](bool needed, const at::Tensor& tensor) {
    return needed ? at::empty_symint(tensor.sym_sizes(), tensor.options())
                  : at::empty({0}, tensor.options());
  };
  const bool needs_state =
      call.kv_state && (gradients.needs[4] || gradients.needs[5]);
  return {gradient_of(gradients.needs[0], call.q),
          gradient_of(gradients.needs[1], call.k),
          gradient_of(gradients.needs[2], call.v),
          gradient_of(gradients.needs[3], call.projection),
          needs_state
              ? at::empty_symint(call.kv_state->sym_sizes(), accumulation)
              : at::empty({0}, accumulation),
          needs_state ? at::empty_symint(call.k_sum->sym_sizes(), accumulation)
                      : at::empty({0}, accumulation)};
}

at::Tensor performer_decode_meta(const PerformerDecodeCall& call,
                                 const PerformerSpec& spec) {
  check_performer_decode(call, spec);
  return at::empty_symint(
      {call.q.sym_size(0), 1, call.q.sym_size(2), call.v.sym_size(3)},
      call.q.options());
}

}  // namespace cosformer::ops
