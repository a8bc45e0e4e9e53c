// The gradients of the queries: the forward walk with the gradients of the
// outputs as queries, the values as keys and the keys as values.
//
//   A_ij = (g_i . v_j + r_i)(1 + ratio_i ratio_j)            j <= i, this chunk
//   dq_i = phi'(q_i) main_i (g_i S_main + ratio_i g_i S_other
//            + r_i (z_main + ratio_i z_other) + sum_j A_ij main_j k_j)
//   S_main += sum_j v_j (main_j k_j)^T,  z_main += sum_j main_j k_j,  ...
//
// S is built again, transposed: keeping the forward's at every block would cost
// more memory traffic than the products.
#if defined(COSFORMER_SRC_KERNELS_SIMD_D_QUERIES_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_D_QUERIES_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_D_QUERIES_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_D_QUERIES_INL_H_
#endif

#include "kernels/simd/backward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

template <typename T>
struct DQueriesState {
  DQueriesState(const Shape& s, const void* memory)
      : data(static_cast<T*>(const_cast<void*>(memory))), shape(s) {}
  static int64_t elements(const Shape& s) {
    return s.parts * (s.value_rows + 1) * s.q_stride;
  }
  Panels<T> part(int64_t p) const {
    return {data + p * shape.value_rows * shape.q_stride, shape.value_rows,
            shape.q_stride};
  }
  T* sum(int64_t p) const {
    return data + (shape.parts * shape.value_rows + p) * shape.q_stride;
  }

  T* data;
  const Shape& shape;
};

template <typename T>
struct DQueriesScratch {
  DQueriesScratch(const LinearCall& call, Carver<T>& carver)
      : shape(Shape::of<T>(call)),
        short_angles(call, shape.chunk,
                     carver.take(Angles<T>::size(call, shape.chunk))),
        long_angles(call, shape.long_chunk,
                    carver.take(Angles<T>::size(call, shape.long_chunk))) {
    const int64_t qs = shape.slots * shape.q_stride;
    const int64_t vs = shape.slots * shape.v_stride;
    k_turned = k = carver.take(qs);
    if (call.rotary) k_turned = carver.take(qs);
    k_main = carver.take(qs);
    k_other = call.cosine ? carver.take(qs) : k_turned;
    plain_main = call.rotary ? carver.take(qs) : k_main;
    q = carver.take(qs);
    dq = carver.take(qs);
    dq_plain = call.rotary ? carver.take(qs) : nullptr;
    v = carver.take(vs);
    across_values = carver.take(shape.value_rows * shape.scores_stride);
    d_out = carver.take(vs);
    out = carver.take(vs);
    g = carver.take(vs);
    scores = carver.take(shape.slots * shape.scores_stride);
    r = carver.take(kMaxChunk);
    scale = carver.take(kMaxChunk);
    ones = carver.take(kMaxChunk);
  }
  void start() {
    short_angles.start();
    long_angles.start();
    std::fill_n(ones, kMaxChunk, T{1});
  }

  Shape shape;
  Angles<T> short_angles, long_angles;
  // [slots][q_stride]
  T *k, *k_turned, *k_main, *k_other, *plain_main, *q, *dq, *dq_plain;
  T *v, *d_out, *out, *g;  // [slots][v_stride]
  T* across_values;        // [value_rows][scores_stride]
  T* scores;
  T *r, *scale, *ones;
};

template <typename T>
class DQueries {
 public:
  DQueries(const LinearCall& call, const Unit& unit, const void* state,
           void* scratch)
      : call_(call),
        unit_(unit),
        s_(*static_cast<DQueriesScratch<T>*>(scratch)),
        shape_(s_.shape),
        state_(shape_, state) {}

