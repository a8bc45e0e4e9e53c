#include "kernels/check.h"

#include <algorithm>
#include <cfloat>
#include <cmath>

namespace cosformer {
namespace {

constexpr std::string_view kWhere = "linear_attention";

bool is_float(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat64 ||
         dtype == DType::kBFloat16 || dtype == DType::kFloat16;
}

std::string describe(const std::array<int64_t, 4>& size) {
  return str_cat("[", size[0], ", ", size[1], ", ", size[2], ", ", size[3],
                 "]");
}

// Whether a product (and the bytes of so many doubles) fits into int64.
template <typename... Sizes>
bool product_fits(Sizes... sizes) {
  int64_t product = sizeof(double);
  for (int64_t size : {static_cast<int64_t>(sizes)...}) {
    if (size == 0) return true;
    if (__builtin_mul_overflow(product, size, &product)) return false;
  }
  return true;
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
  if (!product_fits(view.size[0], view.size[1], view.size[2], view.size[3])) {
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
        __builtin_add_overflow(span, step, &span) || !product_fits(span)) {
      return invalid_argument(where, ": ", name, " has stride ", view.stride[d],
                              " in dimension ", kDims[d], " of size ",
                              view.size[d], ": beyond what memory can hold");
    }
  }
  return Status();
}

Status check_options(const LinearAttentionOptions& options, int64_t head_dim,
                     DType dtype) {
  if (options.normalizer == Normalizer::kSum) {
    // The kernels hold eps in the type they accumulate in: it must not become 0
    // there.
    const double smallest = dtype == DType::kFloat64 ? DBL_MIN : FLT_MIN;
    if (!(options.eps > 0) || !std::isfinite(options.eps)) {
      return invalid_argument(kWhere, ": eps is ", options.eps,
                              ", expected a finite number above 0");
    }
    if (options.eps < smallest) {
      return invalid_argument(
          kWhere, ": eps is ", options.eps, ", expected at least ", smallest,
          ", the smallest normal number of the accumulator for ", name(dtype));
    }
  }
  if (options.reweight_len < 0 || options.reweight_len > kMaxPosition) {
    return invalid_argument(
        kWhere, ": reweight_len is ", options.reweight_len,
        ", expected 1 to 2^53, or 0 for no cosine re-weighting");
  }
  if (options.rotary_base != 0) {
    if (!(options.rotary_base > 0) || !std::isfinite(options.rotary_base)) {
      return invalid_argument(
          kWhere, ": rotary_base is ", options.rotary_base,
          ", expected a finite number above 0, or 0 for no rotary positions");
    }
    if (head_dim % 2 != 0) {
      return invalid_argument(kWhere, ": head_dim is ", head_dim,
                              ": rotary positions turn pairs, expected an even "
                              "head_dim");
    }
  }
  return Status();
}

Status check_shapes(const LinearAttentionInputs& inputs) {
  const ConstView4 &q = inputs.q, &k = inputs.k, &v = inputs.v;
  if (!is_float(q.dtype)) {
    return invalid_argument(kWhere, ": query is ", name(q.dtype),
                            ", expected float32, float64, bfloat16 or float16");
  }
  if (k.dtype != q.dtype) {
    return invalid_argument(kWhere, ": key is ", name(k.dtype), ", query is ",
                            name(q.dtype), ": expected one dtype");
  }
  if (v.dtype != q.dtype) {
    return invalid_argument(kWhere, ": value is ", name(v.dtype), ", query is ",
                            name(q.dtype), ": expected one dtype");
  }
  COSFORMER_RETURN_IF_ERROR(check_memory(kWhere, "query", q));
  COSFORMER_RETURN_IF_ERROR(check_memory(kWhere, "key", k));
  COSFORMER_RETURN_IF_ERROR(check_memory(kWhere, "value", v));
  if (k.size[0] != q.size[0]) {
    return invalid_argument(kWhere, ": key has batch size ", k.size[0],
                            ", query has ", q.size[0], ": expected the same");
  }
  if (v.size[0] != q.size[0]) {
    return invalid_argument(kWhere, ": value has batch size ", v.size[0],
                            ", query has ", q.size[0], ": expected the same");
  }
  if (q.size[2] == 0 || k.size[2] == 0) {
    return invalid_argument(kWhere, ": query has ", q.size[2],
                            " heads, key has ", k.size[2],
                            ": expected at least 1");
  }
  if (q.size[3] == 0 || v.size[3] == 0) {
    return invalid_argument(kWhere, ": head_dim is ", q.size[3],
                            ", value_dim is ", v.size[3],
                            ": expected at least 1");
  }
  if (k.size[3] != q.size[3]) {
    return invalid_argument(kWhere, ": key has head_dim ", k.size[3],
                            ", query has ", q.size[3], ": expected the same");
  }
  if (v.size[1] != k.size[1]) {
    return invalid_argument(kWhere, ": value has length ", v.size[1],
                            ", key has ", k.size[1], ": expected the same");
  }
  if (v.size[2] != k.size[2]) {
    return invalid_argument(kWhere, ": value has ", v.size[2],
                            " heads, key has ", k.size[2],
                            ": expected the same");
  }
  if (q.size[2] % k.size[2] != 0) {
    return invalid_argument(kWhere, ": key has ", k.size[2],
                            " heads, query has ", q.size[2],
                            ": query heads must be a multiple of key heads");
  }
  return Status();
}

Status check_offsets(std::string_view name, const int64_t* offsets,
                     int64_t count, int64_t total) {
  if (offsets[0] != 0) {
    return invalid_argument(kWhere, ": ", name, " starts with ", offsets[0],
                            ", expected 0");
  }
  for (int64_t s = 0; s < count; ++s) {
    if (offsets[s + 1] < offsets[s]) {
      return invalid_argument(
          kWhere, ": ", name, "[", s + 1, "] is ", offsets[s + 1], ", below ",
          name, "[", s, "] = ", offsets[s], ": offsets must not decrease");
    }
  }
  if (offsets[count] != total) {
    return invalid_argument(kWhere, ": ", name, " ends with ", offsets[count],
                            ", expected the number of tokens, ", total);
  }
  return Status();
}

Status check_packing(const LinearAttentionInputs& inputs) {
  if (inputs.cu_seqlens_q == nullptr && inputs.cu_seqlens_k == nullptr)
    return Status();
  if (inputs.cu_seqlens_q == nullptr || inputs.cu_seqlens_k == nullptr) {
    return invalid_argument(
        kWhere, ": ",
        inputs.cu_seqlens_q == nullptr ? "cu_seqlens_k" : "cu_seqlens_q",
        " is given without ",
        inputs.cu_seqlens_q == nullptr ? "cu_seqlens_q" : "cu_seqlens_k",
        ": packed sequences need both");
  }
  if (inputs.key_mask != nullptr || inputs.query_mask != nullptr) {
    return invalid_argument(
        kWhere, ": ", inputs.key_mask != nullptr ? "key_mask" : "query_mask",
        " and cu_seqlens are given together: packed sequences have no padding "
        "to mask");
  }
  if (inputs.q.size[0] != 1) {
    return invalid_argument(kWhere, ": batch size is ", inputs.q.size[0],
                            " with cu_seqlens, expected 1");
  }
  if (inputs.num_sequences < 0) {
    return invalid_argument(kWhere, ": num_sequences is ", inputs.num_sequences,
                            ", expected 0 or more");
  }
  COSFORMER_RETURN_IF_ERROR(check_offsets("cu_seqlens_q", inputs.cu_seqlens_q,
                                          inputs.num_sequences,
                                          inputs.q.size[1]));
  return check_offsets("cu_seqlens_k", inputs.cu_seqlens_k,
                       inputs.num_sequences, inputs.k.size[1]);
}

Status check_masks(const LinearAttentionInputs& inputs) {
  const int64_t batch = inputs.q.size[0];
  if (inputs.key_mask != nullptr && batch > 1 && inputs.key_mask_stride < 0) {
    return invalid_argument(kWhere, ": key_mask has batch stride ",
                            inputs.key_mask_stride, ", expected 0 or more");
  }
  if (inputs.query_mask != nullptr && batch > 1 &&
      inputs.query_mask_stride < 0) {
    return invalid_argument(kWhere, ": query_mask has batch stride ",
                            inputs.query_mask_stride, ", expected 0 or more");
  }
  return Status();
}

Status check_state(const LinearAttentionOptions& options,
                   const LinearAttentionInputs& inputs) {
  const int64_t features =
      inputs.q.size[3] * (options.reweight_len > 0 ? 2 : 1);
  if (!product_fits(std::max<int64_t>(num_rows(inputs), 1), inputs.k.size[2],
                    features, inputs.v.size[3])) {
    return invalid_argument(
        kWhere, ": a state of size [", num_rows(inputs), ", ", inputs.k.size[2],
        ", ", features, ", ", inputs.v.size[3],
        "] [rows, kv_heads, features, value_dim] has more elements than memory "
        "can hold");
  }
  const ConstLinearStateView& state = inputs.state;
  if (state.kv_state == nullptr || num_rows(inputs) == 0) return Status();
  if (state.k_sum == nullptr || state.start == nullptr ||
      state.position == nullptr) {
    return invalid_argument(kWhere, ": state has kv_state but no ",
                            state.k_sum == nullptr   ? "k_sum"
                            : state.start == nullptr ? "start"
                                                     : "position");
  }
  return Status();
}

Status check_position(std::string_view name, int64_t row, int64_t position) {
  if (position > kMaxPosition || position < -kMaxPosition) {
    return invalid_argument(kWhere, ": ", name, " of row ", row, " is ",
                            position,
                            ": positions must lie within -2^53 and 2^53");
  }
  return Status();
}

// Lengths are below 2^60 (check_memory), positions within 2^53: nothing below
// overflows.
Status check_row(const LinearAttentionOptions& options,
                 const LinearAttentionInputs& inputs, int64_t row) {
  const ConstLinearStateView& state = inputs.state;
  const bool has_state = state.kv_state != nullptr;
  if (has_state) {
    COSFORMER_RETURN_IF_ERROR(
        check_position("state.start", row, state.start[row]));
    COSFORMER_RETURN_IF_ERROR(
        check_position("state.position", row, state.position[row]));
    if (state.start[row] > state.position[row]) {
      return invalid_argument(kWhere, ": state.start of row ", row, " is ",
                              state.start[row], ", after state.position ",
                              state.position[row]);
    }
    if (inputs.kv_start != nullptr &&
        inputs.kv_start[row] != state.position[row]) {
      return invalid_argument(kWhere, ": kv_start of row ", row, " is ",
                              inputs.kv_start[row],
                              ", the state's position is ", state.position[row],
                              ": keys must go on where the state ends");
    }
    if (options.is_causal && inputs.q_start != nullptr &&
        inputs.q_start[row] < state.position[row]) {
      return invalid_argument(
          kWhere, ": q_start of row ", row, " is ", inputs.q_start[row],
          ", the state's position is ", state.position[row],
          ": a causal query may not stand before keys of the state");
    }
  }
  const AttentionRow r = attention_row(inputs, row);
  COSFORMER_RETURN_IF_ERROR(check_position("q_start", row, r.q_start));
  COSFORMER_RETURN_IF_ERROR(check_position("kv_start", row, r.kv_start));
  const int64_t first_query = r.q_start, last_query = r.q_start + r.q_len - 1;
  if (r.q_len > 0)
    COSFORMER_RETURN_IF_ERROR(check_position("last query", row, last_query));
  if (r.kv_len > 0) {
    COSFORMER_RETURN_IF_ERROR(
        check_position("last key", row, r.kv_start + r.kv_len - 1));
  }

  const bool state_keys = r.state_position > r.state_start;
  if (options.reweight_len == 0 || r.q_len == 0 ||
      (r.kv_len == 0 && !state_keys)) {
    return Status();
  }
  const int64_t first_key = state_keys ? r.state_start : r.kv_start;
  const int64_t last_key =
      r.kv_len > 0 ? r.kv_start + r.kv_len - 1 : r.state_position - 1;
  int64_t query = last_query, key = first_key;
  if (!options.is_causal &&
      last_key - first_query > std::abs(last_query - first_key)) {
    query = first_query;
    key = last_key;
  }
  if (options.is_causal && key > query) return Status();  // nothing visible
  const int64_t distance = std::abs(query - key);
  if (distance > options.reweight_len) {
    return invalid_argument(
        kWhere, ": in row ", row, " the query at position ", query,
        " sees the key at position ", key, ", ", distance,
        " apart, but reweight_len is ", options.reweight_len,
        ": beyond it the cosine is negative; use a reweight_len of at least ",
        distance);
  }
  return Status();
}

}  // namespace

