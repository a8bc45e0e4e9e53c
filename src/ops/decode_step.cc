#include "ops/decode_step.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include "ops/autograd_util.h"
#include "ops/cpu_inputs.h"
#include "ops/errors.h"
#include "ops/executor.h"
#include "ops/linear_checks.h"

namespace cosformer::ops {
namespace {

constexpr char kWhere[] = "linear_attention_decode_step_: ";

// The same call as a linear attention, with or without its state.
class AsLinearCall {
 public:
  AsLinearCall(const DecodeCall& call, bool with_state) : call_(call) {
    if (!with_state) return;
    kv_state_ = call.kv_state;
    k_sum_ = call.k_sum;
    start_ = call.start;
    position_ = call.position;
  }

  LinearCall get() const {
    return {call_.q,
            call_.k,
            call_.v,
            none_,
            none_,
            call_.key_mask,
            call_.query_mask,
            none_,
            none_,
            kv_state_,
            k_sum_,
            start_,
            position_,
            call_.feature_map,
            call_.reweight_len,
            /*is_causal=*/true,
            call_.normalizer,
            call_.eps,
            call_.rotary_base,
            call_.rotary_interleaved};
  }

 private:
  const DecodeCall& call_;
  OptionalTensor none_, kv_state_, k_sum_, start_, position_;
};

void check_in_place(const at::Tensor& tensor, const char* name) {
  if (!tensor.is_contiguous()) {
    fail(kWhere, "state.", name,
         " is not contiguous and cannot be updated in place: pass "
         "state.clone()");
  }
}

}  // namespace

void check_decode_step(const DecodeCall& call, const StateSpec& spec) {
  const AsLinearCall as_linear(call, /*with_state=*/true);
  const LinearCall linear = as_linear.get();
  check_state_spec(linear, spec);
  check_linear_call(linear);
  if (call.q.sym_size(1) != 1 || call.k.sym_size(1) != 1) {
    fail(kWhere, "query has length ", call.q.sym_size(1), ", key has ",
         call.k.sym_size(1), ", expected 1: one token a row");
  }
}

at::Tensor decode_step_cpu(const DecodeCall& call, const StateSpec& spec) {
  check_decode_step(call, spec);
  check_in_place(call.kv_state, "kv_state");
  check_in_place(call.k_sum, "k_sum");
  check_in_place(call.position, "position");
  check_in_place(call.start, "start");
  const AsLinearCall as_linear(call, /*with_state=*/false);
  const LinearCall linear = as_linear.get();
  const CpuInputs inputs(linear);
  at::Tensor out = at::empty(
      {call.q.size(0), 1, call.q.size(2), call.v.size(3)}, call.q.options());
  const LinearStateView state{call.kv_state.mutable_data_ptr(),
                              call.k_sum.mutable_data_ptr(),
                              call.start.mutable_data_ptr<int64_t>(),
                              call.position.mutable_data_ptr<int64_t>()};
  throw_if_error(
      linear_attention_decode_step(kernel_options(linear), inputs.inputs(),
                                   state, mutable_view(out), torch_executor()));
  return out;
}

at::Tensor decode_step_meta(const DecodeCall& call, const StateSpec& spec) {
  check_decode_step(call, spec);
  return at::empty_symint(
      {call.q.sym_size(0), 1, call.q.sym_size(2), call.v.sym_size(3)},
      call.q.options());
}

at::Tensor decode_step_autograd(const DecodeCall& call, const StateSpec& spec) {
  if (is_differentiated(
          {&call.q, &call.k, &call.v, &call.kv_state, &call.k_sum}, {})) {
    fail(kWhere,
         "updates its state in place and has no gradient: call it under "
         "torch.no_grad(), or use linear_attention with return_state");
  }
  at::AutoDispatchBelowAutograd below;
  return call_decode_step(call, spec);
}

at::Tensor decode_step_in_place(const DecodeCall& call, const StateSpec& spec) {
  bump_versions({&call.kv_state, &call.k_sum, &call.position});
  at::AutoDispatchBelowADInplaceOrView below;
  return call_decode_step(call, spec);
}

}  // namespace cosformer::ops