  void add_keys(int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at += shape_.long_chunk) {
      const int64_t size = std::min(shape_.long_chunk, end - at);
      const Chunk<T> chunk = s_.long_angles.chunk(begin, end, at);
      const Slots keys = key_slots(call_, unit_, at, size);
      if (keys.real == 0) continue;
      pack_keys(chunk, keys);
      update(chunk);
    }
  }

  void read(int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at += shape_.long_chunk) {
      const int64_t size = std::min(shape_.long_chunk, end - at);
      answer(s_.long_angles.chunk(begin, end, at),
             query_slots(call_, unit_, at, size), false, true);
    }
  }

  void attend(int64_t begin, int64_t end, const Next& next) {
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
        if (queries.real != 0) {
          transpose<T>(s_.v, shape_.v_stride, round_up(size, 4),
                       call_.value_dim, s_.across_values, shape_.scores_stride);
        }
      }
      answer(chunk, queries, has_keys, given || at > unit_.row.kv_start);
      if (has_keys && at + size < unit_.q_end()) update(chunk);
    }
  }

 private:
  void look_ahead(const Target& to) {
    ahead_.start(
        to.rows,
        call_.group * count_tiles<T>(shape_.chunk, shape_.q_stride) +
            call_.parts * count_tiles<T>(shape_.value_rows, shape_.q_stride));
    add_keys_ahead(ahead_, call_, to);
    add_gradients_ahead<T>(ahead_, call_, to);
  }

  void pack_keys(const Chunk<T>& chunk, const Slots& keys) {
    const int64_t rows = round_up(chunk.size, 4);
    keys_finite_ =
        pack_rows<T>(call_.options.feature_map, call_.dtype,
                     key_rows(call_.inputs.k, unit_, chunk.position), keys.real,
                     rows, call_.dim, s_.k, shape_.q_stride);
    if (call_.rotary)
      turn_rows<T>(call_, chunk, s_.k, rows, shape_.q_stride, s_.k_turned);
    scale_rows<T>(s_.k_turned, chunk.main, rows, shape_.q_stride, s_.k_main);
    if (call_.cosine) {
      scale_rows<T>(s_.k_main, chunk.ratio, rows, shape_.q_stride, s_.k_other);
    }
    if (call_.rotary)
      scale_rows<T>(s_.k, chunk.main, rows, shape_.q_stride, s_.plain_main);
    pack_rows<T>(FeatureMap::kIdentity, call_.dtype,
                 key_rows(call_.inputs.v, unit_, chunk.position), keys.real,
                 rows, call_.value_dim, s_.v, shape_.v_stride);
  }

  void update(const Chunk<T>& chunk) {
    const int main = chunk.main_part;
    add_outer_products<T>(s_.v, shape_.v_stride, s_.k_main, shape_.q_stride,
                          chunk.size, state_.part(main), ahead_);
    add_weighted_rows<T>(s_.plain_main, shape_.q_stride, s_.ones, chunk.size,
                         state_.sum(main));
    if (!call_.cosine) return;
    add_outer_products<T>(s_.v, shape_.v_stride, s_.k_other, shape_.q_stride,
                          chunk.size, state_.part(1 - main), ahead_);
    add_weighted_rows<T>(s_.plain_main, shape_.q_stride, chunk.ratio,
                         chunk.size, state_.sum(1 - main));
  }

  void answer(const Chunk<T>& chunk, const Slots& queries, bool has_keys,
              bool has_state) {
    if (queries.present == 0) return;
    for (int64_t g = 0; g < call_.group; ++g) {
      const int64_t head = unit_.head * call_.group + g;
      if (queries.real != 0)
        answer_head(chunk, queries, head, has_keys, has_state);
      write_rows<T>(call_.dtype, s_.dq, shape_.q_stride, chunk.main,
                    queries.present, queries.real, call_.dim,
                    query_rows(call_.dq, unit_, head, chunk.position),
                    call_.stream);
    }
  }

  void answer_head(const Chunk<T>& chunk, const Slots& queries, int64_t head,
                   bool has_keys, bool has_state) {
    const int64_t rows = round_up(chunk.size, 4);
    const int64_t q_size = rows * shape_.q_stride;
    pack_output_gradients<T>(call_, unit_, head, chunk, queries, s_.ones,
                             s_.d_out, s_.out, s_.scale, s_.g, shape_.v_stride,
                             s_.r);
    // With rotary, r belongs to the plain features.
    T* plain = s_.dq;
    if (call_.rotary) {
      plain = s_.dq_plain;
      std::fill_n(plain, q_size, T{0});
    }
    if (has_state) {
      const int main = chunk.main_part;
      const Panels<T> none{nullptr, 0, 0};
      read_state<T>(s_.g, shape_.v_stride, rows, call_.value_dim, chunk.ratio,
                    state_.part(main),
                    call_.cosine ? state_.part(1 - main) : none, s_.dq,
                    shape_.q_stride, ahead_);
      if (call_.normalize) {
        add_sums<T>(state_.sum(main),
                    call_.cosine ? state_.sum(1 - main) : nullptr, chunk.ratio,
                    s_.r, rows, shape_.q_stride, plain);
      }
    } else {
      std::fill_n(s_.dq, q_size, T{0});
    }
    if (has_keys) {
      triangle_scores<T, Triangle::kLower>(
          s_.g, shape_.v_stride, s_.across_values, shape_.scores_stride, rows,
          call_.value_dim, chunk.ratio, call_.cosine,
          call_.normalize && !call_.rotary ? s_.r : nullptr, s_.scores,
          shape_.scores_stride);
      add_triangle_product<T, Triangle::kLower>(
          s_.scores, shape_.scores_stride, s_.k_main, shape_.q_stride, rows,
          keys_finite_, s_.dq, shape_.q_stride);
      if (call_.rotary && call_.normalize) {
        triangle_scores<T, Triangle::kLower>(
            s_.g, shape_.v_stride, s_.across_values, shape_.scores_stride, rows,
            0, chunk.ratio, call_.cosine, s_.r, s_.scores,
            shape_.scores_stride);
        add_triangle_product<T, Triangle::kLower>(
            s_.scores, shape_.scores_stride, s_.plain_main, shape_.q_stride,
            rows, keys_finite_, plain, shape_.q_stride);
      }
    }
    pack_rows<T>(call_.options.feature_map, call_.dtype,
                 query_rows(call_.inputs.q, unit_, head, chunk.position),
                 queries.real, rows, call_.dim, s_.q, shape_.q_stride);
    finish_gradient<T>(call_, chunk, s_.dq, call_.rotary ? plain : nullptr,
                       s_.q, shape_.q_stride);
  }

  const LinearCall& call_;
  const Unit& unit_;
  DQueriesScratch<T>& s_;
  const Shape& shape_;
  DQueriesState<T> state_;
  bool keys_finite_ = true;
  Ahead ahead_;
};

