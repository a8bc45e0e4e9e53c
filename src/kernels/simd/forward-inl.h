// Causal linear attention, forward, a chunk of positions at a time:
//
//   P_ij  = (q_i . k_j)(1 + ratio_i ratio_j)                 j <= i, this chunk
//   out_i = main_i / n_i (q_i S_main + ratio_i q_i S_other
//                         + sum_j P_ij main_j v_j)
//   S_main += sum_j k_j (main_j v_j)^T,    S_other += sum_j k_j (other_j v_j)^T
//
// (call.h explains main, other and ratio; without the cosine there is one S.)
//
// Floor: a token and head cost 8 d (d + 1) operations with the cosine (two
// states read, two updated), and the products inside a chunk of C tokens add
// about C / (4 d) of that (kForwardChunk). Measured at d = 32 and 64: packing a
// chunk at once, into one buffer, takes 3% less time than packing the next one
// between the tiles into a second. Rows are multiplied with rows
// (dot_tile-inl.h), so that nothing is transposed, or in blocks
// (query_blocks-inl.h), and a panel of the state is updated right after it was
// read.
#if defined(COSFORMER_SRC_KERNELS_SIMD_FORWARD_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_FORWARD_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_FORWARD_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_FORWARD_INL_H_
#endif

#include <hwy/cache_control.h>

#include <algorithm>
#include <new>

#include "kernels/simd/chunk-inl.h"
#include "kernels/simd/pack_queue-inl.h"
#include "kernels/simd/panel-inl.h"
#include "kernels/simd/pass.h"
#include "kernels/simd/query_blocks-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

// Where the states leave the second-level cache every pass over them serves as
// many positions as a chunk may have: its own products are few beside that.
template <typename T>
Shape walk_shape(const LinearCall& call) {
  constexpr int64_t kCached = 1 << 20;
  const int64_t bytes =
      call.parts * call.dim * call.value_dim * static_cast<int64_t>(sizeof(T));
  return bytes > kCached ? Shape::of<T>(call, kMaxChunk)
                         : forward_shape<T>(call);
}

// Walks of so many positions are taken in pairs (is_alone): n (d + d_v)
// operations a token and query head, against 2 d d_v to read each part of a
// state, and as many to update it, once a group. Measured at head_dim 32, 64
// and 128 and without the cosine, pairs win up to about 3/4 of the length at
// which both are alike.
inline int64_t longest_pairs(const LinearCall& call) {
  const int64_t even = 2 * call.parts * call.dim * call.value_dim *
                       (call.group + 1) /
                       (call.group * (call.dim + call.value_dim));
  // Whole tiles of rows.
  return std::clamp(even * 3 / 16 * 4, kMaxChunk, kBlock);
}

template <typename T>
struct ForwardState {
  ForwardState(const Shape& shape, const void* memory)
      : data(static_cast<T*>(const_cast<void*>(memory))), shape(shape) {}
  static int64_t elements(const Shape& s) {
    return s.parts * (s.rows * s.v_stride + s.q_stride);
  }
  Panels<T> part(int64_t p) const {
    return {data + p * shape.rows * shape.v_stride, shape.rows, shape.v_stride};
  }
  T* sum(int64_t p) const {
    return data + shape.parts * shape.rows * shape.v_stride +
           p * shape.q_stride;
  }

  T* data;
  const Shape& shape;
};

// A thread's memory.
template <typename T>
struct ForwardScratch {
  ForwardScratch(const LinearCall& call, Carver<T>& carver)
      : shape(walk_shape<T>(call)),
        short_angles(call, shape.chunk,
                     carver.take(Angles<T>::size(call, shape.chunk))),
        long_angles(call, shape.long_chunk,
                    carver.take(Angles<T>::size(call, shape.long_chunk))) {
    const int64_t pairs = longest_pairs(call);
    Carver<T> counter(nullptr);
    place(call, std::max(shape.slots, kMaxChunk), std::max(shape.slots, pairs),
          counter);
    rows_memory =
        carver.take(static_cast<int64_t>(counter.bytes() / sizeof(T)));
    plain_scores = scores = carver.take(kSquare);
    if (call.rotary) plain_scores = carver.take(kSquare);
    squares = carver.take((pairs - 1) / kMaxChunk * kSquare);
    scale = carver.take(kMaxChunk * kApart);
    sums = carver.take(kMaxChunk * kApart);
    ones = carver.take(kMaxChunk);
    zeros = carver.take(shape.q_stride);
  }
  void start() {
    short_angles.start();
    long_angles.start();
    for (T* s : {scores, plain_scores}) std::fill_n(s, kSquare, T{0});
    std::fill_n(ones, kMaxChunk, T{1});
    std::fill_n(zeros, shape.q_stride, T{0});
  }

