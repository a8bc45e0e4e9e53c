// Performer's backward walks (performer_walk.h). A query's features are formed
// as exp(log q_f + m_f - D), D the logarithm of the row's sum that the forward
// gave: normalised already, and for the keys that it sees at most exp(kRise),
// also where m_f is that of an earlier block. So no maxima of queries are
// needed, and the engine's gradients (with denominators of 1) are those of the
// features, whose logarithms have gradients d_feature x feature:
//
//   from the first position on: dq; the maxima before each block are kept
//   from the last one back:     dk, dv, the gradient of the given state
//
// The row constant |q|^2 / 2 cancels, and so does its gradient.
#include <algorithm>

#include "kernels/simd/performer_walk.h"

namespace cosformer::simd {
namespace {

template <typename T>
class PerformerBackward : public PerformerWalk<T> {
  using Base = PerformerWalk<T>;
  using Base::b_, Base::begin_, Base::call_, Base::ends_, Base::inside_,
      Base::k_, Base::n_, Base::pieces_, Base::s_, Base::unit_, Base::w_,
      Base::query_bits_, Base::key_bits_;

 public:
  // d_projection: the unit's own panels, or nullptr.
  PerformerBackward(const PerformerCall<T>& call, const Unit& unit,
                    const Pass& queries_pass, const Pass& keys_pass,
                    const PerformerGradients& gradients, T* d_projection,
                    PerformerScratch<T>& scratch)
      : Base(call, unit, scratch),
        queries_pass_(queries_pass),
        keys_pass_(keys_pass),
        gradients_(gradients),
        d_projection_(d_projection),
        causal_(call.whole.options.is_causal),
        wants_queries_(gradients.dq.data != nullptr || d_projection != nullptr),
        wants_keys_(gradients.dk.data != nullptr ||
                    gradients.dv.data != nullptr || d_projection != nullptr ||
                    gradients.d_state_in.kv_state != nullptr ||
                    gradients.d_state_in.k_sum != nullptr) {
    // Denominators: the queries' features are normalised.
    std::fill_n(s_.denominator, call.whole.group * Base::kBlock, T{1});
    s_.piece.saved_denominator = s_.denominator;
    s_.piece.d_state_out = gradients.d_state_out;
    s_.piece.d_state_in = gradients.d_state_in;
  }

  void run() {
    this->start_maxima(s_.maxima);
    if (causal_) {
      run_causal();
    } else {
      run_noncausal();
    }
  }

 private:
  void run_causal() {
    queries_pass_.load_state(s_.piece, inside_, s_.state[0]);
    const Walk walk(unit_);
    int64_t block = 0;
    for (const Span& span : {walk.first, walk.second}) {
      Base::for_blocks(span, [&](int64_t b, int64_t e) {
        std::copy_n(s_.maxima, call_.features, before(block++));
        attend_forward(b, e);
      });
    }
    if (!wants_keys_) return;
    keys_pass_.load_state(s_.piece, inside_, s_.state[1]);
    for (const Span& span : {walk.second, walk.first}) {
      Base::for_blocks_back(span, [&](int64_t b, int64_t e) {
        // Between the blocks the state stands at the maxima before the later
        // one, which are those after the earlier one.
        std::copy_n(before(--block), call_.features, s_.maxima);
        attend_back(b, e);
      });
    }
    finish_state();
  }

