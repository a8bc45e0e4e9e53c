// The definition of linear attention, term by term: every weight is formed on
// its own from one query and one key, in double. Nothing here is fast, and
// nothing may be: it is what the kernels are compared with.
#include <cmath>
#include <numbers>
#include <vector>

#include "kernels/call_check.h"
#include "kernels/reference/access.h"

namespace cosformer::reference {
namespace {

// Comparisons are written so that NaN goes through.
double feature(FeatureMap map, double x) {
  switch (map) {
    case FeatureMap::kRelu:
      return x <= 0 ? 0.0 : x;
    case FeatureMap::kElu1:
      return x <= 0 ? std::exp(x) : x + 1;
    case FeatureMap::kIdentity:
      break;
  }
  return x;
}

// gradient x the derivative of the feature map at x.
double feature_gradient(FeatureMap map, double x, double gradient) {
  switch (map) {
    case FeatureMap::kRelu:
      return x <= 0 ? 0.0 : gradient;
    case FeatureMap::kElu1:
      return x <= 0 ? gradient * std::exp(x) : gradient;
    case FeatureMap::kIdentity:
      break;
  }
  return gradient;
}

// cos(pi/2 distance / M) and the sine. Both have period 4 M: whole periods are
// taken off in integers, so that far positions are as exact as near ones.
double cosine(int64_t distance, int64_t reweight_len) {
  if (reweight_len == 0) return 1.0;
  const double part = static_cast<double>(distance % (4 * reweight_len)) /
                      static_cast<double>(reweight_len);
  return std::cos(std::numbers::pi / 2 * part);
}
double sine(int64_t position, int64_t reweight_len) {
  const double part = static_cast<double>(position % (4 * reweight_len)) /
                      static_cast<double>(reweight_len);
  return std::sin(std::numbers::pi / 2 * part);
}

// Turns x in place by its position, or back.
void rotate(const LinearAttentionOptions& options, int64_t position,
            bool inverse, double* x, int64_t dim) {
  if (options.rotary_base == 0) return;
  for (int64_t c = 0; c < dim / 2; ++c) {
    const double angle =
        static_cast<double>(position) *
        std::pow(options.rotary_base,
                 -2.0 * static_cast<double>(c) / static_cast<double>(dim));
    const double cos = std::cos(angle),
                 sin = inverse ? -std::sin(angle) : std::sin(angle);
    double& a = x[options.rotary_interleaved ? 2 * c : c];
    double& b = x[options.rotary_interleaved ? 2 * c + 1 : c + dim / 2];
    const double turned = a * cos - b * sin;
    b = a * sin + b * cos;
    a = turned;
  }
}

// A call's sizes and the options that every step looks at.
struct Call {
  Call(const LinearAttentionOptions& o, const LinearAttentionInputs& in)
      : options(o),
        inputs(in),
        dim(in.q.size[3]),
        value_dim(in.v.size[3]),
        features(dim * (o.reweight_len > 0 ? 2 : 1)),
        heads(in.q.size[2]),
        kv_heads(in.k.size[2]),
        dtype(in.q.dtype),
        accumulator(accumulator_of(dtype)) {}

