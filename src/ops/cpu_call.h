// What the kernels of every kind take alike, made of a call's tensors.
#ifndef COSFORMER_OPS_CPU_CALL_H_
#define COSFORMER_OPS_CPU_CALL_H_

#include <c10/util/SmallVector.h>

#include <cstdint>
#include <vector>

#include "ops/call.h"
#include "ops/views.h"

namespace cosformer::ops {

// kValuesOnly: for a kind's check on any device, with addresses that are not to
// be followed; small integer tensors are copied to the host.
enum class Content { kAll, kValuesOnly };

// An integer tensor's values in order, on the host. Throws where the tensor has
// none (torch.compile and opcheck trace with such), which would be a read of
// address 0.
std::vector<int64_t> host_integers(const at::Tensor& tensor);

using Integers = c10::SmallVector<int64_t, 8>;
// A tensor's integers, on the host; a 0-dim tensor is repeated for every row.
// Never nullptr, which would mean that nothing is given.
const int64_t* integers(const at::Tensor& tensor, int64_t rows,
                        Integers& buffer);
// A bool matrix whose rows are dense (a copy in the holder where they are not).
struct MaskView {
  const uint8_t* data;
  int64_t stride;
};
MaskView mask_view(const at::Tensor& mask, at::Tensor& holder);
// A view of the tensor's size, with an address that is not to be followed.
ConstView4 placeholder(const at::Tensor& tensor);

// What has to live as long as a kernel's inputs.
class CpuCall {
 public:
  // Fills the fields of Inputs (LinearAttentionInputs and its like) that the
  // kinds share. Precondition: the call is checked.
  template <typename Inputs>
  void fill(const AttentionCall& call, Content content, Inputs& inputs) {
    rows_ = call.cu_seqlens_q ? call.cu_seqlens_q->size(0) - 1 : call.q.size(0);
    if (content == Content::kAll) {
      inputs.q = view(dense_rows(call.q, q_));
      inputs.k = view(dense_rows(call.k, k_));
      inputs.v = view(dense_rows(call.v, v_));
      if (call.key_mask) {
        const MaskView mask = mask_view(*call.key_mask, key_mask_);
        inputs.key_mask = mask.data;
        inputs.key_mask_stride = mask.stride;
      }
      if (call.query_mask) {
        const MaskView mask = mask_view(*call.query_mask, query_mask_);
        inputs.query_mask = mask.data;
        inputs.query_mask_stride = mask.stride;
      }
    } else {
      inputs.q = placeholder(call.q);
      inputs.k = placeholder(call.k);
      inputs.v = placeholder(call.v);
    }
    if (call.cu_seqlens_q) {
      inputs.num_sequences = rows_;
      inputs.cu_seqlens_q = integers(*call.cu_seqlens_q, rows_, cu_seqlens_q_);
      inputs.cu_seqlens_k =
          call.cu_seqlens_k ? integers(*call.cu_seqlens_k, rows_, cu_seqlens_k_)
                            : inputs.cu_seqlens_q;
    }
    if (call.q_start) inputs.q_start = integers(*call.q_start, rows_, q_start_);
    if (call.kv_start)
      inputs.kv_start = integers(*call.kv_start, rows_, kv_start_);
  }

  int64_t rows() const { return rows_; }

 private:
  int64_t rows_ = 0;
  at::Tensor q_, k_, v_, key_mask_, query_mask_;
  Integers q_start_, kv_start_, cu_seqlens_q_, cu_seqlens_k_;
};

}  // namespace cosformer::ops

#endif  // COSFORMER_OPS_CPU_CALL_H_
