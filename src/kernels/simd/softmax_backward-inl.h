// The backward of the softmax engine, a key block at a time (softmax_backward.h
// has the plan of it): packs the block's keys, walks the queries that see any
// of them in runs of kCellRows, and hands each run and each part of the block
// to the products of softmax_backward_cell-inl.h.
#if defined(COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_BACKWARD_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_BACKWARD_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_BACKWARD_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_BACKWARD_INL_H_
#endif

#include <hwy/cache_control.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/simd/chunk-inl.h"
#include "kernels/simd/softmax_backward.h"
#include "kernels/simd/softmax_backward_cell-inl.h"
#include "kernels/simd/softmax_backward_terms-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

// Rows that are written at once (write_rows takes fewer than a word has bits).
inline constexpr int64_t kWrittenRows = 32;

// Sizes of packed rows, and a thread's working memory.
template <typename T>
struct BackwardScratch {
  static constexpr int64_t kKeys = kCellKeys<T>;

  BackwardScratch(const SoftmaxCall& call, int64_t block_keys,
                  Carver<T>& carver)
      : q_stride(row_length<T>(call.dim)),
        v_stride(row_length<T>(call.value_dim)),
        kt_size(across_size<T>(kKeys, call.dim)),
        vt_size(across_size<T>(kKeys, call.value_dim)) {
    k = carver.take(block_keys * q_stride);
    v = carver.take(kKeys * v_stride);
    kt = carver.take(block_keys / kKeys * kt_size);
    vt = carver.take(block_keys / kKeys * vt_size);
    dk = carver.take(block_keys * q_stride);
    dv = carver.take(block_keys * v_stride);
    q = carver.take(kCellRows * q_stride);
    d_out = carver.take(kCellRows * v_stride);
    memory = carver.take(kLanes<T> * std::max(q_stride, v_stride));
    dq = carver.take(kCellRows * q_stride);
    p = carver.take(kCellRows * kCellStride<T>);
    ds = carver.take(kCellRows * kCellStride<T>);
    start = carver.take(kCellRows);
    delta = carver.take(kCellRows);
    if (call.inputs.relative_bias != nullptr)
      bias = carver.take(kCellRows * kCellStride<T>);
    if (call.d_relative_bias != nullptr)
      d_bias = carver.take(kCellRows + kCellStride<T>);
  }

  int64_t q_stride, v_stride, kt_size, vt_size;
  T *k, *v, *kt, *vt, *dk, *dv, *q, *d_out, *dq, *p, *ds, *start, *delta,
      *memory;
  T *bias = nullptr, *d_bias = nullptr;
  InnerList inner;
  uint64_t visible[kCellRows * kCellWords], kept[kCellRows * kCellWords];
};

template <typename T>
class BackwardBlocks {
 public:
  static constexpr int64_t kKeys = kCellKeys<T>;

  explicit BackwardBlocks(const SoftmaxBackwardTask& task)
      : task_(task),
        plan_(*task.plan),
        call_(plan_.call()),
        row_(plan_.row(task.row)),
        queries_(plan_.queries(task.row)),
        keys_(plan_.keys(task.row)),
        carver_(task.scratch),
        s_(call_, task.block_keys, carver_),
        terms_(call_, row_, task.row, task.head),
        wants_dq_(call_.dq.data != nullptr),
        wants_dk_(call_.dk.data != nullptr),
        wants_dv_(call_.dv.data != nullptr) {}

  void run() {
    if (wants_dq_) {
      std::memset(
          task_.dq, 0,
          static_cast<size_t>((row_.q_len + 4) * s_.q_stride) * sizeof(T));
    }
    for (int64_t b = task_.first_block; b < task_.last_block;
         b += task_.block_step) {
      const int64_t next = b + task_.block_step;
      next_block_ = next < task_.last_block ? &block_at(next) : nullptr;
      next_head_ = task_.head;
      if (next_block_ == nullptr && task_.head + call_.group < call_.heads) {
        // What likely comes next on this thread.
        next_block_ = &block_at(task_.first_block);
        next_head_ += call_.group;
      }
      run_block(b);
    }
    hwy::FlushStream();
  }