  // For chunks of so many rows, and so many keys, without gaps: rows a power of
  // two apart would meet in the same few lines of the first-level cache.
  void place(const LinearCall& call, int64_t slots, int64_t keys,
             Carver<T>& carver) {
    const int64_t qs = slots * shape.q_stride;
    q_turned = q = carver.take(qs);
    k_turned = k = carver.take(keys * shape.q_stride);
    if (call.rotary) {
      q_turned = carver.take(qs);
      k_turned = carver.take(qs);
      if (kInBlocks<T>) q_rows = carver.take(qs);
    }
    v_main = carver.take(keys * shape.v_stride);
    out = carver.take(slots * shape.v_stride);
  }

  // Of the sums and scales of rows.
  static constexpr int kApart = kInBlocks<T> ? kBlockRows : 1;

  Shape shape;
  Angles<T> short_angles, long_angles;
  T* rows_memory;
  // [slots][q_stride], the queries maybe in blocks; the turned ones (rotary)
  // carry the numerator.
  T *q, *q_turned, *k, *k_turned;
  T* q_rows = nullptr;                 // for what turns rows
  T *v_main, *out;                     // [slots][v_stride]
  T *scores, *plain_scores, *squares;  // rows of kScoresStride
  T *scale, *sums, *ones, *zeros;
};

template <typename T>
class Forward {
 public:
  Forward(const LinearCall& call, const Unit& unit, const void* state,
          void* scratch)
      : call_(call),
        unit_(unit),
        s_(*static_cast<ForwardScratch<T>*>(scratch)),
        shape_(s_.shape),
        state_(shape_, state) {}

  void add_keys(int64_t begin, int64_t end) {
    const int64_t tiles = update_tiles();
    walk_chunks(
        unit_, begin, end, place(shape_.long_chunk), {},
        [&](const Target& to) {
          ahead_.start(to.rows, tiles);
          add_keys_ahead(ahead_, call_, to);
        },
        [&](int64_t at) {
          const Chunk<T> chunk = s_.long_angles.chunk(begin, end, at);
          const Slots keys = key_slots(call_, unit_, at, chunk.size);
          if (keys.real == 0) return;
          pack_keys(chunk, keys);
          for_panels<T>(shape_.v_stride,
                        [&](auto vectors, int64_t c0) HWY_ATTR {
                          update<decltype(vectors)::value>(chunk, c0);
                        });
          update_sums(chunk);
        });
  }

  void read(int64_t begin, int64_t end) {
    const int64_t tiles = read_tiles(shape_.long_chunk);
    walk_chunks(
        unit_, begin, end, place(shape_.long_chunk), {},
        [&](const Target& to) {
          ahead_.start(to.rows, tiles);
          add_queries_ahead(ahead_, call_, call_.inputs.q, to);
        },
        [&](int64_t at) {
          const Chunk<T> chunk = s_.long_angles.chunk(begin, end, at);
          answer(chunk, query_slots(call_, unit_, at, chunk.size), false, true,
                 false);
        });
  }

