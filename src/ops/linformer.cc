// Linformer (Wang et al. 2020): softmax attention over keys and values that
// learned projections shorten along the sequence.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "ops/call_checks.h"
#include "ops/errors.h"
#include "ops/softmax_kinds.h"

namespace cosformer::ops {
namespace {

constexpr std::string_view kWhere = "linformer_attention: ";

void check_projection(const AttentionCall& call, const at::Tensor& projection,
                      const char* name) {
  if (projection.dim() != 2 || !at::isFloatingType(projection.scalar_type())) {
    fail(kWhere, name, " is ", projection.scalar_type(), " ", shape(projection),
         ", expected floating [max_len, projected_len]");
  }
  if (projection.sym_size(1) == 0)
    fail(kWhere, name, " has projected_len 0, expected at least 1");
  if (call.k.sym_size(1) > projection.sym_size(0)) {
    fail(kWhere, "key has length ", call.k.sym_size(1), ", ", name,
         " has max_len ", projection.sym_size(0),
         ": a Linformer takes no longer inputs than its projections were made "
         "for");
  }
  check_same_device(call, projection, name);
}

// [batch, kv_len, heads, dim] -> [batch, projected_len, heads, dim].
at::Tensor shortened(const at::Tensor& x, const at::Tensor& projection) {
  const at::Tensor rows = projection.narrow_symint(0, 0, x.sym_size(1));
  return at::matmul(rows.t(), x.flatten(2))
      .unflatten_symint(-1, {x.sym_size(2), x.sym_size(3)});
}

}  // namespace

at::Tensor linformer(const SoftmaxCall& call, const at::Tensor& key_len_proj,
                     const at::Tensor& value_len_proj) {
  const AttentionCall common = attention_call(kWhere, call);
  check_queries_keys_values(common);
  check_layout(common, "");
  if (call.is_causal) {
    fail(kWhere,
         "is_causal: a Linformer has no causal form, as each projected key "
         "mixes all positions, later ones too");
  }
  check_projection(common, key_len_proj, "key_len_proj");
  check_projection(common, value_len_proj, "value_len_proj");
  if (key_len_proj.sym_size(1) != value_len_proj.sym_size(1)) {
    fail(kWhere, "key_len_proj has projected_len ", key_len_proj.sym_size(1),
         ", value_len_proj has ", value_len_proj.sym_size(1),
         ": expected the same");
  }
  at::Tensor k = call.k, v = call.v;
  if (call.key_mask) {
    // What a mask hides must not enter the sums.
    const at::Tensor hidden =
        call.key_mask->logical_not().unsqueeze(-1).unsqueeze(-1);
    k = k.masked_fill(hidden, 0);
    v = v.masked_fill(hidden, 0);
  }
  k = shortened(k, key_len_proj);
  v = shortened(v, value_len_proj);
  const OptionalTensor none;
  return std::get<0>(call_softmax({call.q,
                                   k,
                                   v,
                                   none,
                                   none,
                                   none,
                                   call.query_mask,
                                   none,
                                   none,
                                   none,
                                   none,
                                   none,
                                   call.dropout_seed,
                                   /*is_causal=*/false,
                                   call.scale,
                                   std::nullopt,
                                   std::nullopt,
                                   /*dilation=*/1,
                                   std::nullopt,
                                   call.dropout_p},
                                  false));
}

}  // namespace cosformer::ops