template <typename T>
struct DQueriesPass {
  static size_t state_bytes(const LinearCall& call) {
    return static_cast<size_t>(DQueriesState<T>::elements(Shape::of<T>(call))) *
           sizeof(T);
  }
  static void load_state(const LinearCall& call, const Unit& unit,
                         void* memory) {
    zero_state<state_bytes>(call, memory);
    const ConstLinearStateView& given = call.inputs.state;
    if (given.kv_state == nullptr) return;
    const Shape shape = Shape::of<T>(call);
    const DQueriesState<T> state(shape, memory);
    const T* kv =
        static_cast<const T*>(given.kv_state) + call.kv_state_at(unit);
    const T* sum = static_cast<const T*>(given.k_sum) + call.k_sum_at(unit);
    for (int p = 0; p < call.parts; ++p) {
      load_panels_across<T>(kv + p * call.dim * call.value_dim, call.dim,
                            call.value_dim, state.part(p));
      std::copy_n(sum + p * call.dim, call.dim, state.sum(p));
    }
  }
  static void store_state(const LinearCall&, const Unit&, const void*) {}
  static void accumulate(const LinearCall& call, const Unit& unit,
                         int64_t begin, int64_t end, void* state,
                         void* scratch) {
    DQueries<T>(call, unit, state, scratch).add_keys(begin, end);
  }
  static void read(const LinearCall& call, const Unit& unit, int64_t begin,
                   int64_t end, const void* state, void* scratch) {
    DQueries<T>(call, unit, state, scratch).read(begin, end);
    hwy::FlushStream();
  }
  static void attend(const LinearCall& call, const Unit& unit, int64_t begin,
                     int64_t end, const Next& next, void* state,
                     void* scratch) {
    DQueries<T>(call, unit, state, scratch).attend(begin, end, next);
    hwy::FlushStream();
  }
  static constexpr Pass make() {
    return {false,
            &state_bytes,
            &scratch_bytes<T, DQueriesScratch<T>>,
            &init_scratch<T, DQueriesScratch<T>>,
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

#endif  // COSFORMER_SRC_KERNELS_SIMD_D_QUERIES_INL_H_