  const LinearAttentionOptions& options;
  const LinearAttentionInputs& inputs;
  int64_t dim, value_dim, features, heads, kv_heads;
  DType dtype, accumulator;

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
  double weight(const AttentionRow& row, int64_t i, int64_t j) const {
    return cosine((row.q_start + i) - (row.kv_start + j), options.reweight_len);
  }
  // Where the state of (row, kv head) begins, in elements.
  int64_t kv_state_at(int64_t row, int64_t head) const {
    return (row * kv_heads + head) * features * value_dim;
  }
  int64_t k_sum_at(int64_t row, int64_t head) const {
    return (row * kv_heads + head) * features;
  }
};

// phi of one query or key: as it stands (for the denominator), and turned (for
// the numerator).
struct Features {
  Doubles raw, plain, turned;
};
Features features_of(const Call& call, const ConstView4& view, int64_t b,
                     int64_t s, int64_t h, int64_t position) {
  Features f;
  f.raw = load_row(view, b, s, h);
  f.plain = f.raw;
  for (double& x : f.plain) x = feature(call.options.feature_map, x);
  f.turned = f.plain;
  rotate(call.options, position, false, f.turned.data(), call.dim);
  return f;
}
// The gradient of the raw vector from those of both.
Doubles raw_gradient(const Call& call, const Features& f, Doubles d_plain,
                     Doubles d_turned, int64_t position) {
  rotate(call.options, position, true, d_turned.data(), call.dim);
  for (size_t c = 0; c < d_plain.size(); ++c) {
    d_plain[c] = feature_gradient(call.options.feature_map, f.raw[c],
                                  d_plain[c] + d_turned[c]);
  }
  return d_plain;
}

// The real keys of a row and head, and the state in front of them. Keys that
// the mask hides are never read: theirs stay empty.
struct Keys {
  Keys(const Call& call, const AttentionRow& row, int64_t row_index,
       int64_t head)
      : features(static_cast<size_t>(row.kv_len)),
        values(static_cast<size_t>(row.kv_len)),
        has_state(row.state_position > row.state_start) {
    for (int64_t j = 0; j < row.kv_len; ++j) {
      if (!call.key_is_real(row, j)) continue;
      features[static_cast<size_t>(j)] =
          features_of(call, call.inputs.k, row.batch, row.kv_offset + j, head,
                      row.kv_start + j);
      values[static_cast<size_t>(j)] =
          load_row(call.inputs.v, row.batch, row.kv_offset + j, head);
    }
    kv_state = load_block(call.inputs.state.kv_state, call.accumulator,
                          call.kv_state_at(row_index, head),
                          call.features * call.value_dim);
    k_sum = load_block(
        call.inputs.state.kv_state != nullptr ? call.inputs.state.k_sum
                                              : nullptr,
        call.accumulator, call.k_sum_at(row_index, head), call.features);
  }

