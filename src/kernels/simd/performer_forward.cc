// Performer's forward walk (performer_call.h) over blocks of positions
// (performer_block.h).
//
// A task is a unit, or some that are walked together. Where units are few their
// features are cut into parts, by shape alone, each a Performer of its own but
// for the row's shift and sum: the parts' answers to some blocks are formed in
// parallel, and then put together.
#include <algorithm>

#include "kernels/simd/performer_block.h"
#include "kernels/simd/performer_call.h"

namespace cosformer::simd {
namespace {

// The blocks of a unit's walk.
class Blocks {
 public:
  struct Block {
    int64_t begin, end;
    bool keys, queries;
  };
  Blocks(const Unit& unit, bool causal) : causal_(causal) {
    if (causal) {
      const Walk walk(unit);
      first_ = walk.first;
      second_ = walk.second;
    } else {
      first_ = key_span(unit);
      second_ = query_span(unit);
    }
  }
  int64_t count() const { return blocks(first_) + blocks(second_); }
  Block operator[](int64_t i) const {
    const bool in_first = i < blocks(first_);
    const Span& span = in_first ? first_ : second_;
    const int64_t begin =
        span.begin + (in_first ? i : i - blocks(first_)) * kPerformerBlock;
    return {begin, std::min(begin + kPerformerBlock, span.end),
            causal_ || in_first, causal_ || !in_first};
  }

 private:
  static int64_t blocks(const Span& span) {
    return (span.size() + kPerformerBlock - 1) / kPerformerBlock;
  }
  bool causal_;
  Span first_, second_;
};

// Such outputs are written past the caches.
bool too_large_for_cache(const ConstView4& out) {
  constexpr int64_t kBytes = 1 << 20;
  return out.size[0] * out.size[1] * out.size[2] * out.size[3] *
             static_cast<int64_t>(size_of(out.dtype)) >=
         kBytes;
}

// What a block's queries got, before it is divided by their sums: of each head
// of the group [kPerformerRows][value_stride], and [kPerformerBlock].
template <typename T>
struct Answers {
  T* out;
  T* denominator;
  double* top;  // logarithm that the sum's lacks
};

// Sizes of a call's arrays.
template <typename T>
struct Sizes {
  int64_t rows, dim, v_stride, group;

  PerformerSums<T> sums(ArrayCarver& carver) const {
    return {carver.take<T>(rows), carver.take<T>(rows * v_stride),
            carver.take<T>(rows)};
  }
  Answers<T> answers(ArrayCarver& carver) const {
    return {carver.take<T>(group * kPerformerRows * v_stride),
            carver.take<T>(group * kPerformerBlock),
            carver.take<double>(group * kPerformerBlock)};
  }
};

// A thread's memory.
template <typename T>
struct ForwardScratch {
  ForwardScratch(const Sizes<T>& sizes, void* memory) {
    ArrayCarver carver(memory);
    work = carve_performer_work<T>(sizes.rows, sizes.dim, carver);
    v = carver.take<T>(kPerformerRows * sizes.v_stride);
    before = carver.take<T>(sizes.rows);
    keys = carve_performer_logs<T>(sizes.rows, carver);
    for (int64_t g = 0; g < sizes.group; ++g)
      queries.push_back(carve_performer_logs<T>(sizes.rows, carver));
    bytes = carver.bytes();
  }

  size_t bytes;
  PerformerWork<T> work{};
  T *v, *before;
  PerformerLogs<T> keys;
  std::vector<PerformerLogs<T>> queries;
};

// One unit's walk with some of its features.
template <typename T>
class UnitForward : public PerformerPlace<T> {
  using Place = PerformerPlace<T>;
  using Place::begin_, Place::call_, Place::dtype_, Place::key_bits_, Place::n_,
      Place::query_bits_, Place::unit_;

