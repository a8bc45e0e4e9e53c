#include "ops/cpu_inputs.h"

#include <algorithm>

namespace cosformer::ops {
namespace {

void mask_view(const at::Tensor& tensor, at::Tensor& holder,
               const uint8_t*& data, int64_t& stride) {
  holder = tensor.size(1) <= 1 || tensor.stride(1) == 1 ? tensor
                                                        : tensor.contiguous();
  data = static_cast<const uint8_t*>(holder.const_data_ptr());
  stride = holder.stride(0);
}

template <typename T>
void copy_integers(const at::Tensor& tensor, int64_t count, int64_t stride,
                   int64_t* to) {
  const T* data = tensor.const_data_ptr<T>();
  for (int64_t i = 0; i < count; ++i) to[i] = data[i * stride];
}

}  // namespace

void CpuInputs::set_tensors(const LinearCall& call) {
  inputs_.q = view(dense_rows(call.q, q_));
  inputs_.k = view(dense_rows(call.k, k_));
  inputs_.v = view(dense_rows(call.v, v_));
  if (call.key_mask) {
    mask_view(*call.key_mask, key_mask_, inputs_.key_mask,
              inputs_.key_mask_stride);
  }
  if (call.query_mask) {
    mask_view(*call.query_mask, query_mask_, inputs_.query_mask,
              inputs_.query_mask_stride);
  }
  if (call.kv_state) {
    kv_state_ = call.kv_state->contiguous();
    k_sum_ = call.k_sum->contiguous();
    inputs_.state.kv_state = kv_state_.const_data_ptr();
    inputs_.state.k_sum = k_sum_.const_data_ptr();
  }
}

void CpuInputs::set_placeholders(const LinearCall& call) {
  const auto placeholder = [this](const at::Tensor& tensor) {
    ConstView4 result;
    result.data = &inputs_;
    result.dtype = dtype_of(tensor);
    for (int i = 0; i < 4; ++i) result.size[i] = tensor.size(i);
    result.stride = contiguous_strides(result.size);
    return result;
  };
  inputs_.q = placeholder(call.q);
  inputs_.k = placeholder(call.k);
  inputs_.v = placeholder(call.v);
  if (call.kv_state) inputs_.state.kv_state = inputs_.state.k_sum = &inputs_;
}

CpuInputs::CpuInputs(const LinearCall& call, Content content) {
  rows_ = call.cu_seqlens_q ? call.cu_seqlens_q->size(0) - 1 : call.q.size(0);
  content == kAll ? set_tensors(call) : set_placeholders(call);
  if (call.cu_seqlens_q) {
    inputs_.num_sequences = rows_;
    inputs_.cu_seqlens_q = integers(*call.cu_seqlens_q, cu_seqlens_q_);
    inputs_.cu_seqlens_k = call.cu_seqlens_k
                               ? integers(*call.cu_seqlens_k, cu_seqlens_k_)
                               : inputs_.cu_seqlens_q;
  }
  if (call.kv_state) {
    inputs_.state.start = integers(*call.state_start, state_start_);
    inputs_.state.position = integers(*call.state_position, state_position_);
  }
  // No start: 0, or where the state stands.
  inputs_.q_start =
      call.q_start ? integers(*call.q_start, q_start_) : inputs_.state.position;
  inputs_.kv_start = call.kv_start ? integers(*call.kv_start, kv_start_)
                                   : inputs_.state.position;
}

const int64_t* CpuInputs::integers(const at::Tensor& tensor,
                                   Integers& buffer) const {
  const int64_t count = tensor.dim() == 0 ? rows_ : tensor.size(0);
  const int64_t stride = tensor.dim() == 0 ? 0 : tensor.stride(0);
  buffer.resize(std::max<int64_t>(count, 1));
  if (!tensor.is_cpu()) return integers(tensor.to(at::kCPU), buffer);
  if (tensor.scalar_type() == at::kInt) {
    copy_integers<int32_t>(tensor, count, stride, buffer.data());
  } else {
    copy_integers<int64_t>(tensor, count, stride, buffer.data());
  }
  return buffer.data();
}

}  // namespace cosformer::ops
