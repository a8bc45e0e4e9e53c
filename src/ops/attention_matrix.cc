#include "ops/attention_matrix.h"

#include <ATen/ops/eye.h>

#include "cosformer/ops.h"
#include "ops/errors.h"

namespace cosformer {
namespace ops {

at::Tensor unit_values(const at::Tensor& q, const at::Tensor& k) {
  if (q.dim() != 4 || k.dim() != 4) {
    fail("attention_matrix: query has ", q.dim(), " dimensions, key has ",
         k.dim(), ", expected 4: [batch, length, heads, head_dim]");
  }
  constexpr int64_t kMost = int64_t{1} << 26;
  const int64_t kv_len = k.size(1);
  const int64_t rows = q.size(0) * q.size(1) * q.size(2);
  if (kv_len > 0 && rows > kMost / kv_len) {
    fail("attention_matrix: [batch, heads, q_len, kv_len] = [", q.size(0), ", ",
         q.size(2), ", ", q.size(1), ", ", kv_len, "] has more than ", kMost,
         " weights: look at fewer rows, heads or positions at a time");
  }
  return at::eye(kv_len, k.options())
      .unsqueeze(0)
      .unsqueeze(2)
      .expand({k.size(0), kv_len, k.size(2), kv_len});
}

at::Tensor as_matrix(const at::Tensor& out) {
  return out.permute({0, 2, 1, 3});
}

}  // namespace ops

namespace {

// A call without keys has no value_dim that would be its kv_len.
bool is_empty(const at::Tensor& k) { return k.dim() == 4 && k.size(1) == 0; }

at::Tensor empty_matrix(const at::Tensor& q) {
  return q.new_zeros({q.size(0), q.size(2), q.size(1), 0});
}

void check_unset(bool is_set, const char* name) {
  if (is_set) {
    ops::fail("attention_matrix: ", name,
              " is set, expected a plain call: the matrix is that of one call "
              "on a padded batch");
  }
}

}  // namespace

at::Tensor attention_matrix(const at::Tensor& q, const at::Tensor& k,
                            const LinearAttentionArgs& args) {
  check_unset(args.state.has_value() || args.return_state, "state");
  check_unset(args.cu_seqlens_q || args.cu_seqlens_k, "cu_seqlens");
  const at::Tensor values = ops::unit_values(q, k);
  if (is_empty(k)) return empty_matrix(q);
  return ops::as_matrix(std::get<0>(linear_attention(q, k, values, args)));
}

at::Tensor attention_matrix(const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& projection,
                            const PerformerAttentionArgs& args) {
  check_unset(args.state.has_value() || args.return_state, "state");
  check_unset(args.cu_seqlens_q || args.cu_seqlens_k, "cu_seqlens");
  const at::Tensor values = ops::unit_values(q, k);
  if (is_empty(k)) return empty_matrix(q);
  return ops::as_matrix(
      std::get<0>(performer_attention(q, k, values, projection, args)));
}

at::Tensor attention_matrix(const at::Tensor& q, const at::Tensor& k,
                            const SoftmaxAttentionArgs& args) {
  check_unset(args.dropout_p != 0, "dropout_p");
  check_unset(args.cu_seqlens_q || args.cu_seqlens_k, "cu_seqlens");
  const at::Tensor values = ops::unit_values(q, k);
  if (is_empty(k)) return empty_matrix(q);
  return ops::as_matrix(softmax_attention(q, k, values, args));
}

}  // namespace cosformer
