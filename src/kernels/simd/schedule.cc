// Cuts a pass into tasks (schedule.h), whatever its instruction set.
#include "kernels/simd/schedule.h"

#include "kernels/simd/pass.h"

namespace cosformer::simd {
namespace {

class Schedule {
 public:
  Schedule(const LinearCall& call, const Pass& pass, Executor& executor)
      : call_(call),
        k_(pass),
        executor_(executor),
        units_(units_of(call)),
        block_(call.options.is_causal ? pass.block : kBlock),
        scratch_(executor.num_threads(), pass.scratch_bytes(call)) {}

  Status run() {
    if (units_.empty()) return Status();
    if (scratch_.failed()) return out_of_memory(k_.scratch_bytes(call_));
    started_.assign(static_cast<size_t>(executor_.num_threads()), false);
    int64_t longest = 0;
    for (const Unit& unit : units_) {
      longest =
          std::max(longest, call_.options.is_causal
                                ? Walk(unit).size()
                                : std::max(unit.row.q_len, unit.row.kv_len));
    }
    const int64_t units = static_cast<int64_t>(units_.size());
    segment_ = segment_size(units, longest);
    segments_ = std::max<int64_t>(1, (longest + segment_ - 1) / segment_);
    return segments_ == 1 ? whole() : in_segments();
  }

 private:
  void* scratch(int thread) {
    void* memory = scratch_[thread];
    if (!started_[static_cast<size_t>(thread)]) {
      k_.init_scratch(call_, memory);
      started_[static_cast<size_t>(thread)] = true;
    }
    return memory;
  }

  // Each unit from its beginning to its end, several units side by side.
  Status whole() {
    const int64_t units = static_cast<int64_t>(units_.size());
    const size_t state_bytes = k_.state_bytes(call_);
    const int64_t share =
        units_per_task(units, state_bytes, executor_.num_threads());
    const int64_t tasks = (units + share - 1) / share;
    const Pieces states(executor_.num_threads() * share, state_bytes);
    if (states.failed()) {
      return out_of_memory(
          static_cast<size_t>(executor_.num_threads() * share) * state_bytes);
    }
    executor_.run(tasks, [&](int64_t task, int thread) {
      const int64_t first = task * share;
      const int64_t last = std::min(first + share, units);
      const auto state = [&](int64_t u) {
        return states[thread * share + u - first];
      };
      for (int64_t u = first; u < last; ++u)
        k_.load_state(call_, units_[static_cast<size_t>(u)], state(u));
      if (call_.options.is_causal) {
        side_by_side(
            first, last, k_.from_the_end,
            [&](int64_t u) { return Walk(unit(u)).size(); },
            [&](int64_t u, int64_t from, int64_t to, int64_t next,
                int64_t next_from) {
              attend(u, from, to, block(next, next_from), state(u),
                     scratch(thread));
            });
      } else {
        side_by_side(
            first, last, false, [&](int64_t u) { return writers(u).size(); },
            [&](int64_t u, int64_t from, int64_t to, int64_t, int64_t) {
              accumulate(u, from, to, state(u), scratch(thread));
            });
        side_by_side(
            first, last, false, [&](int64_t u) { return readers(u).size(); },
            [&](int64_t u, int64_t from, int64_t to, int64_t, int64_t) {
              read(u, from, to, state(u), scratch(thread));
            });
      }
      for (int64_t u = first; u < last; ++u)
        k_.store_state(call_, unit(u), state(u));
    });
    return Status();
  }

  // The blocks of several units in turn: visit(unit, from, to, next unit (-1:
  // none), where its block begins).
  template <typename Steps, typename Visit>
  void side_by_side(int64_t first, int64_t last, bool from_the_end,
                    const Steps& steps, const Visit& visit) const {
    int64_t blocks = 0;
    for (int64_t u = first; u < last; ++u)
      blocks = std::max(blocks, (steps(u) + block_ - 1) / block_);
    // The visit before is made once the one that follows it is known.
    int64_t unit = -1, start = 0;
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t from = (from_the_end ? blocks - 1 - i : i) * block_;
      for (int64_t u = first; u < last; ++u) {
        if (from >= steps(u)) continue;
        if (unit >= 0) {
          visit(unit, start, std::min(start + block_, steps(unit)), u, from);
        }
        unit = u;
        start = from;
      }
    }
    if (unit >= 0)
      visit(unit, start, std::min(start + block_, steps(unit)), -1, 0);
  }

