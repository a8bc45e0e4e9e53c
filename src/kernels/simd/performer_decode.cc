// Performer's decode step: one token a row.
#include <algorithm>

#include "kernels/simd/performer_call.h"

namespace cosformer::simd {
namespace {

// The features of one token a row, all heads, which are columns here: the key's
// raises the maxima, and the sums follow.
template <typename T>
class PerformerStep {
 public:
  // Memory that a thread works in.
  static size_t bytes(const PerformerCall<T>& call) {
    ArrayCarver counter(nullptr);
    const PerformerStep counted(call, {}, counter);
    return counter.bytes();
  }

  PerformerStep(const PerformerCall<T>& call, const PerformerStateView& state,
                ArrayCarver& carver)
      : call_(call),
        b_(performer_block<T>(call.isa)),
        state_(state),
        m_(call.features),
        stride_(call.stride),
        work_(carve_performer_work<T>(call.features, call.whole.dim, carver)),
        logs_(carve_performer_logs<T>(call.all.rows(), carver)),
        top_(carver.take<double>(kPerformerBlock)),
        maxima_(carver.take<T>(stride_)),
        rows_(carver.take<T>(4 * stride_)) {}

  // keys: [kv_heads][stride]
  void add_key(int64_t r, T* keys) {
    const int64_t kv_heads = call_.whole.kv_heads;
    for_heads(call_.inputs.call.k, r, kv_heads, true, kNarrow,
              [&](int64_t h, int64_t column) {
                T* scale = log_scale(r * kv_heads + h);
                std::copy_n(scale, m_, maxima_);
                b_.raise(call_.all, logs_, ~uint64_t{0}, column, column + 1,
                         std::numeric_limits<double>::infinity(), true, work_,
                         maxima_);
                rescale(r * kv_heads + h, scale);
                std::copy_n(maxima_, m_, scale);
                b_.form_rows(call_.all, logs_, column, 1, maxima_, nullptr,
                             work_, rows_, stride_);
                std::copy_n(rows_, m_, keys + h * stride_);
              });
  }

  // queries: [heads][stride]
  void form_queries(int64_t r, T* queries) {
    const int64_t heads = call_.whole.heads, group = call_.whole.group;
    const bool large = are_large(log_scale(r * call_.whole.kv_heads),
                                 call_.whole.kv_heads * m_);
    for_heads(call_.inputs.call.q, r, heads, false, large ? -1 : kNarrow,
              [&](int64_t h, int64_t column) {
                const T* scale =
                    log_scale(r * call_.whole.kv_heads + h / group);
                b_.find_tops(call_.all, logs_, column, 1, scale, top_);
                b_.form_rows(call_.all, logs_, column, 1, scale, top_ + column,
                             work_, rows_, stride_);
                std::copy_n(rows_, m_, queries + h * stride_);
              });
  }

 private:
  T* log_scale(int64_t unit) const {
    return static_cast<T*>(state_.log_scale) + unit * m_;
  }

  // Calls use(head, its column) for the heads of a token.
  template <typename Use>
  void for_heads(const ConstView4& view, int64_t r, int64_t heads, bool keys,
                 double limit, const Use& use) {
    const PerformerAhead none[kPerformerAhead];
    const char* data =
        static_cast<const char*>(view.data) +
        r * view.stride[0] * static_cast<int64_t>(size_of(view.dtype));
    for (int64_t h = 0; h < heads; h += kPerformerBlock) {
      const int64_t n = std::min(heads - h, kPerformerBlock);
      b_.project(call_.all, view.dtype, data, h, view.stride[2], ~uint64_t{0},
                 n, keys, limit, none, work_, logs_);
      for (int64_t i = 0; i < n; ++i) use(h + i, i);
    }
  }

  void rescale(int64_t unit, const T* from) const {
    const int64_t columns = call_.whole.value_dim;
    T* kv = static_cast<T*>(state_.sums.kv_state) + unit * m_ * columns;
    T* sum = static_cast<T*>(state_.sums.k_sum) + unit * m_;
    for (int64_t f = 0; f < m_; ++f) {
      if (from[f] == maxima_[f]) continue;
      const T factor = static_cast<T>(std::exp(
          static_cast<double>(from[f]) - static_cast<double>(maxima_[f])));
      sum[f] *= factor;
      for (int64_t c = 0; c < columns; ++c) kv[f * columns + c] *= factor;
    }
  }

