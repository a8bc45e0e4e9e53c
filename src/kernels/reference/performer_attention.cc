// The definition of Performer, term by term: w_ij = sum_f exp(log phi_f(q_i) +
// log phi_f(k_j)), every term formed on its own in double and shifted by the
// largest one that its row sees. Nothing here is fast, and nothing may be: it
// is what the kernels are compared with.
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/check.h"
#include "kernels/reference/access.h"

namespace cosformer::reference {
namespace {

using Rows = std::vector<Doubles>;

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

double dot(const Doubles& a, const Doubles& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}
void add_scaled(double scale, const Doubles& x, Doubles& sum) {
  for (size_t i = 0; i < x.size(); ++i) sum[i] += scale * x[i];
}
Rows zeros(int64_t rows, int64_t columns) {
  return Rows(static_cast<size_t>(rows),
              Doubles(static_cast<size_t>(columns), 0.0));
}

struct Call {
  Call(const PerformerAttentionOptions& o, const PerformerAttentionInputs& in)
      : options(o),
        inputs(in.call),
        state(in.state),
        features(in.num_features),
        dim(in.call.q.size[3]),
        value_dim(in.call.v.size[3]),
        heads(in.call.q.size[2]),
        kv_heads(in.call.k.size[2]),
        accumulator(accumulator_of(in.call.q.dtype)) {
    inputs.state = in.state.sums;
    for (int64_t f = 0; f < features; ++f) {
      projection.emplace_back();
      for (int64_t c = 0; c < dim; ++c)
        projection.back().push_back(
            load(in.projection, accumulator, f * dim + c));
    }
  }
  bool key_is_real(const AttentionRow& row, int64_t j) const {
    return inputs.key_mask == nullptr ||
           inputs.key_mask[row.batch * inputs.key_mask_stride + j] != 0;
  }
  bool query_is_real(const AttentionRow& row, int64_t i) const {
    return inputs.query_mask == nullptr ||
           inputs.query_mask[row.batch * inputs.query_mask_stride + i] != 0;
  }
  bool visible(const AttentionRow& row, int64_t i, int64_t j) const {
    return key_is_real(row, j) &&
           (!options.is_causal || row.kv_start + j <= row.q_start + i);
  }
  double scale() const {  // x' = x scale
    return std::pow(static_cast<double>(dim), -0.25);
  }

