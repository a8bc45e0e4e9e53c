#include "ops/softmax_checks.h"

#include <cmath>
#include <vector>

#include "ops/call_checks.h"
#include "ops/errors.h"

namespace cosformer::ops {
namespace {

constexpr std::string_view kWhere = "softmax_attention: ";
constexpr std::string_view kDecode = "softmax_attention_decode_step_: ";
constexpr std::string_view kMaskNote =
    " (of additive masks, those by distance go to relative_bias)";

void check_window(std::string_view where, std::optional<int64_t> left,
                  std::optional<int64_t> right, int64_t dilation) {
  if (left.has_value() != right.has_value()) {
    fail(where, "window_", left ? "right" : "left", " is missing, window_",
         left ? "left" : "right", " is ", left ? *left : *right,
         ": expected both, keys to the left and to the right (-1 = all)");
  }
  if (dilation < 1) fail(where, "dilation is ", dilation, ", expected >= 1");
  if (!left) {
    if (dilation == 1) return;
    fail(where, "dilation is ", dilation,
         " without a window, expected 1: it spaces the keys of a window");
  }
  if (*left < -1 || *right < -1) {
    fail(where, "window is (", *left, ", ", *right,
         "), expected keys to the left and to the right, each 0 or more, or "
         "-1 for all");
  }
}

void check_blocks(const AttentionCall& call, const OptionalTensor& block_mask,
                  std::optional<int64_t> block_size) {
  if (!block_mask) {
    if (!block_size) return;
    fail(call.where, "block_size is ", *block_size,
         " without block_mask: give both or neither");
  }
  if (!block_size) {
    fail(call.where,
         "block_mask is given without block_size: expected the number of "
         "positions that a block holds");
  }
  if (*block_size < 1)
    fail(call.where, "block_size is ", *block_size, ", expected at least 1");
  if (block_mask->scalar_type() != at::kBool) {
    fail(call.where, "block_mask is ", block_mask->scalar_type(),
         ", expected bool [heads or 1, q_blocks, kv_blocks], true = visible");
  }
  const c10::SymInt heads = call.q.sym_size(2);
  if (block_mask->dim() != 3 ||
      (block_mask->sym_size(0) != 1 && block_mask->sym_size(0) != heads)) {
    fail(call.where, "block_mask has shape ", shape(*block_mask),
         ", expected [heads or 1, q_blocks, kv_blocks] with ", heads, " heads");
  }
  check_same_device(call, *block_mask, "block_mask");
}

void check_bias(const AttentionCall& call, const OptionalTensor& bias) {
  if (!bias) return;
  const at::ScalarType dtype = bias->scalar_type();
  if (!at::isFloatingType(dtype))
    fail(call.where, "relative_bias is ", dtype, ", expected a floating dtype");
  const c10::SymInt heads = call.q.sym_size(2);
  if (bias->dim() != 2 || bias->sym_size(0) != heads ||
      bias->sym_size(1) % 2 != 1) {
    fail(call.where, "relative_bias has shape ", shape(*bias),
         ", expected [heads, 2 R + 1] with ", heads,
         " heads: an entry for each distance from -R to R");
  }
  check_same_device(call, *bias, "relative_bias");
}

void check_scale(std::string_view where, std::optional<double> scale) {
  if (scale && (!std::isfinite(*scale) || *scale == 0)) {
    fail(where, "scale is ", *scale,
         ", expected a finite number other than 0 (or none: 1 / "
         "sqrt(head_dim))");
  }
}

void check_dropout(const SoftmaxCall& call) {
  if (!(call.dropout_p >= 0 && call.dropout_p < 1)) {
    fail(kWhere, "dropout_p is ", call.dropout_p,
         ", expected at least 0 and below 1");
  }
  if (!call.dropout_seed) {
    if (call.dropout_p == 0) return;
    fail(kWhere, "dropout_p is ", call.dropout_p,
         " without dropout_seed: which weights are dropped follows from the "
         "seed alone; draw a new one for each step");
  }
  if (call.dropout_seed->scalar_type() != at::kLong ||
      call.dropout_seed->dim() != 0) {
    fail(kWhere, "dropout_seed is ", call.dropout_seed->scalar_type(), " ",
         shape(*call.dropout_seed), ", expected int64 []");
  }
}

}  // namespace

void check_softmax_call(const SoftmaxCall& call) {
  const AttentionCall common = attention_call(kWhere, call);
  check_queries_keys_values(common);
  check_scale(kWhere, call.scale);
  check_window(kWhere, call.window_left, call.window_right, call.dilation);
  check_dropout(call);
  check_layout(common, kMaskNote);
  if (call.global_mask) {
    check_mask(common, *call.global_mask, "global_mask", call.k.sym_size(1),
               "kv_len", "");
  }
  check_blocks(common, call.block_mask, call.block_size);
  check_bias(common, call.relative_bias);
}

void check_softmax_gradients(const SoftmaxGradients& gradients,
                             const SoftmaxCall& call) {
  constexpr std::string_view where = "softmax_attention_backward: ";
  const std::vector<c10::SymInt> size = {call.q.sym_size(0), call.q.sym_size(1),
                                         call.q.sym_size(2),
                                         call.v.sym_size(3)};
  const at::ScalarType dtype = call.q.scalar_type();
  check_tensor(where, gradients.d_out, "d_out", dtype, size);
  check_tensor(where, gradients.out, "out", dtype, size);
  check_tensor(where, gradients.log_sum_exp, "log_sum_exp",
               accumulation_dtype(call.q),
               c10::SymIntArrayRef(size).slice(0, 3));
}

void check_softmax_decode(const SoftmaxDecodeCall& call) {
  const OptionalTensor none;
  const AttentionCall common{kDecode, call.q, call.k,          call.v, none,
                             none,    none,   call.query_mask, none,   none};
  check_queries_keys_values(common);
  if (call.q.sym_size(1) != 1 || call.k.sym_size(1) != 1) {
    fail(kDecode, "query has length ", call.q.sym_size(1), ", key has ",
         call.k.sym_size(1), ", expected 1: one token a row");
  }
  check_layout(common, kMaskNote);
  check_scale(kDecode, call.scale);
  check_window(kDecode, call.window_left, call.window_right, call.dilation);
  check_blocks(common, call.block_mask, call.block_size);
  check_bias(common, call.relative_bias);
  const c10::SymInt rows = call.q.sym_size(0);
  const auto check_cache = [&](const at::Tensor& cache, const char* name,
                               const at::Tensor& of, const char* expected) {
    if (cache.dim() != 4 || cache.sym_size(0) != rows ||
        cache.sym_size(2) != of.sym_size(2) ||
        cache.sym_size(3) != of.sym_size(3)) {
      fail(kDecode, name, " has shape ", shape(cache), ", expected ", expected,
           " = [", rows, ", capacity, ", of.sym_size(2), ", ", of.sym_size(3),
           "]");
    }
    if (cache.scalar_type() != of.scalar_type()) {
      fail(kDecode, name, " is ", cache.scalar_type(), ", the token's are ",
           of.scalar_type(), ": expected one dtype");
    }
    check_same_device(common, cache, name);
  };
  check_cache(call.keys, "keys", call.k,
              "[rows, capacity, kv_heads, head_dim]");
  check_cache(call.values, "values", call.v,
              "[rows, capacity, kv_heads, value_dim]");
  const c10::SymInt capacity = call.keys.sym_size(1);
  if (call.values.sym_size(1) != capacity) {
    fail(kDecode, "keys have capacity ", capacity, ", values ",
         call.values.sym_size(1), ": expected the same");
  }
  check_positions(common, call.position, "position", rows);
  if (call.start) check_positions(common, *call.start, "start", rows);
  if (call.cache_mask) {
    check_mask(common, *call.cache_mask, "cache_mask", capacity, "capacity",
               "");
  }
  if (call.global_mask) {
    check_mask(common, *call.global_mask, "global_mask", capacity, "capacity",
               " (by slot)");
  }
}

SoftmaxAttentionOptions kernel_options(const SoftmaxCall& call) {
  SoftmaxAttentionOptions options;
  options.is_causal = call.is_causal;
  options.scale = call.scale.value_or(0.0);
  options.has_window = call.window_left.has_value();
  options.window_left = call.window_left.value_or(-1);
  options.window_right = call.window_right.value_or(-1);
  options.dilation = call.dilation;
  options.dropout_p = call.dropout_p;
  if (call.dropout_p > 0) {
    options.dropout_seed =
        static_cast<uint64_t>(call.dropout_seed->item<int64_t>());
  }
  return options;
}

}  // namespace cosformer::ops