 public:
  UnitForward(const PerformerCall<T>& call, const Unit& unit,
              const PerformerFeatures<T>& features, int64_t first_feature,
              const PerformerOutputs& outputs, const PerformerSums<T>& state)
      : Place(call, unit),
        k_(performer_block<T>(call.isa)),
        features_(features),
        outputs_(outputs),
        state_(state),
        at_(call.state_at(unit) + first_feature),
        v_stride_(k_.value_stride(features.value_dim)) {}

  void load_state() const {
    const ConstPerformerStateView& given = call_.inputs.state;
    const bool has = given.sums.kv_state != nullptr;
    const auto at = [&](const void* data, int64_t offset) {
      return has ? static_cast<const T*>(data) + offset : nullptr;
    };
    k_.load_state(features_, at(given.sums.kv_state, at_ * features_.value_dim),
                  at(given.sums.k_sum, at_), at(given.log_scale, at_), state_);
  }
  void store_state() const {
    const PerformerStateView& to = outputs_.state_out;
    if (to.sums.kv_state == nullptr) return;
    k_.store_state(
        features_, state_,
        static_cast<T*>(to.sums.kv_state) + at_ * features_.value_dim,
        static_cast<T*>(to.sums.k_sum) + at_,
        static_cast<T*>(to.log_scale) + at_);
  }

  // The block that is taken after the one at hand, if any.
  struct Next {
    const UnitForward* unit = nullptr;
    Blocks::Block block{};
  };

  void attend(const Blocks::Block& block, const Next& next,
              ForwardScratch<T>& s, const Answers<T>& answers) {
    this->stand_at(block.begin, block.end);
    const bool has_keys = block.keys && key_bits_.real != 0;
    const bool asks = block.queries && query_bits_.real != 0;
    bool finite = true;
    if (has_keys) finite = take_keys(next, s);
    if (asks) take_queries(next, has_keys && s.keys.wide, s);
    if (!has_keys && !asks) return;
    const double bound = call_.whole.options.is_causal && asks
                             ? kRise<T>
                             : std::numeric_limits<double>::infinity();
    PerformerPiece<T> piece;
    piece.real_keys = key_bits_.real;
    piece.v = s.v;
    piece.finite = finite;
    piece.keys = has_keys ? &s.keys : nullptr;
    for (int64_t from = 0, to; from < n_; from = to) {
      to = std::min(from + kPerformerPiece, n_);
      piece.read = this->seen_before(begin_ + from);
      if (has_keys) {
        std::copy_n(state_.maxima, features_.count, s.before);
        to = k_.raise(features_, s.keys, key_bits_.real, from, to, bound,
                      piece.read, s.work, state_.maxima);
        k_.rescale(features_, s.before, state_);
      }
      piece.begin = from;
      piece.n = to - from;
      const bool update = !call_.whole.options.is_causal ||
                          outputs_.state_out.sums.kv_state != nullptr ||
                          begin_ + to < unit_.q_end();
      const int64_t heads = asks ? call_.whole.group : 1;
      for (int64_t g = 0; g < heads; ++g) {
        piece.update = update && g == heads - 1;
        if (asks) {
          piece.queries = &s.queries[static_cast<size_t>(g)];
          piece.out = answers.out + g * kPerformerRows * v_stride_;
          piece.denominator = answers.denominator + g * kPerformerBlock;
          piece.top = answers.top + g * kPerformerBlock;
        }
        k_.attend(features_, piece, s.work, state_);
      }
    }
    for (int64_t g = 0; asks && g < call_.whole.group; ++g) {
      const double* half_norm = s.queries[static_cast<size_t>(g)].half_norm;
      for (int64_t j = 0; j < n_; ++j) {
        answers.top[g * kPerformerBlock + j] -=
            half_norm[j] + call_.log_features;
      }
    }
  }