 private:
  const SoftmaxBlock& block_at(int64_t b) const {
    return plan_.blocks()[static_cast<size_t>(b)];
  }
  int64_t kv_head() const { return task_.head / call_.group; }

  // Where the keys, or the queries of this head, lie: to pack and to write.
  HeadRows packed_keys(const ConstView4& view) const {
    return head_rows(view, row_.batch, kv_head(), row_.kv_offset);
  }
  HeadRows packed_queries(const ConstView4& view) const {
    return head_rows(view, row_.batch, task_.head, row_.q_offset);
  }
  Rows key_rows_of(const ConstView4& view) const {
    return rows_at(view, row_.batch, kv_head(), row_.kv_offset);
  }

  void run_block(int64_t b) {
    const SoftmaxBlock& block = block_at(b);
    const SoftmaxItem item{&block, task_.head};
    T* dk = task_.dk_sum == nullptr
                ? s_.dk
                : static_cast<T*>(task_.dk_sum) + task_.slot[b] * s_.q_stride;
    T* dv = task_.dv_sum == nullptr
                ? s_.dv
                : static_cast<T*>(task_.dv_sum) + task_.slot[b] * s_.v_stride;
    const int64_t slots = round_up(block.outer.count, kBackwardSlots);
    if (task_.is_first_head) {
      std::fill_n(dk, slots * s_.q_stride, T{0});
      std::fill_n(dv, slots * s_.v_stride, T{0});
    }
    s_.inner.fill(plan_, item);
    bool packed = false;
    for (const IndexList& inner : s_.inner.parts()) {
      if (inner.count > 0 && !packed) pack_keys(block);
      packed |= inner.count > 0;
      int64_t count = 0;
      for (int64_t first = 0; first < inner.count; first += count) {
        count = cell_queries(inner, first);
        bring_ahead(block, inner, first, count);
        run_queries(item, inner, first, count, dk, dv);
      }
    }
    if (!task_.is_last_head) return;
    // The packed queries carried log2 e.
    if (wants_dk_) write_keys(block, dk, s_.q_stride, 1 / kLog2E, call_.dk);
    if (wants_dv_) write_keys(block, dv, s_.v_stride, 1.0, call_.dv);
  }

  // Of the next cell: neighbours, whose dq is summed up in place, unless these
  // are few.
  static int64_t cell_queries(const IndexList& inner, int64_t first) {
    constexpr int64_t kEnough = 48;
    const int64_t most = std::min(kCellRows, inner.count - first);
    if (run_step(inner, first, most) != 0) return most;
    int64_t count = 1;
    while (inner[first + count] == inner[first] + count) ++count;
    return count < kEnough ? most : count;
  }

  // A key that takes part, and belongs to this block.
  bool counts(const SoftmaxBlock& block, int64_t y) const {
    return keys_.real(y) && keys_.is_global(y) == block.is_global;
  }

  void pack_keys(const SoftmaxBlock& block) {
    const IndexList& outer = block.outer;
    const auto live = [&](int64_t y) { return counts(block, y); };
    for (int64_t part = 0; part * kKeys < outer.count; ++part) {
      const int64_t first = part * kKeys;
      const int64_t end = std::min(first + kKeys, outer.count);
      const int64_t rows = round_up(end - first, kPadding);
      T* k = s_.k + first * s_.q_stride;
      bool finite = pack_as_rows<T>(packed_keys(call_.inputs.k), outer, first,
                                    end, live, call_.dim, T{1}, k);
      pad_rows(k, end - first, rows, s_.q_stride);
      pack_columns(k, s_.q_stride, rows, s_.kt + part * s_.kt_size);
      finite &= pack_as_rows<T>(packed_keys(call_.inputs.v), outer, first, end,
                                live, call_.value_dim, T{1}, s_.v);
      pad_rows(s_.v, end - first, rows, s_.v_stride);
      pack_columns(s_.v, s_.v_stride, rows, s_.vt + part * s_.vt_size);
      keys_finite_[part] = finite;
    }
  }
  // Packed rows across.
  void pack_columns(const T* rows, int64_t stride, int64_t count, T* out) {
    constexpr DType kType = sizeof(T) == 8 ? DType::kFloat64 : DType::kFloat32;
    static constexpr IndexList kAll;
    pack_across<T>({reinterpret_cast<const char*>(rows),
                    stride * static_cast<int64_t>(sizeof(T)), kType},
                   kAll, 0, count, bit_range(0, count), stride, out, s_.memory);
  }
  static void pad_rows(T* rows, int64_t count, int64_t padded, int64_t stride) {
    std::fill_n(rows + count * stride, (padded - count) * stride, T{0});
  }

