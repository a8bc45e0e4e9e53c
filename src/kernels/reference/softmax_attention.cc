// The definition of softmax attention, term by term: every weight is formed on
// its own from one query and one key, in double, and every rule of visibility
// is asked for every pair. Nothing here is fast, and nothing may be: it is
// what the kernels are compared with.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/call_check.h"
#include "kernels/reference/access.h"

namespace cosformer::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

int64_t floor_div(int64_t a, int64_t b) {
  return a / b - (a % b != 0 && a < 0 ? 1 : 0);
}

struct Call {
  Call(const SoftmaxAttentionOptions& o, const SoftmaxAttentionInputs& in)
      : options(o),
        inputs(in),
        dim(in.q.size[3]),
        value_dim(in.v.size[3]),
        heads(in.q.size[2]),
        kv_heads(in.k.size[2]),
        accumulator(accumulator_of(in.q.dtype)),
        scale(o.scale != 0 ? o.scale
                           : 1 / std::sqrt(static_cast<double>(dim))) {}

  const SoftmaxAttentionOptions& options;
  const SoftmaxAttentionInputs& inputs;
  int64_t dim, value_dim, heads, kv_heads;
  DType accumulator;
  double scale;

  bool key_is_real(const AttentionRow& row, int64_t j) const {
    return inputs.key_mask == nullptr ||
           inputs.key_mask[row.batch * inputs.key_mask_stride + j] != 0;
  }
  bool query_is_real(const AttentionRow& row, int64_t i) const {
    return inputs.query_mask == nullptr ||
           inputs.query_mask[row.batch * inputs.query_mask_stride + i] != 0;
  }

  bool in_window(int64_t query_position, int64_t key_position) const {
    const int64_t distance = key_position - query_position;
    if (distance % options.dilation != 0) return false;
    const int64_t t = distance / options.dilation;
    return (options.window_left == -1 || t >= -options.window_left) &&
           (options.window_right == -1 || t <= options.window_right);
  }
  // Whether a global token stands at this position of the row.
  bool is_global(const AttentionRow& row, int64_t position) const {
    const int64_t j = position - row.kv_start;
    return j >= 0 && j < row.kv_len &&
           inputs.global_mask[row.batch * inputs.global_mask_stride +
                              row.kv_offset + j] != 0;
  }
  bool in_blocks(int64_t head, int64_t query_position,
                 int64_t key_position) const {
    const int64_t a = floor_div(query_position, inputs.block_size);
    const int64_t b = floor_div(key_position, inputs.block_size);
    if (a < 0 || a >= inputs.q_blocks || b < 0 || b >= inputs.kv_blocks)
      return false;
    const int64_t h = inputs.block_mask_heads == 1 ? 0 : head;
    return inputs
               .block_mask[(h * inputs.q_blocks + a) * inputs.kv_blocks + b] !=
           0;
  }

  bool visible(const AttentionRow& row, int64_t head, int64_t i,
               int64_t j) const {
    const int64_t query_position = row.q_start + i;
    const int64_t key_position = row.kv_start + j;
    if (!key_is_real(row, j)) return false;
    if (options.is_causal && key_position > query_position) return false;
    const bool has_window = options.has_window;
    const bool has_global = inputs.global_mask != nullptr;
    const bool has_blocks = inputs.block_mask != nullptr;
    if (!has_window && !has_global && !has_blocks) return true;
    return (has_window && in_window(query_position, key_position)) ||
           (has_global &&
            (is_global(row, key_position) || is_global(row, query_position))) ||
           (has_blocks && in_blocks(head, query_position, key_position));
  }

  // Which entry of the table of relative biases stands for a pair.
  int64_t bias_at(const AttentionRow& row, int64_t head, int64_t i,
                  int64_t j) const {
    const int64_t reach = inputs.relative_reach;
    const int64_t distance = (row.kv_start + j) - (row.q_start + i);
    return head * (2 * reach + 1) + std::clamp(distance, -reach, reach) + reach;
  }
  double bias(const AttentionRow& row, int64_t head, int64_t i,
              int64_t j) const {
    if (inputs.relative_bias == nullptr) return 0;
    return load(inputs.relative_bias, accumulator, bias_at(row, head, i, j));
  }

  // What dropout multiplies a weight with.
  double kept(const AttentionRow& row, int64_t row_index, int64_t head,
              int64_t i, int64_t j) const {
    if (options.dropout_p == 0) return 1;
    return softmax_dropout_keeps(options.dropout_p, options.dropout_seed,
                                 row_index, head, row.q_start + i,
                                 row.kv_start + j)
               ? 1 / (1 - options.dropout_p)
               : 0;
  }
};