  // The caller's rows and logarithms of a block.
  void finish(const Blocks::Block& block, const Answers<T>& answers) {
    if (!block.queries) return;
    this->stand_at(block.begin, block.end);
    if (query_bits_.present == 0) return;
    const int64_t group = call_.whole.group;
    const T least = static_cast<T>(call_.whole.options.eps);
    const ConstView4& out = outputs_.out;
    for (int64_t g = 0; g < group; ++g) {
      const T* sums = answers.denominator + g * kPerformerBlock;
      T scale[kPerformerBlock];
      for (int64_t j = 0; j < kPerformerBlock; ++j)
        scale[j] = 1 / (sums[j] < least ? least : sums[j]);
      k_.write(dtype_, answers.out + g * kPerformerRows * v_stride_, scale,
               query_bits_.present, query_bits_.real, features_.value_dim,
               const_cast<char*>(
                   this->head_of(out, unit_.row.batch, this->first_head() + g)),
               this->first_query(), out.stride[1], too_large_for_cache(out));
      if (outputs_.log_denominator != nullptr)
        write_logarithms(g, sums, answers.top + g * kPerformerBlock);
    }
  }

 private:
  // Rows of the next block in the caller's memory.
  static PerformerAhead ahead(const ConstView4& view, const char* head,
                              int64_t first, int64_t rows) {
    const int64_t size = static_cast<int64_t>(size_of(view.dtype));
    return {head + first * view.stride[1] * size, view.stride[1] * size,
            view.size[3] * size, rows};
  }

  bool take_keys(const Next& next, ForwardScratch<T>& s) {
    const ConstView4 &k = call_.inputs.call.k, &v = call_.inputs.call.v;
    const char* keys = this->head_of(k, unit_.row.batch, unit_.head);
    const char* values = this->head_of(v, unit_.row.batch, unit_.head);
    PerformerAhead later[kPerformerAhead];
    if (next.block.keys) {
      const int64_t first = next.unit->key_at(next.block.begin);
      const int64_t rows = next.block.end - next.block.begin;
      const Unit& unit = next.unit->unit_;
      later[0] =
          ahead(k, this->head_of(k, unit.row.batch, unit.head), first, rows);
      later[1] =
          ahead(v, this->head_of(v, unit.row.batch, unit.head), first, rows);
    }
    k_.project(features_, dtype_, keys, this->first_key(), k.stride[1],
               key_bits_.real, n_, true, kNarrow, later, s.work, s.keys);
    return k_.load_values(dtype_, values, this->first_key(), v.stride[1],
                          key_bits_.real, n_, features_.value_dim, s.v);
  }

  void take_queries(const Next& next, bool wide, ForwardScratch<T>& s) {
    const ConstView4& q = call_.inputs.call.q;
    // Of large maxima and logarithms little may be left over.
    const double limit =
        wide || are_large(state_.maxima, features_.count) ? -1 : kNarrow;
    for (int64_t g = 0; g < call_.whole.group; ++g) {
      const char* head =
          this->head_of(q, unit_.row.batch, this->first_head() + g);
      PerformerAhead later[kPerformerAhead];
      if (next.block.queries) {
        later[0] = ahead(q,
                         this->head_of(q, next.unit->unit_.row.batch,
                                       next.unit->first_head() + g),
                         next.unit->query_at(next.block.begin),
                         next.block.end - next.block.begin);
      }
      k_.project(features_, dtype_, head, this->first_query(), q.stride[1],
                 query_bits_.real, n_, false, limit, later, s.work,
                 s.queries[static_cast<size_t>(g)]);
    }
  }

  void write_logarithms(int64_t g, const T* sums, const double* top) const {
    const int64_t first =
        unit_.row.batch * call_.inputs.call.q.size[1] + this->first_query();
    for (int64_t j = 0; j < n_; ++j) {
      if ((query_bits_.present >> j & 1) == 0) continue;
      double& to = outputs_.log_denominator[(first + j) * call_.whole.heads +
                                            this->first_head() + g];
      to = (query_bits_.real >> j & 1) == 0
               ? kMinusInfinity
               : std::log(static_cast<double>(sums[j])) + top[j];
    }
  }