  const PerformerAttentionOptions& options;
  LinearAttentionInputs inputs;
  ConstPerformerStateView state;
  int64_t features, dim, value_dim, heads, kv_heads;
  DType accumulator;
  Rows projection;
};

// A query or key: x' and the logarithms of its features.
struct Features {
  Doubles x, logs;
};
Features features_of(const Call& call, const ConstView4& view, int64_t b,
                     int64_t s, int64_t h) {
  Features f;
  f.x = load_row(view, b, s, h);
  for (double& x : f.x) x *= call.scale();
  const double half_norm = dot(f.x, f.x) / 2;
  for (const Doubles& w : call.projection)
    f.logs.push_back(dot(w, f.x) - half_norm);
  return f;
}
// The gradient of x from that of the logarithms; adds to the projection's.
Doubles gradient_of(const Call& call, const Features& f, const Doubles& d_logs,
                    Rows& d_projection) {
  Doubles d(f.x.size(), 0.0);
  for (size_t m = 0; m < d_logs.size(); ++m) {
    add_scaled(d_logs[m], call.projection[m], d);
    add_scaled(-d_logs[m], f.x, d);
    add_scaled(d_logs[m], f.x, d_projection[m]);
  }
  for (double& x : d) x *= call.scale();
  return d;
}

// Features of a state: what its sums are scaled by, and the sums. logs is
// -infinity where no key was seen.
struct Given {
  Doubles logs, k_sum;
  Rows kv;
};
Given load_state(const Call& call, const ConstLinearStateView& sums,
                 const void* log_scale, int64_t row, int64_t head) {
  const int64_t at = (row * call.kv_heads + head) * call.features;
  Given state{Doubles(static_cast<size_t>(call.features), kMinusInfinity),
              Doubles(static_cast<size_t>(call.features), 0.0),
              zeros(call.features, call.value_dim)};
  for (int64_t f = 0; f < call.features; ++f) {
    const size_t fs = static_cast<size_t>(f);
    if (log_scale != nullptr)
      state.logs[fs] = load(log_scale, call.accumulator, at + f);
    if (sums.k_sum != nullptr)
      state.k_sum[fs] = load(sums.k_sum, call.accumulator, at + f);
    for (int64_t c = 0; sums.kv_state != nullptr && c < call.value_dim; ++c)
      state.kv[fs][static_cast<size_t>(c)] =
          load(sums.kv_state, call.accumulator, (at + f) * call.value_dim + c);
  }
  return state;
}
void store_state(const Call& call, const Given& state,
                 const LinearStateView& sums, void* log_scale, int64_t row,
                 int64_t head) {
  const int64_t at = (row * call.kv_heads + head) * call.features;
  for (int64_t f = 0; f < call.features; ++f) {
    const size_t fs = static_cast<size_t>(f);
    if (log_scale != nullptr)
      store(log_scale, call.accumulator, at + f, state.logs[fs]);
    if (sums.k_sum != nullptr)
      store(sums.k_sum, call.accumulator, at + f, state.k_sum[fs]);
    for (int64_t c = 0; sums.kv_state != nullptr && c < call.value_dim; ++c)
      store(sums.kv_state, call.accumulator, (at + f) * call.value_dim + c,
            state.kv[fs][static_cast<size_t>(c)]);
  }
}

// The real keys of a row and head, and the state in front of them.
struct Keys {
  Keys(const Call& call, const AttentionRow& row, int64_t row_index,
       int64_t head)
      : features(static_cast<size_t>(row.kv_len)),
        values(static_cast<size_t>(row.kv_len)),
        has_state(row.state_position > row.state_start) {
    for (int64_t j = 0; j < row.kv_len; ++j) {
      if (!call.key_is_real(row, j)) continue;
      features[static_cast<size_t>(j)] =
          features_of(call, call.inputs.k, row.batch, row.kv_offset + j, head);
      values[static_cast<size_t>(j)] =
          load_row(call.inputs.v, row.batch, row.kv_offset + j, head);
    }
    const bool given = call.state.sums.kv_state != nullptr;
    state = load_state(call, given ? call.state.sums : ConstLinearStateView{},
                       given ? call.state.log_scale : nullptr, row_index, head);
  }
  std::vector<Features> features;
  Rows values;
  bool has_state;
  Given state;
};

// A row's weights: shift and sum, w_ij = exp(log - shift) over the sum.
struct Row {
  Doubles out;
  double shift = kMinusInfinity, sum = 0;
};
// Calls use(logs of the features, state or key index) for what a row sees.
template <typename Use>
void for_visible(const Call& call, const AttentionRow& row, const Keys& keys,
                 int64_t i, const Use& use) {
  if (keys.has_state) use(keys.state.logs, -1);
  for (int64_t j = 0; j < row.kv_len; ++j)
    if (call.visible(row, i, j))
      use(keys.features[static_cast<size_t>(j)].logs, j);
}
Row attend(const Call& call, const AttentionRow& row, const Keys& keys,
           const Features& q, int64_t i) {
  Row result;
  result.out.resize(static_cast<size_t>(call.value_dim), 0.0);
  for_visible(call, row, keys, i, [&](const Doubles& logs, int64_t) {
    for (size_t f = 0; f < logs.size(); ++f)
      if (q.logs[f] + logs[f] > result.shift)
        result.shift = q.logs[f] + logs[f];
  });
  const double shift = result.shift == kMinusInfinity ? 0 : result.shift;
  for_visible(call, row, keys, i, [&](const Doubles& logs, int64_t j) {
    double key_weight = 0;
    for (size_t f = 0; f < logs.size(); ++f) {
      const double w = std::exp(q.logs[f] + logs[f] - shift);
      if (j >= 0) {
        key_weight += w;
      } else {
        result.sum += w * keys.state.k_sum[f];
        add_scaled(w, keys.state.kv[f], result.out);
      }
    }
    if (j < 0) return;
    result.sum += key_weight;
    add_scaled(key_weight, keys.values[static_cast<size_t>(j)], result.out);
  });
  if (result.sum != 0)
    for (double& x : result.out) x /= result.sum;
  return result;
}

void forward_head(const Call& call, const AttentionRow& row, int64_t row_index,
                  int64_t head, const View4& out, double* log_denominator) {
  const Keys keys(call, row, row_index, head);
  const int64_t group = call.heads / call.kv_heads;
  for (int64_t h = head * group; h < (head + 1) * group; ++h) {
    for (int64_t i = 0; i < row.q_len; ++i) {
      Row result;
      result.out.resize(static_cast<size_t>(call.value_dim), 0.0);
      const int64_t s = row.q_offset + i;
      if (call.query_is_real(row, i)) {
        result = attend(call, row, keys,
                        features_of(call, call.inputs.q, row.batch, s, h), i);
      }
      store_row(out, row.batch, s, h, result.out);
      if (log_denominator != nullptr) {
        log_denominator[(row.batch * call.inputs.q.size[1] + s) * call.heads +
                        h] =
            result.sum == 0 ? kMinusInfinity
                            : result.shift + std::log(result.sum) -
                                  std::log(static_cast<double>(call.features));
      }
    }
  }
}

void state_after(const Call& call, const AttentionRow& row, int64_t row_index,
                 int64_t head, const PerformerStateView& to) {
  const Keys keys(call, row, row_index, head);
  Given state = keys.state;
  for (size_t f = 0; f < state.logs.size(); ++f) {
    double top = keys.state.logs[f];
    for (const Features& k : keys.features)
      if (!k.logs.empty() && k.logs[f] > top) top = k.logs[f];
    // As it is stored, so that the sums are scaled by what the state says.
    if (call.accumulator == DType::kFloat32) top = static_cast<float>(top);
    const double before =
        keys.state.logs[f] == top ? 1 : std::exp(keys.state.logs[f] - top);
    state.logs[f] = top;
    state.k_sum[f] *= before;
    for (double& x : state.kv[f]) x *= before;
    for (size_t j = 0; j < keys.features.size(); ++j) {
      if (keys.features[j].logs.empty()) continue;
      const double w = std::exp(keys.features[j].logs[f] -
                                (top == kMinusInfinity ? 0 : top));
      state.k_sum[f] += w;
      add_scaled(w, keys.values[j], state.kv[f]);
    }
  }
  store_state(call, state, to.sums, to.log_scale, row_index, head);
}

void backward_head(const Call& call, const AttentionRow& row, int64_t row_index,
                   int64_t head, const ConstView4& d_out,
                   const ConstLinearStateView& d_state_out, const View4& dq,
                   const View4& dk, const View4& dv, Rows& d_projection,
                   const LinearStateView& d_state_in) {
  const Keys keys(call, row, row_index, head);
  Rows d_logs = zeros(row.kv_len, call.features);
  Rows d_values = zeros(row.kv_len, call.value_dim);
  // Nothing reaches a key that nothing sees, whatever it holds (0 x NaN would).
  std::vector<bool> seen(static_cast<size_t>(row.kv_len), false);
  Given d_state{{},
                Doubles(static_cast<size_t>(call.features), 0.0),
                zeros(call.features, call.value_dim)};
  const int64_t group = call.heads / call.kv_heads;
  for (int64_t h = head * group; h < (head + 1) * group; ++h) {
    for (int64_t i = 0; i < row.q_len; ++i) {
      const int64_t s = row.q_offset + i;
      Doubles d_query(static_cast<size_t>(call.dim), 0.0);
      if (call.query_is_real(row, i)) {
        const Features q = features_of(call, call.inputs.q, row.batch, s, h);
        const Row result = attend(call, row, keys, q, i);
        const Doubles g = load_row(d_out, row.batch, s, h);
        const double along = dot(g, result.out);
        Doubles d_q_logs(static_cast<size_t>(call.features), 0.0);
        bool any = false;
        for_visible(call, row, keys, i, [&](const Doubles& logs, int64_t j) {
          any = true;
          const size_t js = static_cast<size_t>(j);
          const double d_w = j < 0 ? 0 : dot(g, keys.values[js]) - along;
          for (size_t f = 0; f < logs.size(); ++f) {
            const double w =
                result.sum == 0
                    ? 0
                    : std::exp(q.logs[f] + logs[f] - result.shift) / result.sum;
            if (j < 0) {
              const double d =
                  dot(g, keys.state.kv[f]) - keys.state.k_sum[f] * along;
              d_q_logs[f] += w * d;
              add_scaled(w, g, d_state.kv[f]);
              d_state.k_sum[f] -= w * along;
            } else {
              seen[js] = true;
              d_q_logs[f] += w * d_w;
              d_logs[js][f] += w * d_w;
              add_scaled(w, g, d_values[js]);
            }
          }
        });
        if (any) d_query = gradient_of(call, q, d_q_logs, d_projection);
      }
      if (dq.data != nullptr) store_row(dq, row.batch, s, h, d_query);
    }
  }
  // The returned state is the given one and this call's keys, all at its scale.
  if (d_state_out.kv_state != nullptr || d_state_out.k_sum != nullptr) {
    seen.assign(seen.size(), true);
    const Given d_after =
        load_state(call, d_state_out, nullptr, row_index, head);
    for (size_t f = 0; f < d_after.kv.size(); ++f) {
      double top = keys.state.logs[f];
      for (const Features& k : keys.features)
        if (!k.logs.empty() && k.logs[f] > top) top = k.logs[f];
      for (size_t j = 0; j < keys.features.size(); ++j) {
        if (keys.features[j].logs.empty()) continue;
        const double w = std::exp(keys.features[j].logs[f] -
                                  (top == kMinusInfinity ? 0 : top));
        d_logs[j][f] +=
            w * (dot(d_after.kv[f], keys.values[j]) + d_after.k_sum[f]);
        add_scaled(w, d_after.kv[f], d_values[j]);
      }
      const double before = keys.state.logs[f] == kMinusInfinity
                                ? 0
                                : std::exp(keys.state.logs[f] - top);
      add_scaled(before, d_after.kv[f], d_state.kv[f]);
      d_state.k_sum[f] += before * d_after.k_sum[f];
    }
  }
  for (int64_t j = 0; j < row.kv_len; ++j) {
    const size_t js = static_cast<size_t>(j);
    Doubles d_key(static_cast<size_t>(call.dim), 0.0);
    if (call.key_is_real(row, j) && seen[js])
      d_key = gradient_of(call, keys.features[js], d_logs[js], d_projection);
    if (dk.data != nullptr)
      store_row(dk, row.batch, row.kv_offset + j, head, d_key);
    if (dv.data != nullptr)
      store_row(dv, row.batch, row.kv_offset + j, head, d_values[js]);
  }
  store_state(call, d_state, d_state_in, nullptr, row_index, head);
}

}  // namespace

Status performer_attention_forward(const PerformerAttentionOptions& options,
                                   const PerformerAttentionInputs& inputs,
                                   const View4& out, double* log_denominator,
                                   const PerformerStateView& state_out) {
  COSFORMER_RETURN_IF_ERROR(check_performer_attention(options, inputs));
  const Call call(options, inputs);
  COSFORMER_RETURN_IF_ERROR(
      check_output_view("performer_attention", "out", out,
                        {call.inputs.q.size[0], call.inputs.q.size[1],
                         call.heads, call.value_dim},
                        call.inputs.q.dtype));
  for (int64_t r = 0; r < num_rows(call.inputs); ++r) {
    const AttentionRow row = attention_row(call.inputs, r);
    for (int64_t head = 0; head < call.kv_heads; ++head) {
      forward_head(call, row, r, head, out, log_denominator);
      if (state_out.sums.kv_state != nullptr)
        state_after(call, row, r, head, state_out);
    }
  }
  if (state_out.sums.kv_state != nullptr)
    write_state_places(call.inputs, state_out.sums);
  return Status();
}

Status performer_attention_backward(const PerformerAttentionOptions& options,
                                    const PerformerAttentionInputs& inputs,
                                    const ConstView4& d_out,
                                    const ConstLinearStateView& d_state_out,
                                    const View4& dq, const View4& dk,
                                    const View4& dv, void* d_projection,
                                    const LinearStateView& d_state_in) {
  COSFORMER_RETURN_IF_ERROR(check_performer_attention(options, inputs));
  const Call call(options, inputs);
  Rows sums = zeros(call.features, call.dim);
  for (int64_t r = 0; r < num_rows(call.inputs); ++r) {
    const AttentionRow row = attention_row(call.inputs, r);
    for (int64_t head = 0; head < call.kv_heads; ++head)
      backward_head(call, row, r, head, d_out, d_state_out, dq, dk, dv, sums,
                    d_state_in);
  }
  for (int64_t f = 0; d_projection != nullptr && f < call.features; ++f)
    for (int64_t c = 0; c < call.dim; ++c)
      store(d_projection, call.accumulator, f * call.dim + c,
            sums[static_cast<size_t>(f)][static_cast<size_t>(c)]);
  return Status();
}

}  // namespace cosformer::reference