  const PerformerCall<T>& call_;
  const PerformerBlockKernels<T>& b_;
  const PerformerStateView& state_;
  int64_t m_, stride_;
  PerformerWork<T> work_;
  PerformerLogs<T> logs_;
  double* top_;
  T *maxima_, *rows_;
};

// [rows, 1, heads, columns] contiguous but for `heads` rounded up to `slots`
// rows of `stride`.
template <typename T>
ConstView4 tokens_of(const T* data, int64_t rows, int64_t heads, int64_t slots,
                     int64_t columns, int64_t stride) {
  return {data,
          std::is_same_v<T, double> ? DType::kFloat64 : DType::kFloat32,
          {rows, 1, heads, columns},
          {slots * stride, slots * stride, stride, 1}};
}

template <typename T>
Status decode(const PerformerAttentionInputs& inputs,
              const PerformerStateView& state, const View4& out, Isa isa,
              Executor& executor) {
  PerformerAttentionOptions causal;
  causal.is_causal = true;
  PerformerCall<T> call(causal, inputs, true, isa);
  COSFORMER_RETURN_IF_ERROR(call.prepare(false));
  const PerformerKernels<T>& k = call.kernels;
  const LinearAttentionInputs& in = inputs.call;
  const int64_t rows = in.q.size[0], heads = in.q.size[2],
                kv_heads = in.k.size[2], value_dim = in.v.size[3];
  const int64_t stride = call.stride, wide = padded(value_dim);
  const int64_t kv_slots = (kv_heads + 3) / 4 * 4;
  const int64_t k_size = rows * kv_heads * stride,
                q_size = rows * heads * stride,
                v_size = call.half ? rows * kv_slots * wide : 0,
                out_size = call.half ? rows * heads * wide : 0;
  const size_t bytes =
      static_cast<size_t>(k_size + q_size + v_size + out_size) * sizeof(T);
  const AlignedBuffer memory(bytes + 64);
  const Pieces scratch(executor.num_threads(), PerformerStep<T>::bytes(call));
  if (memory.data() == nullptr || scratch.failed()) return out_of_memory(bytes);
  T* keys = memory.template as<T>();
  T* queries = keys + k_size;
  T* v = queries + q_size;
  T* wide_out = v + v_size;
  executor.run(rows, [&](int64_t r, int thread) {
    ArrayCarver carver(scratch[thread]);
    PerformerStep<T> step(call, state, carver);
    const bool has_key =
        in.key_mask == nullptr || in.key_mask[r * in.key_mask_stride] != 0;
    if (has_key) step.add_key(r, keys + r * kv_heads * stride);
    if (in.query_mask == nullptr ||
        in.query_mask[r * in.query_mask_stride] != 0)
      step.form_queries(r, queries + r * heads * stride);
    if (!call.half || !has_key) return;
    const char* data =
        static_cast<const char*>(in.v.data) +
        r * in.v.stride[0] * static_cast<int64_t>(size_of(in.v.dtype));
    for (int64_t h = 0; h < kv_heads; h += kPerformerBlock) {
      k.pack(in.v.dtype, data, h, in.v.stride[2], ~uint64_t{0},
             std::min(kv_heads - h, kPerformerBlock), value_dim,
             v + (r * kv_slots + h) * wide);
    }
  });

  LinearAttentionInputs features = in;
  features.k = tokens_of(keys, rows, kv_heads, kv_heads, call.features, stride);
  features.q = tokens_of(queries, rows, heads, heads, call.features, stride);
  View4 to = out;
  if (call.half) {
    features.v = tokens_of(v, rows, kv_heads, kv_slots, value_dim, wide);
    const ConstView4 view =
        tokens_of(wide_out, rows, heads, heads, value_dim, wide);
    to = {wide_out, view.dtype, view.size, view.stride};
  }
  COSFORMER_RETURN_IF_ERROR(linear_attention_decode_step(
      call.whole.options, features, state.sums, to, executor));
  for (int64_t i = 0; call.half && i < rows * heads; ++i) {
    char* data =
        static_cast<char*>(out.data) +
        i / heads * out.stride[0] * static_cast<int64_t>(size_of(out.dtype));
    k.write(out.dtype, wide_out + i * wide, 1, 1, value_dim, data, i % heads,
            out.stride[2]);
  }
  return Status();
}

}  // namespace

Status run_performer_decode(const PerformerAttentionInputs& inputs,
                            const PerformerStateView& state, const View4& out,
                            Isa isa, Executor& executor) {
  return inputs.call.q.dtype == DType::kFloat64
             ? decode<double>(inputs, state, out, isa, executor)
             : decode<float>(inputs, state, out, isa, executor);
}

}  // namespace cosformer::simd
