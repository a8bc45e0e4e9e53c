// How Performer's backward walks a row and kv head: blocks of positions whose
// features are formed from the logarithms and the maxima of the keys seen so
// far (performer_call.h), and handed to the passes of the linear engine as
// queries and keys that are features already.
#ifndef COSFORMER_SRC_KERNELS_SIMD_PERFORMER_WALK_H_
#define COSFORMER_SRC_KERNELS_SIMD_PERFORMER_WALK_H_

#include <memory>
#include <vector>

#include "kernels/simd/pass.h"
#include "kernels/simd/performer_call.h"

namespace cosformer::simd {

// A thread's memory: arrays of a block, rows by position - begin. Those of
// queries are [group][kPerformerBlock][...].
template <typename T>
class PerformerScratch {
 public:
  // blocks: how many of a unit's blocks keep the maxima before them.
  PerformerScratch(const PerformerCall<T>& call, const Pass& first,
                   const Pass* second, int64_t blocks, void* memory)
      : carver_(memory), piece(call.whole.options, feature_inputs(call)) {
    constexpr int64_t n = kPerformerBlock;
    const int64_t m = call.stride, dim = padded(call.whole.dim),
                  value_dim = padded(call.whole.value_dim),
                  group = call.whole.group;
    const bool backward = second != nullptr;
    work = carve_performer_work<T>(call.features, call.whole.dim, carver_);
    key_logs = carve_performer_logs<T>(call.all.rows(), carver_);
    query_logs = carve_performer_logs<T>(call.all.rows(), carver_);
    row = take<double>(n);
    x = take<T>(n * dim);
    // Features are written by fours of rows.
    keys = take<T>(kPerformerRows * m);
    queries = take<T>((group * n + 4) * m);
    maxima = take<T>((n + 1) * m);
    factor = take<T>(m);
    denominator = take<T>(group * n);
    if (call.half) {
      v = take<T>(n * value_dim);
      out = take<T>(group * n * value_dim);
    }
    if (backward) {
      d_keys = take<T>(n * m);
      d_queries = take<T>(group * n * m);
      sums = take<T>(n);
      dx = take<T>(n * dim);
      if (call.half) {
        d_out = take<T>(group * n * value_dim);
        dv = take<T>(n * value_dim);
      }
      before = take<T>(blocks * m);
    }
    const Pass* passes[2] = {&first, second};
    for (int i = 0; i < 2; ++i) {
      if (passes[i] == nullptr) continue;
      pass_scratch[i] =
          take<char>(static_cast<int64_t>(passes[i]->scratch_bytes(piece)));
      state[i] =
          take<char>(static_cast<int64_t>(passes[i]->state_bytes(piece)));
      if (memory != nullptr) passes[i]->init_scratch(piece, pass_scratch[i]);
    }
  }
  PerformerScratch(const PerformerScratch&) = delete;
  PerformerScratch& operator=(const PerformerScratch&) = delete;

  size_t bytes() const { return carver_.bytes(); }

 private:
  // Sizes only: the engine's scratch asks for them.
  static LinearAttentionInputs feature_inputs(const PerformerCall<T>& call) {
    LinearAttentionInputs in;
    in.q.dtype = in.k.dtype = in.v.dtype =
        std::is_same_v<T, double> ? DType::kFloat64 : DType::kFloat32;
    in.q.size = {1, kPerformerBlock, call.whole.group, call.features};
    in.k.size = {1, kPerformerBlock, 1, call.features};
    in.v.size = {1, kPerformerBlock, 1, call.whole.value_dim};
    return in;
  }

  template <typename E>
  E* take(int64_t count) {
    return carver_.take<E>(count);
  }

  ArrayCarver carver_;