  // State s of a unit: what the s segments before (in the pass's direction)
  // hold; the last: what all of them hold.
  Status in_segments() {
    const int64_t units = static_cast<int64_t>(units_.size());
    const size_t state_bytes = k_.state_bytes(call_);
    const Pieces states(units * (segments_ + 1), state_bytes);
    if (states.failed()) {
      return out_of_memory(static_cast<size_t>(units * (segments_ + 1)) *
                           state_bytes);
    }
    const bool causal = call_.options.is_causal;
    const auto state = [&](int64_t u, int64_t s) {
      return states[u * (segments_ + 1) + s];
    };
    // Where the s-th segment of the pass begins.
    const auto from = [&](int64_t s) {
      return (causal && k_.from_the_end ? segments_ - 1 - s : s) * segment_;
    };
    executor_.run(units * segments_, [&](int64_t task, int thread) {
      const int64_t u = task / segments_, s = task % segments_;
      k_.zero_state(call_, state(u, s + 1));
      // The last segment of a causal pass adds to the state as it goes.
      if (causal && s == segments_ - 1) return;
      if (causal) {
        Walk(unit(u)).blocks(from(s), from(s) + segment_, block_, false,
                             [&](int64_t begin, int64_t end) {
                               k_.accumulate(call_, unit(u), begin, end,
                                             state(u, s + 1), scratch(thread));
                             });
      } else {
        accumulate(u, from(s), std::min(from(s) + segment_, writers(u).size()),
                   state(u, s + 1), scratch(thread));
      }
    });
    executor_.run(units, [&](int64_t u, int) {
      k_.load_state(call_, unit(u), state(u, 0));
      for (int64_t s = 0; s < segments_; ++s)
        k_.add_state(call_, state(u, s), state(u, s + 1));
    });
    executor_.run(units * segments_, [&](int64_t task, int thread) {
      const int64_t u = task / segments_, s = task % segments_;
      const bool last = s == segments_ - 1;
      if (causal) {
        attend(u, from(s), from(s) + segment_, {}, state(u, s),
               scratch(thread));
        if (last) k_.store_state(call_, unit(u), state(u, s));
      } else {
        read(u, from(s), std::min(from(s) + segment_, readers(u).size()),
             state(u, segments_), scratch(thread));
        if (last) k_.store_state(call_, unit(u), state(u, segments_));
      }
    });
    return Status();
  }

  const Unit& unit(int64_t u) const { return units_[static_cast<size_t>(u)]; }
  Span writers(int64_t u) const {
    return k_.from_the_end ? query_span(unit(u)) : key_span(unit(u));
  }
  Span readers(int64_t u) const {
    return k_.from_the_end ? key_span(unit(u)) : query_span(unit(u));
  }

  // The block of a walk that a step lies in.
  Next block(int64_t u, int64_t from) const {
    if (u < 0) return {};
    const Walk walk(unit(u));
    Next next{&unit(u), 0, 0};
    walk.blocks(from, std::min(from + block_, walk.size()), block_,
                k_.from_the_end, [&](int64_t begin, int64_t end) {
                  if (next.begin == next.end) next = {&unit(u), begin, end};
                });
    return next;
  }

  void attend(int64_t u, int64_t from, int64_t to, const Next& next,
              void* state, void* scratch) const {
    Walk(unit(u)).blocks(
        from, to, block_, k_.from_the_end, [&](int64_t begin, int64_t end) {
          k_.attend(call_, unit(u), begin, end, next, state, scratch);
        });
  }
  void accumulate(int64_t u, int64_t from, int64_t to, void* state,
                  void* scratch) const {
    const int64_t start = writers(u).begin;
    for (; from < to; from += block_) {
      k_.accumulate(call_, unit(u), start + from,
                    start + std::min(from + block_, to), state, scratch);
    }
  }
  void read(int64_t u, int64_t from, int64_t to, const void* state,
            void* scratch) const {
    const int64_t start = readers(u).begin;
    for (; from < to; from += block_) {
      k_.read(call_, unit(u), start + from, start + std::min(from + block_, to),
              state, scratch);
    }
  }

  const LinearCall& call_;
  const Pass& k_;
  Executor& executor_;
  std::vector<Unit> units_;
  const int64_t block_;
  Pieces scratch_;
  std::vector<char> started_;
  int64_t segment_ = 0, segments_ = 1;
};

}  // namespace

Status run_pass(const LinearCall& call, const Pass& pass, Executor& executor) {
  return Schedule(call, pass, executor).run();
}

}  // namespace cosformer::simd
