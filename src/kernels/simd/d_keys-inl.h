// The gradients of keys and values: a walk from the end, with a state T of the
// queries and output gradients that come later.
//
//   W_ji = (k_j . q_i)(1 + ratio_i ratio_j)                  i >= j, this chunk
//   A_ji = (v_j . main_i g_i + main_i r_i)(1 + ratio_i ratio_j)
//   dv_j = main_j (k_j T_main + ratio_j k_j T_other + sum_i W_ji main_i g_i)
//   dk_j = phi'(k_j) main_j (T_main v_j + ratio_j T_other v_j
//            + u_main + ratio_j u_other + sum_i A_ji q_i)
//   T_main += sum_i q_i (main_i g_i)^T,  u_main += sum_i main_i r_i q_i,  ...
//
// Floor: 12 d (d + 1) operations a token and head with the cosine (8 a row of T
// for each of dv, dk and T), and about (chunk + 4) / (3 d) of that inside the
// chunk. dk reads T along its rows: the rows of T and of v are multiplied as
// they lie, a vector of partial sums an element, and the lanes are added at the
// end (DotTile); a second, transposed T would cost another update. Measured
// reasons for the rest of the shape, at head_dim 64: rows packed between the
// tiles of dk, 5% of the time (in the update they would wait for its stores);
// gradients written past the caches, 8%; packed rows side by side and panels of
// T set apart, 5% with AVX2 (they would share a few sets of a first-level cache
// of 32 KB). What bounds it: packing, still 6%, and rows from memory, 10%, of
// which huge pages under the tensors would take off a third. In float and with
// 16 lanes another walk is faster (d_keys_lanes-inl.h); this one takes rotary
// positions there.
#if defined(COSFORMER_SRC_KERNELS_SIMD_D_KEYS_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_D_KEYS_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_D_KEYS_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_D_KEYS_INL_H_
#endif

#include "kernels/simd/backward-inl.h"
#include "kernels/simd/d_keys_lanes-inl.h"
#include "kernels/simd/d_keys_scratch-inl.h"
#include "kernels/simd/gather-inl.h"
#include "kernels/simd/panel-inl.h"
#include "kernels/simd/query_notes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

// Rows of a tile of dk: with 4 columns, as many sums as the registers hold.
#if HWY_TARGET == HWY_AVX2
inline constexpr int kDkRows = 3;
#else
inline constexpr int kDkRows = kDotRows;
#endif
// Calls tile(rows, first row) for the tiles of `rows` rows, a multiple of 4.
template <class F>
HWY_INLINE void for_dot_rows(int64_t rows, F&& tile) {
  int64_t r = 0;
  if constexpr (kDkRows == 3) {
    for (; rows - r >= 3 && rows - r != 4; r += 3)
      tile(std::integral_constant<int, 3>(), r);
    for (; r < rows; r += 2) tile(std::integral_constant<int, 2>(), r);
  } else {
    for (; r < rows; r += kDkRows)
      tile(std::integral_constant<int, kDkRows>(), r);
  }
}

template <typename T>
class DKeys {
 public:
  DKeys(const LinearCall& call, const Unit& unit, const void* state,
        void* scratch)
      : call_(call),
        unit_(unit),
        s_(*static_cast<DKeysScratch<T>*>(scratch)),
        shape_(s_.shape),
        state_(shape_, state) {}

  void add_queries(int64_t begin, int64_t end) {
    walk({begin, end, shape_.long_chunk, kQueries}, s_.long_angles, {},
         [&](const KeyRows<T>& keys, const QueryRows<T>& queries, int64_t)
             HWY_ATTR {
               if (queries.slots.real != 0) update(keys.chunk, queries);
             });
  }

  void read(int64_t begin, int64_t end) {
    walk({begin, end, shape_.long_chunk, kKeys}, s_.long_angles, {},
         [&](const KeyRows<T>& keys, const QueryRows<T>& queries, int64_t)
             HWY_ATTR { answer(keys, queries, true, false, true, true); });
  }

