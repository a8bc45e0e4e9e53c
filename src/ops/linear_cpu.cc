// The linear attention operators on CPU tensors: views and buffers for the
// kernels, nothing else.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/SmallVector.h>

#include "ops/errors.h"
#include "ops/executor.h"
#include "ops/linear_call.h"
#include "ops/linear_checks.h"
#include "ops/views.h"

namespace cosformer::ops {
namespace {

using Integers = c10::SmallVector<int64_t, 8>;

// Kernel inputs, and what has to live as long as they do.
class CpuInputs {
 public:
  explicit CpuInputs(const LinearCall& call) {
    rows_ = call.cu_seqlens_q ? call.cu_seqlens_q->size(0) - 1 : call.q.size(0);
    inputs_.q = view(dense_rows(call.q, q_));
    inputs_.k = view(dense_rows(call.k, k_));
    inputs_.v = view(dense_rows(call.v, v_));
    if (call.key_mask)
      mask(*call.key_mask, key_mask_, inputs_.key_mask,
           inputs_.key_mask_stride);
    if (call.query_mask)
      mask(*call.query_mask, query_mask_, inputs_.query_mask,
           inputs_.query_mask_stride);
    if (call.cu_seqlens_q) {
      inputs_.num_sequences = rows_;
      inputs_.cu_seqlens_q = integers(*call.cu_seqlens_q, cu_seqlens_q_);
      inputs_.cu_seqlens_k = call.cu_seqlens_k
                                 ? integers(*call.cu_seqlens_k, cu_seqlens_k_)
                                 : inputs_.cu_seqlens_q;
    }
    if (call.kv_state) {
      kv_state_ = call.kv_state->contiguous();
      k_sum_ = call.k_sum->contiguous();
      inputs_.state = {kv_state_.const_data_ptr(), k_sum_.const_data_ptr(),
                       integers(*call.state_start, state_start_),
                       integers(*call.state_position, state_position_)};
    }
    // No start: 0, or where the state stands.
    inputs_.q_start = call.q_start ? integers(*call.q_start, q_start_)
                                   : inputs_.state.position;
    inputs_.kv_start = call.kv_start ? integers(*call.kv_start, kv_start_)
                                     : inputs_.state.position;
  }
  CpuInputs(const CpuInputs&) = delete;
  CpuInputs& operator=(const CpuInputs&) = delete;

  const LinearAttentionInputs& inputs() const { return inputs_; }
  int64_t rows() const { return rows_; }

 private:
  static void mask(const at::Tensor& tensor, at::Tensor& holder,
                   const uint8_t*& data, int64_t& stride) {
    holder = tensor.size(1) <= 1 || tensor.stride(1) == 1 ? tensor
                                                          : tensor.contiguous();
    data = static_cast<const uint8_t*>(holder.const_data_ptr());
    stride = holder.stride(0);
  }

  // A 0-dim tensor is repeated for every row; never nullptr, which would mean
  // that nothing is given.
  const int64_t* integers(const at::Tensor& tensor, Integers& buffer) const {
    const int64_t count = tensor.dim() == 0 ? rows_ : tensor.size(0);
    const int64_t stride = tensor.dim() == 0 ? 0 : tensor.stride(0);
    buffer.resize(std::max<int64_t>(count, 1));
    if (tensor.scalar_type() == at::kInt) {
      const int32_t* data = tensor.const_data_ptr<int32_t>();
      for (int64_t i = 0; i < count; ++i) buffer[i] = data[i * stride];
    } else {
      const int64_t* data = tensor.const_data_ptr<int64_t>();
      for (int64_t i = 0; i < count; ++i) buffer[i] = data[i * stride];
    }
    return buffer.data();
  }

