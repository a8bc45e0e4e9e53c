#include "ops/linear_checks.h"

#include <string>
#include <vector>

#include "ops/errors.h"

namespace cosformer::ops {
namespace {

constexpr std::string_view kWhere = "linear_attention: ";

AttentionCall common(const LinearCall& call) {
  return attention_call(kWhere, call);
}

FeatureMap parse_feature_map(std::string_view name) {
  if (name == "relu") return FeatureMap::kRelu;
  if (name == "elu1") return FeatureMap::kElu1;
  if (name == "identity") return FeatureMap::kIdentity;
  fail(kWhere, "unknown feature_map '", name,
       "': expected 'relu', 'elu1' or 'identity'");
}

Normalizer parse_normalizer(std::string_view name) {
  if (name == "sum") return Normalizer::kSum;
  if (name == "none") return Normalizer::kNone;
  fail(kWhere, "unknown normalizer '", name, "': expected 'sum' or 'none'");
}

void check_options(const LinearCall& call) {
  parse_feature_map(call.feature_map);
  parse_normalizer(call.normalizer);
  if (call.reweight_len && *call.reweight_len < 1) {
    fail(kWhere, "reweight_len is ", *call.reweight_len,
         ", expected at least 1 (or none: no cosine)");
  }
  if (!(call.eps > 0)) fail(kWhere, "eps is ", call.eps, ", expected > 0");
  if (call.rotary_base && !(*call.rotary_base > 0)) {
    fail(kWhere, "rotary_base is ", *call.rotary_base,
         ", expected above 0 (or none: no rotary positions)");
  }
  if (call.rotary_base && call.q.sym_size(3) % 2 != 0) {
    fail(kWhere, "head_dim is ", call.q.sym_size(3),
         ", rotary positions need an even one");
  }
}

std::string describe(const StateSpec& spec) {
  return str_cat(
      "kind '", spec.kind, "', feature_map '", spec.feature_map,
      "', reweight_len ", spec.reweight_len, ", rotary_base ", spec.rotary_base,
      spec.rotary_base > 0 && spec.rotary_interleaved ? " interleaved" : "");
}

}  // namespace

void check_state_tensors(const AttentionCall& call,
                         const OptionalTensor& kv_state_given,
                         const OptionalTensor& k_sum_given,
                         const OptionalTensor& start,
                         const OptionalTensor& position,
                         const c10::SymInt& features) {
  if (!kv_state_given && !k_sum_given && !start && !position) return;
  if (!kv_state_given || !k_sum_given || !start || !position) {
    fail(call.where,
         "a state needs kv_state, k_sum, start and position: give all or none");
  }
  const at::ScalarType dtype = accumulation_dtype(call.q);
  const c10::SymInt rows = num_rows(call);
  const at::Tensor& kv_state = *kv_state_given;
  const at::Tensor& k_sum = *k_sum_given;
  if (kv_state.scalar_type() != dtype || k_sum.scalar_type() != dtype) {
    fail(call.where, "state is ", kv_state.scalar_type(), " and ",
         k_sum.scalar_type(), ", expected ", dtype, " for ",
         call.q.scalar_type(), " inputs");
  }
  const auto kv = kv_state.sym_sizes();
  if (kv_state.dim() != 4 || kv[0] != rows || kv[1] != call.k.sym_size(2) ||
      kv[2] != features || kv[3] != call.v.sym_size(3)) {
    fail(call.where, "state.kv_state has shape ", shape(kv_state),
         ", expected [rows, kv_heads, features, value_dim] = [", rows, ", ",
         call.k.sym_size(2), ", ", features, ", ", call.v.sym_size(3), "]");
  }
  const auto ks = k_sum.sym_sizes();
  if (k_sum.dim() != 3 || ks[0] != rows || ks[1] != call.k.sym_size(2) ||
      ks[2] != features) {
    fail(call.where, "state.k_sum has shape ", shape(k_sum),
         ", expected [rows, kv_heads, features] = [", rows, ", ",
         call.k.sym_size(2), ", ", features, "]");
  }
  check_positions(call, *start, "state.start", rows);
  check_positions(call, *position, "state.position", rows);
  check_same_device(call, kv_state, "state.kv_state");
  check_same_device(call, k_sum, "state.k_sum");
}

at::ScalarType accumulation_dtype(const LinearCall& call) {
  return accumulation_dtype(call.q);
}

c10::SymInt num_rows(const LinearCall& call) { return num_rows(common(call)); }

c10::SymInt num_features(const LinearCall& call) {
  return call.reweight_len ? call.q.sym_size(3) * 2 : call.q.sym_size(3);
}

LinearAttentionOptions kernel_options(const LinearCall& call) {
  LinearAttentionOptions options;
  options.feature_map = parse_feature_map(call.feature_map);
  options.reweight_len = call.cosine();
  options.is_causal = call.is_causal;
  options.normalizer = parse_normalizer(call.normalizer);
  options.eps = call.eps;
  options.rotary_base = call.rotary();
  options.rotary_interleaved = call.rotary_interleaved;
  return options;
}

void check_linear_call(const LinearCall& call) {
  check_queries_keys_values(common(call));
  check_options(call);
  check_layout(common(call), " (additive masks have no linear form)");
  check_state_tensors(common(call), call.kv_state, call.k_sum, call.state_start,
                      call.state_position, num_features(call));
}

void check_gradients(const LinearGradients& gradients, const LinearCall& call) {
  const c10::SymInt batch = call.q.sym_size(0), q_len = call.q.sym_size(1),
                    heads = call.q.sym_size(2);
  const c10::SymInt value_dim = call.v.sym_size(3);
  const auto check = [](const at::Tensor& tensor, const char* name,
                        at::ScalarType dtype,
                        const std::vector<c10::SymInt>& expected) {
    check_tensor("linear_attention_backward: ", tensor, name, dtype, expected);
  };
  const at::ScalarType dtype = call.q.scalar_type();
  const at::ScalarType accumulation = accumulation_dtype(call);
  check(gradients.out, "out", dtype, {batch, q_len, heads, value_dim});
  if (gradients.d_out)
    check(*gradients.d_out, "d_out", dtype, {batch, q_len, heads, value_dim});
  if (call.normalizer == "sum") {
    check(gradients.denominator, "denominator", accumulation,
          {batch, q_len, heads});
  }
  const c10::SymInt rows = num_rows(call), features = num_features(call),
                    kv_heads = call.k.sym_size(2);
  if (gradients.d_kv_state) {
    check(*gradients.d_kv_state, "d_kv_state", accumulation,
          {rows, kv_heads, features, value_dim});
  }
  if (gradients.d_k_sum) {
    check(*gradients.d_k_sum, "d_k_sum", accumulation,
          {rows, kv_heads, features});
  }
}

void check_state_spec(const LinearCall& call, const StateSpec& spec) {
  if (!call.kv_state) return;
  if (spec.kind == "linear" && spec.feature_map == call.feature_map &&
      spec.reweight_len == call.cosine() && spec.rotary_base == call.rotary() &&
      (spec.rotary_base == 0 ||
       spec.rotary_interleaved == call.rotary_interleaved)) {
    return;
  }
  fail(kWhere, "the state was made with ", describe(spec), "; the call has ",
       describe({"linear", call.feature_map, call.cosine(), call.rotary(),
                 call.rotary_interleaved}),
       ": expected the same");
}

}  // namespace cosformer::ops
