// How Performer walks a row and kv head: blocks of positions whose features are
// formed from the logarithms and the maxima of the keys seen so far, and handed
// to the passes of the linear engine as queries and keys that are features
// already.
//
// With m_f the maximum of log feature f over the keys seen, keys are held as
// exp(log k_f - m_f) and a query as exp(log q_f + m_f - c), where c = max_f
// (log q_f + m_f) belongs to the row and cancels. Both are at most 1. In a
// causal block m_f covers keys that its first queries do not see, so that what
// those see may be as small as exp(-rise): a block is cut into pieces before a
// key that would raise some maximum by more than kRise, and the sums of a row
// stay above exp(-kRise). What lies below exp(kNothing) (performer-inl.h) is
// then left out unseen.
#ifndef COSFORMER_SRC_KERNELS_SIMD_PERFORMER_WALK_H_
#define COSFORMER_SRC_KERNELS_SIMD_PERFORMER_WALK_H_

#include <cfloat>
#include <cmath>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "kernels/simd/pass.h"
#include "kernels/simd/performer.h"
#include "kernels/simd/schedule.h"

namespace cosformer::simd {

inline constexpr double kMinusInfinity =
    -std::numeric_limits<double>::infinity();

template <typename T>
inline constexpr double kRise = std::is_same_v<T, double> ? 250 : 24;

template <typename T>
const PerformerKernels<T>& performer_kernels(Isa isa) {
  if constexpr (std::is_same_v<T, double>) {
    return performer_f64(isa);
  } else {
    return performer_f32(isa);
  }
}

// What all units of a call share. Read only.
template <typename T>
struct PerformerCall {
  // needs_all: keys that no query sees matter too (for the state).
  PerformerCall(const PerformerAttentionOptions& options,
                const PerformerAttentionInputs& in, bool needs_all, Isa isa_)
      : inputs(in),
        isa(isa_),
        kernels(performer_kernels<T>(isa_)),
        whole(linear_options(options), linear_inputs(in)),
        features(in.num_features),
        stride(padded(in.num_features)),
        log_features(std::log(static_cast<double>(in.num_features))),
        half(size_of(in.call.q.dtype) < 4) {
    // Any address: units_of only asks whether there is one.
    if (needs_all) whole.d_state_out.kv_state = this;
    units = units_of(whole);
  }

  Status pack_projection(bool for_gradients) {
    const int64_t dim = padded(whole.dim);
    const size_t wide = static_cast<size_t>(whole.dim * stride) * 8;
    const size_t narrow =
        for_gradients ? static_cast<size_t>(stride * dim) * sizeof(T) : 0;
    projection_memory = AlignedBuffer(wide + narrow + 64);
    if (projection_memory.data() == nullptr)
      return out_of_memory(wide + narrow);
    double* across = projection_memory.template as<double>();
    T* along =
        for_gradients
            ? reinterpret_cast<T*>(across + (whole.dim * stride + 7) / 8 * 8)
            : nullptr;
    w = {features, whole.dim, whole.value_dim, across, along};
    kernels.pack_projection(static_cast<const T*>(inputs.projection), w);
    return Status();
  }

  const T* log_scale_in(const Unit& unit) const {
    const T* at = static_cast<const T*>(inputs.state.log_scale);
    return inputs.state.sums.kv_state == nullptr ? nullptr
                                                 : at + state_at(unit);
  }
  int64_t state_at(const Unit& unit) const {
    return (unit.row_index * whole.kv_heads + unit.head) * features;
  }

  const PerformerAttentionInputs& inputs;
  const Isa isa;
  const PerformerKernels<T>& kernels;
  LinearCall whole;  // the call as the engine sees it but for the features
  const int64_t features, stride;
  const double log_features;
  const bool half;  // inputs are narrower than T
  std::vector<Unit> units;
  PerformerProjection<T> w{};
  AlignedBuffer projection_memory;