  // Asks for what follows the queries inner[first .. first + count): the
  // next ones, and as many keys of the block after this one; at the end, the
  // first queries of that.
  void bring_ahead(const SoftmaxBlock& block, const IndexList& inner,
                   int64_t first, int64_t count) {
    const bool queries_follow = first + count < inner.count;
    const SoftmaxBlock* next = next_block_;
    if (next != nullptr && next->outer.list != nullptr) next = nullptr;
    // Under causality the first to see a key stands at its position.
    IndexList queries = inner;
    int64_t at = first + count, head = task_.head;
    if (!queries_follow && next != nullptr) {
      const int64_t query = next->outer[0] + row_.kv_start - row_.q_start;
      const SoftmaxPlan::Reach& reach = plan_.reach();
      queries = {call_.options.is_causal ? query
                 : reach.has_before ? std::max<int64_t>(0, query - reach.before)
                                    : 0,
                 1, 1, nullptr};
      at = 0;
      head = next_head_;
    }
    const bool any_queries = (queries_follow || next != nullptr) &&
                             queries[at] >= 0 && queries[at] < row_.q_len;
    const bool any_keys = next != nullptr && first < next->outer.count;
    if (!any_queries && !any_keys) return ahead_.start(0, 1);
    const int64_t cells = (block.outer.count + kKeys - 1) / kKeys;
    ahead_.start(kCellRows, cells * tiles_of_cell<T>(call_));
    if (any_queries) {
      for (const ConstView4* view : {&call_.inputs.q, &call_.d_out})
        add_rows_ahead(*view, head, row_.q_offset, queries, at);
    }
    if (any_keys) {
      for (const ConstView4* view : {&call_.inputs.k, &call_.inputs.v}) {
        add_rows_ahead(*view, next_head_ / call_.group, row_.kv_offset,
                       next->outer, first);
      }
    }
  }
  void add_rows_ahead(const ConstView4& view, int64_t head, int64_t offset,
                      const IndexList& list, int64_t first) {
    add_ahead(ahead_, view,
              rows_from(rows_at(view, row_.batch, head, offset), call_.dtype,
                        list[first], list.step));
  }

  // The queries inner[first .. first + count) against the whole block.
  void run_queries(const SoftmaxItem& item, const IndexList& inner,
                   int64_t first, int64_t count, T* dk, T* dv) {
    const int64_t keys = item.block->outer.count;
    mask_.start(plan_, item, inner, first, count);
    bool packed = false, finite = true;
    Cell<T> cell;
    for (int64_t part = 0; part * kKeys < keys; ++part) {
      const int64_t begin = part * kKeys, end = std::min(keys, begin + kKeys);
      const TileClass of_part = mask_.classify(begin, end);
      if (of_part == TileClass::kNone) continue;
      cell.visible = nullptr;
      if (of_part == TileClass::kPartial && !find_visible(begin, end, count))
        continue;
      if (of_part == TileClass::kPartial) cell.visible = s_.visible;
      if (!packed) {
        packed = true;
        finite = pack_queries(inner, first, count);
        place_queries(inner, first, count, cell);
      }
      cell.keys = round_up(end - begin, kPadding);
      cell.finite = finite && keys_finite_[part] && terms_.bias_finite();
      if (cell.visible == nullptr &&
          (!cell.finite || cell.keys != end - begin)) {
        see_all(count, end - begin);
        cell.visible = s_.visible;
      }
      cell.k = s_.k + begin * s_.q_stride;
      cell.kt = s_.kt + part * s_.kt_size;
      cell.vt = s_.vt + part * s_.vt_size;
      cell.dk = wants_dk_ ? dk + begin * s_.q_stride : nullptr;
      cell.dv = wants_dv_ ? dv + begin * s_.v_stride : nullptr;
      const CellPlace place{&inner, &item.block->outer, first, begin,
                            count,  end - begin};
      terms_.prepare(place, s_.bias, s_.kept, cell);
      start_cell(cell, ahead_);
      if (task_.d_bias != nullptr)
        terms_.add_d_bias(place, cell, s_.d_bias, task_.d_bias);
      finish_cell(cell, ahead_);
    }
    if (packed && wants_dq_ && cell.dq == s_.dq)
      scatter_queries(inner, first, count);
  }

