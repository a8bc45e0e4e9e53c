// The in-place step of one token a row: arguments, glue and implementations, as
// linear_call.h has them for the other operators.
#ifndef COSFORMER_OPS_DECODE_STEP_H_
#define COSFORMER_OPS_DECODE_STEP_H_

#include "ops/linear_call.h"

namespace cosformer::ops {

struct DecodeCall {
  const at::Tensor& q;   // [rows, 1, heads, head_dim]
  const at::Tensor& k;   // [rows, 1, kv_heads, head_dim]
  const at::Tensor& v;   // [rows, 1, kv_heads, value_dim]
  at::Tensor& kv_state;  // updated in place, as are k_sum and position
  at::Tensor& k_sum;
  at::Tensor& position;
  const at::Tensor& start;
  const OptionalTensor& key_mask;
  const OptionalTensor& query_mask;
  std::string_view feature_map;
  std::optional<int64_t> reweight_len;
  std::string_view normalizer;
  double eps;
  std::optional<double> rotary_base;
  bool rotary_interleaved;
};

using DecodeTypes =
    TypeList<const at::Tensor&, const at::Tensor&, const at::Tensor&,
             at::Tensor&, at::Tensor&, at::Tensor&, const at::Tensor&,
             const OptionalTensor&, const OptionalTensor&, std::string_view,
             std::optional<int64_t>, std::string_view, double,
             std::optional<double>, bool>;
using DecodeImpl = at::Tensor (*)(const DecodeCall&, const StateSpec&);

template <DecodeImpl impl, typename = DecodeTypes, typename = SpecTypes>
struct DecodeKernel;
template <DecodeImpl impl, typename... D, typename... S>
struct DecodeKernel<impl, TypeList<D...>, TypeList<S...>> {
  using Signature = at::Tensor(D..., S...);
  static at::Tensor call(D... decode, S... spec) {
    return impl(DecodeCall{decode...}, StateSpec{spec...});
  }
};

// Throws; values are not looked at.
void check_decode_step(const DecodeCall& call, const StateSpec& spec);

// Through the dispatcher.
at::Tensor call_decode_step(const DecodeCall& call, const StateSpec& spec);

at::Tensor decode_step_cpu(const DecodeCall& call, const StateSpec& spec);
at::Tensor decode_step_meta(const DecodeCall& call, const StateSpec& spec);
at::Tensor decode_step_portable(const DecodeCall& call, const StateSpec& spec);
at::Tensor decode_step_autograd(const DecodeCall& call, const StateSpec& spec);
// Tells autograd, also in inference mode, that the state changes.
at::Tensor decode_step_in_place(const DecodeCall& call, const StateSpec& spec);
at::Tensor decode_step_autocast(const DecodeCall& call, const StateSpec& spec);

}  // namespace cosformer::ops

#endif  // COSFORMER_OPS_DECODE_STEP_H_