  void attend(int64_t begin, int64_t end, const Next& next) {
    const bool given = call_.has_d_state_out();
    const bool alone =
        !given && !call_.wants_d_state() && is_alone(call_, unit_, begin, end);
    walk({begin, end, alone ? end - begin : shape_.chunk, kKeys | kQueries,
          alone},
         s_.short_angles, next,
         [&](const KeyRows<T>& keys, const QueryRows<T>& queries, int64_t g)
             HWY_ATTR {
               const Chunk<T>& chunk = keys.chunk;
               const bool has_later =
                   given || chunk.position + chunk.size < unit_.q_end();
               const bool keys_before =
                   call_.wants_d_state() || chunk.position > unit_.row.kv_start;
               const bool asked = queries.slots.real != 0;
               answer(keys, queries, has_later, asked, g == 0,
                      g + 1 == call_.group);
               if (asked && keys_before) update(chunk, queries);
             });
  }

 private:
  static constexpr int kKeys = 1, kQueries = 2;
  struct Stretch {
    int64_t begin, end, chunk;
    int what;
    bool alone = false;  // one chunk, whose angles are its own
  };

  // Calls take(keys, queries, g) for the chunks of [begin, end), last first,
  // and each head g of the group; what is taken next is packed meanwhile. The
  // rotary angles are a chunk's own: there, packing waits.
  template <class Take>
  void walk(const Stretch& span, Angles<T>& angles, const Next& next,
            const Take& take) {
    if (span.begin >= span.end) return;
    const bool has_keys = (span.what & kKeys) != 0;
    const bool has_queries = (span.what & kQueries) != 0;
    const int64_t group = has_queries ? call_.group : 1;
    const int64_t key_tiles =
        has_keys ? count_tiles<T>(span.chunk, shape_.v_stride) : 0;
    const int64_t update_tiles =
        has_queries && !span.alone
            ? call_.parts * count_tiles<T>(shape_.rows, shape_.v_stride)
            : 0;
    s_.lay_out(call_, round_up(span.chunk, 4));
    KeyRows<T>*keys = &s_.keys[0], *next_keys = &s_.keys[1];
    QueryRows<T>*queries = &s_.queries[0], *next_queries = &s_.queries[1];
    const auto prepare = [&](KeyRows<T>& k, QueryRows<T>& q, int64_t at,
                             int64_t g, int64_t tiles) HWY_ATTR {
      beside_.queue.start(tiles);
      if (g == 0) {
        k.chunk = span.alone ? angles.alone(span.begin, span.end)
                             : angles.chunk(span.begin, span.end, at);
        if (has_keys) add_keys_to_queue(k);
      }
      if (has_queries)
        add_queries_to_queue(k.chunk, unit_.head * call_.group + g, q);
    };
    int64_t at =
        span.begin + (span.end - span.begin - 1) / span.chunk * span.chunk;
    prepare(*keys, *queries, at, 0, 1);
    queries->finite = beside_.queue.finish();
    for (int64_t g = 0; at >= span.begin;) {
      if (g == 0) look_ahead(span, at, next, key_tiles + group * update_tiles);
      const bool same = g + 1 < group;
      const int64_t next_at = same ? at : at - span.chunk;
      const int64_t next_g = same ? g + 1 : 0;
      const auto prepare_next = [&]() HWY_ATTR {
        if (next_at < span.begin) return;
        prepare(same ? *keys : *next_keys, *next_queries, next_at, next_g,
                (g == 0 ? key_tiles : 0) + update_tiles);
      };
      beside_.queue.start(1);
      if (!call_.rotary) prepare_next();
      if (call_.rotary) turn(*keys, *queries, g, has_keys, has_queries);
      if (has_queries) {
        queries->finish(keys->chunk);
        leave(keys->chunk, *queries, g);
      }
      take(*keys, *queries, g);
      if (call_.rotary) prepare_next();
      next_queries->finite = beside_.queue.finish();
      std::swap(queries, next_queries);
      if (!same) std::swap(keys, next_keys);
      at = next_at;
      g = next_g;
    }
  }

  void look_ahead(const Stretch& span, int64_t at, const Next& next,
                  int64_t tiles) {
    const Target to = target_before(unit_, span.begin, at, span.chunk, next);
    beside_.ahead.start(to.rows, tiles);
    if ((span.what & kKeys) != 0) add_keys_ahead(beside_.ahead, call_, to);
    if ((span.what & kQueries) != 0)
      add_gradients_ahead<T>(beside_.ahead, call_, to);
  }