  // The bits of keys [begin, end) for each query, where they are no intervals
  // from those of queries for each key. Whether there are any.
  bool find_visible(int64_t begin, int64_t end, int64_t count) {
    TileBits queries[kCellRows];
    if (mask_.columns(begin, end, queries)) {
      TileBits all;
      for (int64_t i = 0; i < count; ++i) {
        all = all | queries[i];
        for (int64_t w = 0; w < kCellWords; ++w)
          s_.visible[i * kCellWords + w] = queries[i].word[w];
      }
      std::fill(s_.visible + count * kCellWords,
                s_.visible + round_up(count, 4) * kCellWords, uint64_t{0});
      return all.any();
    }
    uint64_t any = 0;
    uint64_t bits[kCellWords][64];
    for (int64_t w = 0; w < kCellWords; ++w) {
      const int64_t from = begin + w * 64;
      const int64_t n = std::clamp<int64_t>(end - from, 0, 64);
      TileBits rows[64];
      if (n > 0) mask_.rows(from, from + n, rows);
      for (int64_t t = 0; t < 64; ++t) {
        for (int64_t part = 0; part < kCellWords; ++part)
          bits[part][t] = rows[t].word[part];
      }
      for (int64_t part = 0; part < kCellWords; ++part) {
        if (n > 0) transpose_bits(bits[part]);
        const int64_t queries =
            std::clamp<int64_t>(round_up(count, 4) - part * 64, 0, 64);
        for (int64_t i = 0; i < queries; ++i) {
          s_.visible[(part * 64 + i) * kCellWords + w] = bits[part][i];
          any |= bits[part][i];
        }
      }
    }
    return any != 0;
  }
  void see_all(int64_t count, int64_t keys) {
    const TileBits all = bit_range(0, keys);
    for (int64_t i = 0; i < round_up(count, 4); ++i) {
      for (int64_t w = 0; w < kCellWords; ++w)
        s_.visible[i * kCellWords + w] = i < count ? all.word[w] : 0;
    }
  }

  // Packs the queries and what belongs to them; whether all are finite.
  bool pack_queries(const IndexList& inner, int64_t first, int64_t count) {
    const int64_t rows = round_up(count, 4), end = first + count;
    const int64_t token = row_.batch * call_.inputs.q.size[1] + row_.q_offset;
    const auto at = [&](int64_t x) {
      return (token + x) * call_.heads + task_.head;
    };
    const T* log_sum = static_cast<const T*>(call_.saved_log_sum_exp);
    const T* delta = static_cast<const T*>(task_.delta);
    // What does not take part, or sees nothing, has weights of 0.
    const auto live = [&](int64_t x) {
      return queries_.real(x) &&
             log_sum[at(x)] != -std::numeric_limits<T>::infinity();
    };
    T not_finite = 0;
    for (int64_t i = 0; i < rows; ++i) {
      s_.start[i] = T{-1e30f};
      s_.delta[i] = 0;
      if (i >= count || !live(inner[first + i])) continue;
      s_.start[i] = -log_sum[at(inner[first + i])] * static_cast<T>(kLog2E);
      s_.delta[i] = -delta[at(inner[first + i])];
      not_finite += s_.start[i] * 0 + s_.delta[i] * 0;
    }
    bool finite = not_finite == 0;
    finite &=
        pack_as_rows<T>(packed_queries(call_.inputs.q), inner, first, end, live,
                        call_.dim, static_cast<T>(call_.scale * kLog2E), s_.q);
    pad_rows(s_.q, count, rows, s_.q_stride);
    finite &= pack_as_rows<T>(packed_queries(call_.d_out), inner, first, end,
                              live, call_.value_dim, T{1}, s_.d_out);
    pad_rows(s_.d_out, count, rows, s_.v_stride);
    return finite;
  }