  void run_noncausal() {
    queries_pass_.load_state(s_.piece, inside_, s_.state[0]);
    Base::for_blocks(key_span(unit_), [&](int64_t b, int64_t e) {
      this->enter(b, e);
      if (key_bits_.real == 0) return;
      this->project_keys();
      this->cut();
      if (wants_queries_) {
        this->form_keys();
        s_.piece.inputs.v = this->key_rows_of(call_.inputs.call.v, s_.v);
        if (this->set_factor(s_.maxima, this->maxima_of(0)))
          k_.rescale_across(s_.state[0], w_, s_.factor);
        queries_pass_.accumulate(s_.piece, inside_, b, e, s_.state[0],
                                 s_.pass_scratch[0]);
      }
      this->keep_maxima();
    });
    keys_pass_.load_state(s_.piece, inside_, s_.state[1]);
    Base::for_blocks(query_span(unit_), [&](int64_t b, int64_t e) {
      this->enter(b, e);
      one_piece(e);
      form_queries();
      if (wants_queries_) {
        queries_pass_.read(s_.piece, inside_, b, e, s_.state[0],
                           s_.pass_scratch[0]);
      }
      if (wants_keys_ && query_bits_.real != 0) {
        keys_pass_.accumulate(s_.piece, inside_, b, e, s_.state[1],
                              s_.pass_scratch[1]);
      }
      if (wants_queries_) finish_queries();
    });
    if (!wants_keys_) return;
    Base::for_blocks(key_span(unit_), [&](int64_t b, int64_t e) {
      this->enter(b, e);
      one_piece(e);
      start_keys();
      keys_pass_.read(s_.piece, inside_, b, e, s_.state[1], s_.pass_scratch[1]);
      finish_keys();
    });
    finish_state();
  }

  void attend_forward(int64_t begin, int64_t end) {
    this->enter(begin, end);
    if (key_bits_.real != 0) this->project_keys();
    this->cut();
    if (wants_queries_) {
      if (key_bits_.real != 0) this->form_keys();
      s_.piece.inputs.v = this->key_rows_of(call_.inputs.call.v, s_.v);
      form_queries();
      for (int64_t p = 0; p < pieces_; ++p) {
        if (this->set_factor(this->maxima_of(p - 1), this->maxima_of(p)))
          k_.rescale_across(s_.state[0], w_, s_.factor);
        queries_pass_.attend(s_.piece, inside_, this->begin_of(p), ends_[p], {},
                             s_.state[0], s_.pass_scratch[0]);
      }
      finish_queries();
    }
    this->keep_maxima();
  }

  void attend_back(int64_t begin, int64_t end) {
    this->enter(begin, end);
    if (key_bits_.real != 0) this->project_keys();
    this->cut();
    start_keys();
    form_queries();
    for (int64_t p = pieces_ - 1; p >= 0; --p) {
      keys_pass_.attend(s_.piece, inside_, this->begin_of(p), ends_[p], {},
                        s_.state[1], s_.pass_scratch[1]);
      // From the maxima of this piece to those before it.
      if (this->set_factor(this->maxima_of(p - 1), this->maxima_of(p)))
        k_.rescale(s_.state[1], w_, s_.factor);
    }
    finish_keys();
  }

  // The block as one piece at the maxima of all keys.
  void one_piece(int64_t end) {
    std::copy_n(s_.maxima, call_.features, s_.maxima + call_.stride);
    pieces_ = 1;
    ends_[0] = end;
    if (key_bits_.real != 0) this->project_keys();
  }

  // Features of the block's queries, and the engine's views of what belongs to
  // them.
  void form_queries() {
    LinearCall& piece = s_.piece;
    if (query_bits_.present == 0) return;
    piece.d_out = this->query_rows_of(gradients_.d_out, s_.d_out);
    piece.saved_out = this->query_rows_of(gradients_.out, s_.out);
    piece.dq = Base::writable(
        this->heads_of(s_.d_queries, call_.features, call_.stride));
    if (query_bits_.real == 0) return;
    for (int64_t g = 0; g < call_.whole.group; ++g) {
      this->project_queries(g);
      shift_by_row_sums(g);
      for (int64_t p = 0; p < pieces_; ++p) {
        const int64_t r = this->begin_of(p) - begin_;
        b_.form_rows(call_.all, s_.query_logs, r, ends_[p] - this->begin_of(p),
                     this->maxima_of(p), s_.row + r, s_.work,
                     s_.queries + (g * Base::kBlock + r) * call_.stride,
                     call_.stride);
      }
    }
  }