  void add_keys_to_queue(KeyRows<T>& keys) {
    const Chunk<T>& chunk = keys.chunk;
    const int64_t rows = round_up(chunk.size, 4);
    keys.slots = seen_key_slots(call_, unit_, chunk.position, chunk.size);
    beside_.queue.add(
        {nullptr, key_rows(call_.inputs.k, unit_, chunk.position),
         keys.slots.real, rows, call_.dim, keys.k, shape_.q_stride},
        call_.options.feature_map, call_.dtype);
    beside_.queue.add({nullptr, key_rows(call_.inputs.v, unit_, chunk.position),
                       keys.slots.real, rows, call_.value_dim, keys.v,
                       shape_.v_stride, nullptr, keys.v_other, chunk.ratio},
                      FeatureMap::kIdentity, call_.dtype);
  }
  void add_queries_to_queue(const Chunk<T>& chunk, int64_t head,
                            QueryRows<T>& queries) {
    queries.slots = query_slots(call_, unit_, chunk.position, chunk.size);
    if (queries.slots.real == 0) return;
    beside_.queue.add(
        {nullptr, query_rows(call_.inputs.q, unit_, head, chunk.position),
         queries.slots.real, round_up(chunk.size, 4), call_.dim, queries.q,
         shape_.q_stride},
        call_.options.feature_map, call_.dtype);
    PackJob<T> job = gradient_job<T>(call_, unit_, head, chunk, queries.slots,
                                     queries.scale, queries.r);
    job.main = chunk.main;
    job.out = queries.g_main;
    job.other = queries.g_other;
    job.ratio = chunk.ratio;
    job.stride = shape_.v_stride;
    beside_.queue.add(job);
  }
  void turn(const KeyRows<T>& keys, const QueryRows<T>& queries, int64_t g,
            bool has_keys, bool has_queries) {
    const int64_t rows = round_up(keys.chunk.size, 4);
    if (has_keys && g == 0) {
      turn_rows<T>(call_, keys.chunk, keys.k, rows, shape_.q_stride,
                   keys.k_turned);
    }
    if (has_queries) {
      turn_rows<T>(call_, keys.chunk, queries.q, rows, shape_.q_stride,
                   queries.q_turned);
    }
  }

  void leave(const Chunk<T>& chunk, const QueryRows<T>& queries, int64_t g) {
    if (!QueryNotes<T>::kPossible || call_.query_notes == nullptr ||
        queries.slots.real == 0)
      return;
    leave_notes<T>({call_, unit_, unit_.head * call_.group + g, chunk.position},
                   queries.slots.real, chunk.size, queries.scale, queries.r,
                   queries.q, shape_.q_stride);
  }

  // What the keys of a chunk learn from the later queries (at a group's first
  // head) and from the chunk's own; written at its last head.
  void answer(const KeyRows<T>& keys, const QueryRows<T>& queries,
              bool has_later, bool asked, bool first, bool last) {
    if (keys.slots.real != 0) {
      if (asked) score(keys, queries);
      if (call_.dv.data != nullptr)
        answer_values(keys, queries, has_later, asked, first, last);
      if (call_.dk.data != nullptr)
        answer_keys(keys, queries, has_later, asked, first, last);
    } else if (last) {
      write_scratch(keys, call_.dv, s_.dv, shape_.v_stride, call_.value_dim);
      write_scratch(keys, call_.dk, s_.dk, shape_.q_stride, call_.dim);
    }
  }

  void score(const KeyRows<T>& keys, const QueryRows<T>& queries) {
    const Chunk<T>& chunk = keys.chunk;
    const int64_t rows = round_up(chunk.size, 4);
    triangle_dots<T, Triangle::kUpper>(
        keys.k_turned, shape_.q_stride, queries.q_turned, shape_.q_stride, rows,
        shape_.q_stride, chunk.ratio, call_.cosine, nullptr, s_.key_scores);
    triangle_dots<T, Triangle::kUpper>(
        keys.v, shape_.v_stride, queries.g_main, shape_.v_stride, rows,
        shape_.v_stride, chunk.ratio, call_.cosine,
        call_.normalize && !call_.rotary ? queries.r_main : nullptr,
        s_.value_scores);
  }