 public:
  LinearCall piece;  // of a block, its q and k the features
  PerformerWork<T> work;
  PerformerLogs<T> key_logs, query_logs;
  double* row;
  T *x, *keys, *queries, *maxima, *factor, *denominator;
  T *v = nullptr, *out = nullptr;
  T *d_keys = nullptr, *d_queries = nullptr, *sums = nullptr, *dx = nullptr;
  T *d_out = nullptr, *dv = nullptr, *before = nullptr;
  void *pass_scratch[2] = {}, *state[2] = {};
};

// One unit's walk: what its forward and its backward share.
template <typename T>
class PerformerWalk : public PerformerPlace<T> {
  using Place = PerformerPlace<T>;

 public:
  using Place::kBlock;

  PerformerWalk(const PerformerCall<T>& call, const Unit& unit,
                PerformerScratch<T>& scratch)
      : Place(call, unit),
        k_(call.kernels),
        b_(performer_block<T>(call.isa)),
        s_(scratch),
        inside_(unit),
        w_(call.w) {
    LinearCall& piece = s_.piece;
    const LinearAttentionInputs& in = call.inputs.call;
    inside_.row.batch = 0;
    inside_.row_index = unit.row_index * call.whole.kv_heads + unit.head;
    inside_.head = 0;
    piece.inputs.key_mask =
        in.key_mask == nullptr
            ? nullptr
            : in.key_mask + unit.row.batch * in.key_mask_stride;
    piece.inputs.query_mask =
        in.query_mask == nullptr
            ? nullptr
            : in.query_mask + unit.row.batch * in.query_mask_stride;
    piece.inputs.state = call.inputs.state.sums;
    queries_ahead_.resize(
        static_cast<size_t>(call.whole.group * kPerformerAhead));
  }

 protected:
  using Place::begin_, Place::call_, Place::dtype_, Place::key_bits_, Place::n_,
      Place::query_bits_, Place::unit_;
  using Place::first_head, Place::first_key, Place::first_query, Place::head_of,
      Place::seen_before;

  static constexpr T kUnseen = static_cast<T>(kMinusInfinity);

  // Blocks of the positions of a span, or of a causal walk.
  template <typename Visit>
  static void for_blocks(const Span& span, const Visit& visit) {
    for (int64_t at = span.begin; at < span.end; at += kBlock)
      visit(at, std::min(at + kBlock, span.end));
  }
  template <typename Visit>
  static void for_blocks_back(const Span& span, const Visit& visit) {
    if (span.size() == 0) return;
    int64_t at = span.begin + (span.size() - 1) / kBlock * kBlock;
    for (; at >= span.begin; at -= kBlock)
      visit(at, std::min(at + kBlock, span.end));
  }

  // The views of a block: row 0 is position `begin`.
  void enter(int64_t begin, int64_t end) {
    this->stand_at(begin, end);
    inside_.row.q_offset = inside_.row.q_start - begin;
    inside_.row.kv_offset = inside_.row.kv_start - begin;
    LinearCall& piece = s_.piece;
    piece.inputs.k = rows_of(s_.keys, call_.features, call_.stride);
    piece.inputs.q = heads_of(s_.queries, call_.features, call_.stride);
  }

  ConstView4 rows_of(const T* data, int64_t columns, int64_t stride) const {
    return {data, s_.piece.dtype, {1, n_, 1, columns}, {0, stride, 0, 1}};
  }
  ConstView4 heads_of(const T* data, int64_t columns, int64_t stride) const {
    return {data,
            s_.piece.dtype,
            {1, n_, call_.whole.group, columns},
            {0, stride, kBlock * stride, 1}};
  }
  static View4 writable(const ConstView4& view) {
    return {const_cast<void*>(view.data), view.dtype, view.size, view.stride};
  }

  // The caller's memory as the engine's view of the block. Rows outside of the
  // row's range are never touched.
  ConstView4 view_at(const ConstView4& view, int64_t head,
                     int64_t first) const {
    ConstView4 at = view;
    const int64_t bytes =
        first * view.stride[1] * static_cast<int64_t>(size_of(view.dtype));
    at.data = reinterpret_cast<const void*>(
        reinterpret_cast<uintptr_t>(head_of(view, unit_.row.batch, head)) +
        static_cast<uintptr_t>(bytes));
    at.stride[0] = 0;
    return at;
  }