// The real keys of a row and kv head. Those that the mask hides are never
// read: theirs stay empty.
struct Keys {
  Keys(const Call& call, const AttentionRow& row, int64_t head)
      : keys(static_cast<size_t>(row.kv_len)), values(keys) {
    for (int64_t j = 0; j < row.kv_len; ++j) {
      if (!call.key_is_real(row, j)) continue;
      keys[static_cast<size_t>(j)] =
          load_row(call.inputs.k, row.batch, row.kv_offset + j, head);
      values[static_cast<size_t>(j)] =
          load_row(call.inputs.v, row.batch, row.kv_offset + j, head);
    }
  }
  std::vector<Doubles> keys, values;
};

// One row of the attention matrix: the keys that the query sees, and their
// weights over the sum.
struct Weights {
  std::vector<int64_t> visible;
  Doubles weight;  // of visible
  double log_sum = -kInfinity;
};
Weights weights_of(const Call& call, const AttentionRow& row, const Keys& keys,
                   const Doubles& q, int64_t h, int64_t i) {
  Weights w;
  double largest = -kInfinity;
  for (int64_t j = 0; j < row.kv_len; ++j) {
    if (!call.visible(row, h, i, j)) continue;
    const double score =
        call.scale *
            dot(q.data(), keys.keys[static_cast<size_t>(j)].data(), call.dim) +
        call.bias(row, h, i, j);
    w.visible.push_back(j);
    w.weight.push_back(score);
    largest = std::max(largest, score);
  }
  // Off the largest, so that exp stays within double; it cancels. A NaN score
  // makes every weight of the row one, as the sum does.
  double sum = 0;
  for (double& x : w.weight) sum += x = std::exp(x - largest);
  for (double& x : w.weight) x /= sum;
  if (!w.visible.empty()) w.log_sum = largest + std::log(sum);
  return w;
}

struct Head {
  const Call& call;
  const AttentionRow& row;
  int64_t row_index;
  int64_t head;  // of keys and values
  Keys keys{call, row, head};

  // use(query head, query index) for each real query that reads these keys.
  template <typename Use>
  void for_queries(const Use& use) const {
    const int64_t group = call.heads / call.kv_heads;
    for (int64_t h = head * group; h < (head + 1) * group; ++h)
      for (int64_t i = 0; i < row.q_len; ++i)
        if (call.query_is_real(row, i)) use(h, i);
  }
  Doubles query(int64_t h, int64_t i) const {
    return load_row(call.inputs.q, row.batch, row.q_offset + i, h);
  }
  Weights weights(int64_t h, int64_t i) const {
    return weights_of(call, row, keys, query(h, i), h, i);
  }
  double kept(int64_t h, int64_t i, int64_t j) const {
    return call.kept(row, row_index, h, i, j);
  }
};

template <typename Use>
void for_heads(const Call& call, const Use& use) {
  for (int64_t r = 0; r < num_rows(call.inputs); ++r) {
    const AttentionRow row = attention_row(call.inputs, r);
    for (int64_t head = 0; head < call.kv_heads; ++head)
      use(Head{call, row, r, head});
  }
}

void fill(const View4& view, double value) {
  if (view.data == nullptr) return;
  const Doubles row(static_cast<size_t>(view.size[3]), value);
  for (int64_t b = 0; b < view.size[0]; ++b)
    for (int64_t s = 0; s < view.size[1]; ++s)
      for (int64_t h = 0; h < view.size[2]; ++h) store_row(view, b, s, h, row);
}

void backward_head(const Head& head, const ConstView4& d_out, const View4& dq,
                   const View4& dk, const View4& dv, Doubles& d_bias) {
  const Call& call = head.call;
  const AttentionRow& row = head.row;
  const size_t kv_len = static_cast<size_t>(row.kv_len);
  std::vector<Doubles> d_keys(kv_len, Doubles(static_cast<size_t>(call.dim)));
  std::vector<Doubles> d_values(kv_len,
                                Doubles(static_cast<size_t>(call.value_dim)));
  head.for_queries([&](int64_t h, int64_t i) {
    const Doubles q = head.query(h, i);
    const Doubles g = load_row(d_out, row.batch, row.q_offset + i, h);
    const Weights w = head.weights(h, i);
    // d out / d weight, and its mean: what the normalisation takes off.
    Doubles d_weight(w.visible.size());
    double mean = 0;
    for (size_t n = 0; n < w.visible.size(); ++n) {
      const size_t j = static_cast<size_t>(w.visible[n]);
      const double kept = head.kept(h, i, w.visible[n]);
      d_weight[n] =
          kept * dot(g.data(), head.keys.values[j].data(), call.value_dim);
      add_scaled(kept * w.weight[n], g.data(), d_values[j].data(),
                 call.value_dim);
      mean += w.weight[n] * d_weight[n];
    }
    Doubles d_query(static_cast<size_t>(call.dim));
    for (size_t n = 0; n < w.visible.size(); ++n) {
      const size_t j = static_cast<size_t>(w.visible[n]);
      const double d_score = w.weight[n] * (d_weight[n] - mean);
      add_scaled(call.scale * d_score, head.keys.keys[j].data(), d_query.data(),
                 call.dim);
      add_scaled(call.scale * d_score, q.data(), d_keys[j].data(), call.dim);
      if (!d_bias.empty()) {
        d_bias[static_cast<size_t>(call.bias_at(row, h, i, w.visible[n]))] +=
            d_score;
      }
    }
    if (dq.data != nullptr)
      store_row(dq, row.batch, row.q_offset + i, h, d_query);
  });
  for (int64_t j = 0; j < row.kv_len; ++j) {
    const size_t at = static_cast<size_t>(j);
    if (dk.data != nullptr)
      store_row(dk, row.batch, row.kv_offset + j, head.head, d_keys[at]);
    if (dv.data != nullptr)
      store_row(dv, row.batch, row.kv_offset + j, head.head, d_values[at]);
  }
}

}  // namespace

