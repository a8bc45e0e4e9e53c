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
// about C / (4 d) of that. So C is small; but below 16 the state, which does
// not fit into the first-level cache, is read and written too often.
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
#include "kernels/simd/pass.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

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
      : shape(Shape::of<T>(call)),
        short_angles(call, shape.chunk,
                     carver.take(Angles<T>::size(call, shape.chunk))),
        long_angles(call, shape.long_chunk,
                    carver.take(Angles<T>::size(call, shape.long_chunk))) {
    const int64_t qs = shape.slots * shape.q_stride;
    const int64_t vs = shape.slots * shape.v_stride;
    const int64_t across = shape.rows * shape.scores_stride;
    q_turned = q = carver.take(qs);
    k_turned = k = carver.take(qs);
    turned_across = across_keys = carver.take(across);
    plain_scores = scores = carver.take(shape.slots * shape.scores_stride);
    if (call.rotary) {
      q_turned = carver.take(qs);
      k_turned = carver.take(qs);
      turned_across = carver.take(across);
      plain_scores = carver.take(shape.slots * shape.scores_stride);
    }
    v = carver.take(vs);
    v_main = call.cosine ? carver.take(vs) : v;
    v_other = call.cosine ? carver.take(vs) : v;
    out = carver.take(vs);
    scale = carver.take(kMaxChunk);
  }
  void start() {
    short_angles.start();
    long_angles.start();
  }

  Shape shape;
  Angles<T> short_angles, long_angles;
  // [slots][q_stride]; the turned ones (rotary) carry the numerator.
  T *q, *q_turned, *k, *k_turned;
  T *across_keys, *turned_across;  // [rows][scores_stride]
  T *scores, *plain_scores;        // [slots][scores_stride]
  T *v, *v_main, *v_other, *out;   // [slots][v_stride]
  T* scale;
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
    for (int64_t at = begin; at < end; at += shape_.long_chunk) {
      const int64_t size = std::min(shape_.long_chunk, end - at);
      const Chunk<T> chunk = s_.long_angles.chunk(begin, end, at);
      const Slots keys = key_slots(call_, unit_, at, size);
      if (keys.real == 0) continue;
      const Target to =
          target_after(unit_, begin, end, at, shape_.long_chunk, {});
      ahead_.start(to.rows,
                   call_.parts * count_tiles<T>(shape_.rows, shape_.v_stride));
      add_keys_ahead(ahead_, call_, to);
      pack_keys(chunk, keys);
      update(chunk);
    }
  }

  void read(int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at += shape_.long_chunk) {
      const int64_t size = std::min(shape_.long_chunk, end - at);
      const Target to =
          target_after(unit_, begin, end, at, shape_.long_chunk, {});
      ahead_.start(to.rows, call_.group * count_tiles<T>(shape_.long_chunk,
                                                         shape_.v_stride));
      add_queries_ahead(ahead_, call_, call_.inputs.q, to);
      answer(s_.long_angles.chunk(begin, end, at),
             query_slots(call_, unit_, at, size), false, true);
    }
  }

  void attend(int64_t begin, int64_t end, const Next& next) {
    // The state need not be read before it holds a key, nor updated where no
    // query follows.
    const bool given = call_.inputs.state.kv_state != nullptr;
    for (int64_t at = begin; at < end; at += shape_.chunk) {
      const int64_t size = std::min(shape_.chunk, end - at);
      const Chunk<T> chunk = s_.short_angles.chunk(begin, end, at);
      const Slots keys = key_slots(call_, unit_, at, size);
      const Slots queries = query_slots(call_, unit_, at, size);
      const bool has_keys = keys.real != 0;
      look_ahead(target_after(unit_, begin, end, at, shape_.chunk, next));
      if (has_keys) {
        pack_keys(chunk, keys);
        if (queries.real != 0) cross_keys();
      }
      answer(chunk, queries, has_keys, given || at > unit_.row.kv_start);
      if (has_keys &&
          (call_.state_out.kv_state != nullptr || at + size < unit_.q_end()))
        update(chunk);
    }
  }

 private:
  void look_ahead(const Target& to) {
    ahead_.start(
        to.rows,
        call_.group * count_tiles<T>(shape_.chunk, shape_.v_stride) +
            call_.parts * count_tiles<T>(shape_.rows, shape_.v_stride));
    add_keys_ahead(ahead_, call_, to);
    add_queries_ahead(ahead_, call_, call_.inputs.q, to);
  }

  void pack_keys(const Chunk<T>& chunk, const Slots& keys) {
    const int64_t rows = round_up(chunk.size, 4);
    packed_rows_ = rows;
    pack_rows<T>(call_.options.feature_map, call_.dtype,
                 key_rows(call_.inputs.k, unit_, chunk.position), keys.real,
                 rows, call_.dim, s_.k, shape_.q_stride);
    if (call_.rotary) {
      turn_rows<T>(call_, chunk, s_.k, rows, shape_.q_stride, s_.k_turned);
    }
    values_finite_ =
        pack_rows<T>(FeatureMap::kIdentity, call_.dtype,
                     key_rows(call_.inputs.v, unit_, chunk.position), keys.real,
                     rows, call_.value_dim, s_.v, shape_.v_stride);
    if (call_.cosine) {
      scale_rows<T>(s_.v, chunk.main, rows, shape_.v_stride, s_.v_main);
      scale_rows<T>(s_.v_main, chunk.ratio, rows, shape_.v_stride, s_.v_other);
    }
  }

  void cross_keys() {
    transpose<T>(s_.k, shape_.q_stride, packed_rows_, call_.dim, s_.across_keys,
                 shape_.scores_stride);
    if (call_.rotary) {
      transpose<T>(s_.k_turned, shape_.q_stride, packed_rows_, call_.dim,
                   s_.turned_across, shape_.scores_stride);
    }
  }

  void update(const Chunk<T>& chunk) {
    const int main = chunk.main_part;
    add_outer_products<T>(s_.k_turned, shape_.q_stride, s_.v_main,
                          shape_.v_stride, chunk.size, state_.part(main),
                          ahead_);
    add_weighted_rows<T>(s_.k, shape_.q_stride, chunk.main, chunk.size,
                         state_.sum(main));
    if (!call_.cosine) return;
    add_outer_products<T>(s_.k_turned, shape_.q_stride, s_.v_other,
                          shape_.v_stride, chunk.size, state_.part(1 - main),
                          ahead_);
    for (int64_t i = 0; i < chunk.size; ++i)
      s_.scale[i] = chunk.main[i] * chunk.ratio[i];
    add_weighted_rows<T>(s_.k, shape_.q_stride, s_.scale, chunk.size,
                         state_.sum(1 - main));
  }

  // The queries of a chunk, of all heads of the group.
  void answer(const Chunk<T>& chunk, const Slots& queries, bool has_keys,
              bool has_state) {
    if (queries.present == 0) return;
    for (int64_t g = 0; g < call_.group; ++g)
      answer_head(chunk, queries, unit_.head * call_.group + g, has_keys,
                  has_state);
  }

  void answer_head(const Chunk<T>& chunk, const Slots& queries, int64_t head,
                   bool has_keys, bool has_state) {
    const int64_t rows = round_up(chunk.size, 4);
    if (queries.real != 0) {
      pack_rows<T>(call_.options.feature_map, call_.dtype,
                   query_rows(call_.inputs.q, unit_, head, chunk.position),
                   queries.real, rows, call_.dim, s_.q, shape_.q_stride);
      if (call_.rotary) {
        turn_rows<T>(call_, chunk, s_.q, rows, shape_.q_stride, s_.q_turned);
      }
      if (has_state) {
        const Panels<T> none{nullptr, 0, 0};
        read_state<T>(s_.q_turned, shape_.q_stride, rows, call_.dim,
                      chunk.ratio, state_.part(chunk.main_part),
                      call_.cosine ? state_.part(1 - chunk.main_part) : none,
                      s_.out, shape_.v_stride, ahead_);
      } else {
        std::fill_n(s_.out, rows * shape_.v_stride, T{0});
      }
      if (has_keys) {
        triangle_scores<T, Triangle::kLower>(
            s_.q_turned, shape_.q_stride, s_.turned_across,
            shape_.scores_stride, rows, call_.dim, chunk.ratio, call_.cosine,
            nullptr, s_.scores, shape_.scores_stride);
        if (call_.rotary && call_.normalize) {
          triangle_scores<T, Triangle::kLower>(
              s_.q, shape_.q_stride, s_.across_keys, shape_.scores_stride, rows,
              call_.dim, chunk.ratio, call_.cosine, nullptr, s_.plain_scores,
              shape_.scores_stride);
        }
        add_triangle_product<T, Triangle::kLower>(
            s_.scores, shape_.scores_stride, s_.v_main, shape_.v_stride, rows,
            values_finite_, s_.out, shape_.v_stride);
      }
    }
    normalise(chunk, queries, head, has_keys, has_state);
    write_rows<T>(call_.dtype, s_.out, shape_.v_stride, s_.scale,
                  queries.present, queries.real, call_.value_dim,
                  query_rows(call_.out, unit_, head, chunk.position),
                  call_.stream);
  }

  // scale_i = main_i / max(denominator_i, eps), and the denominators.
  void normalise(const Chunk<T>& chunk, const Slots& queries, int64_t head,
                 bool has_keys, bool has_state) {
    if (!call_.normalize) {
      std::copy_n(chunk.main, chunk.size, s_.scale);
      return;
    }
    const Tag<T> d;
    const T eps = static_cast<T>(call_.options.eps);
    T* denominator = static_cast<T*>(call_.denominator);
    const AttentionRow& row = unit_.row;
    for (int64_t i = 0; i < chunk.size; ++i) {
      if ((queries.present >> i & 1) == 0) continue;
      T sum = 0;
      if ((queries.real >> i & 1) != 0) {
        const T* q = s_.q + i * shape_.q_stride;
        Vec<T> lanes = hn::Zero(d);
        if (has_state) {
          if (call_.cosine) {
            lanes = dot_lanes(q, state_.sum(1 - chunk.main_part),
                              shape_.q_stride, lanes);
            lanes = hn::Mul(lanes, hn::Set(d, chunk.ratio[i]));
          }
          lanes =
              dot_lanes(q, state_.sum(chunk.main_part), shape_.q_stride, lanes);
        }
        if (has_keys) {
          const T* scores = s_.plain_scores + i * shape_.scores_stride;
          for (int64_t j = 0; j <= i; j += kLanes<T>) {
            lanes = hn::MulAdd(hn::Load(d, scores + j),
                               hn::LoadU(d, chunk.main + j), lanes);
          }
        }
        sum = chunk.main[i] * hn::GetLane(hn::SumOfLanes(d, lanes));
        // Adding 0 makes -0 a 0.
        sum += T{0};
      }
      s_.scale[i] = chunk.main[i] / (sum < eps ? eps : sum);
      if (denominator != nullptr) {
        const int64_t token = row.batch * call_.inputs.q.size[1] +
                              row.q_offset + chunk.position + i - row.q_start;
        denominator[token * call_.heads + head] = sum;
      }
    }
  }

  const LinearCall& call_;
  const Unit& unit_;
  ForwardScratch<T>& s_;
  const Shape& shape_;
  ForwardState<T> state_;
  int64_t packed_rows_ = 0;
  bool values_finite_ = true;
  Ahead ahead_;
};

// The functions of the pass.
template <typename T>
struct ForwardPass {
  static size_t state_bytes(const LinearCall& call) {
    return static_cast<size_t>(ForwardState<T>::elements(Shape::of<T>(call))) *
           sizeof(T);
  }
  static void load_state(const LinearCall& call, const Unit& unit,
                         void* memory) {
    zero_state<state_bytes>(call, memory);
    const ConstLinearStateView& given = call.inputs.state;
    if (given.kv_state == nullptr) return;
    const Shape shape = Shape::of<T>(call);
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
    const Shape shape = Shape::of<T>(call);
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