  void answer_values(const KeyRows<T>& keys, const QueryRows<T>& queries,
                     bool has_later, bool asked, bool first, bool last) {
    const Chunk<T>& chunk = keys.chunk;
    const int main = chunk.main_part;
    const Output out =
        output(keys, call_.dv, s_.dv, shape_.v_stride, call_.value_dim, last);
    const T* scale = last ? chunk.main : nullptr;
    if (first) {
      Reading<T> in;
      in.x = keys.k_turned;
      in.x_stride = shape_.q_stride;
      in.rows = round_up(chunk.size, 4);
      in.depth = call_.dim;
      in.ratio = chunk.ratio;
      if (has_later) {
        in.main = state_.part(main);
        if (call_.cosine) in.other = state_.part(1 - main);
      }
      if (asked) {
        in.scores = s_.key_scores;
        in.y = queries.g_main;
        in.y_stride = shape_.v_stride;
        in.finite = queries.finite;
      }
      for_panels<T>(shape_.v_stride, [&](auto vectors, int64_t c0) HWY_ATTR {
        constexpr int kVectors = decltype(vectors)::value;
        read_panel<T, kVectors, Triangle::kUpper>(
            in, c0, beside_, [&](auto& tile, int64_t r) COSFORMER_LAMBDA {
              out.put(tile, r, c0, scale);
            });
      });
    } else {
      Gathering<T> in;
      in.from = s_.dv;
      in.stride = shape_.v_stride;
      in.rows = round_up(chunk.size, 4);
      if (asked) in.add_inside(s_.key_scores, queries.g_main, queries.finite);
      gather_rows<T>(in, [&](auto& tile, int64_t r, int64_t c0)
                             COSFORMER_LAMBDA { out.put(tile, r, c0, scale); });
    }
    if (last && !out.direct)
      write_scratch(keys, call_.dv, s_.dv, shape_.v_stride, call_.value_dim);
  }

  void answer_keys(const KeyRows<T>& keys, const QueryRows<T>& queries,
                   bool has_later, bool asked, bool first, bool last) {
    const Chunk<T>& chunk = keys.chunk;
    const int main = chunk.main_part;
    const Output out =
        output(keys, call_.dk, s_.dk, shape_.q_stride, call_.dim, last);
    const int64_t rows = round_up(chunk.size, 4);
    Gathering<T> in;
    in.stride = shape_.q_stride;
    in.rows = rows;
    in.ratio = chunk.ratio;
    in.ones = s_.ones;
    in.from = first ? nullptr : s_.dk;
    if (first && has_later) {
      dot_state(keys, rows);
      in.from = s_.dk;
      in.sum_main = state_.sum(main);
      if (call_.cosine) in.sum_other = state_.sum(1 - main);
    }
    if (asked) in.add_inside(s_.value_scores, queries.q_turned, queries.finite);
    if (call_.rotary) {
      answer_turned_keys(keys, queries, in, asked, first, last);
      return;
    }
    const FeatureMap map = call_.options.feature_map;
    const T* features = keys.k;
    gather_rows<T>(in, [&](auto& tile, int64_t r, int64_t c0) COSFORMER_LAMBDA {
      if (last) {
        times_derivative(map, features + r * shape_.q_stride + c0,
                         shape_.q_stride, tile);
      }
      out.put(tile, r, c0, last ? chunk.main : nullptr);
    });
    if (last && !out.direct)
      write_scratch(keys, call_.dk, s_.dk, shape_.q_stride, call_.dim);
  }

  // With rotary positions r belongs to the plain features.
  void answer_turned_keys(const KeyRows<T>& keys, const QueryRows<T>& queries,
                          Gathering<T> in, bool asked, bool first, bool last) {
    Gathering<T> plain = in;
    plain.from = first ? nullptr : s_.dk_plain;
    plain.scores = nullptr;
    if (asked && call_.normalize) {
      triangle_dots<T, Triangle::kUpper>(
          keys.v, shape_.v_stride, queries.g_main, shape_.v_stride, in.rows, 0,
          keys.chunk.ratio, call_.cosine, queries.r_main, s_.key_scores);
      plain.add_inside(s_.key_scores, queries.q, queries.finite);
    }
    in.sum_main = in.sum_other = nullptr;
    const auto store = [&](T* to) {
      return [to, this](auto& tile, int64_t r, int64_t c0) COSFORMER_LAMBDA {
        tile.store(to + r * shape_.q_stride + c0, shape_.q_stride);
      };
    };
    gather_rows<T>(in, store(s_.dk));
    gather_rows<T>(plain, store(s_.dk_plain));
    if (!last) return;
    finish_gradient<T>(call_, keys.chunk, s_.dk, s_.dk_plain, keys.k,
                       shape_.q_stride);
    write_scratch(keys, call_.dk, s_.dk, shape_.q_stride, call_.dim,
                  keys.chunk.main);
  }