  // A tensor that belongs to the keys of the block, widened where it is narrow.
  ConstView4 key_rows_of(const ConstView4& view, T* memory) {
    if (!call_.half) return view_at(view, unit_.head, first_key());
    const int64_t columns = view.size[3];
    k_.pack(dtype_, head_of(view, unit_.row.batch, unit_.head), first_key(),
            view.stride[1], key_bits_.real, n_, columns, memory);
    return rows_of(memory, columns, padded(columns));
  }
  ConstView4 query_rows_of(const ConstView4& view, T* memory) {
    if (!call_.half) return view_at(view, first_head(), first_query());
    const int64_t columns = view.size[3], stride = padded(columns);
    for (int64_t g = 0; g < call_.whole.group; ++g) {
      k_.pack(dtype_, head_of(view, unit_.row.batch, first_head() + g),
              first_query(), view.stride[1], query_bits_.real, n_, columns,
              memory + g * kBlock * stride);
    }
    return heads_of(memory, columns, stride);
  }
  // Rows of T as the caller wants them.
  void write_keys(const T* from, const View4& to) const {
    k_.write(dtype_, from, key_bits_.present, key_bits_.real, to.size[3],
             const_cast<char*>(head_of(to, unit_.row.batch, unit_.head)),
             first_key(), to.stride[1]);
  }
  void write_queries(const T* from, const View4& to, int64_t g) const {
    k_.write(dtype_, from, query_bits_.present, query_bits_.real, to.size[3],
             const_cast<char*>(head_of(to, unit_.row.batch, first_head() + g)),
             first_query(), to.stride[1]);
  }

  void project_keys() {
    const ConstView4& k = call_.inputs.call.k;
    b_.project(call_.all, dtype_, head_of(k, unit_.row.batch, unit_.head),
               first_key(), k.stride[1], key_bits_.real, n_, true, kNarrow,
               keys_ahead_, s_.work, s_.key_logs);
  }
  // As the forward did, where it can be known.
  void project_queries(int64_t g) {
    const ConstView4& q = call_.inputs.call.q;
    const bool wide = (key_bits_.real != 0 && s_.key_logs.wide) ||
                      are_large(s_.maxima, call_.features);
    b_.project(call_.all, dtype_, head_of(q, unit_.row.batch, first_head() + g),
               first_query(), q.stride[1], query_bits_.real, n_, false,
               wide ? -1 : kNarrow, queries_ahead_.data() + g * kPerformerAhead,
               s_.work, s_.query_logs);
  }
  void pack_queries(int64_t g) {
    const ConstView4& q = call_.inputs.call.q;
    k_.pack(dtype_, head_of(q, unit_.row.batch, first_head() + g),
            first_query(), q.stride[1], query_bits_.real, n_, call_.whole.dim,
            s_.x);
  }

  // Cuts the block into pieces whose maxima (rows of s_.maxima; row 0: what
  // they were before, row i + 1: those of piece i) rise by no more than kRise
  // while queries look. Given: the keys' logarithms, row 0.
  void cut() {
    const double bound = call_.whole.options.is_causal && query_bits_.real != 0
                             ? kRise<T>
                             : std::numeric_limits<double>::infinity();
    pieces_ = 0;
    for (int64_t from = 0; from < n_;) {
      T* now = s_.maxima + (pieces_ + 1) * call_.stride;
      std::copy_n(now - call_.stride, call_.features, now);
      from = b_.raise(call_.all, s_.key_logs, key_bits_.real, from, n_, bound,
                      seen_before(begin_ + from), s_.work, now);
      ends_[pieces_++] = begin_ + from;
    }
  }

  const T* maxima_of(int64_t piece) const {
    return s_.maxima + (piece + 1) * call_.stride;
  }
  int64_t begin_of(int64_t piece) const {
    return piece == 0 ? begin_ : ends_[piece - 1];
  }

  // s_.keys from their logarithms.
  void form_keys() {
    for (int64_t p = 0; p < pieces_; ++p) {
      const int64_t r = begin_of(p) - begin_;
      b_.form_rows(call_.all, s_.key_logs, r, ends_[p] - begin_of(p),
                   maxima_of(p), nullptr, s_.work, s_.keys + r * call_.stride,
                   call_.stride);
    }
  }