  const PerformerBlockKernels<T>& k_;
  const PerformerFeatures<T>& features_;
  const PerformerOutputs& outputs_;
  const PerformerSums<T> state_;
  const int64_t at_;  // of the features in the caller's states
  const int64_t v_stride_;
};

template <typename T>
class Forward {
 public:
  Forward(const PerformerCall<T>& call, const PerformerOutputs& outputs)
      : call_(call), outputs_(outputs), units_(std::ssize(call.units)) {
    cut_features();
    sizes_ = {parts_[0].rows(), call.whole.dim,
              performer_block<T>(call.isa).value_stride(call.whole.value_dim),
              call.whole.group};
  }

  Status run(Executor& executor) {
    const int64_t threads = executor.num_threads();
    const int64_t parts = std::ssize(parts_);
    const bool whole = parts == 1;
    const size_t scratch_bytes = ForwardScratch<T>(sizes_, nullptr).bytes;
    ArrayCarver state_size(nullptr), answer_size(nullptr);
    sizes_.sums(state_size);
    sizes_.answers(answer_size);
    const int64_t share = whole ? units_a_task(threads, state_size.bytes()) : 1;
    const Pieces scratch(threads, scratch_bytes),
        states(whole ? threads * share : units_ * parts, state_size.bytes()),
        answers(whole ? threads : units_ * parts * kRound, answer_size.bytes());
    if (scratch.failed() || states.failed() || answers.failed())
      return out_of_memory(scratch_bytes);
    const auto state_of = [&](int64_t i) {
      ArrayCarver carver(states[i]);
      return sizes_.sums(carver);
    };
    const auto answers_of = [&](int64_t i) {
      ArrayCarver carver(answers[i]);
      return sizes_.answers(carver);
    };
    const bool causal = call_.whole.options.is_causal;
    if (whole) {
      executor.run((units_ + share - 1) / share, [&](int64_t task, int thread) {
        ForwardScratch<T> s(sizes_, scratch[thread]);
        const Answers<T> own = answers_of(thread);
        std::vector<UnitForward<T>> units;
        std::vector<Blocks> blocks;
        int64_t most = 0;
        const int64_t end = std::min(units_, (task + 1) * share);
        for (int64_t u = task * share; u < end; ++u) {
          units.push_back(walk(u, 0, state_of(thread * share + u % share)));
          blocks.emplace_back(call_.units[static_cast<size_t>(u)], causal);
          most = std::max(most, blocks.back().count());
          units.back().load_state();
        }
        // The first block from step i and unit u on.
        const auto next_of = [&](int64_t i, size_t u) {
          for (; i < most; ++i, u = 0)
            for (; u < units.size(); ++u)
              if (i < blocks[u].count())
                return typename UnitForward<T>::Next{&units[u], blocks[u][i]};
          return typename UnitForward<T>::Next{};
        };
        for (int64_t i = 0; i < most; ++i) {
          for (size_t u = 0; u < units.size(); ++u) {
            if (i >= blocks[u].count()) continue;
            units[u].attend(blocks[u][i], next_of(i, u + 1), s, own);
            units[u].finish(blocks[u][i], own);
          }
        }
        for (const UnitForward<T>& unit : units) unit.store_state();
      });
      return Status();
    }
    int64_t longest = 0;
    for (const Unit& unit : call_.units)
      longest = std::max(longest, Blocks(unit, causal).count());
    for (int64_t from = 0; from == 0 || from < longest; from += kRound) {
      executor.run(units_ * parts, [&](int64_t task, int thread) {
        const int64_t u = task / parts, p = task % parts;
        ForwardScratch<T> s(sizes_, scratch[thread]);
        UnitForward<T> unit = walk(u, p, state_of(task));
        const Blocks blocks(call_.units[static_cast<size_t>(u)], causal);
        if (from == 0) unit.load_state();
        const int64_t end = std::min(from + kRound, blocks.count());
        for (int64_t i = from; i < end; ++i) {
          typename UnitForward<T>::Next next;
          if (i + 1 < blocks.count()) next = {&unit, blocks[i + 1]};
          unit.attend(blocks[i], next, s, answers_of(task * kRound + i - from));
        }
        if (from + kRound >= longest) unit.store_state();
      });
      executor.run(units_ * kRound, [&](int64_t task, int) {
        const int64_t u = task / kRound, i = task % kRound;
        const Blocks blocks(call_.units[static_cast<size_t>(u)], causal);
        if (from + i >= blocks.count() || !blocks[from + i].queries) return;
        const Answers<T> sum = answers_of(u * parts * kRound + i);
        for (int64_t p = 1; p < parts; ++p)
          add(answers_of((u * parts + p) * kRound + i), sum);
        walk(u, 0, state_of(u * parts)).finish(blocks[from + i], sum);
      });
    }
    return Status();
  }

