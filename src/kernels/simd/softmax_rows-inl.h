// The queries of a block of the softmax engine's forward, whatever multiplies
// them: which there are, and their results once all keys are in.
#if defined(COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_ROWS_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_ROWS_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_ROWS_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_ROWS_INL_H_
#endif

#include <hwy/contrib/math/math-inl.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "kernels/simd/chunk-inl.h"
#include "kernels/simd/softmax_pack-inl.h"
#include "kernels/simd/softmax_plan.h"
#include "kernels/simd/softmax_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

// What the rows of a block have come to: sums by lanes and outputs relative to
// 2^reference.
template <typename T>
struct RowResults {
  RowResults(int64_t rows, int64_t out_width, Carver<T>& carver)
      : width(out_width) {
    out = carver.take(rows * width);
    reference = carver.take(round_up(rows, kLanes<T>));
    sums = carver.take(rows * kLanes<T>);
    total = carver.take(round_up(rows, kLanes<T>));
    seen = reinterpret_cast<uint8_t*>(
        carver.take(rows / static_cast<int64_t>(sizeof(T)) + 1));
  }

  int64_t width;  // of a row of out: whole vectors
  T* out;
  T *reference, *sums, *total;
  uint8_t* seen;  // whether a row has a reference: kUnseen ..
};

template <typename T>
class BlockRows {
 public:
  explicit BlockRows(const SoftmaxPlan& plan)
      : plan_(plan), call_(plan.call()) {}

  // The most queries of a block of the plan.
  static int64_t longest(const SoftmaxPlan& plan) {
    int64_t queries = 0;
    for (const SoftmaxBlock& block : plan.blocks())
      queries = std::max(queries, block.outer.count);
    return queries;
  }

  HeadRows queries_of(const SoftmaxItem& item) const {
    const AttentionRow& row = plan_.row(item.block->row);
    return head_rows(call_.inputs.q, row.batch, item.head, row.q_offset);
  }
  // Of the view of keys, or of values.
  HeadRows keys_of(const ConstView4& view, const SoftmaxItem& item) const {
    const AttentionRow& row = plan_.row(item.block->row);
    return head_rows(view, row.batch, item.head / call_.group, row.kv_offset);
  }

  // From here on the rows of this item, which have seen nothing yet. padded:
  // rows that there is memory for.
  void start(const SoftmaxItem& item, int64_t padded,
             const RowResults<T>& results) {
    item_ = item;
    side_ = plan_.queries(item.block->row);
    std::fill_n(results.reference, padded, T{0});
    std::fill_n(results.sums, padded * kLanes<T>, T{0});
    // Rows that are not live need no reference: what they hold is not used.
    const bool all_live = side_.mask == nullptr && side_.global_mask == nullptr;
    for (int64_t t = 0; t < padded; ++t) {
      const bool is_live =
          t < count() && (all_live || live(item.block->outer[t]));
      results.seen[t] = is_live ? kUnseen : kSeen;
    }
  }

  const SoftmaxItem& item() const { return item_; }
  int64_t count() const { return item_.block->outer.count; }
  // Whether the block answers query x, and whether that one sees anything.
  bool owned(int64_t x) const {
    return item_.block->is_global || !side_.is_global(x);
  }
  bool live(int64_t x) const { return side_.real(x) && owned(x); }

  // Writes outputs and, where wanted, log-sum-exps. has_output(t): whether row
  // t of out holds something.
  template <class F>
  void finish(const RowResults<T>& results, const F& has_output) const {
    const Tag<T> d;
    const int64_t rows = count();
    for (int64_t t = 0; t < rows; ++t) {
      // A softmax of infinities and NaN is none.
      results.total[t] =
          results.seen[t] == kNothingFinite
              ? std::numeric_limits<T>::quiet_NaN()
              : hn::GetLane(hn::SumOfLanes(
                    d, hn::Load(d, results.sums + t * kLanes<T>)));
    }
    if (call_.log_sum_exp != nullptr) store_log_sums(results);
    const T kept = static_cast<T>(1 / (1 - call_.options.dropout_p));
    for (int64_t t = 0; t < rows; ++t)
      results.total[t] = kept / results.total[t];
    const IndexList& outer = item_.block->outer;
    const AttentionRow& row = plan_.row(item_.block->row);
    const View4& view = call_.out;
    const HeadRows to = head_rows(view, row.batch, item_.head, row.q_offset);
    // A run of rows is a strided one.
    const int64_t run = outer.list == nullptr ? 32 : 1;
    for (int64_t t = 0; t < rows; t += run) {
      uint64_t written = 0, alive = 0;
      for (int64_t s = 0; s < std::min(run, rows - t); ++s) {
        const int64_t x = outer[t + s];
        const bool seen =
            results.seen[t + s] != kUnseen && has_output(t + s) && live(x);
        written |= uint64_t{owned(x)} << s;
        alive |= uint64_t{seen} << s;
      }
      if (written == 0) continue;
      write_rows<T>(view.dtype, results.out + t * results.width, results.width,
                    results.total + t, written, alive, call_.value_dim,
                    {to.at(outer[t]), 0, view.stride[1] * outer.step},
                    call_.stream);
    }
  }

 private:
  void store_log_sums(const RowResults<T>& results) const {
    constexpr int64_t kLane = kLanes<T>;
    const Tag<T> d;
    const AttentionRow& row = plan_.row(item_.block->row);
    T* to = static_cast<T*>(call_.log_sum_exp) +
            (row.batch * call_.inputs.q.size[1] + row.q_offset) * call_.heads +
            item_.head;
    HWY_ALIGN T logs[kLane];
    for (int64_t t = 0; t < count(); ++t) {
      if (t % kLane == 0) {
        const Vec<T> total = hn::Load(d, results.total + t);
        hn::Store(
            hn::MulAdd(hn::Load(d, results.reference + t),
                       hn::Set(d, std::numbers::ln2_v<T>), hn::Log(d, total)),
            d, logs);
      }
      const int64_t x = item_.block->outer[t];
      if (!owned(x)) continue;
      const T total = results.total[t];
      T& log_sum = to[x * call_.heads];
      if (results.seen[t] == kUnseen || !live(x)) {
        log_sum = -std::numeric_limits<T>::infinity();
      } else if (total > 0 && std::isfinite(total)) {
        log_sum = logs[t % kLane];
      } else {
        log_sum =
            std::numbers::ln2_v<T> * results.reference[t] + std::log(total);
      }
    }
  }

  const SoftmaxPlan& plan_;
  const SoftmaxCall& call_;
  SoftmaxItem item_;
  SideView side_;
};

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_ROWS_INL_H_
