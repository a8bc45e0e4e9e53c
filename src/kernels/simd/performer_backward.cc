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
// A call that is not causal sums up all keys first, answers all queries, whose
// gradients it sums up for the keys.
//
// The row constant |q|^2 / 2 cancels, and so does its gradient.
#include <algorithm>
#include <array>
#include <memory>
#include <vector>

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
  // A block's turn in the walk.
  struct Step {
    enum Kind { kForward, kBack, kSum, kQueries, kKeys } kind;
    int64_t begin, end;
    bool has_queries() const { return kind == kForward || kind == kQueries; }
    bool has_keys() const { return kind == kBack || kind == kKeys; }
  };

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

  const std::vector<Step>& steps() const { return steps_; }

  void run() {
    start();
    for (const Step& step : steps_) take(step);
    finish();
  }
  void start() {
    list_steps();
    this->start_maxima(s_.maxima);
    queries_pass_.load_state(s_.piece, inside_, s_.state[0]);
    keys_pass_.load_state(s_.piece, inside_, s_.state[1]);
  }
  // step: one of steps().
  void take(const Step& step) {
    const int64_t b = step.begin, e = step.end;
    const Step& later = &step == &steps_.back() ? step : *(&step + 1);
    this->look_ahead(later.begin, &later == &step ? 0 : later.end - later.begin,
                     gradients_.out, gradients_.d_out);
    switch (step.kind) {
      case Step::kForward:
        std::copy_n(s_.maxima, call_.features, before(block_++));
        return attend_forward(b, e);
      case Step::kBack:
        // Between the blocks the state stands at the maxima before the later
        // one, which are those after the earlier one.
        std::copy_n(before(--block_), call_.features, s_.maxima);
        return attend_back(b, e);
      case Step::kSum:
        return sum_keys(b, e);
      case Step::kQueries:
        return answer_queries(b, e);
      case Step::kKeys:
        return answer_keys(b, e);
    }
  }
  void finish() {
    if (wants_keys_) finish_state();
  }

  // Of a step to come: its gradients go to `own` (of kPerformerBlock rows a
  // head) instead of the caller's memory.
  void redirect(const Step& step, const PerformerGradients& own) {
    this->stand_at(step.begin, step.end);
    if (step.has_queries())
      gradients_.dq = at_block(own.dq, this->first_query(), this->first_head());
    if (step.has_keys()) {
      gradients_.dk = at_block(own.dk, this->first_key(), unit_.head);
      gradients_.dv = at_block(own.dv, this->first_key(), unit_.head);
    }
  }
  // What a redirected step gave, added to the caller's.
  void add(const Step& step, const PerformerGradients& own,
           const PerformerGradients& to) {
    this->stand_at(step.begin, step.end);
    if (step.has_queries()) {
      for (int64_t g = 0; g < call_.whole.group; ++g) {
        add_rows(own.dq, g, to.dq, this->first_head() + g, this->first_query(),
                 query_bits_.present);
      }
    }
    if (!step.has_keys()) return;
    add_rows(own.dk, 0, to.dk, unit_.head, this->first_key(),
             key_bits_.present);
    add_rows(own.dv, 0, to.dv, unit_.head, this->first_key(),
             key_bits_.present);
  }

 private:
  void list_steps() {
    const auto add = [&](typename Step::Kind kind, const Span& span) {
      Base::for_blocks(
          span, [&](int64_t b, int64_t e) { steps_.push_back({kind, b, e}); });
    };
    if (causal_) {
      const Walk walk(unit_);
      add(Step::kForward, walk.first);
      add(Step::kForward, walk.second);
      if (!wants_keys_) return;
      for (int64_t i = std::ssize(steps_) - 1; i >= 0; --i) {
        const Step& step = steps_[static_cast<size_t>(i)];
        steps_.push_back({Step::kBack, step.begin, step.end});
      }
      return;
    }
    add(Step::kSum, key_span(unit_));
    add(Step::kQueries, query_span(unit_));
    if (wants_keys_) add(Step::kKeys, key_span(unit_));
  }

  // A view whose row `first` and head `head` are the first of `own`.
  static View4 at_block(const View4& own, int64_t first, int64_t head) {
    View4 at = own;
    if (own.data == nullptr) return at;
    at.data = reinterpret_cast<void*>(
        reinterpret_cast<uintptr_t>(own.data) -
        static_cast<uintptr_t>((first * own.stride[1] + head * own.stride[2]) *
                               static_cast<int64_t>(sizeof(T))));
    return at;
  }
  void add_rows(const View4& own, int64_t own_head, const View4& to,
                int64_t head, int64_t first, uint64_t present) const {
    if (to.data == nullptr) return;
    const T* more = static_cast<const T*>(own.data) + own_head * own.stride[2];
    T* sum = static_cast<T*>(to.data) + unit_.row.batch * to.stride[0] +
             head * to.stride[2];
    for (int64_t r = 0; r < n_; ++r) {
      if ((present >> r & 1) == 0) continue;
      for (int64_t c = 0; c < to.size[3]; ++c) {
        sum[(first + r) * to.stride[1] + c] += more[r * own.stride[1] + c];
      }
    }
  }

  void sum_keys(int64_t b, int64_t e) {
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
  }

  void answer_queries(int64_t b, int64_t e) {
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
  }

  void answer_keys(int64_t b, int64_t e) {
    this->enter(b, e);
    one_piece(e);
    start_keys();
    keys_pass_.read(s_.piece, inside_, b, e, s_.state[1], s_.pass_scratch[1]);
    finish_keys();
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
  PerformerGradients gradients_;
  T* d_projection_;
  const bool causal_, wants_queries_, wants_keys_;
  std::vector<Step> steps_;
  int64_t block_ = 0;  // of a causal walk
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

// Where units are few their features are cut: given the rows' sums each part is
// a Performer of its own, and the gradients are those of the parts added up, in
// their order. The parts take some blocks in parallel, the first into the
// caller's memory, and are then put together.
template <typename T>
class Backward {
  using UnitBackward = PerformerBackward<T>;

 public:
  Backward(const PerformerAttentionOptions& options,
           const PerformerAttentionInputs& inputs,
           const PerformerGradients& gradients, Isa isa)
      : options_(options),
        inputs_(inputs),
        gradients_(gradients),
        isa_(isa),
        needs_all_(gradients.d_state_out.kv_state != nullptr ||
                   gradients.d_state_out.k_sum != nullptr),
        whole_(options, inputs, needs_all_, isa),
        queries_(std::is_same_v<T, double> ? d_queries_f64(isa)
                                           : d_queries_f32(isa)),
        keys_(std::is_same_v<T, double> ? d_keys_f64(isa) : d_keys_f32(isa)) {}

  Status run(Executor& executor) {
    COSFORMER_RETURN_IF_ERROR(make_parts());
    if (gradients_.d_projection != nullptr) {
      const int64_t panels = units() * std::ssize(parts_) * panel_size();
      COSFORMER_RETURN_IF_ERROR(
          make_zeros(static_cast<size_t>(panels) * sizeof(T), panels_));
    }
    const int64_t blocks =
        options_.is_causal && units() > 0 ? count_blocks(whole_) : 0;
    if (parts_.size() > 1) {
      COSFORMER_RETURN_IF_ERROR(run_parts(blocks, executor));
    } else {
      COSFORMER_RETURN_IF_ERROR(run_units<T>(
          whole_, queries_, &keys_, blocks, executor,
          [&](const Unit& unit, int64_t u, PerformerScratch<T>& s) {
            UnitBackward(whole_, unit, queries_, keys_, gradients_,
                         panels_of(u, 0), s)
                .run();
          }));
    }
    collect_projection();
    return Status();
  }

 private:
  // Blocks between two times that the parts are put together.
  static constexpr int64_t kRound = 16;

  static Status make_zeros(size_t bytes, AlignedBuffer& buffer) {
    buffer = AlignedBuffer(bytes + 64);
    if (buffer.data() == nullptr) return out_of_memory(bytes);
    std::fill_n(buffer.as<char>(), bytes, char{0});
    return Status();
  }

  int64_t units() const { return std::ssize(whole_.units); }
  // Of the first part, the largest.
  int64_t panel_size() const {
    return parts_[0]->stride * padded(whole_.whole.dim);
  }
  T* panels_of(int64_t unit, int64_t part) const {
    T* all = panels_.template as<T>();
    if (all == nullptr) return nullptr;
    return all + (unit * std::ssize(parts_) + part) * panel_size();
  }

  // States hold all features side by side, and narrow types would round each
  // part: those calls are not cut.
  Status make_parts() {
    const int64_t size = features_of_part(whole_);
    const bool has_state = inputs_.state.sums.kv_state != nullptr ||
                           needs_all_ ||
                           gradients_.d_state_in.kv_state != nullptr ||
                           gradients_.d_state_in.k_sum != nullptr;
    if (size >= inputs_.num_features || has_state || whole_.half) {
      parts_.push_back(&whole_);
      return whole_.prepare(true);
    }
    COSFORMER_RETURN_IF_ERROR(whole_.prepare(false));
    const int64_t count = (inputs_.num_features + size - 1) / size;
    part_inputs_.assign(static_cast<size_t>(count), inputs_);
    for (int64_t p = 0; p < count; ++p) {
      PerformerAttentionInputs& in = part_inputs_[static_cast<size_t>(p)];
      in.projection = static_cast<const T*>(inputs_.projection) +
                      p * size * whole_.whole.dim;
      in.num_features = std::min(size, inputs_.num_features - p * size);
      made_.push_back(std::make_unique<PerformerCall<T>>(
          options_, in, needs_all_, isa_, inputs_.num_features));
      COSFORMER_RETURN_IF_ERROR(made_.back()->prepare(true));
      // So that all choose alike between float32 and double.
      made_.back()->all.reach = whole_.all.reach;
      parts_.push_back(made_.back().get());
    }
    return Status();
  }

  // Memory for a block's gradients of a unit, behind another.
  PerformerGradients block_gradients(ArrayCarver& carver) const {
    const auto rows = [&](const View4& like, int64_t heads) {
      View4 own = like;
      if (like.data == nullptr) return own;
      const int64_t dim = like.size[3];
      own.stride = {0, dim, kPerformerBlock * dim, 1};
      own.data = carver.take<T>(heads * kPerformerBlock * dim);
      return own;
    };
    PerformerGradients own = gradients_;
    own.dq = rows(gradients_.dq, whole_.whole.group);
    own.dk = rows(gradients_.dk, 1);
    own.dv = rows(gradients_.dv, 1);
    return own;
  }

  Status run_parts(int64_t blocks, Executor& executor) {
    const int64_t parts = std::ssize(parts_), count = units() * parts;
    const size_t bytes =
        PerformerScratch<T>(*parts_[0], queries_, &keys_, blocks, nullptr)
            .bytes();
    const Pieces memory(count, bytes);
    ArrayCarver counter(nullptr);
    block_gradients(counter);
    // The first part of a unit needs none.
    const Pieces blocks_memory((count - units()) * kRound, counter.bytes());
    if (memory.failed() || blocks_memory.failed())
      return out_of_memory(static_cast<size_t>(count) * bytes);
    const auto own_of = [&](int64_t task, int64_t i) {
      const int64_t other = task - task / parts - 1;
      ArrayCarver carver(blocks_memory[other * kRound + i % kRound]);
      return block_gradients(carver);
    };
    std::vector<std::unique_ptr<PerformerScratch<T>>> scratch;
    std::vector<std::unique_ptr<UnitBackward>> walks;
    int64_t longest = 0;
    for (int64_t task = 0; task < count; ++task) {
      const PerformerCall<T>& call = *parts_[static_cast<size_t>(task % parts)];
      scratch.push_back(std::make_unique<PerformerScratch<T>>(
          call, queries_, &keys_, blocks, memory[task]));
      walks.push_back(std::make_unique<UnitBackward>(
          call, call.units[static_cast<size_t>(task / parts)], queries_, keys_,
          gradients_, panels_of(task / parts, task % parts), *scratch.back()));
      walks.back()->start();
      longest = std::max(longest, std::ssize(walks.back()->steps()));
    }
    for (int64_t from = 0; from < longest; from += kRound) {
      const auto for_steps = [&](int64_t task, const auto& visit) {
        const auto& steps = walks[static_cast<size_t>(task)]->steps();
        const int64_t end = std::min(from + kRound, std::ssize(steps));
        for (int64_t i = from; i < end; ++i)
          visit(*walks[static_cast<size_t>(task)],
                steps[static_cast<size_t>(i)], i);
      };
      executor.run(count, [&](int64_t task, int) {
        for_steps(task, [&](UnitBackward& walk, const auto& step, int64_t i) {
          if (task % parts > 0) walk.redirect(step, own_of(task, i));
          walk.take(step);
        });
      });
      for (int64_t task = 0; task < count; ++task) {
        if (task % parts == 0) continue;
        for_steps(task, [&](UnitBackward& walk, const auto& step, int64_t i) {
          walk.add(step, own_of(task, i), gradients_);
        });
      }
    }
    return Status();
  }

  // In the order of the units, in double.
  void collect_projection() const {
    if (gradients_.d_projection == nullptr) return;
    const int64_t dim = whole_.whole.dim;
    std::vector<double> total(static_cast<size_t>(inputs_.num_features * dim),
                              0.0);
    for (int64_t u = 0; u < units(); ++u) {
      for (int64_t p = 0; p < std::ssize(parts_); ++p) {
        whole_.kernels.collect_projection_gradient(
            parts_[static_cast<size_t>(p)]->w, panels_of(u, p),
            total.data() + p * parts_[0]->features * dim);
      }
    }
    T* to = static_cast<T*>(gradients_.d_projection);
    for (size_t i = 0; i < total.size(); ++i) to[i] = static_cast<T>(total[i]);
  }

  const PerformerAttentionOptions& options_;
  const PerformerAttentionInputs& inputs_;
  const PerformerGradients& gradients_;
  const Isa isa_;
  const bool needs_all_;
  PerformerCall<T> whole_;
  const Pass &queries_, &keys_;
  std::vector<PerformerAttentionInputs> part_inputs_;
  std::vector<std::unique_ptr<PerformerCall<T>>> made_;
  std::vector<const PerformerCall<T>*> parts_;
  AlignedBuffer panels_;  // gradients of the projection, a unit and part each
};

}  // namespace

Status run_performer_backward(const PerformerAttentionOptions& options,
                              const PerformerAttentionInputs& inputs,
                              const PerformerGradients& gradients, Isa isa,
                              Executor& executor) {
  return inputs.call.q.dtype == DType::kFloat64
             ? Backward<double>(options, inputs, gradients, isa).run(executor)
             : Backward<float>(options, inputs, gradients, isa).run(executor);
}

}  // namespace cosformer::simd