  // s_.factor = exp(from - to); whether any is not 1.
  bool set_factor(const T* from, const T* to) {
    bool any = false;
    for (int64_t f = 0; f < call_.features; ++f) {
      s_.factor[f] = T{1};
      if (from[f] == to[f]) continue;
      any = true;
      s_.factor[f] = static_cast<T>(
          std::exp(static_cast<double>(from[f]) - static_cast<double>(to[f])));
    }
    return any;
  }

  // Row 0 of the maxima for a unit's first block.
  void start_maxima(T* maxima) const {
    const T* given = call_.log_scale_in(unit_);
    if (given != nullptr) {
      std::copy_n(given, call_.features, maxima);
    } else {
      std::fill_n(maxima, call_.features, kUnseen);
    }
  }
  // Row 0 for the block that follows.
  void keep_maxima() {
    std::copy_n(maxima_of(pieces_ - 1), call_.features, s_.maxima);
  }

  // While a block is projected, so many rows of the caller's tensors from
  // position `begin` on come into the cache.
  void look_ahead(int64_t begin, int64_t rows, const ConstView4& out,
                  const ConstView4& d_out) {
    const auto set = [&](PerformerAhead& to, const ConstView4& view,
                         int64_t head, int64_t first) {
      const int64_t size = static_cast<int64_t>(size_of(view.dtype));
      to = {};
      if (view.data == nullptr || rows == 0) return;
      to = {view_at(view, head, first).data, view.stride[1] * size,
            view.size[3] * size, rows};
    };
    const LinearAttentionInputs& in = call_.inputs.call;
    set(keys_ahead_[0], in.k, unit_.head, this->key_at(begin));
    set(keys_ahead_[1], in.v, unit_.head, this->key_at(begin));
    for (int64_t g = 0; g < call_.whole.group; ++g) {
      PerformerAhead* to = queries_ahead_.data() + g * kPerformerAhead;
      const int64_t head = first_head() + g, first = this->query_at(begin);
      set(to[0], in.q, head, first);
      set(to[1], d_out, head, first);
      set(to[2], out, head, first);
    }
  }

  const PerformerKernels<T>& k_;
  const PerformerBlockKernels<T>& b_;
  PerformerScratch<T>& s_;
  Unit inside_;  // the unit as the engine sees it in a block
  const PerformerProjection<T>& w_;
  int64_t pieces_ = 0;
  int64_t ends_[kPerformerBlock + 1] = {};

 private:
  PerformerAhead keys_ahead_[kPerformerAhead];
  std::vector<PerformerAhead> queries_ahead_;  // as many of each head
};

// Calls run(unit, its index, scratch) for every unit of a call: a task each, so
// that no result depends on the number of threads.
template <typename T, typename Run>
Status run_units(const PerformerCall<T>& call, const Pass& first,
                 const Pass* second, int64_t blocks, Executor& executor,
                 const Run& run) {
  const auto threads = static_cast<size_t>(executor.num_threads());
  const size_t bytes =
      PerformerScratch<T>(call, first, second, blocks, nullptr).bytes();
  const Pieces memory(executor.num_threads(), bytes);
  if (memory.failed()) return out_of_memory(threads * bytes);
  std::vector<std::unique_ptr<PerformerScratch<T>>> scratch(threads);
  executor.run(static_cast<int64_t>(call.units.size()),
               [&](int64_t u, int thread) {
                 auto& mine = scratch[static_cast<size_t>(thread)];
                 if (mine == nullptr) {
                   mine = std::make_unique<PerformerScratch<T>>(
                       call, first, second, blocks, memory[thread]);
                 }
                 run(call.units[static_cast<size_t>(u)], u, *mine);
               });
  return Status();
}

}  // namespace cosformer::simd

#endif  // COSFORMER_SRC_KERNELS_SIMD_PERFORMER_WALK_H_