  // s_.dk = T_main v + T_other v_other: rows of T with rows of v.
  void dot_state(const KeyRows<T>& keys, int64_t rows) {
    const int main = keys.chunk.main_part;
    const T* const v = keys.v;
    const T* const v_other = call_.cosine ? keys.v_other : nullptr;
    const Panels<T> state = state_.part(main), other = state_.part(1 - main);
    const int64_t v_stride = shape_.v_stride, q_stride = shape_.q_stride;
    T* const dk = s_.dk;
    for (int64_t f = 0; f < shape_.rows; f += kDotColumns) {
      for_dot_rows(rows, [&](auto count, int64_t r) COSFORMER_LAMBDA {
        DotTile<T, decltype(count)::value> tile;
        tile.zero();
        if (v_other != nullptr) {
          dot_panels(v_other + r * v_stride, v_stride, other, f, tile);
          beside_.step();
        }
        dot_panels(v + r * v_stride, v_stride, state, f, tile);
        tile.store(dk + r * q_stride + f, q_stride);
        beside_.step();
        beside_.queue.tile();
      });
    }
  }
  template <int kRows>
  static HWY_INLINE void dot_panels(const T* HWY_RESTRICT v, int64_t v_stride,
                                    const Panels<T>& state, int64_t f,
                                    DotTile<T, kRows>& tile) {
    int64_t c0 = 0;
    for (; c0 + kPanel<T> <= state.columns; c0 += kPanel<T>) {
      tile.template multiply<kMaxVectors>(
          v + c0, v_stride, state.panel(c0) + f * kPanel<T>, kPanel<T>);
    }
    if (c0 == state.columns) return;
    for_vectors<T>(
        (state.columns - c0) / kLanes<T>, [&](auto vectors) COSFORMER_LAMBDA {
          constexpr int kVectors = decltype(vectors)::value;
          constexpr int64_t kWidth = kVectors * kLanes<T>;
          tile.template multiply<kVectors>(
              v + c0, v_stride, state.panel(c0) + f * kWidth, kWidth);
        });
  }
  void update(const Chunk<T>& chunk, const QueryRows<T>& queries) {
    const int main = chunk.main_part;
    for_panels<T>(shape_.v_stride, [&](auto vectors, int64_t c0) HWY_ATTR {
      constexpr int kVectors = decltype(vectors)::value;
      update_panel<T, kVectors>(queries.q_turned, shape_.q_stride,
                                queries.g_main + c0, shape_.v_stride,
                                chunk.size, state_.part(main).panel(c0),
                                shape_.rows, beside_);
      if (!call_.cosine) return;
      update_panel<T, kVectors>(queries.q_turned, shape_.q_stride,
                                queries.g_other + c0, shape_.v_stride,
                                chunk.size, state_.part(1 - main).panel(c0),
                                shape_.rows, beside_);
    });
    if (!call_.normalize) return;
    add_to_sums<T>(queries.q, shape_.q_stride, chunk.size, queries.r_main,
                   chunk.ratio, state_.sum(main),
                   call_.cosine ? state_.sum(1 - main) : nullptr);
  }

  // Where the tiles of a gradient go. Its rows are written by them where they
  // are of its own type, without padding, and all count; else they are kept.
  struct Output {
    T* at;
    int64_t stride;
    bool direct, stream;
    // scale: of a finished gradient.
    template <class AnyTile>
    HWY_INLINE void put(AnyTile& tile, int64_t r, int64_t c0,
                        const T* scale) const {
      T* HWY_RESTRICT to = at + r * stride + c0;
      if (scale != nullptr) tile.finish_rows(scale + r);
      if (stream) {
        tile.stream(to, stride);
      } else {
        tile.store_unaligned(to, stride);
      }
    }
  };
  Output output(const KeyRows<T>& keys, const View4& view, T* scratch,
                int64_t stride, int64_t dim, bool last) const {
    const int64_t size = keys.chunk.size;
    const bool direct = last && !call_.rotary &&
                        size_of(view.dtype) == sizeof(T) && size % 4 == 0 &&
                        keys.slots.real == (~uint64_t{0} >> (64 - size)) &&
                        dim == stride;
    if (!direct) return {scratch, stride, false, false};
    const Rows to = key_rows(view, unit_, keys.chunk.position);
    T* const at =
        static_cast<T*>(const_cast<void*>(to.data)) + to.first * to.stride;
    const size_t row_bytes = static_cast<size_t>(to.stride) * sizeof(T);
    return {at, to.stride, true,
            call_.stream && row_bytes % sizeof(Vec<T>) == 0 &&
                reinterpret_cast<uintptr_t>(at) % sizeof(Vec<T>) == 0};
  }
  void write_scratch(const KeyRows<T>& keys, const View4& view, const T* rows,
                     int64_t stride, int64_t dim, const T* scale = nullptr) {
    if (view.data == nullptr || keys.slots.present == 0) return;
    write_rows<T>(call_.dtype, rows, stride, scale != nullptr ? scale : s_.ones,
                  keys.slots.present, keys.slots.real, dim,
                  key_rows(view, unit_, keys.chunk.position), call_.stream);
  }

