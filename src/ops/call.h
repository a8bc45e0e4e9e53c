// What the operators of every kind of attention take alike.
#ifndef COSFORMER_OPS_CALL_H_
#define COSFORMER_OPS_CALL_H_

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

namespace cosformer::ops {

using OptionalTensor = std::optional<at::Tensor>;

// Argument lists, to make flat operator signatures of.
template <typename...>
struct TypeList {};

// References: a call lives no longer than the tensors it was made from.
struct AttentionCall {
  std::string_view where;              // "linear_attention: ", of errors
  const at::Tensor& q;                 // [batch, q_len, heads, head_dim]
  const at::Tensor& k;                 // [batch, kv_len, kv_heads, head_dim]
  const at::Tensor& v;                 // [batch, kv_len, kv_heads, value_dim]
  const OptionalTensor& q_start;       // int64, 0-dim or [rows]
  const OptionalTensor& kv_start;      // int64, 0-dim or [rows]
  const OptionalTensor& key_mask;      // bool [batch, kv_len]
  const OptionalTensor& query_mask;    // bool [batch, q_len]
  const OptionalTensor& cu_seqlens_q;  // int32 or int64 [sequences + 1]
  const OptionalTensor& cu_seqlens_k;
};

// Of a kind's call, whose members have the same names.
template <typename Call>
AttentionCall attention_call(std::string_view where, const Call& c) {
  return {where,          c.q,           c.k,        c.v,
          c.q_start,      c.kv_start,    c.key_mask, c.query_mask,
          c.cu_seqlens_q, c.cu_seqlens_k};
}

}  // namespace cosformer::ops

#endif  // COSFORMER_OPS_CALL_H_
