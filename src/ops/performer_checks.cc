#include "ops/performer_checks.h"

#include "ops/errors.h"
#include "ops/linear_checks.h"

namespace cosformer::ops {
namespace {

constexpr std::string_view kWhere = "performer_attention: ";

AttentionCall common(const PerformerCall& call) {
  return attention_call(kWhere, call);
}

}  // namespace

void check_performer_call(const PerformerCall& call) {
  const AttentionCall base = common(call);
  check_queries_keys_values(base);
  const at::Tensor& w = call.projection;
  const at::ScalarType dtype = accumulation_dtype(call.q);
  if (w.dim() != 2 || w.sym_size(0) == 0 ||
      w.sym_size(1) != call.q.sym_size(3)) {
    fail(kWhere, "projection has shape ", shape(w),
         ", expected [num_features, head_dim] with head_dim ",
         call.q.sym_size(3), " and at least 1 feature");
  }
  if (w.scalar_type() != dtype) {
    fail(kWhere, "projection is ", w.scalar_type(), ", expected ", dtype,
         " for ", call.q.scalar_type(), " inputs");
  }
  check_same_device(base, w, "projection");
  check_layout(base, " (additive masks have no linear form)");
  check_state_tensors(base, call.kv_state, call.k_sum, call.state_start,
                      call.state_position, w.sym_size(0));
  if (call.kv_state.has_value() != call.log_scale.has_value()) {
    fail(kWhere,
         "a state of kind 'performer' needs log_scale beside kv_state: give "
         "both or none");
  }
  if (!call.log_scale) return;
  if (call.log_scale->scalar_type() != dtype ||
      call.log_scale->sym_sizes() != call.k_sum->sym_sizes()) {
    fail(kWhere, "state.log_scale is ", call.log_scale->scalar_type(), " ",
         shape(*call.log_scale), ", expected ", dtype, " ", shape(*call.k_sum));
  }
  check_same_device(base, *call.log_scale, "state.log_scale");
}

void check_performer_call(const PerformerCall& call,
                          const PerformerSpec& spec) {
  if (call.kv_state &&
      (spec.kind != "performer" || spec.feature_map != "performer")) {
    fail(kWhere, "the state was made with kind '", spec.kind,
         "', feature_map '", spec.feature_map,
         "'; the call has kind 'performer', feature_map 'performer': expected "
         "the same");
  }
  check_performer_call(call);
}

void check_performer_gradients(const PerformerGradients& gradients,
                               const PerformerCall& call) {
  constexpr std::string_view kBackward = "performer_attention_backward: ";
  const c10::SymInt batch = call.q.sym_size(0), q_len = call.q.sym_size(1),
                    heads = call.q.sym_size(2), value_dim = call.v.sym_size(3);
  const at::ScalarType dtype = call.q.scalar_type();
  const at::ScalarType accumulation = accumulation_dtype(call.q);
  const std::array<c10::SymInt, 4> out = {batch, q_len, heads, value_dim};
  const std::array<c10::SymInt, 3> sums = {batch, q_len, heads};
  check_tensor(kBackward, gradients.out, "out", dtype, out);
  check_tensor(kBackward, gradients.log_denominator, "log_denominator",
               at::kDouble, sums);
  if (gradients.d_out)
    check_tensor(kBackward, *gradients.d_out, "d_out", dtype, out);
  const c10::SymInt rows = num_rows(common(call)),
                    features = call.projection.sym_size(0),
                    kv_heads = call.k.sym_size(2);
  const std::array<c10::SymInt, 4> kv = {rows, kv_heads, features, value_dim};
  const std::array<c10::SymInt, 3> k = {rows, kv_heads, features};
  if (gradients.d_kv_state) {
    check_tensor(kBackward, *gradients.d_kv_state, "d_kv_state", accumulation,
                 kv);
  }
  if (gradients.d_k_sum)
    check_tensor(kBackward, *gradients.d_k_sum, "d_k_sum", accumulation, k);
}

AsPerformerCall::AsPerformerCall(const PerformerDecodeCall& call,
                                 bool with_state)
    : call_(call) {
  if (!with_state) return;
  kv_state_ = call.kv_state;
  k_sum_ = call.k_sum;
  log_scale_ = call.log_scale;
  start_ = call.start;
  position_ = call.position;
}

PerformerCall AsPerformerCall::get() const {
  return {call_.q,
          call_.k,
          call_.v,
          call_.projection,
          none_,
          none_,
          call_.key_mask,
          none_,
          none_,
          none_,
          kv_state_,
          k_sum_,
          log_scale_,
          start_,
          position_,
          /*is_causal=*/true};
}

void check_performer_decode(const PerformerDecodeCall& call,
                            const PerformerSpec& spec) {
  const AsPerformerCall with_state(call, /*with_state=*/true);
  check_performer_call(with_state.get(), spec);
  if (call.q.sym_size(1) != 1 || call.k.sym_size(1) != 1) {
    fail("performer_attention_decode_step_: query has length ",
         call.q.sym_size(1), ", key has ", call.k.sym_size(1),
         ", expected 1: one token a row");
  }
}

}  // namespace cosformer::ops