  // s_.row: what the logarithms of W q lack from normalised weights.
  void shift_by_row_sums(int64_t g) {
    const int64_t first =
        unit_.row.batch * call_.inputs.call.q.size[1] + this->first_query();
    for (int64_t i = 0; i < n_; ++i) {
      s_.row[i] = 0;
      if ((query_bits_.real >> i & 1) == 0) continue;
      const double sum =
          gradients_.log_denominator[(first + i) * call_.whole.heads +
                                     this->first_head() + g];
      s_.row[i] = sum == kMinusInfinity
                      ? std::numeric_limits<double>::infinity()
                      : sum + s_.query_logs.half_norm[i] + call_.log_features;
    }
  }

  void finish_queries() {
    if (query_bits_.present == 0) return;
    for (int64_t g = 0; g < call_.whole.group; ++g) {
      T* d_logs = s_.d_queries + g * Base::kBlock * call_.stride;
      if (query_bits_.real != 0) {
        k_.log_gradients(d_logs, s_.queries + g * Base::kBlock * call_.stride,
                         n_, call_.features, s_.sums);
        clear_dead(d_logs, query_bits_);
        if (gradients_.dq.data != nullptr)
          k_.project_back(w_, d_logs, n_, s_.dx);
        if (d_projection_ != nullptr) {
          this->pack_queries(g);
          k_.add_projection_gradient(w_, d_logs, s_.x, n_, d_projection_);
        }
      }
      if (gradients_.dq.data != nullptr)
        this->write_queries(s_.dx, gradients_.dq, g);
    }
  }

  void start_keys() {
    LinearCall& piece = s_.piece;
    if (key_bits_.real != 0) this->form_keys();
    piece.inputs.v = this->key_rows_of(call_.inputs.call.v, s_.v);
    piece.dk =
        Base::writable(this->rows_of(s_.d_keys, call_.features, call_.stride));
    if (gradients_.dv.data == nullptr) return;
    piece.dv =
        Base::writable(call_.half ? this->rows_of(s_.dv, call_.whole.value_dim,
                                                  padded(call_.whole.value_dim))
                                  : this->view_at(gradients_.dv, unit_.head,
                                                  this->first_key()));
  }

  // d/dk of log k_f = W_f.k - |k|^2 / (2 sqrt(dim)).
  void finish_keys() {
    if (key_bits_.present == 0) return;
    if (call_.half && gradients_.dv.data != nullptr)
      this->write_keys(s_.dv, gradients_.dv);
    if (gradients_.dk.data == nullptr && d_projection_ == nullptr) return;
    if (key_bits_.real != 0) {
      k_.log_gradients(s_.d_keys, s_.keys, n_, call_.features, s_.sums);
      clear_dead(s_.d_keys, key_bits_);
      const ConstView4& k = call_.inputs.call.k;
      k_.pack(this->dtype_, Base::head_of(k, unit_.row.batch, unit_.head),
              this->first_key(), k.stride[1], key_bits_.real, n_,
              call_.whole.dim, s_.x);
      if (d_projection_ != nullptr)
        k_.add_projection_gradient(w_, s_.d_keys, s_.x, n_, d_projection_);
      k_.project_back(w_, s_.d_keys, n_, s_.dx);
      const int64_t stride = padded(call_.whole.dim);
      const T scale =
          static_cast<T>(1 / std::sqrt(static_cast<double>(call_.whole.dim)));
      for (int64_t r = 0; r < n_; ++r) {
        if ((key_bits_.real >> r & 1) == 0) continue;
        for (int64_t c = 0; c < stride; ++c)
          s_.dx[r * stride + c] -= scale * s_.sums[r] * s_.x[r * stride + c];
      }
    }
    if (gradients_.dk.data != nullptr) this->write_keys(s_.dx, gradients_.dk);
  }

  // Rows that do not count may hold anything (their features are those of
  // zeros): nothing may come of them.
  void clear_dead(T* d_logs, const Slots& bits) const {
    for (int64_t r = 0; r < n_; ++r)
      if ((bits.real >> r & 1) == 0)
        std::fill_n(d_logs + r * call_.stride, call_.stride, T{0});
  }