  void attend(int64_t begin, int64_t end, const Next& next) {
    // The state need not be read before it holds a key, nor updated where no
    // query follows.
    const bool given = call_.inputs.state.kv_state != nullptr;
    const bool wanted = call_.state_out.kv_state != nullptr;
    const int64_t longest = longest_pairs(call_);
    const bool alone =
        !given && !wanted && is_alone(call_, unit_, begin, end, longest);
    const int64_t size =
        alone ? std::min(end - begin, kMaxChunk) : shape_.chunk;
    const int64_t tiles = read_tiles(size) + (alone ? 0 : update_tiles());
    walk_chunks(
        unit_, begin, end, place(size, alone ? end - begin : size), next,
        [&](const Target& to) {
          ahead_.start(to.rows, tiles);
          add_keys_ahead(ahead_, call_, to);
          add_queries_ahead(ahead_, call_, call_.inputs.q, to);
        },
        [&](int64_t at) {
          const Chunk<T> chunk =
              alone ? s_.short_angles.alone(begin, end, longest)
                          .part(at, std::min(size, end - at))
                    : s_.short_angles.chunk(begin, end, at);
          before_ = alone ? at - begin : 0;
          const Slots keys = key_slots(call_, unit_, at, chunk.size);
          const bool has_keys = alone || keys.real != 0;
          if (has_keys) pack_keys(chunk, keys);
          answer(chunk, query_slots(call_, unit_, at, chunk.size), has_keys,
                 given || (!alone && at > unit_.row.kv_start),
                 has_keys && !alone &&
                     (wanted || at + chunk.size < unit_.q_end()));
        });
  }

 private:
  int64_t place(int64_t chunk) { return place(chunk, chunk); }
  int64_t place(int64_t chunk, int64_t keys) {
    Carver<T> carver(s_.rows_memory);
    s_.place(call_, round_up(chunk, 4), round_up(keys, 4), carver);
    return chunk;
  }
  int64_t read_tiles(int64_t chunk) const {
    return call_.group * count_tiles<T>(chunk, shape_.v_stride);
  }
  int64_t update_tiles() const {
    return call_.parts * count_tiles<T>(shape_.rows, shape_.v_stride);
  }

  void pack_keys(const Chunk<T>& chunk, const Slots& keys) {
    const int64_t rows = round_up(chunk.size, 4);
    pack_now(
        PackJob<T>{nullptr, key_rows(call_.inputs.k, unit_, chunk.position),
                   keys.real, rows, call_.dim, own_keys(), shape_.q_stride},
        call_.options.feature_map, call_.dtype);
    if (call_.rotary)
      turn_rows<T>(call_, chunk, s_.k, rows, shape_.q_stride, s_.k_turned);
    const bool finite = pack_now(
        PackJob<T>{nullptr, key_rows(call_.inputs.v, unit_, chunk.position),
                   keys.real, rows, call_.value_dim, own_values(),
                   shape_.v_stride, call_.cosine ? chunk.main : nullptr},
        FeatureMap::kIdentity, call_.dtype);
    values_finite_ = finite && (before_ == 0 || values_finite_);
  }
  // Of the chunk at hand.
  T* own_keys() const { return s_.k + before_ * shape_.q_stride; }
  T* own_values() const { return s_.v_main + before_ * shape_.v_stride; }

  template <int kVectors>
  HWY_INLINE void update(const Chunk<T>& chunk, int64_t c0) {
    const int main = chunk.main_part;
    update_panel<T, kVectors, kForwardDepth>(
        s_.k_turned, shape_.q_stride, s_.v_main + c0, shape_.v_stride,
        chunk.size, state_.part(main).panel(c0), shape_.rows, ahead_);
    if (!call_.cosine) return;
    // In place: the state and the rows just fit the first-level cache.
    T* HWY_RESTRICT v = s_.v_main + c0;
    for (int64_t r = 0; r < chunk.size; ++r, v += shape_.v_stride) {
      const Vec<T> ratio = hn::Set(Tag<T>(), chunk.ratio[r]);
      unroll<kVectors>([&](auto n) COSFORMER_LAMBDA {
        T* HWY_RESTRICT at = v + n * kLanes<T>;
        hn::Store(hn::Mul(hn::Load(Tag<T>(), at), ratio), Tag<T>(), at);
      });
    }
    update_panel<T, kVectors, kForwardDepth>(
        s_.k_turned, shape_.q_stride, s_.v_main + c0, shape_.v_stride,
        chunk.size, state_.part(1 - main).panel(c0), shape_.rows, ahead_);
  }
  void update_sums(const Chunk<T>& chunk) {
    const int main = chunk.main_part;
    add_to_sums<T>(s_.k, shape_.q_stride, chunk.size, chunk.main, chunk.ratio,
                   state_.sum(main),
                   call_.cosine ? state_.sum(1 - main) : nullptr);
  }

