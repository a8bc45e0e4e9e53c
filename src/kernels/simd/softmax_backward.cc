// Cuts the backward into tasks by shape alone. A unit is a row and a kv head;
// its query heads take turns, so that the sums of dk and dv need one place
// each. Where units are few, the key blocks of one are dealt out to several
// tasks (in turn: under causality the first see the most queries), each with
// its own sum of dq, which are added up in order.
#include "kernels/simd/softmax_backward.h"

#include <algorithm>
#include <vector>

#include "kernels/simd/schedule.h"

namespace cosformer::simd {
namespace {

constexpr int64_t kEnoughTasks = 8;
// Tokens, or queries, of a task that has little to do for each.
constexpr int64_t kTokens = 256;

Status no_memory(size_t bytes) {
  return Status(StatusCode::kOutOfMemory,
                str_cat("softmax_attention: cannot allocate ", bytes,
                        " bytes of working memory"));
}

class Backward {
 public:
  Backward(const SoftmaxCall& call, const SoftmaxBackwardKernels& kernels,
           Executor& executor)
      : call_(call),
        k_(kernels),
        executor_(executor),
        block_keys_(backward_keys(call, num_rows(call.inputs) * call.kv_heads)),
        plan_(call, Side::kKeys, block_keys_) {}

  Status run() {
    const int64_t rows = plan_.num_rows();
    find_blocks();
    const int64_t units = rows * call_.kv_heads;
    slices_ =
        units == 0 || units >= kEnoughTasks
            ? 1
            : std::max<int64_t>(1, std::min((kEnoughTasks + units - 1) / units,
                                            most_blocks_));
    tasks_ = units * slices_;
    COSFORMER_RETURN_IF_ERROR(allocate());
    find_deltas();
    for (int64_t g = 0; g < call_.group; ++g) {
      executor_.run(tasks_,
                    [&](int64_t task, int thread) { attend(task, g, thread); });
      if (slices_ > 1 && call_.dq.data != nullptr) add_slices(g);
      if (call_.d_relative_bias != nullptr) add_biases(g);
    }
    return Status();
  }

 private:
  void find_blocks() {
    row_begin_.assign(static_cast<size_t>(plan_.num_rows()) + 1, 0);
    for (const SoftmaxBlock& block : plan_.blocks()) {
      ++row_begin_[static_cast<size_t>(block.row) + 1];
      slot_.push_back(slots_);
      slots_ += (block.outer.count + kBackwardSlots - 1) / kBackwardSlots *
                kBackwardSlots;
    }
    for (size_t r = 1; r < row_begin_.size(); ++r) {
      most_blocks_ = std::max(most_blocks_, row_begin_[r]);
      row_begin_[r] += row_begin_[r - 1];
    }
    for (int64_t r = 0; r < plan_.num_rows(); ++r)
      most_queries_ = std::max(most_queries_, plan_.row(r).q_len);
  }

  Status allocate() {
    const size_t q_row = k_.q_row_bytes(call_), v_row = k_.v_row_bytes(call_);
    const int64_t threads = executor_.num_threads();
    const auto pieces = [](Pieces& to, int64_t count, size_t bytes) {
      to = Pieces(count, bytes);
      return to.failed() ? no_memory(static_cast<size_t>(count) * bytes)
                         : Status();
    };
    COSFORMER_RETURN_IF_ERROR(
        pieces(scratch_, threads, k_.scratch_bytes(call_, block_keys_)));
    COSFORMER_RETURN_IF_ERROR(
        pieces(dq_, slices_ > 1 ? tasks_ : threads,
               static_cast<size_t>(most_queries_ + 4) * q_row));
    COSFORMER_RETURN_IF_ERROR(
        pieces(delta_, 1,
               static_cast<size_t>(tokens() * call_.heads) * accumulator()));
    if (call_.group > 1) {
      const size_t slots = static_cast<size_t>(slots_);
      COSFORMER_RETURN_IF_ERROR(pieces(dk_, call_.kv_heads, slots * q_row));
      COSFORMER_RETURN_IF_ERROR(pieces(dv_, call_.kv_heads, slots * v_row));
    }
    if (call_.d_relative_bias != nullptr) {
      COSFORMER_RETURN_IF_ERROR(
          pieces(d_bias_, tasks_,
                 static_cast<size_t>(bias_entries()) * sizeof(double)));
    }
    return Status();
  }

  int64_t tokens() const {
    return call_.inputs.q.size[0] * call_.inputs.q.size[1];
  }
  size_t accumulator() const {
    return call_.dtype == DType::kFloat64 ? sizeof(double) : sizeof(float);
  }
  int64_t bias_entries() const { return 2 * call_.inputs.relative_reach + 1; }

