// Sizes and dtypes of what the linear attention operators return, for meta and
// fake tensors (torch.compile, export).
#include <ATen/ops/empty.h>

#include "ops/linear_call.h"
#include "ops/linear_checks.h"

namespace cosformer::ops {

ForwardOutputs forward_meta(const LinearCall& call, const StateSpec& spec,
                            ForwardWanted wanted) {
  check_state_spec(call, spec);
  check_linear_call(call);
  const at::TensorOptions same = call.q.options();
  const at::TensorOptions accumulation = same.dtype(accumulation_dtype(call));
  const at::TensorOptions integers = same.dtype(at::kLong);
  const auto q = call.q.sym_sizes();
  const c10::SymInt kv_heads = call.k.sym_size(2),
                    value_dim = call.v.sym_size(3);
  at::Tensor out = at::empty_symint({q[0], q[1], q[2], value_dim}, same);
  at::Tensor denominator =
      wanted.denominator && call.normalizer == "sum"
          ? at::empty_symint({q[0], q[1], q[2]}, accumulation)
          : at::empty({0}, accumulation);
  if (!wanted.state) {
    return {out,
            denominator,
            at::empty({0}, accumulation),
            at::empty({0}, accumulation),
            at::empty({0}, integers),
            at::empty({0}, integers)};
  }
  const c10::SymInt rows = num_rows(call), features = num_features(call);
  return {out,
          denominator,
          at::empty_symint({rows, kv_heads, features, value_dim}, accumulation),
          at::empty_symint({rows, kv_heads, features}, accumulation),
          at::empty_symint({rows}, integers),
          at::empty_symint({rows}, integers)};
}

BackwardOutputs backward_meta(const LinearGradients& gradients,
                              const LinearCall& call) {
  check_linear_call(call);
  check_gradients(gradients, call);
  const at::TensorOptions accumulation =
      call.q.options().dtype(accumulation_dtype(call));
  const auto gradient_of = [](bool needed, const at::Tensor& tensor) {
    return needed ? at::empty_symint(tensor.sym_sizes(), tensor.options())
                  : at::empty({0}, tensor.options());
  };
  const bool needs_state =
      call.kv_state && (gradients.needs[3] || gradients.needs[4]);
  return {gradient_of(gradients.needs[0], call.q),
          gradient_of(gradients.needs[1], call.k),
          gradient_of(gradients.needs[2], call.v),
          needs_state
              ? at::empty_symint(call.kv_state->sym_sizes(), accumulation)
              : at::empty({0}, accumulation),
          needs_state ? at::empty_symint(call.k_sum->sym_sizes(), accumulation)
                      : at::empty({0}, accumulation)};
}

}  // namespace cosformer::ops