Status softmax_attention_forward(const SoftmaxAttentionOptions& options,
                                 const SoftmaxAttentionInputs& inputs,
                                 const View4& out, void* log_sum_exp) {
  COSFORMER_RETURN_IF_ERROR(check_softmax_attention(options, inputs));
  COSFORMER_RETURN_IF_ERROR(check_softmax_forward(inputs, out));
  const Call call(options, inputs);
  fill(out, 0);
  const int64_t rows_of_out = inputs.q.size[0] * inputs.q.size[1] * call.heads;
  for (int64_t n = 0; log_sum_exp != nullptr && n < rows_of_out; ++n)
    store(log_sum_exp, call.accumulator, n, -kInfinity);
  for_heads(call, [&](const Head& head) {
    head.for_queries([&](int64_t h, int64_t i) {
      const int64_t b = head.row.batch, s = head.row.q_offset + i;
      const Weights w = head.weights(h, i);
      Doubles sum(static_cast<size_t>(call.value_dim));
      for (size_t n = 0; n < w.visible.size(); ++n) {
        const double kept = head.kept(h, i, w.visible[n]);
        add_scaled(kept * w.weight[n],
                   head.keys.values[static_cast<size_t>(w.visible[n])].data(),
                   sum.data(), call.value_dim);
      }
      store_row(out, b, s, h, sum);
      if (log_sum_exp != nullptr) {
        store(log_sum_exp, call.accumulator,
              (b * inputs.q.size[1] + s) * call.heads + h, w.log_sum);
      }
    });
  });
  return Status();
}

Status softmax_attention_backward(const SoftmaxAttentionOptions& options,
                                  const SoftmaxAttentionInputs& inputs,
                                  const ConstView4& d_out, const View4& dq,
                                  const View4& dk, const View4& dv,
                                  void* d_relative_bias) {
  COSFORMER_RETURN_IF_ERROR(check_softmax_attention(options, inputs));
  COSFORMER_RETURN_IF_ERROR(
      check_softmax_backward(inputs, d_out, dq, dk, dv, d_relative_bias));
  const Call call(options, inputs);
  fill(dq, 0);
  Doubles d_bias;
  if (inputs.relative_bias != nullptr)
    d_bias.resize(
        static_cast<size_t>(call.heads * (2 * inputs.relative_reach + 1)));
  for_heads(call, [&](const Head& head) {
    backward_head(head, d_out, dq, dk, dv, d_bias);
  });
  store_block(d_relative_bias, call.accumulator, 0, d_bias);
  return Status();
}

Status softmax_attention_weights(const SoftmaxAttentionOptions& options,
                                 const SoftmaxAttentionInputs& inputs,
                                 double* weights) {
  COSFORMER_RETURN_IF_ERROR(check_softmax_attention(options, inputs));
  const Call call(options, inputs);
  const int64_t q_len = inputs.q.size[1], kv_len = inputs.k.size[1];
  std::fill_n(weights, inputs.q.size[0] * call.heads * q_len * kv_len, 0.0);
  for_heads(call, [&](const Head& head) {
    head.for_queries([&](int64_t h, int64_t i) {
      const AttentionRow& row = head.row;
      double* of_query =
          weights +
          ((row.batch * call.heads + h) * q_len + row.q_offset + i) * kv_len;
      const Weights w = head.weights(h, i);
      for (size_t n = 0; n < w.visible.size(); ++n)
        of_query[row.kv_offset + w.visible[n]] = w.weight[n];
    });
  });
  return Status();
}

}  // namespace cosformer::reference