  void find_deltas() {
    executor_.run((tokens() + kTokens - 1) / kTokens, [&](int64_t task, int) {
      k_.deltas(call_, task * kTokens, std::min(tokens(), (task + 1) * kTokens),
                delta_[0]);
    });
  }

  // Task t: slice t % slices_ of unit t / slices_, head g of its group.
  void attend(int64_t t, int64_t g, int thread) {
    const int64_t slice = t % slices_, unit = t / slices_;
    const int64_t kv_head = unit % call_.kv_heads;
    SoftmaxBackwardTask task;
    task.plan = &plan_;
    task.block_keys = block_keys_;
    task.row = unit / call_.kv_heads;
    task.head = kv_head * call_.group + g;
    task.first_block = row_begin_[static_cast<size_t>(task.row)] + slice;
    task.last_block = row_begin_[static_cast<size_t>(task.row) + 1];
    task.block_step = slices_;
    task.delta = delta_[0];
    task.dq = dq_[slices_ > 1 ? t : thread];
    if (call_.group > 1) {
      task.dk_sum = dk_[kv_head];
      task.dv_sum = dv_[kv_head];
    }
    task.slot = slot_.data();
    task.is_first_head = g == 0;
    task.is_last_head = g == call_.group - 1;
    if (call_.d_relative_bias != nullptr) {
      task.d_bias = static_cast<double*>(d_bias_[t]);
      std::fill_n(task.d_bias, bias_entries(), 0.0);
    }
    task.scratch = scratch_[thread];
    k_.run(task);
    if (slices_ == 1 && call_.dq.data != nullptr) {
      k_.write_dq(plan_, task.row, task.head, 0, plan_.row(task.row).q_len,
                  &task.dq, 1);
    }
  }

  void add_slices(int64_t g) {
    const int64_t pieces = (most_queries_ + kTokens - 1) / kTokens;
    executor_.run(tasks_ / slices_ * pieces, [&](int64_t task, int) {
      const int64_t unit = task / pieces, begin = task % pieces * kTokens;
      const int64_t row = unit / call_.kv_heads;
      const int64_t end = std::min(begin + kTokens, plan_.row(row).q_len);
      if (begin >= end) return;
      void* sums[kEnoughTasks];
      for (int64_t s = 0; s < slices_; ++s) sums[s] = dq_[unit * slices_ + s];
      k_.write_dq(plan_, row, unit % call_.kv_heads * call_.group + g, begin,
                  end, sums, slices_);
    });
  }

  void add_biases(int64_t g) {
    executor_.run(call_.kv_heads, [&](int64_t kv_head, int) {
      const int64_t at = (kv_head * call_.group + g) * bias_entries();
      for (int64_t e = 0; e < bias_entries(); ++e) {
        double sum = 0;
        for (int64_t row = 0; row < plan_.num_rows(); ++row) {
          for (int64_t s = 0; s < slices_; ++s) {
            const int64_t t = (row * call_.kv_heads + kv_head) * slices_ + s;
            sum += static_cast<const double*>(d_bias_[t])[e];
          }
        }
        if (call_.dtype == DType::kFloat64) {
          static_cast<double*>(call_.d_relative_bias)[at + e] = sum;
        } else {
          static_cast<float*>(call_.d_relative_bias)[at + e] =
              static_cast<float>(sum);
        }
      }
    });
  }

  const SoftmaxCall& call_;
  const SoftmaxBackwardKernels& k_;
  Executor& executor_;
  const int64_t block_keys_;
  const SoftmaxPlan plan_;
  int64_t slices_ = 1, tasks_ = 0;
  std::vector<int64_t> row_begin_;  // of a row's blocks
  std::vector<int64_t> slot_;       // of a block's sums
  int64_t slots_ = 0, most_blocks_ = 1, most_queries_ = 0;
  Pieces scratch_{0, 0}, dq_{0, 0}, delta_{0, 0}, dk_{0, 0}, dv_{0, 0},
      d_bias_{0, 0};
};

}  // namespace

int64_t backward_keys(const SoftmaxCall& call, int64_t units) {
  constexpr int64_t kFew = 128, kCached = 640 << 10;
  if (call.inputs.block_mask != nullptr) return kFew;
  // k three times, v twice.
  const int64_t key = (3 * call.dim + 2 * call.value_dim) *
                      (call.dtype == DType::kFloat64 ? 8 : 4);
  const bool fits = kMostBackwardKeys * key <= kCached;
  const int64_t keys =
      fits && units >= kEnoughTasks ? kMostBackwardKeys : kMostBackwardKeys / 2;
  const int64_t all = (call.inputs.k.size[1] + kFew - 1) / kFew * kFew;
  return std::clamp(all, kFew, keys);
}

Status run_softmax_backward(const SoftmaxCall& call,
                            const SoftmaxBackwardKernels& kernels,
                            Executor& executor) {
  return Backward(call, kernels, executor).run();
}

}  // namespace cosformer::simd