  LinearAttentionInputs inputs_;
  int64_t rows_ = 0;
  at::Tensor q_, k_, v_, key_mask_, query_mask_, kv_state_, k_sum_;
  Integers q_start_, kv_start_, cu_seqlens_q_, cu_seqlens_k_, state_start_,
      state_position_;
};

bool is_normalized(const LinearCall& call) { return call.normalizer == "sum"; }

}  // namespace

ForwardOutputs forward_cpu(const LinearCall& call, const StateSpec& spec,
                           ForwardWanted wanted) {
  check_state_spec(call, spec);
  check_linear_call(call);
  const CpuInputs inputs(call);
  const at::TensorOptions same = call.q.options();
  const at::TensorOptions accumulation = same.dtype(accumulation_dtype(call));
  const at::TensorOptions integers = same.dtype(at::kLong);

  at::Tensor out = at::empty(
      {call.q.size(0), call.q.size(1), call.q.size(2), call.v.size(3)}, same);
  const bool with_denominator = wanted.denominator && is_normalized(call);
  at::Tensor denominator =
      with_denominator
          ? at::empty({call.q.size(0), call.q.size(1), call.q.size(2)},
                      accumulation)
          : at::empty({0}, accumulation);
  at::Tensor kv_state, k_sum, start, position;
  LinearStateView state_out;
  if (wanted.state) {
    const int64_t rows = inputs.rows(), kv_heads = call.k.size(2);
    const int64_t features = call.k.size(3) * (call.reweight_len > 0 ? 2 : 1);
    kv_state =
        at::empty({rows, kv_heads, features, call.v.size(3)}, accumulation);
    k_sum = at::empty({rows, kv_heads, features}, accumulation);
    start = at::empty({rows}, integers);
    position = at::empty({rows}, integers);
    state_out = {kv_state.mutable_data_ptr(), k_sum.mutable_data_ptr(),
                 start.mutable_data_ptr<int64_t>(),
                 position.mutable_data_ptr<int64_t>()};
  } else {
    kv_state = at::empty({0}, accumulation);
    k_sum = at::empty({0}, accumulation);
    start = at::empty({0}, integers);
    position = at::empty({0}, integers);
  }
  throw_if_error(linear_attention_forward(
      kernel_options(call), inputs.inputs(), mutable_view(out),
      with_denominator ? denominator.mutable_data_ptr() : nullptr, state_out,
      torch_executor()));
  return {out, denominator, kv_state, k_sum, start, position};
}

BackwardOutputs backward_cpu(const LinearGradients& gradients,
                             const LinearCall& call) {
  check_linear_call(call);
  check_gradients(gradients, call);
  const CpuInputs inputs(call);
  const at::TensorOptions same = call.q.options();
  const at::TensorOptions accumulation = same.dtype(accumulation_dtype(call));

  at::Tensor out_holder, d_out_holder;
  const at::Tensor d_out = gradients.d_out
                               ? dense_rows(*gradients.d_out, d_out_holder)
                               : at::zeros(gradients.out.sizes(), same);
  const at::Tensor& out = dense_rows(gradients.out, out_holder);
  at::Tensor denominator, d_kv_state, d_k_sum;
  ConstLinearStateView d_state_out;
  if (is_normalized(call)) denominator = gradients.denominator.contiguous();
  if (gradients.d_kv_state || gradients.d_k_sum) {
    const int64_t rows = inputs.rows(), kv_heads = call.k.size(2);
    const int64_t features = call.k.size(3) * (call.reweight_len > 0 ? 2 : 1);
    d_kv_state = gradients.d_kv_state
                     ? gradients.d_kv_state->contiguous()
                     : at::zeros({rows, kv_heads, features, call.v.size(3)},
                                 accumulation);
    d_k_sum = gradients.d_k_sum
                  ? gradients.d_k_sum->contiguous()
                  : at::zeros({rows, kv_heads, features}, accumulation);
    d_state_out.kv_state = d_kv_state.const_data_ptr();
    d_state_out.k_sum = d_k_sum.const_data_ptr();
  }

  const auto gradient_of = [](bool needed, const at::Tensor& tensor) {
    return needed ? at::empty(tensor.sizes(), tensor.options())
                  : at::empty({0}, tensor.options());
  };
  at::Tensor dq = gradient_of(gradients.needs[0], call.q);
  at::Tensor dk = gradient_of(gradients.needs[1], call.k);
  at::Tensor dv = gradient_of(gradients.needs[2], call.v);
  const bool needs_state =
      call.kv_state && (gradients.needs[3] || gradients.needs[4]);
  at::Tensor d_kv_in = at::empty({0}, accumulation);
  at::Tensor d_k_sum_in = at::empty({0}, accumulation);
  LinearStateView d_state_in;
  if (needs_state) {
    d_kv_in = at::empty(call.kv_state->sizes(), accumulation);
    d_k_sum_in = at::empty(call.k_sum->sizes(), accumulation);
    d_state_in.kv_state = d_kv_in.mutable_data_ptr();
    d_state_in.k_sum = d_k_sum_in.mutable_data_ptr();
  }
  const auto target = [](bool needed, at::Tensor& tensor) {
    return needed ? mutable_view(tensor) : View4{};
  };
  throw_if_error(linear_attention_backward(
      kernel_options(call), inputs.inputs(), view(out),
      is_normalized(call) ? denominator.const_data_ptr() : nullptr, view(d_out),
      d_state_out, target(gradients.needs[0], dq),
      target(gradients.needs[1], dk), target(gradients.needs[2], dv),
      d_state_in, torch_executor()));
  return {dq, dk, dv, d_kv_in, d_k_sum_in};
}

}  // namespace cosformer::ops