  std::vector<Features> features;
  std::vector<Doubles> values;
  bool has_state;  // one that holds keys
  Doubles kv_state, k_sum;
};

// Calls use(feature index in the state, index in the head, factor) for each
// entry of [phi cos, phi sin] at a position, or of phi alone.
template <typename Use>
void for_state_features(const Call& call, int64_t position, const Use& use) {
  const int64_t m = call.options.reweight_len;
  const double cos = cosine(position, m);
  for (int64_t f = 0; f < call.dim; ++f) use(f, f, cos);
  if (m == 0) return;
  const double sin = sine(position, m);
  for (int64_t f = 0; f < call.dim; ++f) use(call.dim + f, f, sin);
}

struct Row {
  Doubles numerator;
  double denominator = 0;
};
Row attend(const Call& call, const AttentionRow& row, const Keys& keys,
           const Features& q, int64_t i) {
  Row result;
  result.numerator.resize(static_cast<size_t>(call.value_dim), 0.0);
  double* numerator = result.numerator.data();
  if (keys.has_state) {
    for_state_features(
        call, row.q_start + i, [&](int64_t at, int64_t f, double factor) {
          const double plain = q.plain[static_cast<size_t>(f)] * factor;
          const double turned = q.turned[static_cast<size_t>(f)] * factor;
          result.denominator += plain * keys.k_sum[static_cast<size_t>(at)];
          add_scaled(turned, keys.kv_state.data() + at * call.value_dim,
                     numerator, call.value_dim);
        });
  }
  const bool rotary = call.options.rotary_base != 0;
  for (int64_t j = 0; j < row.kv_len; ++j) {
    if (!call.visible(row, i, j)) continue;
    const Features& k = keys.features[static_cast<size_t>(j)];
    const double c = call.weight(row, i, j);
    const double plain = c * dot(q.plain.data(), k.plain.data(), call.dim);
    const double turned =
        rotary ? c * dot(q.turned.data(), k.turned.data(), call.dim) : plain;
    result.denominator += plain;
    add_scaled(turned, keys.values[static_cast<size_t>(j)].data(), numerator,
               call.value_dim);
  }
  return result;
}

// What the sum is divided by. A NaN denominator stays one.
double norm_of(const LinearAttentionOptions& options, double denominator) {
  if (options.normalizer == Normalizer::kNone) return 1.0;
  return denominator < options.eps ? options.eps : denominator;
}

void forward_head(const Call& call, const AttentionRow& row, int64_t row_index,
                  int64_t head, const View4& out, void* denominator) {
  const Keys keys(call, row, row_index, head);
  const int64_t group = call.heads / call.kv_heads;
  for (int64_t h = head * group; h < (head + 1) * group; ++h) {
    for (int64_t i = 0; i < row.q_len; ++i) {
      Row result;
      result.numerator.resize(static_cast<size_t>(call.value_dim), 0.0);
      const int64_t s = row.q_offset + i;
      if (call.query_is_real(row, i)) {
        const Features q =
            features_of(call, call.inputs.q, row.batch, s, h, row.q_start + i);
        result = attend(call, row, keys, q, i);
        const double norm = norm_of(call.options, result.denominator);
        for (double& x : result.numerator) x /= norm;
      }
      store_row(out, row.batch, s, h, result.numerator);
      if (denominator != nullptr &&
          call.options.normalizer == Normalizer::kSum) {
        store(denominator, call.accumulator,
              (row.batch * call.inputs.q.size[1] + s) * call.heads + h,
              result.denominator);
      }
    }
  }
}

void state_after(const Call& call, const AttentionRow& row, int64_t row_index,
                 int64_t head, const LinearStateView& state) {
  Keys keys(call, row, row_index, head);
  for (int64_t j = 0; j < row.kv_len; ++j) {
    if (!call.key_is_real(row, j)) continue;
    const Features& k = keys.features[static_cast<size_t>(j)];
    for_state_features(call, row.kv_start + j,
                       [&](int64_t at, int64_t f, double factor) {
                         keys.k_sum[static_cast<size_t>(at)] +=
                             k.plain[static_cast<size_t>(f)] * factor;
                         add_scaled(k.turned[static_cast<size_t>(f)] * factor,
                                    keys.values[static_cast<size_t>(j)].data(),
                                    keys.kv_state.data() + at * call.value_dim,
                                    call.value_dim);
                       });
  }
  store_block(state.kv_state, call.accumulator,
              call.kv_state_at(row_index, head), keys.kv_state);
  store_block(state.k_sum, call.accumulator, call.k_sum_at(row_index, head),
              keys.k_sum);
}

// Gradients of one kv head: those of its keys and values, summed over the
// query heads that read it.
struct KeyGradients {
  KeyGradients(const Call& call, const AttentionRow& row)
      : plain(static_cast<size_t>(row.kv_len)), turned(plain), value(plain) {
    for (size_t j = 0; j < plain.size(); ++j) {
      plain[j].resize(static_cast<size_t>(call.dim), 0.0);
      turned[j] = plain[j];
      value[j].resize(static_cast<size_t>(call.value_dim), 0.0);
    }
  }
  std::vector<Doubles> plain, turned, value;
};

// One query: adds to the gradients of everything that it sees, returns its own.
Doubles query_gradient(const Call& call, const AttentionRow& row,
                       const Keys& keys, int64_t i, int64_t h,
                       const ConstView4& d_out, KeyGradients& d_keys,
                       Doubles& d_kv_state, Doubles& d_k_sum) {
  const int64_t s = row.q_offset + i, position = row.q_start + i;
  const Features q =
      features_of(call, call.inputs.q, row.batch, s, h, position);
  const Row result = attend(call, row, keys, q, i);
  // out = numerator / norm; where the denominator is clamped the norm is a
  // constant.
  Doubles g = load_row(d_out, row.batch, s, h);
  const double norm = norm_of(call.options, result.denominator);
  double d_denominator = 0;
  if (call.options.normalizer == Normalizer::kSum &&
      !(result.denominator < call.options.eps)) {
    d_denominator =
        -dot(g.data(), result.numerator.data(), call.value_dim) / norm / norm;
  }
  for (double& x : g) x /= norm;

  Doubles d_plain(static_cast<size_t>(call.dim), 0.0), d_turned = d_plain;
  for_state_features(call, position, [&](int64_t at, int64_t f, double factor) {
    const size_t fs = static_cast<size_t>(f), ats = static_cast<size_t>(at);
    if (keys.has_state) {
      d_turned[fs] += factor * dot(keys.kv_state.data() + at * call.value_dim,
                                   g.data(), call.value_dim);
      d_plain[fs] += factor * keys.k_sum[ats] * d_denominator;
    }
    add_scaled(factor * q.turned[fs], g.data(),
               d_kv_state.data() + at * call.value_dim, call.value_dim);
    d_k_sum[ats] += factor * q.plain[fs] * d_denominator;
  });
  for (int64_t j = 0; j < row.kv_len; ++j) {
    if (!call.visible(row, i, j)) continue;
    const size_t js = static_cast<size_t>(j);
    const Features& k = keys.features[js];
    const double c = call.weight(row, i, j);
    const double d_turned_weight =
        c * dot(g.data(), keys.values[js].data(), call.value_dim);
    const double d_plain_weight = c * d_denominator;
    add_scaled(d_turned_weight, k.turned.data(), d_turned.data(), call.dim);
    add_scaled(d_plain_weight, k.plain.data(), d_plain.data(), call.dim);
    add_scaled(d_turned_weight, q.turned.data(), d_keys.turned[js].data(),
               call.dim);
    add_scaled(d_plain_weight, q.plain.data(), d_keys.plain[js].data(),
               call.dim);
    add_scaled(c * dot(q.turned.data(), k.turned.data(), call.dim), g.data(),
               d_keys.value[js].data(), call.value_dim);
  }
  return raw_gradient(call, q, std::move(d_plain), std::move(d_turned),
                      position);
}

// What the gradient of the returned state says about key j.
void add_state_gradient(const Call& call, const AttentionRow& row, int64_t j,
                        const Keys& keys, const Doubles& d_kv_state,
                        const Doubles& d_k_sum, KeyGradients& d_keys) {
  const size_t js = static_cast<size_t>(j);
  for_state_features(
      call, row.kv_start + j, [&](int64_t at, int64_t f, double factor) {
        const size_t fs = static_cast<size_t>(f);
        const double* d_state = d_kv_state.data() + at * call.value_dim;
        d_keys.turned[js][fs] +=
            factor * dot(d_state, keys.values[js].data(), call.value_dim);
        d_keys.plain[js][fs] += factor * d_k_sum[static_cast<size_t>(at)];
        add_scaled(factor * keys.features[js].turned[fs], d_state,
                   d_keys.value[js].data(), call.value_dim);
      });
}

void backward_head(const Call& call, const AttentionRow& row, int64_t row_index,
                   int64_t head, const ConstView4& d_out,
                   const ConstLinearStateView& d_state_out, const View4& dq,
                   const View4& dk, const View4& dv,
                   const LinearStateView& d_state_in) {
  const Keys keys(call, row, row_index, head);
  KeyGradients d_keys(call, row);
  // The returned state is the given one plus this call's keys: its gradient
  // reaches both.
  const Doubles d_kv_out = load_block(d_state_out.kv_state, call.accumulator,
                                      call.kv_state_at(row_index, head),
                                      call.features * call.value_dim);
  const Doubles d_k_sum_out =
      load_block(d_state_out.k_sum, call.accumulator,
                 call.k_sum_at(row_index, head), call.features);
  Doubles d_kv_in = d_kv_out, d_k_sum_in = d_k_sum_out;

  const int64_t group = call.heads / call.kv_heads;
  for (int64_t h = head * group; h < (head + 1) * group; ++h) {
    for (int64_t i = 0; i < row.q_len; ++i) {
      Doubles d_query(static_cast<size_t>(call.dim), 0.0);
      if (call.query_is_real(row, i)) {
        d_query = query_gradient(call, row, keys, i, h, d_out, d_keys, d_kv_in,
                                 d_k_sum_in);
      }
      if (dq.data != nullptr)
        store_row(dq, row.batch, row.q_offset + i, h, d_query);
    }
  }
  for (int64_t j = 0; j < row.kv_len; ++j) {
    const size_t js = static_cast<size_t>(j);
    Doubles d_key(static_cast<size_t>(call.dim), 0.0);
    if (call.key_is_real(row, j)) {
      // Nothing reaches a key through a state that nobody uses, whatever the
      // key holds (0 x NaN would).
      if (d_state_out.kv_state != nullptr)
        add_state_gradient(call, row, j, keys, d_kv_out, d_k_sum_out, d_keys);
      d_key = raw_gradient(call, keys.features[js], d_keys.plain[js],
                           d_keys.turned[js], row.kv_start + j);
    }
    if (dk.data != nullptr)
      store_row(dk, row.batch, row.kv_offset + j, head, d_key);
    if (dv.data != nullptr)
      store_row(dv, row.batch, row.kv_offset + j, head, d_keys.value[js]);
  }
  store_block(d_state_in.kv_state, call.accumulator,
              call.kv_state_at(row_index, head), d_kv_in);
  store_block(d_state_in.k_sum, call.accumulator,
              call.k_sum_at(row_index, head), d_k_sum_in);
}

}  // namespace

Status linear_attention_forward(const LinearAttentionOptions& options,
                                const LinearAttentionInputs& inputs,
                                const View4& out, void* denominator,
                                const LinearStateView& state_out) {
  COSFORMER_RETURN_IF_ERROR(check_linear_attention(options, inputs));
  COSFORMER_RETURN_IF_ERROR(check_output_view(
      "linear_attention", "out", out,
      {inputs.q.size[0], inputs.q.size[1], inputs.q.size[2], inputs.v.size[3]},
      inputs.q.dtype));
  const Call call(options, inputs);
  for (int64_t r = 0; r < num_rows(inputs); ++r) {
    const AttentionRow row = attention_row(inputs, r);
    for (int64_t head = 0; head < call.kv_heads; ++head) {
      forward_head(call, row, r, head, out, denominator);
      if (state_out.kv_state != nullptr)
        state_after(call, row, r, head, state_out);
    }
    if (state_out.kv_state == nullptr) continue;
    const bool has_state = inputs.state.kv_state != nullptr;
    int64_t position = has_state ? row.state_position : row.kv_start;
    for (int64_t j = 0; j < row.kv_len; ++j)
      if (call.key_is_real(row, j)) position = row.kv_start + j + 1;
    if (state_out.start != nullptr)
      state_out.start[r] = has_state ? row.state_start : row.kv_start;
    if (state_out.position != nullptr) state_out.position[r] = position;
  }
  return Status();
}

Status linear_attention_backward(const LinearAttentionOptions& options,
                                 const LinearAttentionInputs& inputs,
                                 const ConstView4& d_out,
                                 const ConstLinearStateView& d_state_out,
                                 const View4& dq, const View4& dk,
                                 const View4& dv,
                                 const LinearStateView& d_state_in) {
  COSFORMER_RETURN_IF_ERROR(check_linear_attention(options, inputs));
  COSFORMER_RETURN_IF_ERROR(check_view(
      "linear_attention", "d_out", d_out,
      {inputs.q.size[0], inputs.q.size[1], inputs.q.size[2], inputs.v.size[3]},
      inputs.q.dtype));
  COSFORMER_RETURN_IF_ERROR(
      check_gradient("linear_attention", "dq", dq, inputs.q));
  COSFORMER_RETURN_IF_ERROR(
      check_gradient("linear_attention", "dk", dk, inputs.k));
  COSFORMER_RETURN_IF_ERROR(
      check_gradient("linear_attention", "dv", dv, inputs.v));
  const Call call(options, inputs);
  for (int64_t r = 0; r < num_rows(inputs); ++r) {
    const AttentionRow row = attention_row(inputs, r);
    for (int64_t head = 0; head < call.kv_heads; ++head) {
      backward_head(call, row, r, head, d_out, d_state_out, dq, dk, dv,
                    d_state_in);
    }
  }
  return Status();
}

}  // namespace cosformer::reference