  // Answers the queries of a chunk, of all heads of the group; `updates`: and
  // adds the keys to the state, a panel at a time while it is in the cache.
  void answer(const Chunk<T>& chunk, const Slots& queries, bool has_keys,
              bool has_state, bool updates) {
    const bool asked = queries.real != 0;
    const bool direct = asked && direct_rows<T>(call_.out, queries, chunk.size,
                                                shape_.v_stride);
    for (int64_t g = 0; g < call_.group; ++g) {
      const int64_t head = unit_.head * call_.group + g;
      const bool last = g + 1 == call_.group;
      const Rows to = query_rows(call_.out, unit_, head, chunk.position);
      if (asked) {
        if constexpr (kInBlocks<T>) {
          prepare_blocks(chunk, queries, head, has_keys, has_state);
        } else {
          prepare_queries(chunk, queries, head, has_keys);
          normalise(chunk, has_keys, has_state);
        }
      }
      if (asked || (last && updates)) {
        Writer<T> writer = direct ? Writer<T>::direct(to, call_.stream)
                                  : Writer<T>::packed(s_.out, shape_.v_stride);
        if (direct) writer.columns = call_.value_dim;
        read_and_update(chunk, reading(chunk, asked, has_keys, has_state),
                        writer, last && updates);
      }
      if (queries.present != 0 && !direct) {
        write_rows<T>(call_.dtype, s_.out, shape_.v_stride, s_.ones,
                      queries.present, queries.real, call_.value_dim, to,
                      call_.stream);
      }
      if (call_.normalize && call_.denominator != nullptr)
        store_denominators(chunk, queries, head);
    }
    if (updates) update_sums(chunk);
  }

  PackJob<T> query_job(const Chunk<T>& chunk, const Slots& queries,
                       int64_t head, T* to) const {
    return {
        nullptr,        query_rows(call_.inputs.q, unit_, head, chunk.position),
        queries.real,   round_up(chunk.size, 4),
        call_.dim,      to,
        shape_.q_stride};
  }

#if HWY_TARGET == HWY_AVX3
  // Queries, scores, denominators and scales, with the queries in blocks.
  void prepare_blocks(const Chunk<T>& chunk, const Slots& queries, int64_t head,
                      bool has_keys, bool has_state) {
    const int64_t rows = round_up(chunk.size, 4);
    BlockScores in;
    in.q = s_.q;
    in.q_stride = in.k_stride = shape_.q_stride;
    in.rows = rows;
    in.ratio = chunk.ratio;
    in.main = chunk.main;
    in.cosine = call_.cosine;
    in.sum_main = has_state ? state_.sum(chunk.main_part) : s_.zeros;
    in.sum_other = has_state && call_.cosine ? state_.sum(1 - chunk.main_part)
                                             : in.sum_main;
    if (call_.rotary) {
      pack_now(query_job(chunk, queries, head, s_.q_rows),
               call_.options.feature_map, call_.dtype);
      block_rows(s_.q_rows, rows, shape_.q_stride, s_.q);
      turn_rows<T>(call_, chunk, s_.q_rows, rows, shape_.q_stride, s_.q_rows);
      block_rows(s_.q_rows, rows, shape_.q_stride, s_.q_turned);
      if (has_keys) {
        in.q = s_.q_turned;
        in.k = s_.k_turned;
        in.scores = s_.scores;
        score_all_blocks(in);
      }
      in.q = s_.q;
    } else {
      pack_blocks(query_job(chunk, queries, head, s_.q),
                  call_.options.feature_map, call_.dtype);
    }
    in.k =
        has_keys && (call_.normalize || !call_.rotary) ? own_keys() : nullptr;
    in.scores = s_.plain_scores;
    in.before = before_;
    in.squares = s_.squares;
    in.normalize = call_.normalize;
    in.eps = static_cast<float>(call_.options.eps);
    in.sums = s_.sums;
    in.scale = s_.scale;
    score_all_blocks(in);
  }
#endif

