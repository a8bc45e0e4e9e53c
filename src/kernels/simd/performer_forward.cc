// Performer's forward walk and decode step (performer_walk.h).
#include "kernels/simd/performer_walk.h"

namespace cosformer::simd {
namespace {

template <typename T>
class PerformerForward : public PerformerWalk<T> {
  using Base = PerformerWalk<T>;
  using Base::begin_, Base::call_, Base::ends_, Base::inside_, Base::k_,
      Base::n_, Base::pieces_, Base::s_, Base::unit_, Base::w_,
      Base::query_bits_, Base::key_bits_;

 public:
  PerformerForward(const PerformerCall<T>& call, const Unit& unit,
                   const Pass& pass, const PerformerOutputs& outputs,
                   PerformerScratch<T>& scratch)
      : Base(call, unit, scratch), pass_(pass), outputs_(outputs) {
    s_.piece.state_out = outputs.state_out.sums;
    s_.piece.denominator = s_.denominator;
  }

  void run() {
    this->start_maxima(s_.maxima);
    pass_.load_state(s_.piece, inside_, s_.state[0]);
    if (call_.whole.options.is_causal) {
      const Walk walk(unit_);
      for (const Span& span : {walk.first, walk.second})
        Base::for_blocks(span, [&](int64_t b, int64_t e) { attend(b, e); });
    } else {
      Base::for_blocks(key_span(unit_),
                       [&](int64_t b, int64_t e) { accumulate(b, e); });
      Base::for_blocks(query_span(unit_),
                       [&](int64_t b, int64_t e) { read(b, e); });
    }
    if (outputs_.state_out.sums.kv_state == nullptr) return;
    pass_.store_state(s_.piece, inside_, s_.state[0]);
    std::copy_n(
        s_.maxima, call_.features,
        static_cast<T*>(outputs_.state_out.log_scale) + call_.state_at(unit_));
  }

 private:
  void attend(int64_t begin, int64_t end) {
    this->enter(begin, end);
    if (key_bits_.real != 0) this->project_keys();
    this->cut();
    if (key_bits_.real != 0) this->form_keys();
    s_.piece.inputs.v = this->key_rows_of(call_.inputs.call.v, s_.v);
    form_queries();
    set_out();
    for (int64_t p = 0; p < pieces_; ++p) {
      if (this->set_factor(this->maxima_of(p - 1), this->maxima_of(p)))
        k_.rescale(s_.state[0], w_, s_.factor);
      pass_.attend(s_.piece, inside_, this->begin_of(p), ends_[p], {},
                   s_.state[0], s_.pass_scratch[0]);
    }
    this->keep_maxima();
    finish_queries();
  }

  void accumulate(int64_t begin, int64_t end) {
    this->enter(begin, end);
    if (key_bits_.real == 0) return;
    this->project_keys();
    this->cut();
    this->form_keys();
    s_.piece.inputs.v = this->key_rows_of(call_.inputs.call.v, s_.v);
    if (this->set_factor(s_.maxima, this->maxima_of(0)))
      k_.rescale(s_.state[0], w_, s_.factor);
    pass_.accumulate(s_.piece, inside_, begin, end, s_.state[0],
                     s_.pass_scratch[0]);
    this->keep_maxima();
  }

  void read(int64_t begin, int64_t end) {
    this->enter(begin, end);
    std::copy_n(s_.maxima, call_.features, s_.maxima + call_.stride);
    pieces_ = 1;
    ends_[0] = end;
    form_queries();
    set_out();
    pass_.read(s_.piece, inside_, begin, end, s_.state[0], s_.pass_scratch[0]);
    finish_queries();
  }

