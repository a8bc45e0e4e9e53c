#include "ops/call_checks.h"

#include <sstream>

#include "ops/errors.h"

namespace cosformer::ops {
namespace {

void check_rank(const AttentionCall& call, const at::Tensor& tensor,
                const char* name, const char* expected) {
  if (tensor.dim() != 4)
    fail(call.where, name, " has shape ", shape(tensor), ", expected ",
         expected);
}

void check_offsets(const AttentionCall& call, const OptionalTensor& offsets,
                   const char* name) {
  if (!offsets) return;
  if (offsets->scalar_type() != at::kInt &&
      offsets->scalar_type() != at::kLong) {
    fail(call.where, name, " is ", offsets->scalar_type(),
         ", expected int32 or int64");
  }
  if (offsets->dim() != 1 || offsets->sym_size(0) < 1) {
    fail(call.where, name, " has shape ", shape(*offsets),
         ", expected [sequences + 1]");
  }
}

void check_packing(const AttentionCall& call) {
  if (!call.cu_seqlens_q && !call.cu_seqlens_k) return;
  if (!call.cu_seqlens_q)
    fail(call.where, "cu_seqlens_k is given without cu_seqlens_q");
  check_offsets(call, call.cu_seqlens_q, "cu_seqlens_q");
  check_offsets(call, call.cu_seqlens_k, "cu_seqlens_k");
  if (call.q.sym_size(0) != 1) {
    fail(call.where, "query has batch ", call.q.sym_size(0),
         ", packed sequences (cu_seqlens_q) need batch 1");
  }
  if (call.cu_seqlens_k &&
      call.cu_seqlens_k->sym_size(0) != call.cu_seqlens_q->sym_size(0)) {
    fail(call.where, "cu_seqlens_q has ", call.cu_seqlens_q->sym_size(0) - 1,
         " sequences, cu_seqlens_k has ", call.cu_seqlens_k->sym_size(0) - 1,
         ": expected the same");
  }
}

void check_start(const AttentionCall& call, const OptionalTensor& start,
                 const char* name, const c10::SymInt& rows) {
  if (!start) return;
  if (start->scalar_type() != at::kLong)
    fail(call.where, name, " is ", start->scalar_type(), ", expected int64");
  if (start->dim() != 0 && (start->dim() != 1 || start->sym_size(0) != rows)) {
    fail(call.where, name, " has shape ", shape(*start),
         ", expected [] or [rows] = [", rows, "]");
  }
}

}  // namespace

std::string shape(const at::Tensor& tensor) {
  std::ostringstream out;
  out << tensor.sym_sizes();
  return out.str();
}

at::ScalarType accumulation_dtype(const at::Tensor& q) {
  return q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

c10::SymInt num_rows(const AttentionCall& call) {
  return call.cu_seqlens_q ? call.cu_seqlens_q->sym_size(0) - 1
                           : call.q.sym_size(0);
}

void check_queries_keys_values(const AttentionCall& call) {
  check_rank(call, call.q, "query", "[batch, q_len, heads, head_dim]");
  check_rank(call, call.k, "key", "[batch, kv_len, kv_heads, head_dim]");
  check_rank(call, call.v, "value", "[batch, kv_len, kv_heads, value_dim]");
  const at::ScalarType dtype = call.q.scalar_type();
  if (!at::isFloatingType(dtype))
    fail(call.where, "query is ", dtype, ", expected a floating dtype");
  if (call.k.scalar_type() != dtype || call.v.scalar_type() != dtype) {
    fail(call.where, "query is ", dtype, ", key ", call.k.scalar_type(),
         ", value ", call.v.scalar_type(), ": expected one dtype");
  }
  if (call.k.device() != call.q.device() ||
      call.v.device() != call.q.device()) {
    fail(call.where, "query is on ", call.q.device(), ", key on ",
         call.k.device(), ", value on ", call.v.device(),
         ": expected one device");
  }
  const auto q = call.q.sym_sizes(), k = call.k.sym_sizes(),
             v = call.v.sym_sizes();
  if (q[0] != k[0] || k[0] != v[0]) {
    fail(call.where, "query has batch ", q[0], ", key ", k[0], ", value ", v[0],
         ": expected one batch size");
  }
  if (k[1] != v[1]) {
    fail(call.where, "key has length ", k[1], ", value has length ", v[1],
         ": expected the same");
  }
  if (k[2] != v[2]) {
    fail(call.where, "key has ", k[2], " heads, value has ", v[2],
         ": expected the same");
  }
  if (q[3] != k[3]) {
    fail(call.where, "query has head_dim ", q[3], ", key has ", k[3],
         ": expected the same");
  }
  if (q[2] == 0 || k[2] == 0) {
    fail(call.where, "query has ", q[2], " heads, key has ", k[2],
         ": expected at least 1");
  }
  if (q[3] == 0 || v[3] == 0) {
    fail(call.where, "head_dim is ", q[3], ", value_dim is ", v[3],
         ": expected at least 1");
  }
  if (q[2] % k[2] != 0) {
    fail(call.where, "key has ", k[2], " heads, query has ", q[2],
         ": query heads must be a multiple of key heads");
  }
}

void check_same_device(const AttentionCall& call, const at::Tensor& tensor,
                       std::string_view name) {
  if (tensor.device() != call.q.device()) {
    fail(call.where, name, " is on ", tensor.device(), ", query on ",
         call.q.device(), ": expected one device");
  }
}

void check_mask(const AttentionCall& call, const at::Tensor& mask,
                std::string_view name, const c10::SymInt& length,
                std::string_view length_name, std::string_view note) {
  if (mask.scalar_type() != at::kBool) {
    fail(call.where, name, " is ", mask.scalar_type(),
         ", expected bool [batch, ", length_name, "], true = takes part", note);
  }
  if (mask.dim() != 2 || mask.sym_size(0) != call.q.sym_size(0) ||
      mask.sym_size(1) != length) {
    fail(call.where, name, " has shape ", shape(mask), ", expected [batch, ",
         length_name, "] = [", call.q.sym_size(0), ", ", length, "]");
  }
  check_same_device(call, mask, name);
}

void check_positions(const AttentionCall& call, const at::Tensor& positions,
                     std::string_view name, const c10::SymInt& rows) {
  if (positions.scalar_type() != at::kLong || positions.dim() != 1 ||
      positions.sym_size(0) != rows) {
    fail(call.where, name, " is ", positions.scalar_type(), " ",
         shape(positions), ", expected int64 [", rows, "]");
  }
}

void check_tensor(std::string_view where, const at::Tensor& tensor,
                  std::string_view name, at::ScalarType dtype,
                  c10::SymIntArrayRef size) {
  if (tensor.scalar_type() == dtype && tensor.sym_sizes() == size) return;
  fail(where, name, " is ", tensor.scalar_type(), " ", shape(tensor),
       ", expected ", dtype, " ", size);
}

void check_layout(const AttentionCall& call, std::string_view mask_note) {
  check_packing(call);
  const auto check = [&](const OptionalTensor& mask, std::string_view name,
                         const at::Tensor& of, std::string_view length_name) {
    if (!mask) return;
    check_mask(call, *mask, name, of.sym_size(1), length_name, mask_note);
    if (call.cu_seqlens_q) {
      fail(call.where, name,
           " and cu_seqlens_q are both given: packed sequences have no padding "
           "to mask; give one of them");
    }
  };
  check(call.key_mask, "key_mask", call.k, "kv_len");
  check(call.query_mask, "query_mask", call.q, "q_len");
  const c10::SymInt rows = num_rows(call);
  check_start(call, call.q_start, "q_start", rows);
  check_start(call, call.kv_start, "kv_start", rows);
}

}  // namespace cosformer::ops
