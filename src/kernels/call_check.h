// What the calls of all engines have alike, its checks, and those of the
// softmax engine: what its entry points call before they touch memory.
#ifndef COSFORMER_SRC_KERNELS_CALL_CHECK_H_
#define COSFORMER_SRC_KERNELS_CALL_CHECK_H_

#include <cstdint>
#include <string_view>

#include "cosformer/kernels.h"
#include "kernels/check.h"

namespace cosformer {

struct CallInputs {
  // Inputs: LinearAttentionInputs, SoftmaxAttentionInputs.
  template <typename Inputs>
  explicit CallInputs(const Inputs& in)
      : q(in.q),
        k(in.k),
        v(in.v),
        q_start(in.q_start),
        kv_start(in.kv_start),
        key_mask(in.key_mask),
        key_mask_stride(in.key_mask_stride),
        query_mask(in.query_mask),
        query_mask_stride(in.query_mask_stride),
        cu_seqlens_q(in.cu_seqlens_q),
        cu_seqlens_k(in.cu_seqlens_k),
        num_sequences(in.num_sequences) {}

  const ConstView4 &q, &k, &v;
  const int64_t *q_start, *kv_start;
  const uint8_t* key_mask;
  int64_t key_mask_stride;
  const uint8_t* query_mask;
  int64_t query_mask_stride;
  const int64_t *cu_seqlens_q, *cu_seqlens_k;
  int64_t num_sequences;
};

int64_t num_rows(const CallInputs& inputs);
// Precondition: the call's check is ok, row < num_rows.
AttentionRow attention_row(const CallInputs& inputs, int64_t row);
AttentionRow attention_row(const SoftmaxAttentionInputs& inputs, int64_t row);

// Shapes, dtypes, memory, packing and masks. where: "linear_attention", ...
Status check_call(std::string_view where, const CallInputs& inputs);
// The positions of a row's first and last query and key.
Status check_positions(std::string_view where, const AttentionRow& r,
                       int64_t row);
Status check_position(std::string_view where, std::string_view name,
                      int64_t row, int64_t position);
// A mask over [batch, seq].
Status check_mask(std::string_view where, std::string_view name,
                  const uint8_t* mask, int64_t stride, int64_t batch);
// A gradient that is wanted where its view has data: as the input it is of.
Status check_gradient(std::string_view where, std::string_view name,
                      const View4& view, const ConstView4& like);

// What a forward and a backward of the softmax engine write, and read beside
// their inputs (which were checked). After check_softmax_attention a position
// plus a reach of the window (times the dilation) cannot overflow.
Status check_softmax_forward(const SoftmaxAttentionInputs& inputs,
                             const ConstView4& out);
Status check_softmax_backward(const SoftmaxAttentionInputs& inputs,
                              const ConstView4& d_out, const View4& dq,
                              const View4& dk, const View4& dv,
                              const void* d_relative_bias);
// What the backward of the kernels reads of its forward.
Status check_softmax_saved(const SoftmaxAttentionInputs& inputs,
                           const ConstView4& out, const void* log_sum_exp);

// Whether a product (and the bytes of so many doubles) fits into int64.
template <typename... Sizes>
bool memory_can_hold(Sizes... sizes) {
  int64_t product = sizeof(double);
  for (int64_t size : {static_cast<int64_t>(sizes)...}) {
    if (size == 0) return true;
    if (__builtin_mul_overflow(product, size, &product)) return false;
  }
  return true;
}

}  // namespace cosformer

#endif  // COSFORMER_SRC_KERNELS_CALL_CHECK_H_