  // The features of the group's queries, and what their rows were shifted by.
  void form_queries() {
    if (query_bits_.real == 0) return;
    for (int64_t g = 0; g < call_.whole.group; ++g) {
      this->project_queries(g);
      T* features = s_.queries + g * Base::kBlock * call_.stride;
      double* top = s_.top + g * Base::kBlock;
      for (int64_t p = 0; p < pieces_; ++p) {
        const int64_t r = this->begin_of(p) - begin_;
        const int64_t n = ends_[p] - this->begin_of(p);
        const double* logs = s_.logs + r * call_.stride;
        this->set_column(this->maxima_of(p), false);
        k_.row_maxima(logs, n, call_.features, s_.column, top + r);
        for (int64_t i = r; i < r + n; ++i)
          if (top[i] == kMinusInfinity) top[i] = 0;
        k_.exponentials(logs, n, call_.features, top + r, s_.column,
                        features + r * call_.stride);
      }
      // What the logarithm of the row's sum lacks.
      for (int64_t i = 0; i < n_; ++i)
        top[i] -= s_.half_norm[i] + call_.log_features;
    }
  }

  void set_out() {
    if (query_bits_.present == 0) return;
    s_.piece.out = Base::writable(
        call_.half ? this->heads_of(s_.out, call_.whole.value_dim,
                                    padded(call_.whole.value_dim))
                   : this->view_at(outputs_.out, this->first_head(),
                                   this->first_query()));
  }

  void finish_queries() {
    if (query_bits_.present == 0) return;
    const int64_t group = call_.whole.group;
    if (call_.half) {
      for (int64_t g = 0; g < group; ++g) {
        this->write_queries(
            s_.out + g * Base::kBlock * padded(call_.whole.value_dim),
            outputs_.out, g);
      }
    }
    if (outputs_.log_denominator == nullptr) return;
    for (int64_t i = 0; i < n_; ++i) {
      if ((query_bits_.present >> i & 1) == 0) continue;
      const int64_t token = unit_.row.batch * call_.inputs.call.q.size[1] +
                            this->first_query() + i;
      double* to = outputs_.log_denominator + token * call_.whole.heads +
                   this->first_head();
      for (int64_t g = 0; g < group; ++g) {
        to[g] = (query_bits_.real >> i & 1) == 0
                    ? kMinusInfinity
                    : std::log(static_cast<double>(
                          s_.denominator[denominator_at(i) + g])) +
                          s_.top[g * Base::kBlock + i];
      }
    }
  }
  // Where the engine puts the denominators of row i: token of its view x group.
  int64_t denominator_at(int64_t i) const { return i * call_.whole.group; }

  const Pass& pass_;
  const PerformerOutputs& outputs_;
};

template <typename T>
Status forward(const PerformerAttentionOptions& options,
               const PerformerAttentionInputs& inputs,
               const PerformerOutputs& outputs, Isa isa, Executor& executor) {
  PerformerCall<T> call(options, inputs,
                        outputs.state_out.sums.kv_state != nullptr, isa);
  COSFORMER_RETURN_IF_ERROR(call.pack_projection(false));
  const Pass& pass =
      std::is_same_v<T, double> ? forward_f64(isa) : forward_f32(isa);
  return run_units<T>(call, pass, nullptr, 0, executor,
                      [&](const Unit& unit, int64_t, PerformerScratch<T>& s) {
                        PerformerForward<T>(call, unit, pass, outputs, s).run();
                      });
}

// The features of one token a row, all heads: the key's raises the maxima, and
// the sums follow.
template <typename T>
class PerformerStep {
 public:
  // Memory that a thread works in.
  static size_t bytes(const PerformerCall<T>& call) {
    const int64_t n = rows_of(call), dim = padded(call.whole.dim);
    return static_cast<size_t>(n * (call.stride + dim) + padded(n) +
                               call.stride) *
               sizeof(double) +
           static_cast<size_t>(n * dim + call.stride) * sizeof(T);
  }

  PerformerStep(const PerformerCall<T>& call, const PerformerStateView& state,
                void* memory)
      : call_(call),
        k_(call.kernels),
        state_(state),
        m_(call.features),
        stride_(call.stride) {
    const int64_t n = rows_of(call), dim = padded(call.whole.dim);
    logs_ = static_cast<double*>(memory);
    wide_ = logs_ + n * stride_;
    half_norm_ = wide_ + n * dim;
    column_ = half_norm_ + padded(n);
    x_ = reinterpret_cast<T*>(column_ + stride_);
    maxima_ = x_ + n * dim;
    std::fill(column_ + m_, column_ + stride_, 0.0);
  }