  const LinearCall& call_;
  const Unit& unit_;
  DKeysScratch<T>& s_;
  const Shape& shape_;
  DKeysState<T> state_;
  Beside<T> beside_;
};

template <typename T>
struct DKeysPass {
  // Calls run(walk) with the walk that takes the call.
  template <class Run>
  static void walk(const LinearCall& call, const Unit& unit, const void* state,
                   void* scratch, const Run& run) {
#if HWY_TARGET == HWY_AVX3
    if constexpr (kInLanes<T>) {
      if (!call.rotary) return run(DKeysInLanes(call, unit, state, scratch));
    }
#endif
    run(DKeys<T>(call, unit, state, scratch));
  }
  static size_t state_bytes(const LinearCall& call) {
    return static_cast<size_t>(DKeysState<T>::elements(d_keys_shape<T>(call))) *
           sizeof(T);
  }
  static void load_state(const LinearCall& call, const Unit& unit,
                         void* memory) {
    zero_state<state_bytes>(call, memory);
    const Shape shape = d_keys_shape<T>(call);
    const DKeysState<T> state(shape, memory);
    const T* kv = static_cast<const T*>(call.d_state_out.kv_state);
    const T* sum = static_cast<const T*>(call.d_state_out.k_sum);
    for (int p = 0; p < call.parts; ++p) {
      if (kv != nullptr) {
        load_panels<T>(
            kv + call.kv_state_at(unit) + p * call.dim * call.value_dim,
            call.dim, call.value_dim, state.part(p));
      }
      if (sum != nullptr) {
        std::copy_n(sum + call.k_sum_at(unit) + p * call.dim, call.dim,
                    state.sum(p));
      }
    }
  }
  static void store_state(const LinearCall& call, const Unit& unit,
                          const void* memory) {
    const Shape shape = d_keys_shape<T>(call);
    const DKeysState<T> state(shape, memory);
    T* kv = static_cast<T*>(call.d_state_in.kv_state);
    T* sum = static_cast<T*>(call.d_state_in.k_sum);
    for (int p = 0; p < call.parts; ++p) {
      if (kv != nullptr) {
        store_panels<T>(
            state.part(p), call.dim, call.value_dim,
            kv + call.kv_state_at(unit) + p * call.dim * call.value_dim);
      }
      if (sum != nullptr) {
        std::copy_n(state.sum(p), call.dim,
                    sum + call.k_sum_at(unit) + p * call.dim);
      }
    }
  }
  static void accumulate(const LinearCall& call, const Unit& unit,
                         int64_t begin, int64_t end, void* state,
                         void* scratch) {
    walk(call, unit, state, scratch,
         [&](auto&& pass) { pass.add_queries(begin, end); });
  }
  static void read(const LinearCall& call, const Unit& unit, int64_t begin,
                   int64_t end, const void* state, void* scratch) {
    walk(call, unit, state, scratch,
         [&](auto&& pass) { pass.read(begin, end); });
    hwy::FlushStream();
  }
  static void attend(const LinearCall& call, const Unit& unit, int64_t begin,
                     int64_t end, const Next& next, void* state,
                     void* scratch) {
    walk(call, unit, state, scratch,
         [&](auto&& pass) { pass.attend(begin, end, next); });
    hwy::FlushStream();
  }
  static size_t note_bytes(const LinearCall& call) {
    return call.rotary ? 0 : QueryNotes<T>::bytes(call);
  }
  static constexpr Pass make() {
    return {true,
            &state_bytes,
            &scratch_bytes<T, DKeysScratch<T>>,
            &init_scratch<T, DKeysScratch<T>>,
            &load_state,
            &zero_state<state_bytes>,
            &store_state,
            &add_state<T, state_bytes>,
            &accumulate,
            &read,
            &attend,
            kBackwardBlock,
            QueryNotes<T>::kPossible ? &note_bytes : nullptr};
  }
};

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_D_KEYS_INL_H_