  void prepare_queries(const Chunk<T>& chunk, const Slots& queries,
                       int64_t head, bool has_keys) {
    const int64_t rows = round_up(chunk.size, 4);
    pack_now(query_job(chunk, queries, head, s_.q), call_.options.feature_map,
             call_.dtype);
    if (call_.rotary)
      turn_rows<T>(call_, chunk, s_.q, rows, shape_.q_stride, s_.q_turned);
    if (!has_keys) return;
    for (int64_t j = 0; j < before_; j += kMaxChunk) {
      square_dots<T>(s_.q, s_.k + j * shape_.q_stride, shape_.q_stride, rows,
                     call_.cosine ? chunk.ratio : nullptr, j - before_,
                     s_.squares + j / kMaxChunk * kSquare);
    }
    triangle_dots<T, Triangle::kLower>(
        s_.q_turned, shape_.q_stride, s_.k_turned + before_ * shape_.q_stride,
        shape_.q_stride, rows, shape_.q_stride, chunk.ratio, call_.cosine,
        nullptr, s_.scores);
    if (call_.rotary && call_.normalize) {
      triangle_dots<T, Triangle::kLower>(
          s_.q, shape_.q_stride, s_.k, shape_.q_stride, rows, shape_.q_stride,
          chunk.ratio, call_.cosine, nullptr, s_.plain_scores);
    }
  }

  // scale_i = main_i / max(denominator_i, eps); sums: the denominators.
  void normalise(const Chunk<T>& chunk, bool has_keys, bool has_state) {
    const int64_t rows = round_up(chunk.size, 4);
    if (!call_.normalize) {
      std::copy_n(chunk.main, rows, s_.scale);
      return;
    }
    const int main = chunk.main_part;
    read_sums<T>(s_.q, shape_.q_stride, rows, chunk.ratio,
                 has_state ? state_.sum(main) : nullptr,
                 call_.cosine ? state_.sum(1 - main) : nullptr,
                 has_keys ? s_.plain_scores : nullptr, chunk.main, s_.sums,
                 before_, s_.squares);
    const hn::CappedTag<T, 4> d;
    const auto zero = hn::Zero(d);
    const auto eps = hn::Set(d, static_cast<T>(call_.options.eps));
    for (int64_t i = 0; i < rows; i += hn::MaxLanes(d)) {
      const auto m = hn::LoadU(d, chunk.main + i);
      // Adding 0 makes -0 a 0.
      const auto sum = hn::MulAdd(hn::Load(d, s_.sums + i), m, zero);
      hn::Store(sum, d, s_.sums + i);
      // NaN goes through.
      hn::Store(hn::Div(m, hn::IfThenElse(hn::Lt(sum, eps), eps, sum)), d,
                s_.scale + i);
    }
  }

  Reading<T> reading(const Chunk<T>& chunk, bool asked, bool has_keys,
                     bool has_state) const {
    const int main = chunk.main_part;
    Reading<T> in;
    in.x = s_.q_turned;
    in.x_stride = shape_.q_stride;
    in.rows = asked ? round_up(chunk.size, 4) : 0;
    in.depth = call_.dim;
    in.ratio = chunk.ratio;
    if (has_state) {
      in.main = state_.part(main);
      if (call_.cosine) in.other = state_.part(1 - main);
    }
    if (has_keys) {
      in.scores = s_.scores;
      in.y = own_values();
      in.y_stride = shape_.v_stride;
      in.finite = values_finite_;
      in.before = before_;
      in.squares = s_.squares;
    }
    return in;
  }

  // Inlined, gcc keeps the addresses of AVX2 tiles on the stack (10%).
  HWY_NOINLINE void read_and_update(const Chunk<T>& chunk, const Reading<T>& in,
                                    const Writer<T>& writer, bool updates) {
    const T* scale = s_.scale;
    for_panels<T>(shape_.v_stride, [&](auto vectors, int64_t c0) HWY_ATTR {
      constexpr int kVectors = decltype(vectors)::value;
      constexpr int kApart = ForwardScratch<T>::kApart;
      read_panel<T, kVectors, Triangle::kLower,
                 kInBlocks<T> ? Along::kBlocks : Along::kRow, true>(
          in, c0, ahead_, [&](auto& tile, int64_t r) COSFORMER_LAMBDA {
            tile.template finish_rows<kApart>(scale + r * kApart);
            writer.write(tile, r, c0);
          });
      if (updates) update<kVectors>(chunk, c0);
    });
  }

