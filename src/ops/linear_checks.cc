#include "ops/linear_checks.h"

#include <sstream>
#include <string>
#include <vector>

#include "ops/errors.h"

namespace cosformer::ops {
namespace {

constexpr char kWhere[] = "linear_attention: ";

// "[2, 37, 3, 16]"
std::string shape(const at::Tensor& tensor) {
  std::ostringstream out;
  out << tensor.sym_sizes();
  return out.str();
}

void check_rank(const at::Tensor& tensor, const char* name,
                const char* expected) {
  if (tensor.dim() != 4)
    fail(kWhere, name, " has shape ", shape(tensor), ", expected ", expected);
}

void check_queries_keys_values(const LinearCall& call) {
  check_rank(call.q, "query", "[batch, q_len, heads, head_dim]");
  check_rank(call.k, "key", "[batch, kv_len, kv_heads, head_dim]");
  check_rank(call.v, "value", "[batch, kv_len, kv_heads, value_dim]");
  const at::ScalarType dtype = call.q.scalar_type();
  if (!at::isFloatingType(dtype))
    fail(kWhere, "query is ", dtype, ", expected a floating dtype");
  if (call.k.scalar_type() != dtype || call.v.scalar_type() != dtype) {
    fail(kWhere, "query is ", dtype, ", key ", call.k.scalar_type(), ", value ",
         call.v.scalar_type(), ": expected one dtype");
  }
  if (call.k.device() != call.q.device() ||
      call.v.device() != call.q.device()) {
    fail(kWhere, "query is on ", call.q.device(), ", key on ", call.k.device(),
         ", value on ", call.v.device(), ": expected one device");
  }
  const auto q = call.q.sym_sizes(), k = call.k.sym_sizes(),
             v = call.v.sym_sizes();
  if (q[0] != k[0] || k[0] != v[0]) {
    fail(kWhere, "query has batch ", q[0], ", key ", k[0], ", value ", v[0],
         ": expected one batch size");
  }
  if (k[1] != v[1]) {
    fail(kWhere, "key has length ", k[1], ", value has length ", v[1],
         ": expected the same");
  }
  if (k[2] != v[2]) {
    fail(kWhere, "key has ", k[2], " heads, value has ", v[2],
         ": expected the same");
  }
  if (q[3] != k[3]) {
    fail(kWhere, "query has head_dim ", q[3], ", key has ", k[3],
         ": expected the same");
  }
  if (q[2] == 0 || k[2] == 0) {
    fail(kWhere, "query has ", q[2], " heads, key has ", k[2],
         ": expected at least 1");
  }
  if (q[3] == 0 || v[3] == 0) {
    fail(kWhere, "head_dim is ", q[3], ", value_dim is ", v[3],
         ": expected at least 1");
  }
  if (q[2] % k[2] != 0) {
    fail(kWhere, "key has ", k[2], " heads, query has ", q[2],
         ": query heads must be a multiple of key heads");
  }
}

void check_same_device(const LinearCall& call, const at::Tensor& tensor,
                       const char* name) {
  if (tensor.device() != call.q.device()) {
    fail(kWhere, name, " is on ", tensor.device(), ", query on ",
         call.q.device(), ": expected one device");
  }
}

void check_mask(const LinearCall& call, const OptionalTensor& mask,
                const char* name, const c10::SymInt& length,
                const char* length_name) {
  if (!mask) return;
  if (mask->scalar_type() != at::kBool) {
    fail(kWhere, name, " is ", mask->scalar_type(), ", expected bool [batch, ",
         length_name,
         "], true = takes part (additive masks have no linear form)");
  }
  if (mask->dim() != 2 || mask->sym_size(0) != call.q.sym_size(0) ||
      mask->sym_size(1) != length) {
    fail(kWhere, name, " has shape ", shape(*mask), ", expected [batch, ",
         length_name, "] = [", call.q.sym_size(0), ", ", length, "]");
  }
  if (call.cu_seqlens_q) {
    fail(kWhere, name,
         " and cu_seqlens_q are both given: packed sequences have no padding "
         "to mask; give one of them");
  }
  check_same_device(call, *mask, name);
}

void check_offsets(const OptionalTensor& offsets, const char* name) {
  if (!offsets) return;
  if (offsets->scalar_type() != at::kInt &&
      offsets->scalar_type() != at::kLong) {
    fail(kWhere, name, " is ", offsets->scalar_type(),
         ", expected int32 or int64");
  }
  if (offsets->dim() != 1 || offsets->sym_size(0) < 1) {
    fail(kWhere, name, " has shape ", shape(*offsets),
         ", expected [sequences + 1]");
  }
}

void check_packing(const LinearCall& call) {
  if (!call.cu_seqlens_q && !call.cu_seqlens_k) return;
  if (!call.cu_seqlens_q)
    fail(kWhere, "cu_seqlens_k is given without cu_seqlens_q");
  check_offsets(call.cu_seqlens_q, "cu_seqlens_q");
  check_offsets(call.cu_seqlens_k, "cu_seqlens_k");
  if (call.q.sym_size(0) != 1) {
    fail(kWhere, "query has batch ", call.q.sym_size(0),
         ", packed sequences (cu_seqlens_q) need batch 1");
  }
  if (call.cu_seqlens_k &&
      call.cu_seqlens_k->sym_size(0) != call.cu_seqlens_q->sym_size(0)) {
    fail(kWhere, "cu_seqlens_q has ", call.cu_seqlens_q->sym_size(0) - 1,
         " sequences, cu_seqlens_k has ", call.cu_seqlens_k->sym_size(0) - 1,
         ": expected the same");
  }
}

void check_start(const OptionalTensor& start, const char* name,
                 const c10::SymInt& rows) {
  if (!start) return;
  if (start->scalar_type() != at::kLong)
    fail(kWhere, name, " is ", start->scalar_type(), ", expected int64");
  if (start->dim() != 0 && (start->dim() != 1 || start->sym_size(0) != rows)) {
    fail(kWhere, name, " has shape ", shape(*start),
         ", expected [] or [rows] = [", rows, "]");
  }
}

void check_positions(const OptionalTensor& positions, const char* name,
                     const c10::SymInt& rows) {
  if (positions->scalar_type() != at::kLong || positions->dim() != 1 ||
      positions->sym_size(0) != rows) {
    fail(kWhere, "state.", name, " is ", positions->scalar_type(), " ",
         shape(*positions), ", expected int64 [", rows, "]");
  }
}

void check_state(const LinearCall& call, const c10::SymInt& rows) {
  const bool any =
      call.kv_state || call.k_sum || call.state_start || call.state_position;
  if (!any) return;
  if (!call.kv_state || !call.k_sum || !call.state_start ||
      !call.state_position) {
    fail(kWhere,
         "a state needs kv_state, k_sum, start and position: give all or none");
  }
  const at::ScalarType dtype = accumulation_dtype(call);
  const c10::SymInt features = num_features(call);
  const at::Tensor& kv_state = *call.kv_state;
  const at::Tensor& k_sum = *call.k_sum;
  if (kv_state.scalar_type() != dtype || k_sum.scalar_type() != dtype) {
    fail(kWhere, "state is ", kv_state.scalar_type(), " and ",
         k_sum.scalar_type(), ", expected ", dtype, " for ",
         call.q.scalar_type(), " inputs");
  }
  const auto kv = kv_state.sym_sizes();
  if (kv_state.dim() != 4 || kv[0] != rows || kv[1] != call.k.sym_size(2) ||
      kv[2] != features || kv[3] != call.v.sym_size(3)) {
    fail(kWhere, "state.kv_state has shape ", shape(kv_state),
         ", expected [rows, kv_heads, features, value_dim] = [", rows, ", ",
         call.k.sym_size(2), ", ", features, ", ", call.v.sym_size(3), "]");
  }
  const auto ks = k_sum.sym_sizes();
  if (k_sum.dim() != 3 || ks[0] != rows || ks[1] != call.k.sym_size(2) ||
      ks[2] != features) {
    fail(kWhere, "state.k_sum has shape ", shape(k_sum),
         ", expected [rows, kv_heads, features] = [", rows, ", ",
         call.k.sym_size(2), ", ", features, "]");
  }
  check_positions(call.state_start, "start", rows);
  check_positions(call.state_position, "position", rows);
  check_same_device(call, kv_state, "state.kv_state");
  check_same_device(call, k_sum, "state.k_sum");
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

at::ScalarType accumulation_dtype(const LinearCall& call) {
  return call.q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

c10::SymInt num_rows(const LinearCall& call) {
  return call.cu_seqlens_q ? call.cu_seqlens_q->sym_size(0) - 1
                           : call.q.sym_size(0);
}

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
  check_queries_keys_values(call);
  check_options(call);
  check_packing(call);
  check_mask(call, call.key_mask, "key_mask", call.k.sym_size(1), "kv_len");
  check_mask(call, call.query_mask, "query_mask", call.q.sym_size(1), "q_len");
  const c10::SymInt rows = num_rows(call);
  check_start(call.q_start, "q_start", rows);
  check_start(call.kv_start, "kv_start", rows);
  check_state(call, rows);
}

void check_gradients(const LinearGradients& gradients, const LinearCall& call) {
  const c10::SymInt batch = call.q.sym_size(0), q_len = call.q.sym_size(1),
                    heads = call.q.sym_size(2);
  const c10::SymInt value_dim = call.v.sym_size(3);
  const auto check = [](const at::Tensor& tensor, const char* name,
                        at::ScalarType dtype,
                        const std::vector<c10::SymInt>& expected) {
    if (tensor.scalar_type() == dtype && tensor.sym_sizes() == expected) return;
    fail("linear_attention_backward: ", name, " is ", tensor.scalar_type(), " ",
         shape(tensor), ", expected ", dtype, " ",
         c10::SymIntArrayRef(expected));
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
