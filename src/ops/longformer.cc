// Longformer (Beltagy et al. 2020): a window, and global tokens with queries,
// keys and values of their own.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/TensorSubclassLikeUtils.h>

#include <algorithm>

#include "ops/call_checks.h"
#include "ops/errors.h"
#include "ops/softmax_kinds.h"

namespace cosformer::ops {
namespace {

constexpr std::string_view kWhere = "longformer_attention: ";

struct GlobalTensors {
  const at::Tensor& q;
  const at::Tensor& k;
  const at::Tensor& v;
};

void check_like(const at::Tensor& found, const at::Tensor& expected,
                const char* name, const char* like) {
  if (found.sym_sizes() != expected.sym_sizes() ||
      found.scalar_type() != expected.scalar_type()) {
    fail(kWhere, name, " is ", found.scalar_type(), " ", shape(found),
         ", expected ", expected.scalar_type(), " ", shape(expected), " as ",
         like);
  }
}

// Whether a global token stands at a query's position: bool [batch, q_len].
at::Tensor global_rows(const SoftmaxCall& call) {
  const at::Tensor& mask = *call.global_mask;
  const c10::SymInt q_len = call.q.sym_size(1), kv_len = call.k.sym_size(1);
  if (!call.q_start && !call.kv_start && q_len == kv_len) return mask;
  if (kv_len == 0) return mask.new_zeros_symint({mask.sym_size(0), q_len});
  const at::TensorOptions integers = mask.options().dtype(at::kLong);
  at::Tensor index = at::arange(q_len, integers).unsqueeze(0);
  const auto shift = [&](const OptionalTensor& start) {
    return start->dim() == 1 ? start->unsqueeze(1) : *start;
  };
  if (call.q_start) index = index + shift(call.q_start);
  if (call.kv_start) index = index - shift(call.kv_start);
  index = index.expand_symint({mask.sym_size(0), q_len});
  const at::Tensor clamped =
      index.clamp_min(0).minimum(at::full_symint({}, kv_len - 1, integers));
  return (index == clamped) & mask.gather(1, clamped);
}

// Rows of global tokens at their places, for the rest zeros. Their queries are
// gathered, so that the work is (global tokens x keys).
at::Tensor gathered_rows(const SoftmaxCall& call, const GlobalTensors& global,
                         const at::Tensor& rows) {
  // At least one, perhaps masked: so that each input has a gradient.
  const int64_t count = std::max<int64_t>(rows.sum(1).max().item<int64_t>(), 1);
  const at::Tensor index = rows.to(at::kByte)
                               .argsort(/*stable=*/true, 1, /*descending=*/true)
                               .slice(1, 0, count);
  const OptionalTensor none, real = rows.gather(1, index);
  const auto wide = [&](const at::Tensor& x) {
    return index.unsqueeze(-1).unsqueeze(-1).expand(
        {-1, -1, x.size(2), x.size(3)});
  };
  const at::Tensor q = global.q.gather(1, wide(global.q));
  const at::Tensor out = std::get<0>(call_softmax({q,
                                                   global.k,
                                                   global.v,
                                                   none,
                                                   none,
                                                   call.key_mask,
                                                   real,
                                                   none,
                                                   none,
                                                   none,
                                                   none,
                                                   none,
                                                   none,
                                                   /*is_causal=*/false,
                                                   call.scale,
                                                   std::nullopt,
                                                   std::nullopt,
                                                   /*dilation=*/1,
                                                   std::nullopt,
                                                   /*dropout_p=*/0.0},
                                                  false));
  return at::zeros({call.q.size(0), call.q.size(1), out.size(2), out.size(3)},
                   out.options())
      .scatter(1, wide(out), out);
}

// The same by masking: for calls where a query's place matters, and where
// tensors have no values (compilation).
at::Tensor masked_rows(const SoftmaxCall& call, const GlobalTensors& global,
                       const OptionalTensor& rows) {
  const OptionalTensor none;
  return std::get<0>(call_softmax({global.q,
                                   global.k,
                                   global.v,
                                   call.q_start,
                                   call.kv_start,
                                   call.key_mask,
                                   rows,
                                   none,
                                   none,
                                   none,
                                   none,
                                   call.relative_bias,
                                   call.dropout_seed,
                                   call.is_causal,
                                   call.scale,
                                   std::nullopt,
                                   std::nullopt,
                                   /*dilation=*/1,
                                   std::nullopt,
                                   call.dropout_p},
                                  false));
}

at::Tensor unpacked(const SoftmaxCall& call, const GlobalTensors& global) {
  at::Tensor rows = global_rows(call);
  at::Tensor others = rows.logical_not();
  if (call.query_mask) {
    rows = rows & *call.query_mask;
    others = others & *call.query_mask;
  }
  const OptionalTensor others_mask = others;
  const at::Tensor local = std::get<0>(call_softmax({call.q,
                                                     call.k,
                                                     call.v,
                                                     call.q_start,
                                                     call.kv_start,
                                                     call.key_mask,
                                                     others_mask,
                                                     call.cu_seqlens_q,
                                                     call.cu_seqlens_k,
                                                     call.global_mask,
                                                     call.block_mask,
                                                     call.relative_bias,
                                                     call.dropout_seed,
                                                     call.is_causal,
                                                     call.scale,
                                                     call.window_left,
                                                     call.window_right,
                                                     call.dilation,
                                                     call.block_size,
                                                     call.dropout_p},
                                                    false));
  const bool by_place =
      call.is_causal || call.relative_bias || call.dropout_p > 0;
  const bool has_values =
      !rows.is_meta() && !at::isTensorSubclassLike(rows) && rows.numel() > 0;
  const at::Tensor of_globals = by_place || !has_values
                                    ? masked_rows(call, global, rows)
                                    : gathered_rows(call, global, rows);
  // Each is exactly 0 where the other is not, and takes no gradient there.
  return local + of_globals;
}

}  // namespace

at::Tensor longformer(const SoftmaxCall& call, const at::Tensor& q_global,
                      const at::Tensor& k_global, const at::Tensor& v_global) {
  const AttentionCall common = attention_call(kWhere, call);
  check_queries_keys_values(common);
  check_layout(common, "");
  if (!call.window_left || !call.global_mask) {
    fail(kWhere, call.window_left ? "global_mask" : "window",
         " is missing: a Longformer has a window and global tokens (for a "
         "window alone, softmax_attention)");
  }
  if (call.block_mask)
    fail(kWhere, "block_mask is given, expected a window and global tokens");
  check_mask(common, *call.global_mask, "global_mask", call.k.sym_size(1),
             "kv_len", "");
  check_like(q_global, call.q, "q_global", "q");
  check_like(k_global, call.k, "k_global", "k");
  check_like(v_global, call.v, "v_global", "v");
  if (!call.cu_seqlens_q) return unpacked(call, {q_global, k_global, v_global});
  return for_each_sequence(
      call, [&](const SoftmaxCall& one, int64_t q_begin, int64_t q_end,
                int64_t kv_begin, int64_t kv_end) {
        const at::Tensor q = q_global.slice(1, q_begin, q_end),
                         k = k_global.slice(1, kv_begin, kv_end),
                         v = v_global.slice(1, kv_begin, kv_end);
        return unpacked(one, {q, k, v});
      });
}

}  // namespace cosformer::ops