 private:
  // Blocks between two times that the parts are put together.
  static constexpr int64_t kRound = 16;

  // Units that a task walks together, a block of each in turn: their rows lie
  // side by side in memory. As many as keep their states in the cache beside
  // logarithms and projection; they share nothing that changes a result.
  int64_t units_a_task(int64_t threads, size_t state_bytes) const {
    constexpr size_t kCache = 320 << 10;
    const int64_t fit = static_cast<int64_t>(kCache / state_bytes);
    return std::clamp<int64_t>(std::min(fit, units_ / threads), 1, 4);
  }

  void cut_features() {
    stride_ = features_of_part(call_);
    for (int64_t first = 0; first < call_.features; first += stride_) {
      PerformerFeatures<T> part = call_.all;
      part.count = std::min(stride_, call_.features - first);
      part.projection += first * part.dim;
      parts_.push_back(part);
    }
  }

  UnitForward<T> walk(int64_t u, int64_t part,
                      const PerformerSums<T>& state) const {
    return {call_,
            call_.units[static_cast<size_t>(u)],
            parts_[static_cast<size_t>(part)],
            part * stride_,
            outputs_,
            state};
  }

  // to += from, at the larger of the two scales.
  void add(const Answers<T>& from, const Answers<T>& to) const {
    for (int64_t g = 0; g < sizes_.group; ++g) {
      for (int64_t j = 0; j < kPerformerBlock; ++j) {
        const int64_t i = g * kPerformerBlock + j;
        const int64_t row = (g * kPerformerRows + j) * sizes_.v_stride;
        const double top = std::max(from.top[i], to.top[i]);
        const T mine = static_cast<T>(std::exp(to.top[i] - top));
        const T other = static_cast<T>(std::exp(from.top[i] - top));
        to.top[i] = top;
        to.denominator[i] =
            mine * to.denominator[i] + other * from.denominator[i];
        for (int64_t c = 0; c < sizes_.v_stride; ++c)
          to.out[row + c] = mine * to.out[row + c] + other * from.out[row + c];
      }
    }
  }

  const PerformerCall<T>& call_;
  const PerformerOutputs& outputs_;
  const int64_t units_;
  std::vector<PerformerFeatures<T>> parts_;
  int64_t stride_ = 0;  // features of a part but the last
  Sizes<T> sizes_{};
};

template <typename T>
Status forward(const PerformerAttentionOptions& options,
               const PerformerAttentionInputs& inputs,
               const PerformerOutputs& outputs, Isa isa, Executor& executor) {
  PerformerCall<T> call(options, inputs,
                        outputs.state_out.sums.kv_state != nullptr, isa);
  if (call.units.empty()) return Status();
  COSFORMER_RETURN_IF_ERROR(call.prepare(false));
  return Forward<T>(call, outputs).run(executor);
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

}  // namespace cosformer::simd