 private:
  static LinearAttentionOptions linear_options(
      const PerformerAttentionOptions& options) {
    LinearAttentionOptions linear;
    linear.feature_map = FeatureMap::kIdentity;
    linear.is_causal = options.is_causal;
    linear.eps = std::is_same_v<T, double> ? DBL_MIN : FLT_MIN;
    return linear;
  }
  static LinearAttentionInputs linear_inputs(
      const PerformerAttentionInputs& in) {
    LinearAttentionInputs linear = in.call;
    linear.state = in.state.sums;
    return linear;
  }
};

// A thread's memory: arrays of a block, rows by position - begin. Those of
// queries are [group][kPerformerBlock][...].
template <typename T>
class PerformerScratch {
 public:
  // blocks: how many of a unit's blocks keep the maxima before them.
  PerformerScratch(const PerformerCall<T>& call, const Pass& first,
                   const Pass* second, int64_t blocks, void* memory)
      : memory_(static_cast<char*>(memory)),
        piece(call.whole.options, feature_inputs(call)) {
    constexpr int64_t n = kPerformerBlock;
    const int64_t m = call.stride, dim = padded(call.whole.dim),
                  value_dim = padded(call.whole.value_dim),
                  group = call.whole.group;
    const bool backward = second != nullptr;
    logs = take<double>(n * m);
    wide = take<double>(n * dim);
    half_norm = take<double>(n);
    row = take<double>(n);
    column = take<double>(m);
    x = take<T>(n * dim);
    keys = take<T>(n * m);
    queries = take<T>(group * n * m);
    maxima = take<T>((n + 1) * m);
    base = take<T>(m);
    factor = take<T>(m);
    denominator = take<T>(group * n);
    top = take<double>(group * n);
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
      if (memory_ != nullptr) passes[i]->init_scratch(piece, pass_scratch[i]);
    }
  }
  PerformerScratch(const PerformerScratch&) = delete;
  PerformerScratch& operator=(const PerformerScratch&) = delete;

  size_t bytes() const { return used_; }

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
    char* at = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += (static_cast<size_t>(count) * sizeof(E) + 63) / 64 * 64;
    return reinterpret_cast<E*>(at);
  }

  char* memory_;
  size_t used_ = 0;

 public:
  LinearCall piece;  // of a block, its q and k the features
  double *logs, *wide, *half_norm, *row, *column, *top;
  T *x, *keys, *queries, *maxima, *base, *factor, *denominator;
  T *v = nullptr, *out = nullptr;
  T *d_keys = nullptr, *d_queries = nullptr, *sums = nullptr, *dx = nullptr;
  T *d_out = nullptr, *dv = nullptr, *before = nullptr;
  void *pass_scratch[2] = {}, *state[2] = {};
};

// One unit's walk: what its forward and its backward share.
template <typename T>
class PerformerWalk {
 public:
  static constexpr int64_t kBlock = kPerformerBlock;

  PerformerWalk(const PerformerCall<T>& call, const Unit& unit,
                PerformerScratch<T>& scratch)
      : call_(call),
        k_(call.kernels),
        unit_(unit),
        s_(scratch),
        inside_(unit),
        w_(call.w),
        dtype_(call.inputs.call.q.dtype) {
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
  }

 protected:
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
    begin_ = begin;
    n_ = end - begin;
    inside_.row.q_offset = inside_.row.q_start - begin;
    inside_.row.kv_offset = inside_.row.kv_start - begin;
    LinearCall& piece = s_.piece;
    piece.inputs.k = rows_of(s_.keys, call_.features, call_.stride);
    piece.inputs.q = heads_of(s_.queries, call_.features, call_.stride);
    query_bits_ = query_slots(call_.whole, unit_, begin, n_);
    key_bits_ = seen_key_slots(call_.whole, unit_, begin, n_);
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