  void place_queries(const IndexList& inner, int64_t first, int64_t count,
                     Cell<T>& cell) {
    cell.rows = round_up(count, 4);
    cell.q = s_.q;
    cell.d_out = s_.d_out;
    cell.start = s_.start;
    cell.delta = s_.delta;
    cell.dim = call_.dim;
    cell.value_dim = call_.value_dim;
    cell.q_stride = s_.q_stride;
    cell.v_stride = s_.v_stride;
    cell.p = s_.p;
    cell.ds = s_.ds;
    cell.dq = nullptr;
    if (!wants_dq_) return;
    if (run_step(inner, first, count) == 1) {
      cell.dq = static_cast<T*>(task_.dq) + inner[first] * s_.q_stride;
    } else {
      cell.dq = s_.dq;
      std::fill_n(s_.dq, cell.rows * s_.q_stride, T{0});
    }
  }
  void scatter_queries(const IndexList& inner, int64_t first, int64_t count) {
    const Tag<T> d;
    for (int64_t i = 0; i < count; ++i) {
      const T* from = s_.dq + i * s_.q_stride;
      T* to = static_cast<T*>(task_.dq) + inner[first + i] * s_.q_stride;
      for (int64_t c = 0; c < s_.q_stride; c += kLanes<T>) {
        hn::Store(hn::Add(hn::Load(d, to + c), hn::Load(d, from + c)), d,
                  to + c);
      }
    }
  }

  // Gives the caller dk or dv of the block's own keys.
  void write_keys(const SoftmaxBlock& block, const T* sums, int64_t stride,
                  double scale, const View4& to) {
    const Rows rows = key_rows_of(to);
    const IndexList& outer = block.outer;
    T factor[kWrittenRows];
    std::fill_n(factor, kWrittenRows, static_cast<T>(scale));
    for (int64_t first = 0; first < outer.count; first += kWrittenRows) {
      const int64_t count = std::min(kWrittenRows, outer.count - first);
      uint64_t written = 0, live = 0;
      for (int64_t t = 0; t < count; ++t) {
        const int64_t y = outer[first + t];
        const uint64_t bit = uint64_t{1} << t;
        if (keys_.is_global(y) == block.is_global) written |= bit;
        if (keys_.real(y)) live |= bit;
      }
      for_listed_rows(rows, call_.dtype, outer, first, count,
                      [&](int64_t t, int64_t n, const Rows& at) {
                        const uint64_t bits = bit_range(0, n).word[0];
                        write_rows<T>(call_.dtype, sums + (first + t) * stride,
                                      stride, factor, written >> t & bits,
                                      live >> t, to.size[3], at, call_.stream);
                      });
    }
  }

  static constexpr int64_t kPadding = kLanes<T> < 4 ? 4 : kLanes<T>;

  const SoftmaxBackwardTask& task_;
  const SoftmaxPlan& plan_;
  const SoftmaxCall& call_;
  const AttentionRow& row_;
  const SideView queries_, keys_;
  Carver<T> carver_;
  BackwardScratch<T> s_;
  BackwardTerms<T> terms_;
  const bool wants_dq_, wants_dk_, wants_dv_;
  const SoftmaxBlock* next_block_ = nullptr;
  int64_t next_head_ = 0;
  bool keys_finite_[kMostBackwardKeys / kKeys] = {};
  TileMask mask_;
  Ahead ahead_;
};

