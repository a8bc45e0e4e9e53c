// What the linear engine checks, and where its rows lie.
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "kernels/call_check.h"

namespace cosformer {
namespace {

constexpr std::string_view kWhere = "linear_attention";

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

Status check_state(const LinearAttentionOptions& options,
                   const LinearAttentionInputs& inputs) {
  const int64_t features =
      inputs.q.size[3] * (options.reweight_len > 0 ? 2 : 1);
  if (!memory_can_hold(std::max<int64_t>(num_rows(inputs), 1), inputs.k.size[2],
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

// Lengths are below 2^60 (check_memory), positions within 2^53: nothing below
// overflows.
Status check_row(const LinearAttentionOptions& options,
                 const LinearAttentionInputs& inputs, int64_t row) {
  const ConstLinearStateView& state = inputs.state;
  const bool has_state = state.kv_state != nullptr;
  if (has_state) {
    COSFORMER_RETURN_IF_ERROR(
        check_position(kWhere, "state.start", row, state.start[row]));
    COSFORMER_RETURN_IF_ERROR(
        check_position(kWhere, "state.position", row, state.position[row]));
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
  COSFORMER_RETURN_IF_ERROR(check_positions(kWhere, r, row));
  const int64_t first_query = r.q_start, last_query = r.q_start + r.q_len - 1;
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
  return num_rows(CallInputs(inputs));
}

AttentionRow attention_row(const LinearAttentionInputs& inputs, int64_t row) {
  AttentionRow r = attention_row(CallInputs(inputs), row);
  if (inputs.state.kv_state != nullptr) {
    r.state_start = inputs.state.start[row];
    r.state_position = inputs.state.position[row];
    if (inputs.q_start == nullptr) r.q_start = r.state_position;
    if (inputs.kv_start == nullptr) r.kv_start = r.state_position;
  }
  return r;
}

Status check_linear_attention(const LinearAttentionOptions& options,
                              const LinearAttentionInputs& inputs) {
  COSFORMER_RETURN_IF_ERROR(check_call(kWhere, CallInputs(inputs)));
  COSFORMER_RETURN_IF_ERROR(
      check_options(options, inputs.q.size[3], inputs.q.dtype));
  COSFORMER_RETURN_IF_ERROR(check_state(options, inputs));
  const int64_t rows = num_rows(inputs);
  for (int64_t row = 0; row < rows; ++row)
    COSFORMER_RETURN_IF_ERROR(check_row(options, inputs, row));
  return Status();
}

void write_state_places(const LinearAttentionInputs& inputs,
                        const LinearStateView& state_out) {
  const bool given = inputs.state.kv_state != nullptr;
  for (int64_t r = 0; r < num_rows(inputs); ++r) {
    const AttentionRow row = attention_row(inputs, r);
    const uint8_t* mask = inputs.key_mask;
    if (mask != nullptr) mask += row.batch * inputs.key_mask_stride;
    int64_t last = row.kv_len;
    while (last > 0 && mask != nullptr && mask[last - 1] == 0) --last;
    if (state_out.start != nullptr)
      state_out.start[r] = given ? row.state_start : row.kv_start;
    if (state_out.position != nullptr) {
      state_out.position[r] = last > 0 ? row.kv_start + last
                              : given  ? row.state_position
                                       : row.kv_start;
    }
  }
}

}  // namespace cosformer
