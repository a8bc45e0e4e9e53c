// Cuts a forward call into tasks (schedule.h) for any instruction set.
#include "kernels/simd/forward.h"
#include "kernels/simd/schedule.h"

namespace cosformer::simd {
namespace {

class Schedule {
 public:
  Schedule(const LinearCall& call, const ForwardKernels& kernels,
           const LinearStateView& state_out, Executor& executor)
      : call_(call),
        k_(kernels),
        state_out_(state_out),
        executor_(executor),
        units_(units_of(call)),
        scratch_(executor.num_threads(), kernels.scratch_bytes(call)) {}

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
            first, last, [&](int64_t u) { return walk(u).size(); },
            [&](int64_t u, int64_t from, int64_t to) {
              causal(u, from, to, state(u), scratch(thread));
            });
      } else {
        side_by_side(
            first, last, [&](int64_t u) { return row(u).kv_len; },
            [&](int64_t u, int64_t from, int64_t to) {
              keys(u, from, to, state(u), scratch(thread));
            });
        side_by_side(
            first, last, [&](int64_t u) { return row(u).q_len; },
            [&](int64_t u, int64_t from, int64_t to) {
              queries(u, from, to, state(u), scratch(thread));
            });
      }
      for (int64_t u = first; u < last; ++u) store(u, state(u));
    });
    return Status();
  }

  template <typename Steps, typename Visit>
  static void side_by_side(int64_t first, int64_t last, const Steps& steps,
                           const Visit& visit) {
    int64_t longest = 0;
    for (int64_t u = first; u < last; ++u)
      longest = std::max(longest, steps(u));
    for (int64_t from = 0; from < longest; from += kBlock) {
      for (int64_t u = first; u < last; ++u)
        if (from < steps(u)) visit(u, from, std::min(from + kBlock, steps(u)));
    }
  }

  // State s of a unit: what the segments before s hold; the last: all of them.
  Status in_segments() {
    const int64_t units = static_cast<int64_t>(units_.size());
    const size_t state_bytes = k_.state_bytes(call_);
    const Pieces states(units * (segments_ + 1), state_bytes);
    if (states.failed()) {
      return out_of_memory(static_cast<size_t>(units * (segments_ + 1)) *
                           state_bytes);
    }
    const bool causal_call = call_.options.is_causal;
    const auto state = [&](int64_t u, int64_t s) {
      return states[u * (segments_ + 1) + s];
    };
    executor_.run(units * segments_, [&](int64_t task, int thread) {
      const int64_t u = task / segments_, s = task % segments_;
      k_.zero_state(call_, state(u, s + 1));
      // A causal last segment adds its own keys as it goes.
      if (causal_call && s == segments_ - 1) return;
      if (causal_call) {
        walk(u).blocks(s * segment_, (s + 1) * segment_,
                       [&](int64_t begin, int64_t end) {
                         k_.add_keys(call_, unit(u), begin, end,
                                     state(u, s + 1), scratch(thread));
                       });
      } else {
        keys(u, s * segment_, std::min((s + 1) * segment_, row(u).kv_len),
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
      const int64_t from = s * segment_;
      if (causal_call) {
        causal(u, from, std::min(from + segment_, walk(u).size()), state(u, s),
               scratch(thread));
        if (s == segments_ - 1) store(u, state(u, s));
      } else {
        queries(u, from, std::min(from + segment_, row(u).q_len),
                state(u, segments_), scratch(thread));
        if (s == segments_ - 1) store(u, state(u, segments_));
      }
    });
    return Status();
  }

  const Unit& unit(int64_t u) const { return units_[static_cast<size_t>(u)]; }
  const AttentionRow& row(int64_t u) const { return unit(u).row; }
  Walk walk(int64_t u) const { return Walk(unit(u)); }

  void causal(int64_t u, int64_t from, int64_t to, void* state,
              void* scratch) const {
    walk(u).blocks(from, to, [&](int64_t begin, int64_t end) {
      k_.attend(call_, unit(u), begin, end, state, scratch);
    });
  }
  void keys(int64_t u, int64_t from, int64_t to, void* state,
            void* scratch) const {
    const int64_t start = row(u).kv_start;
    for (; from < to; from += kBlock) {
      k_.add_keys(call_, unit(u), start + from,
                  start + std::min(from + kBlock, to), state, scratch);
    }
  }
  void queries(int64_t u, int64_t from, int64_t to, const void* state,
               void* scratch) const {
    const int64_t start = row(u).q_start;
    for (; from < to; from += kBlock) {
      k_.read(call_, unit(u), start + from, start + std::min(from + kBlock, to),
              state, scratch);
    }
  }
  void store(int64_t u, const void* state) const {
    if (state_out_.kv_state != nullptr)
      k_.store_state(call_, unit(u), state, state_out_);
  }

  const LinearCall& call_;
  const ForwardKernels& k_;
  const LinearStateView& state_out_;
  Executor& executor_;
  std::vector<Unit> units_;
  Pieces scratch_;
  std::vector<char> started_;
  int64_t segment_ = 0, segments_ = 1;
};

}  // namespace

Status run_forward(const LinearCall& call, const ForwardKernels& kernels,
                   const LinearStateView& state_out, Executor& executor) {
  return Schedule(call, kernels, state_out, executor).run();
}

}  // namespace cosformer::simd
