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
// dk reads T along its rows, so T is transposed once a chunk: that costs as
// much as a few tokens' products, and is the reason for longer chunks than in
// the other passes.
#if defined(COSFORMER_SRC_KERNELS_SIMD_D_KEYS_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_D_KEYS_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_D_KEYS_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_D_KEYS_INL_H_
#endif

#include "kernels/simd/backward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

// As the forward's state: T for S, u for the sums.
template <typename T>
struct DKeysState {
  DKeysState(const Shape& s, const void* memory)
      : data(static_cast<T*>(const_cast<void*>(memory))), shape(s) {}
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

template <typename T>
struct DKeysScratch {
  DKeysScratch(const LinearCall& call, Carver<T>& carver)
      : shape(Shape::of<T>(call)),
        short_angles(call, shape.chunk,
                     carver.take(Angles<T>::size(call, shape.chunk))),
        long_angles(call, shape.long_chunk,
                    carver.take(Angles<T>::size(call, shape.long_chunk))) {
    const int64_t qs = shape.slots * shape.q_stride;
    const int64_t vs = shape.slots * shape.v_stride;
    k_turned = k = carver.take(qs);
    q_turned = q = carver.take(qs);
    dk = carver.take(qs);
    dk_plain = nullptr;
    if (call.rotary) {
      k_turned = carver.take(qs);
      q_turned = carver.take(qs);
      dk_plain = carver.take(qs);
    }
    v = carver.take(vs);
    d_out = carver.take(vs);
    out = carver.take(vs);
    g_main = carver.take(vs);
    g_other = call.cosine ? carver.take(vs) : g_main;
    dv = carver.take(vs);
    across_queries = carver.take(shape.rows * shape.scores_stride);
    across_gradients = carver.take(shape.value_rows * shape.scores_stride);
    scores = carver.take(shape.slots * shape.scores_stride);
    for (int p = 0; p < call.parts; ++p)
      state_across[p] = carver.take(shape.v_stride * shape.q_stride);
    r_main = carver.take(kMaxChunk);
    r_other = carver.take(kMaxChunk);
    scale = carver.take(kMaxChunk);
  }
  void start() {
    short_angles.start();
    long_angles.start();
    for (T* r : {r_main, r_other}) std::fill_n(r, kMaxChunk, T{0});
  }

