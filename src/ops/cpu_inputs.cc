#include "ops/cpu_inputs.h"

namespace cosformer::ops {

CpuInputs::CpuInputs(const LinearCall& call, Content content) {
  call_.fill(attention_call("", call), content, inputs_);
  if (!call.kv_state) return;
  if (content == Content::kAll) {
    kv_state_ = call.kv_state->contiguous();
    k_sum_ = call.k_sum->contiguous();
    inputs_.state.kv_state = kv_state_.const_data_ptr();
    inputs_.state.k_sum = k_sum_.const_data_ptr();
  } else {
    inputs_.state.kv_state = inputs_.state.k_sum = &inputs_;
  }
  inputs_.state.start = integers(*call.state_start, rows(), state_start_);
  inputs_.state.position =
      integers(*call.state_position, rows(), state_position_);
  // No start: where the state stands.
  if (!call.q_start) inputs_.q_start = inputs_.state.position;
  if (!call.kv_start) inputs_.kv_start = inputs_.state.position;
}

}  // namespace cosformer::ops
