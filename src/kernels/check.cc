#include <algorithm>

#include "kernels/call_check.h"

namespace cosformer {
namespace {

bool is_float(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat64 ||
         dtype == DType::kBFloat16 || dtype == DType::kFloat16;
}

std::string describe(const std::array<int64_t, 4>& size) {
  return str_cat("[", size[0], ", ", size[1], ", ", size[2], ", ", size[3],
                 "]");
}

// Memory that the view spans, in elements, must be countable, and there must be
// some where there are elements.
Status check_memory(std::string_view where, std::string_view name,
                    const ConstView4& view) {
  constexpr std::array<std::string_view, 4> kDims = {"batch", "seq", "heads",
                                                     "dim"};
  for (size_t d = 0; d < 4; ++d) {
    if (view.size[d] < 0) {
      return invalid_argument(where, ": ", name, " has size ",
                              describe(view.size), " [batch, seq, heads, dim]",
                              ": sizes must not be negative");
    }
  }
  if (!memory_can_hold(view.size[0], view.size[1], view.size[2],
                       view.size[3])) {
    return invalid_argument(where, ": ", name, " has size ",
                            describe(view.size),
                            ": more elements than memory can hold");
  }
  const bool empty = std::any_of(view.size.begin(), view.size.end(),
                                 [](int64_t n) { return n == 0; });
  if (empty) return Status();
  if (view.data == nullptr) {
    return invalid_argument(where, ": ", name, " of size ", describe(view.size),
                            " has no data (nullptr)");
  }
  if (view.size[3] > 1 && view.stride[3] != 1) {
    return invalid_argument(where, ": ", name, " has stride ", view.stride[3],
                            " in its last dimension, expected 1");
  }
  int64_t span = 1;
  for (size_t d = 0; d < 3; ++d) {
    int64_t step;
    if (view.stride[d] < 0) {
      return invalid_argument(where, ": ", name, " has stride ", view.stride[d],
                              " in dimension ", kDims[d],
                              ": strides must not be negative");
    }
    if (__builtin_mul_overflow(view.stride[d], view.size[d] - 1, &step) ||
        __builtin_add_overflow(span, step, &span) || !memory_can_hold(span)) {
      return invalid_argument(where, ": ", name, " has stride ", view.stride[d],
                              " in dimension ", kDims[d], " of size ",
                              view.size[d], ": beyond what memory can hold");
    }
  }
  return Status();
}

Status check_shapes(std::string_view where, const CallInputs& inputs) {
  const ConstView4 &q = inputs.q, &k = inputs.k, &v = inputs.v;
  if (!is_float(q.dtype)) {
    return invalid_argument(where, ": query is ", name(q.dtype),
                            ", expected float32, float64, bfloat16 or float16");
  }
  if (k.dtype != q.dtype) {
    return invalid_argument(where, ": key is ", name(k.dtype), ", query is ",
                            name(q.dtype), ": expected one dtype");
  }
  if (v.dtype != q.dtype) {
    return invalid_argument(where, ": value is ", name(v.dtype), ", query is ",
                            name(q.dtype), ": expected one dtype");
  }
  COSFORMER_RETURN_IF_ERROR(check_memory(where, "query", q));
  COSFORMER_RETURN_IF_ERROR(check_memory(where, "key", k));
  COSFORMER_RETURN_IF_ERROR(check_memory(where, "value", v));
  if (k.size[0] != q.size[0]) {
    return invalid_argument(where, ": key has batch size ", k.size[0],
                            ", query has ", q.size[0], ": expected the same");
  }
  if (v.size[0] != q.size[0]) {
    return invalid_argument(where, ": value has batch size ", v.size[0],
                            ", query has ", q.size[0], ": expected the same");
  }
  if (q.size[2] == 0 || k.size[2] == 0) {
    return invalid_argument(where, ": query has ", q.size[2],
                            " heads, key has ", k.size[2],
                            ": expected at least 1");
  }
  if (q.size[3] == 0 || v.size[3] == 0) {
    return invalid_argument(where, ": head_dim is ", q.size[3],
                            ", value_dim is ", v.size[3],
                            ": expected at least 1");
  }
  if (k.size[3] != q.size[3]) {
    return invalid_argument(where, ": key has head_dim ", k.size[3],
                            ", query has ", q.size[3], ": expected the same");
  }
  if (v.size[1] != k.size[1]) {
    return invalid_argument(where, ": value has length ", v.size[1],
                            ", key has ", k.size[1], ": expected the same");
  }
  if (v.size[2] != k.size[2]) {
    return invalid_argument(where, ": value has ", v.size[2],
                            " heads, key has ", k.size[2],
                            ": expected the same");
  }
  if (q.size[2] % k.size[2] != 0) {
    return invalid_argument(where, ": key has ", k.size[2],
                            " heads, query has ", q.size[2],
                            ": query heads must be a multiple of key heads");
  }
  return Status();
}

Status check_offsets(std::string_view where, std::string_view name,
                     const int64_t* offsets, int64_t count, int64_t total) {
  if (offsets[0] != 0) {
    return invalid_argument(where, ": ", name, " starts with ", offsets[0],
                            ", expected 0");
  }
  for (int64_t s = 0; s < count; ++s) {
    if (offsets[s + 1] < offsets[s]) {
      return invalid_argument(
          where, ": ", name, "[", s + 1, "] is ", offsets[s + 1], ", below ",
          name, "[", s, "] = ", offsets[s], ": offsets must not decrease");
    }
  }
  if (offsets[count] != total) {
    return invalid_argument(where, ": ", name, " ends with ", offsets[count],
                            ", expected the number of tokens, ", total);
  }
  return Status();
}

Status check_packing(std::string_view where, const CallInputs& inputs) {
  if (inputs.cu_seqlens_q == nullptr && inputs.cu_seqlens_k == nullptr)
    return Status();
  if (inputs.cu_seqlens_q == nullptr || inputs.cu_seqlens_k == nullptr) {
    return invalid_argument(
        where, ": ",
        inputs.cu_seqlens_q == nullptr ? "cu_seqlens_k" : "cu_seqlens_q",
        " is given without ",
        inputs.cu_seqlens_q == nullptr ? "cu_seqlens_q" : "cu_seqlens_k",
        ": packed sequences need both");
  }
  if (inputs.key_mask != nullptr || inputs.query_mask != nullptr) {
    return invalid_argument(
        where, ": ", inputs.key_mask != nullptr ? "key_mask" : "query_mask",
        " and cu_seqlens are given together: packed sequences have no padding "
        "to mask");
  }
  if (inputs.q.size[0] != 1) {
    return invalid_argument(where, ": batch size is ", inputs.q.size[0],
                            " with cu_seqlens, expected 1");
  }
  if (inputs.num_sequences < 0) {
    return invalid_argument(where, ": num_sequences is ", inputs.num_sequences,
                            ", expected 0 or more");
  }
  COSFORMER_RETURN_IF_ERROR(
      check_offsets(where, "cu_seqlens_q", inputs.cu_seqlens_q,
                    inputs.num_sequences, inputs.q.size[1]));
  return check_offsets(where, "cu_seqlens_k", inputs.cu_seqlens_k,
                       inputs.num_sequences, inputs.k.size[1]);
}

}  // namespace

int64_t num_rows(const CallInputs& inputs) {
  return inputs.cu_seqlens_q != nullptr ? inputs.num_sequences
                                        : inputs.q.size[0];
}

AttentionRow attention_row(const CallInputs& inputs, int64_t row) {
  AttentionRow r;
  if (inputs.cu_seqlens_q != nullptr) {
    r.q_offset = inputs.cu_seqlens_q[row];
    r.q_len = inputs.cu_seqlens_q[row + 1] - r.q_offset;
    r.kv_offset = inputs.cu_seqlens_k[row];
    r.kv_len = inputs.cu_seqlens_k[row + 1] - r.kv_offset;
  } else {
    r.batch = row;
    r.q_len = inputs.q.size[1];
    r.kv_len = inputs.k.size[1];
  }
  if (inputs.q_start != nullptr) r.q_start = inputs.q_start[row];
  if (inputs.kv_start != nullptr) r.kv_start = inputs.kv_start[row];
  return r;
}

Status check_mask(std::string_view where, std::string_view name,
                  const uint8_t* mask, int64_t stride, int64_t batch) {
  if (mask != nullptr && batch > 1 && stride < 0) {
    return invalid_argument(where, ": ", name, " has batch stride ", stride,
                            ", expected 0 or more");
  }
  return Status();
}

Status check_position(std::string_view where, std::string_view name,
                      int64_t row, int64_t position) {
  if (position > kMaxPosition || position < -kMaxPosition) {
    return invalid_argument(where, ": ", name, " of row ", row, " is ",
                            position,
                            ": positions must lie within -2^53 and 2^53");
  }
  return Status();
}

Status check_call(std::string_view where, const CallInputs& inputs) {
  COSFORMER_RETURN_IF_ERROR(check_shapes(where, inputs));
  COSFORMER_RETURN_IF_ERROR(check_packing(where, inputs));
  const int64_t batch = inputs.q.size[0];
  COSFORMER_RETURN_IF_ERROR(check_mask(where, "key_mask", inputs.key_mask,
                                       inputs.key_mask_stride, batch));
  return check_mask(where, "query_mask", inputs.query_mask,
                    inputs.query_mask_stride, batch);
}

// The positions of a row's queries and keys. Lengths are below 2^60
// (check_memory): nothing overflows.
Status check_positions(std::string_view where, const AttentionRow& r,
                       int64_t row) {
  COSFORMER_RETURN_IF_ERROR(check_position(where, "q_start", row, r.q_start));
  COSFORMER_RETURN_IF_ERROR(check_position(where, "kv_start", row, r.kv_start));
  if (r.q_len > 0) {
    COSFORMER_RETURN_IF_ERROR(
        check_position(where, "last query", row, r.q_start + r.q_len - 1));
  }
  if (r.kv_len > 0) {
    COSFORMER_RETURN_IF_ERROR(
        check_position(where, "last key", row, r.kv_start + r.kv_len - 1));
  }
  return Status();
}

Status check_view(std::string_view where, std::string_view name,
                  const ConstView4& view, const std::array<int64_t, 4>& size,
                  DType dtype) {
  if (view.dtype != dtype) {
    return invalid_argument(where, ": ", name, " is ",
                            cosformer::name(view.dtype), ", expected ",
                            cosformer::name(dtype));
  }
  if (view.size != size) {
    return invalid_argument(where, ": ", name, " has size ",
                            describe(view.size), ", expected ", describe(size));
  }
  return check_memory(where, name, view);
}

Status check_output_view(std::string_view where, std::string_view name,
                         const ConstView4& view,
                         const std::array<int64_t, 4>& size, DType dtype) {
  COSFORMER_RETURN_IF_ERROR(check_view(where, name, view, size, dtype));
  // Dimensions from the narrowest stride up: each must step over what lies
  // below it.
  std::array<size_t, 3> order = {2, 1, 0};
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return view.stride[a] < view.stride[b];
  });
  if (std::count(view.size.begin(), view.size.end(), 0) > 0) return Status();
  int64_t span = view.size[3];
  for (size_t d : order) {
    if (view.size[d] == 1) continue;
    if (view.stride[d] < span) {
      return invalid_argument(
          where, ": ", name, " of size ", describe(view.size), " and strides ",
          describe(view.stride), " has elements that share memory");
    }
    span += view.stride[d] * (view.size[d] - 1);
  }
  return Status();
}

Status check_gradient(std::string_view where, std::string_view name,
                      const View4& view, const ConstView4& like) {
  if (view.data == nullptr) return Status();
  return check_output_view(where, name, view, like.size, like.dtype);
}

}  // namespace cosformer