  Shape shape;
  Angles<T> short_angles, long_angles;
  T *k, *k_turned, *q, *q_turned, *dk, *dk_plain;  // [slots][q_stride]
  T *v, *d_out, *out, *g_main, *g_other, *dv;      // [slots][v_stride]
  T *across_queries, *across_gradients, *scores;   // [...][scores_stride]
  T* state_across[2];  // T transposed: panels of v_stride rows
  T *r_main, *r_other, *scale;
};

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
    for (int64_t at = begin; at < end; at += shape_.long_chunk) {
      const int64_t size = std::min(shape_.long_chunk, end - at);
      const Slots queries = query_slots(call_, unit_, at, size);
      if (queries.real == 0) continue;
      const Chunk<T> chunk = s_.long_angles.chunk(begin, end, at);
      for (int64_t g = 0; g < call_.group; ++g) {
        pack_queries(chunk, queries, unit_.head * call_.group + g);
        update(chunk);
      }
    }
  }

  void read(int64_t begin, int64_t end) {
    cross_state();
    for (int64_t at = begin; at < end; at += shape_.long_chunk) {
      const int64_t size = std::min(shape_.long_chunk, end - at);
      const Chunk<T> chunk = s_.long_angles.chunk(begin, end, at);
      const Slots keys = seen_key_slots(call_, unit_, at, size);
      if (keys.real != 0) {
        pack_keys(chunk, keys);
        read_later(chunk, true);
      }
      write(chunk, keys);
    }
  }

  void attend(int64_t begin, int64_t end, const Next& next) {
    const bool given = call_.has_d_state_out();
    for (int64_t at = begin + (end - begin - 1) / shape_.chunk * shape_.chunk;
         at >= begin; at -= shape_.chunk) {
      const int64_t size = std::min(shape_.chunk, end - at);
      const Chunk<T> chunk = s_.short_angles.chunk(begin, end, at);
      const Slots keys = seen_key_slots(call_, unit_, at, size);
      const Slots queries = query_slots(call_, unit_, at, size);
      look_ahead(target_before(unit_, begin, at, shape_.chunk, next));
      if (keys.real != 0) {
        const bool has_later = given || at + size < unit_.q_end();
        pack_keys(chunk, keys);
        if (has_later) cross_state();
        read_later(chunk, has_later);
      }
      if (queries.real != 0) {
        const bool keys_before =
            call_.wants_d_state() || at > unit_.row.kv_start;
        for (int64_t g = 0; g < call_.group; ++g) {
          pack_queries(chunk, queries, unit_.head * call_.group + g);
          if (keys.real != 0) add_inside(chunk);
          if (keys_before) update(chunk);
        }
      }
      write(chunk, keys);
    }
  }

 private:
  void look_ahead(const Target& to) {
    ahead_.start(to.rows, count_tiles<T>(shape_.chunk, shape_.v_stride) +
                              count_tiles<T>(shape_.chunk, shape_.q_stride) +
                              call_.group * call_.parts *
                                  count_tiles<T>(shape_.rows, shape_.v_stride));
    add_keys_ahead(ahead_, call_, to);
    add_gradients_ahead<T>(ahead_, call_, to);
  }

  Panels<T> across(int64_t p) const {
    return {s_.state_across[p], shape_.v_stride, shape_.q_stride};
  }
  void cross_state() {
    for (int p = 0; p < call_.parts; ++p)
      transpose_panels<T>(state_.part(p), across(p));
  }

  void pack_keys(const Chunk<T>& chunk, const Slots& keys) {
    const int64_t rows = round_up(chunk.size, 4);
    pack_rows<T>(call_.options.feature_map, call_.dtype,
                 key_rows(call_.inputs.k, unit_, chunk.position), keys.real,
                 rows, call_.dim, s_.k, shape_.q_stride);
    if (call_.rotary)
      turn_rows<T>(call_, chunk, s_.k, rows, shape_.q_stride, s_.k_turned);
    pack_rows<T>(FeatureMap::kIdentity, call_.dtype,
                 key_rows(call_.inputs.v, unit_, chunk.position), keys.real,
                 rows, call_.value_dim, s_.v, shape_.v_stride);
  }

  // What the later chunks say.
  void read_later(const Chunk<T>& chunk, bool has_later) {
    const int64_t rows = round_up(chunk.size, 4);
    const int64_t q_size = rows * shape_.q_stride;
    T* plain = s_.dk;
    if (call_.rotary) {
      plain = s_.dk_plain;
      std::fill_n(plain, q_size, T{0});
    }
    if (!has_later) {
      std::fill_n(s_.dk, q_size, T{0});
      std::fill_n(s_.dv, rows * shape_.v_stride, T{0});
      return;
    }
    const int main = chunk.main_part;
    const Panels<T> none{nullptr, 0, 0};
    read_state<T>(s_.k_turned, shape_.q_stride, rows, call_.dim, chunk.ratio,
                  state_.part(main),
                  call_.cosine ? state_.part(1 - main) : none, s_.dv,
                  shape_.v_stride, ahead_);
    read_state<T>(s_.v, shape_.v_stride, rows, call_.value_dim, chunk.ratio,
                  across(main), call_.cosine ? across(1 - main) : none, s_.dk,
                  shape_.q_stride, ahead_);
    add_sums<T>(state_.sum(main), call_.cosine ? state_.sum(1 - main) : nullptr,
                chunk.ratio, nullptr, rows, shape_.q_stride, plain);
  }

  void pack_queries(const Chunk<T>& chunk, const Slots& queries, int64_t head) {
    const int64_t rows = round_up(chunk.size, 4);
    queries_finite_ =
        pack_rows<T>(call_.options.feature_map, call_.dtype,
                     query_rows(call_.inputs.q, unit_, head, chunk.position),
                     queries.real, rows, call_.dim, s_.q, shape_.q_stride);
    if (call_.rotary)
      turn_rows<T>(call_, chunk, s_.q, rows, shape_.q_stride, s_.q_turned);
    gradients_finite_ = pack_output_gradients<T>(
        call_, unit_, head, chunk, queries, chunk.main, s_.d_out, s_.out,
        s_.scale, s_.g_main, shape_.v_stride, s_.r_main);
    if (call_.cosine) {
      scale_rows<T>(s_.g_main, chunk.ratio, rows, shape_.v_stride, s_.g_other);
      for (int64_t i = 0; i < chunk.size; ++i)
        s_.r_other[i] = s_.r_main[i] * chunk.ratio[i];
    }
  }

  // What the queries of this chunk say.
  void add_inside(const Chunk<T>& chunk) {
    const int64_t rows = round_up(chunk.size, 4);
    transpose<T>(s_.q_turned, shape_.q_stride, rows, call_.dim,
                 s_.across_queries, shape_.scores_stride);
    transpose<T>(s_.g_main, shape_.v_stride, rows, call_.value_dim,
                 s_.across_gradients, shape_.scores_stride);
    triangle_scores<T, Triangle::kUpper>(
        s_.k_turned, shape_.q_stride, s_.across_queries, shape_.scores_stride,
        rows, call_.dim, chunk.ratio, call_.cosine, nullptr, s_.scores,
        shape_.scores_stride);
    add_triangle_product<T, Triangle::kUpper>(
        s_.scores, shape_.scores_stride, s_.g_main, shape_.v_stride, rows,
        gradients_finite_, s_.dv, shape_.v_stride);
    triangle_scores<T, Triangle::kUpper>(
        s_.v, shape_.v_stride, s_.across_gradients, shape_.scores_stride, rows,
        call_.value_dim, chunk.ratio, call_.cosine,
        call_.normalize && !call_.rotary ? s_.r_main : nullptr, s_.scores,
        shape_.scores_stride);
    add_triangle_product<T, Triangle::kUpper>(
        s_.scores, shape_.scores_stride, s_.q_turned, shape_.q_stride, rows,
        queries_finite_, s_.dk, shape_.q_stride);
    if (!call_.rotary || !call_.normalize) return;
    triangle_scores<T, Triangle::kUpper>(
        s_.v, shape_.v_stride, s_.across_gradients, shape_.scores_stride, rows,
        0, chunk.ratio, call_.cosine, s_.r_main, s_.scores,
        shape_.scores_stride);
    add_triangle_product<T, Triangle::kUpper>(
        s_.scores, shape_.scores_stride, s_.q, shape_.q_stride, rows,
        queries_finite_, s_.dk_plain, shape_.q_stride);
  }

  void update(const Chunk<T>& chunk) {
    const int main = chunk.main_part;
    add_outer_products<T>(s_.q_turned, shape_.q_stride, s_.g_main,
                          shape_.v_stride, chunk.size, state_.part(main),
                          ahead_);
    if (call_.cosine) {
      add_outer_products<T>(s_.q_turned, shape_.q_stride, s_.g_other,
                            shape_.v_stride, chunk.size, state_.part(1 - main),
                            ahead_);
    }
    if (!call_.normalize) return;
    add_weighted_rows<T>(s_.q, shape_.q_stride, s_.r_main, chunk.size,
                         state_.sum(main));
    if (call_.cosine) {
      add_weighted_rows<T>(s_.q, shape_.q_stride, s_.r_other, chunk.size,
                           state_.sum(1 - main));
    }
  }

  void write(const Chunk<T>& chunk, const Slots& keys) {
    if (keys.present == 0) return;
    if (call_.dv.data != nullptr) {
      write_rows<T>(call_.dtype, s_.dv, shape_.v_stride, chunk.main,
                    keys.present, keys.real, call_.value_dim,
                    key_rows(call_.dv, unit_, chunk.position), call_.stream);
    }
    if (call_.dk.data == nullptr) return;
    if (keys.real != 0) {
      finish_gradient<T>(call_, chunk, s_.dk, s_.dk_plain, s_.k,
                         shape_.q_stride);
    }
    write_rows<T>(call_.dtype, s_.dk, shape_.q_stride, chunk.main, keys.present,
                  keys.real, call_.dim,
                  key_rows(call_.dk, unit_, chunk.position), call_.stream);
  }

  const LinearCall& call_;
  const Unit& unit_;
  DKeysScratch<T>& s_;
  const Shape& shape_;
  DKeysState<T> state_;
  bool queries_finite_ = true, gradients_finite_ = true;
  Ahead ahead_;
};

template <typename T>
struct DKeysPass {
  static size_t state_bytes(const LinearCall& call) {
    return static_cast<size_t>(DKeysState<T>::elements(Shape::of<T>(call))) *
           sizeof(T);
  }
  static void load_state(const LinearCall& call, const Unit& unit,
                         void* memory) {
    zero_state<state_bytes>(call, memory);
    const Shape shape = Shape::of<T>(call);
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
    const Shape shape = Shape::of<T>(call);
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
    DKeys<T>(call, unit, state, scratch).add_queries(begin, end);
  }
  static void read(const LinearCall& call, const Unit& unit, int64_t begin,
                   int64_t end, const void* state, void* scratch) {
    DKeys<T>(call, unit, state, scratch).read(begin, end);
    hwy::FlushStream();
  }
  static void attend(const LinearCall& call, const Unit& unit, int64_t begin,
                     int64_t end, const Next& next, void* state,
                     void* scratch) {
    DKeys<T>(call, unit, state, scratch).attend(begin, end, next);
    hwy::FlushStream();
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
            &attend};
  }
};

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_D_KEYS_INL_H_