  // The gradient of the given state, at the scale of that state.
  void finish_state() {
    if (!s_.piece.wants_d_state()) return;
    const T* given = call_.log_scale_in(unit_);
    if (this->set_factor(given, s_.maxima))
      k_.rescale(s_.state[1], w_, s_.factor);
    keys_pass_.store_state(s_.piece, inside_, s_.state[1]);
  }

  T* before(int64_t block) const { return s_.before + block * call_.stride; }

  const Pass &queries_pass_, &keys_pass_;
  const PerformerGradients& gradients_;
  T* d_projection_;
  const bool causal_, wants_queries_, wants_keys_;
};

// Blocks of the longest causal walk.
template <typename T>
int64_t count_blocks(const PerformerCall<T>& call) {
  int64_t most = 1;
  for (const Unit& unit : call.units) {
    const Walk walk(unit);
    int64_t blocks = 0;
    for (const Span& span : {walk.first, walk.second})
      blocks += (span.size() + kPerformerBlock - 1) / kPerformerBlock;
    most = std::max(most, blocks);
  }
  return most;
}

template <typename T>
Status backward(const PerformerAttentionOptions& options,
                const PerformerAttentionInputs& inputs,
                const PerformerGradients& gradients, Isa isa,
                Executor& executor) {
  PerformerCall<T> call(options, inputs,
                        gradients.d_state_out.kv_state != nullptr ||
                            gradients.d_state_out.k_sum != nullptr,
                        isa);
  COSFORMER_RETURN_IF_ERROR(call.prepare(true));
  constexpr bool is_double = std::is_same_v<T, double>;
  const Pass& queries = is_double ? d_queries_f64(isa) : d_queries_f32(isa);
  const Pass& keys = is_double ? d_keys_f64(isa) : d_keys_f32(isa);
  const int64_t panels = call.stride * padded(call.whole.dim);
  AlignedBuffer d_projection;
  if (gradients.d_projection != nullptr) {
    const size_t bytes =
        call.units.size() * static_cast<size_t>(panels) * sizeof(T);
    d_projection = AlignedBuffer(bytes + 64);
    if (d_projection.data() == nullptr) return out_of_memory(bytes);
    std::fill_n(d_projection.as<char>(), bytes, char{0});
  }
  COSFORMER_RETURN_IF_ERROR(run_units<T>(
      call, queries, &keys, options.is_causal ? count_blocks(call) : 0,
      executor, [&](const Unit& unit, int64_t u, PerformerScratch<T>& s) {
        T* own = gradients.d_projection == nullptr
                     ? nullptr
                     : d_projection.template as<T>() + u * panels;
        PerformerBackward<T>(call, unit, queries, keys, gradients, own, s)
            .run();
      }));
  if (gradients.d_projection == nullptr) return Status();
  // In the order of the units, in double.
  const int64_t size = call.features * call.whole.dim;
  std::vector<double> total(static_cast<size_t>(size), 0.0);
  for (size_t u = 0; u < call.units.size(); ++u) {
    call.kernels.collect_projection_gradient(
        call.w,
        d_projection.template as<T>() + static_cast<int64_t>(u) * panels,
        total.data());
  }
  T* to = static_cast<T*>(gradients.d_projection);
  for (size_t i = 0; i < total.size(); ++i) to[i] = static_cast<T>(total[i]);
  return Status();
}

}  // namespace

Status run_performer_backward(const PerformerAttentionOptions& options,
                              const PerformerAttentionInputs& inputs,
                              const PerformerGradients& gradients, Isa isa,
                              Executor& executor) {
  return inputs.call.q.dtype == DType::kFloat64
             ? backward<double>(options, inputs, gradients, isa, executor)
             : backward<float>(options, inputs, gradients, isa, executor);
}

}  // namespace cosformer::simd