  // The first row of a block in the caller's memory, and its first head.
  int64_t first_key() const {
    return unit_.row.kv_offset + begin_ - unit_.row.kv_start;
  }
  int64_t first_query() const {
    return unit_.row.q_offset + begin_ - unit_.row.q_start;
  }
  static const char* head_of(const ConstView4& view, int64_t batch,
                             int64_t head) {
    return static_cast<const char*>(view.data) +
           (batch * view.stride[0] + head * view.stride[2]) *
               static_cast<int64_t>(size_of(view.dtype));
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
  int64_t first_head() const { return unit_.head * call_.whole.group; }

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

  // s_.logs and s_.half_norm of the block's keys or of a head's queries; s_.x
  // holds the rows.
  void project_keys() {
    const ConstView4& k = call_.inputs.call.k;
    k_.pack(dtype_, head_of(k, unit_.row.batch, unit_.head), first_key(),
            k.stride[1], key_bits_.real, n_, call_.whole.dim, s_.x);
    k_.project(w_, s_.x, n_, s_.wide, s_.logs, s_.half_norm);
  }
  void pack_queries(int64_t g) {
    const ConstView4& q = call_.inputs.call.q;
    k_.pack(dtype_, head_of(q, unit_.row.batch, first_head() + g),
            first_query(), q.stride[1], query_bits_.real, n_, call_.whole.dim,
            s_.x);
  }
  void project_queries(int64_t g) {
    pack_queries(g);
    k_.project(w_, s_.x, n_, s_.wide, s_.logs, s_.half_norm);
  }

  // Cuts the block into pieces whose maxima (rows of s_.maxima; row 0: what
  // they were before, row i + 1: those of piece i) rise by no more than kRise
  // while queries look. Given: s_.logs of the keys, row 0.
  void cut() {
    const double bound = call_.whole.options.is_causal && query_bits_.real != 0
                             ? kRise<T>
                             : std::numeric_limits<double>::infinity();
    pieces_ = 0;
    int64_t from = 0;
    T* now = start_piece(0);
    // What the piece's first query sees at least; none while it sees nothing.
    bool has_base = seen_before(begin_);
    std::copy_n(now, call_.features, s_.base);
    for (int64_t t = 0; t < n_; ++t) {
      if ((key_bits_.real >> t & 1) == 0) continue;
      const double* logs = s_.logs + t * call_.stride;
      const double half_norm = s_.half_norm[t];
      if (has_base && t > from &&
          k_.rises(logs, half_norm, s_.base, bound, call_.features)) {
        ends_[pieces_++] = begin_ + t;
        now = start_piece(pieces_);
        from = t;
      }
      k_.raise(logs, half_norm, now, call_.features);
      if (t == from || !has_base) {
        std::copy_n(now, call_.features, s_.base);
        has_base = true;
      }
    }
    ends_[pieces_++] = begin_ + n_;
  }

  const T* maxima_of(int64_t piece) const {
    return s_.maxima + (piece + 1) * call_.stride;
  }
  int64_t begin_of(int64_t piece) const {
    return piece == 0 ? begin_ : ends_[piece - 1];
  }

  // s_.keys from s_.logs.
  void form_keys() {
    for (int64_t p = 0; p < pieces_; ++p) {
      set_column(maxima_of(p), true);
      const int64_t r = begin_of(p) - begin_;
      k_.exponentials(s_.logs + r * call_.stride, ends_[p] - begin_of(p),
                      call_.features, s_.half_norm + r, s_.column,
                      s_.keys + r * call_.stride);
    }
  }

  // The logarithms' shift of each feature: m_f for queries, -m_f for keys.
  void set_column(const T* maxima, bool negative) {
    for (int64_t f = 0; f < call_.features; ++f) {
      const double m = static_cast<double>(maxima[f]);
      s_.column[f] = !negative ? m : m == kMinusInfinity ? 0 : -m;
    }
    std::fill(s_.column + call_.features, s_.column + call_.stride, 0.0);
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

  // Whether a key stands before a position.
  bool seen_before(int64_t position) const {
    return unit_.row.state_position > unit_.row.state_start ||
           unit_.visible_from < position;
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

  const PerformerCall<T>& call_;
  const PerformerKernels<T>& k_;
  const Unit& unit_;
  PerformerScratch<T>& s_;
  Unit inside_;  // the unit as the engine sees it in a block
  const PerformerProjection<T>& w_;
  const DType dtype_;
  int64_t begin_ = 0, n_ = 0;
  Slots query_bits_, key_bits_;
  int64_t pieces_ = 0;
  int64_t ends_[kPerformerBlock + 1] = {};

 private:
  T* start_piece(int64_t piece) {
    T* now = s_.maxima + (piece + 1) * call_.stride;
    std::copy_n(now - call_.stride, call_.features, now);
    return now;
  }
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