template <typename T>
size_t backward_q_row_bytes(const SoftmaxCall& call) {
  return static_cast<size_t>(row_length<T>(call.dim)) * sizeof(T);
}
template <typename T>
size_t backward_v_row_bytes(const SoftmaxCall& call) {
  return static_cast<size_t>(row_length<T>(call.value_dim)) * sizeof(T);
}
template <typename T>
size_t backward_scratch_bytes(const SoftmaxCall& call, int64_t block_keys) {
  Carver<T> counter(nullptr);
  const BackwardScratch<T> counted(call, block_keys, counter);
  return counter.bytes();
}

template <typename T, typename In>
void backward_deltas_as(const SoftmaxCall& call, int64_t begin, int64_t end,
                        T* delta) {
  const int64_t q_len = call.inputs.q.size[1];
  for (int64_t token = begin; token < end; ++token) {
    for (int64_t head = 0; head < call.heads; ++head) {
      const auto row = [&](const ConstView4& view) {
        return static_cast<const In*>(view.data) +
               token / q_len * view.stride[0] + token % q_len * view.stride[1] +
               head * view.stride[2];
      };
      delta[token * call.heads + head] =
          dot_rows<T>(row(call.d_out), row(call.saved_out), call.value_dim);
    }
  }
}
template <typename T>
void backward_deltas(const SoftmaxCall& call, int64_t begin, int64_t end,
                     void* memory) {
  T* delta = static_cast<T*>(memory);
  if constexpr (sizeof(T) == 8) {
    backward_deltas_as<T, double>(call, begin, end, delta);
  } else if (call.dtype == DType::kBFloat16) {
    backward_deltas_as<T, BFloat16>(call, begin, end, delta);
  } else if (call.dtype == DType::kFloat16) {
    backward_deltas_as<T, Float16>(call, begin, end, delta);
  } else {
    backward_deltas_as<T, float>(call, begin, end, delta);
  }
}

template <typename T>
void backward_write_dq(const SoftmaxPlan& plan, int64_t row_index, int64_t head,
                       int64_t begin, int64_t end, void* const* sums,
                       int64_t count) {
  const Tag<T> d;
  const SoftmaxCall& call = plan.call();
  const AttentionRow& row = plan.row(row_index);
  const SideView queries = plan.queries(row_index);
  const int64_t stride = row_length<T>(call.dim);
  T* sum = static_cast<T*>(sums[0]);
  for (int64_t s = 1; s < count; ++s) {
    const T* from = static_cast<const T*>(sums[s]);
    for (int64_t x = begin * stride; x < end * stride; x += kLanes<T>)
      hn::Store(hn::Add(hn::Load(d, sum + x), hn::Load(d, from + x)), d,
                sum + x);
  }
  T factor[kWrittenRows];
  std::fill_n(factor, kWrittenRows, static_cast<T>(call.scale));
  const Rows rows = rows_at(call.dq, row.batch, head, row.q_offset);
  for (int64_t first = begin; first < end; first += kWrittenRows) {
    const int64_t n = std::min(kWrittenRows, end - first);
    uint64_t live = 0;
    for (int64_t i = 0; i < n; ++i)
      if (queries.real(first + i)) live |= uint64_t{1} << i;
    write_rows<T>(call.dtype, sum + first * stride, stride, factor,
                  bit_range(0, n).word[0], live, call.dim,
                  {rows.data, rows.first + first, rows.stride}, call.stream);
  }
  hwy::FlushStream();
}

template <typename T>
void backward_run(const SoftmaxBackwardTask& task) {
  BackwardBlocks<T>(task).run();
}

template <typename T>
constexpr SoftmaxBackwardKernels softmax_backward_kernels() {
  return {&backward_q_row_bytes<T>,   &backward_v_row_bytes<T>,
          &backward_scratch_bytes<T>, &backward_deltas<T>,
          &backward_run<T>,           &backward_write_dq<T>};
}

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_BACKWARD_INL_H_