int64_t num_rows(const LinearAttentionInputs& inputs) {
  return inputs.cu_seqlens_q != nullptr ? inputs.num_sequences
                                        : inputs.q.size[0];
}

AttentionRow attention_row(const LinearAttentionInputs& inputs, int64_t row) {
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
  if (inputs.state.kv_state != nullptr) {
    r.state_start = inputs.state.start[row];
    r.state_position = inputs.state.position[row];
    r.q_start = r.kv_start = r.state_position;
  }
  if (inputs.q_start != nullptr) r.q_start = inputs.q_start[row];
  if (inputs.kv_start != nullptr) r.kv_start = inputs.kv_start[row];
  return r;
}

Status check_linear_attention(const LinearAttentionOptions& options,
                              const LinearAttentionInputs& inputs) {
  COSFORMER_RETURN_IF_ERROR(check_shapes(inputs));
  COSFORMER_RETURN_IF_ERROR(
      check_options(options, inputs.q.size[3], inputs.q.dtype));
  COSFORMER_RETURN_IF_ERROR(check_packing(inputs));
  COSFORMER_RETURN_IF_ERROR(check_masks(inputs));
  COSFORMER_RETURN_IF_ERROR(check_state(options, inputs));
  const int64_t rows = num_rows(inputs);
  for (int64_t row = 0; row < rows; ++row)
    COSFORMER_RETURN_IF_ERROR(check_row(options, inputs, row));
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

}  // namespace cosformer