  // keys: [kv_heads][stride]
  void add_key(int64_t r, T* keys) const {
    const int64_t kv_heads = call_.whole.kv_heads;
    project(call_.inputs.call.k, r, kv_heads);
    for (int64_t h = 0; h < kv_heads; ++h) {
      T* scale = log_scale(r * kv_heads + h);
      std::copy_n(scale, m_, maxima_);
      k_.raise(logs_ + h * stride_, half_norm_[h], maxima_, m_);
      rescale(r * kv_heads + h, scale);
      std::copy_n(maxima_, m_, scale);
      for (int64_t f = 0; f < m_; ++f) {
        const double m = static_cast<double>(maxima_[f]);
        column_[f] = m == kMinusInfinity ? 0 : -m;
      }
      k_.exponentials(logs_ + h * stride_, 1, m_, half_norm_ + h, column_,
                      keys + h * stride_);
    }
  }

  // queries: [heads][stride]
  void form_queries(int64_t r, T* queries) const {
    const int64_t heads = call_.whole.heads, group = call_.whole.group;
    project(call_.inputs.call.q, r, heads);
    for (int64_t h = 0; h < heads; ++h) {
      const T* scale = log_scale(r * call_.whole.kv_heads + h / group);
      for (int64_t f = 0; f < m_; ++f)
        column_[f] = static_cast<double>(scale[f]);
      double top;
      k_.row_maxima(logs_ + h * stride_, 1, m_, column_, &top);
      if (top == kMinusInfinity) top = 0;
      k_.exponentials(logs_ + h * stride_, 1, m_, &top, column_,
                      queries + h * stride_);
    }
  }

 private:
  // Tiles take rows by four.
  static int64_t rows_of(const PerformerCall<T>& call) {
    return (call.whole.heads + 3) / 4 * 4;
  }

  T* log_scale(int64_t unit) const {
    return static_cast<T*>(state_.log_scale) + unit * m_;
  }

  // The heads of a token as rows.
  void project(const ConstView4& view, int64_t r, int64_t heads) const {
    const char* data =
        static_cast<const char*>(view.data) +
        r * view.stride[0] * static_cast<int64_t>(size_of(view.dtype));
    for (int64_t h = 0; h < heads; h += kPerformerBlock) {
      const int64_t n = std::min(heads - h, kPerformerBlock);
      k_.pack(view.dtype, data, h, view.stride[2], ~uint64_t{0}, n,
              call_.whole.dim, x_);
      k_.project(call_.w, x_, n, wide_, logs_ + h * stride_, half_norm_ + h);
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
  const PerformerKernels<T>& k_;
  const PerformerStateView& state_;
  int64_t m_, stride_;
  double *logs_, *wide_, *half_norm_, *column_;
  T *x_, *maxima_;
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
  COSFORMER_RETURN_IF_ERROR(call.pack_projection(false));
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
    const PerformerStep<T> step(call, state, scratch[thread]);
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

Status run_performer_forward(const PerformerAttentionOptions& options,
                             const PerformerAttentionInputs& inputs,
                             const PerformerOutputs& outputs, Isa isa,
                             Executor& executor) {
  return inputs.call.q.dtype == DType::kFloat64
             ? forward<double>(options, inputs, outputs, isa, executor)
             : forward<float>(options, inputs, outputs, isa, executor);
}

Status run_performer_decode(const PerformerAttentionInputs& inputs,
                            const PerformerStateView& state, const View4& out,
                            Isa isa, Executor& executor) {
  return inputs.call.q.dtype == DType::kFloat64
             ? decode<double>(inputs, state, out, isa, executor)
             : decode<float>(inputs, state, out, isa, executor);
}

}  // namespace cosformer::simd