  void store_denominators(const Chunk<T>& chunk, const Slots& queries,
                          int64_t head) {
    const AttentionRow& row = unit_.row;
    const int64_t token = row.batch * call_.inputs.q.size[1] + row.q_offset +
                          chunk.position - row.q_start;
    T* HWY_RESTRICT to =
        static_cast<T*>(call_.denominator) + token * call_.heads + head;
    for (int64_t i = 0; i < chunk.size; ++i) {
      if ((queries.present >> i & 1) == 0) continue;
      to[i * call_.heads] =
          (queries.real >> i & 1) != 0 ? s_.sums[i * s_.kApart] : T{0};
    }
  }

  const LinearCall& call_;
  const Unit& unit_;
  ForwardScratch<T>& s_;
  const Shape& shape_;
  ForwardState<T> state_;
  bool values_finite_ = true;
  int64_t before_ = 0;  // keys before the chunk at hand, in pairs with it
  Ahead ahead_;
};

// The functions of the pass.
template <typename T>
struct ForwardPass {
  static size_t state_bytes(const LinearCall& call) {
    return static_cast<size_t>(ForwardState<T>::elements(walk_shape<T>(call))) *
           sizeof(T);
  }
  static void load_state(const LinearCall& call, const Unit& unit,
                         void* memory) {
    zero_state<state_bytes>(call, memory);
    const ConstLinearStateView& given = call.inputs.state;
    if (given.kv_state == nullptr) return;
    const Shape shape = walk_shape<T>(call);
    const ForwardState<T> state(shape, memory);
    const T* kv =
        static_cast<const T*>(given.kv_state) + call.kv_state_at(unit);
    const T* sum = static_cast<const T*>(given.k_sum) + call.k_sum_at(unit);
    for (int p = 0; p < call.parts; ++p) {
      load_panels<T>(kv + p * call.dim * call.value_dim, call.dim,
                     call.value_dim, state.part(p));
      std::copy_n(sum + p * call.dim, call.dim, state.sum(p));
    }
  }
  static void store_state(const LinearCall& call, const Unit& unit,
                          const void* memory) {
    const LinearStateView& to = call.state_out;
    if (to.kv_state == nullptr) return;
    const Shape shape = walk_shape<T>(call);
    const ForwardState<T> state(shape, memory);
    T* kv = static_cast<T*>(to.kv_state) + call.kv_state_at(unit);
    T* sum = static_cast<T*>(to.k_sum) + call.k_sum_at(unit);
    for (int p = 0; p < call.parts; ++p) {
      store_panels<T>(state.part(p), call.dim, call.value_dim,
                      kv + p * call.dim * call.value_dim);
      std::copy_n(state.sum(p), call.dim, sum + p * call.dim);
    }
  }
  static void accumulate(const LinearCall& call, const Unit& unit,
                         int64_t begin, int64_t end, void* state,
                         void* scratch) {
    Forward<T>(call, unit, state, scratch).add_keys(begin, end);
  }
  static void read(const LinearCall& call, const Unit& unit, int64_t begin,
                   int64_t end, const void* state, void* scratch) {
    Forward<T>(call, unit, state, scratch).read(begin, end);
    hwy::FlushStream();
  }
  static void attend(const LinearCall& call, const Unit& unit, int64_t begin,
                     int64_t end, const Next& next, void* state,
                     void* scratch) {
    Forward<T>(call, unit, state, scratch).attend(begin, end, next);
    hwy::FlushStream();
  }
  static constexpr Pass make() {
    return {false,
            &state_bytes,
            &scratch_bytes<T, ForwardScratch<T>>,
            &init_scratch<T, ForwardScratch<T>>,
            &load_state,
            &zero_state<state_bytes>,
            &store_state,
            &add_state<T, state_bytes>,
            &accumulate,
            &read,
            &attend};
  }
};

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_FORWARD_INL_H_
