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
#include "kernels/simd/panel-inl.h"
#include "kernels/simd/query_notes-inl.h"

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
      : shape(forward_shape<T>(call)),
        short_angles(call, shape.chunk,
                     carver.take(Angles<T>::size(call, shape.chunk))),
        long_angles(call, shape.long_chunk,
                    carver.take(Angles<T>::size(call, shape.long_chunk))) {
    Carver<T> counter(nullptr);
    place(call, std::max(shape.slots, kMaxChunk), counter);
    rows_memory =
        carver.take(static_cast<int64_t>(counter.bytes() / sizeof(T)));
    scores = carver.take(kScoresStride * kScoresStride);
    r = carver.take(kMaxChunk);
    scale = carver.take(kMaxChunk);
    ones = carver.take(kMaxChunk);
  }
  void start() {
    short_angles.start();
    long_angles.start();
    std::fill_n(scores, kScoresStride * kScoresStride, T{0});
    std::fill_n(r, kMaxChunk, T{0});
    std::fill_n(ones, kMaxChunk, T{1});
  }

  // For chunks of so many rows, without gaps (forward-inl.h).
  void place(const LinearCall& call, int64_t slots, Carver<T>& carver) {
    const int64_t qs = slots * shape.q_stride;
    const int64_t vs = slots * shape.v_stride;
    k_main = carver.take(qs);
    k_other = call.cosine ? carver.take(qs) : nullptr;
    plain_main = k_main;
    k = k_turned = dq_plain = nullptr;
    if (call.rotary) {
      k = carver.take(qs);
      k_turned = carver.take(qs);
      plain_main = carver.take(qs);
      dq_plain = carver.take(qs);
    }
    q = carver.take(qs);
    v = carver.take(vs);
    g = carver.take(vs);
    dq = carver.take(qs);
  }

  Shape shape;
  Angles<T> short_angles, long_angles;
  T* rows_memory;
  // [slots][q_stride]. plain: not turned (rotary).
  T *k, *k_turned, *k_main, *k_other, *plain_main, *q, *dq, *dq_plain;
  T *v, *g;   // [slots][v_stride]
  T* scores;  // rows of kScoresStride
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
          for_panels<T>(shape_.q_stride,
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
          look_at_queries(to);
        },
        [&](int64_t at) {
          const Chunk<T> chunk = s_.long_angles.chunk(begin, end, at);
          answer(chunk, query_slots(call_, unit_, at, chunk.size), false, true,
                 false);
        });
  }

  void attend(int64_t begin, int64_t end, const Next& next) {
    const bool given = call_.inputs.state.kv_state != nullptr;
    const bool alone = !given && is_alone(call_, unit_, begin, end);
    const int64_t size = alone ? end - begin : shape_.chunk;
    const int64_t tiles = read_tiles(size) + (alone ? 0 : update_tiles());
    walk_chunks(
        unit_, begin, end, place(size), next,
        [&](const Target& to) {
          ahead_.start(to.rows, tiles);
          add_keys_ahead(ahead_, call_, to);
          look_at_queries(to);
        },
        [&](int64_t at) {
          const Chunk<T> chunk = alone ? s_.short_angles.alone(begin, end)
                                       : s_.short_angles.chunk(begin, end, at);
          const Slots keys = key_slots(call_, unit_, at, chunk.size);
          const bool has_keys = keys.real != 0;
          if (has_keys) pack_keys(chunk, keys);
          answer(chunk, query_slots(call_, unit_, at, chunk.size), has_keys,
                 given || at > unit_.row.kv_start,
                 has_keys && at + chunk.size < unit_.q_end());
        });
  }

 private:
  int64_t place(int64_t chunk) {
    Carver<T> carver(s_.rows_memory);
    s_.place(call_, round_up(chunk, 4), carver);
    return chunk;
  }
  int64_t read_tiles(int64_t chunk) const {
    return call_.group * count_tiles<T>(chunk, shape_.q_stride);
  }
  int64_t update_tiles() const {
    return call_.parts * count_tiles<T>(shape_.value_rows, shape_.q_stride);
  }

  void pack_keys(const Chunk<T>& chunk, const Slots& keys) {
    const int64_t rows = round_up(chunk.size, 4);
    PackJob<T> k{
        nullptr,        key_rows(call_.inputs.k, unit_, chunk.position),
        keys.real,      rows,
        call_.dim,      s_.k_main,
        shape_.q_stride};
    if (call_.rotary) {
      k.out = s_.k;
    } else {
      k.factor = chunk.main;
      k.other = s_.k_other;
      k.ratio = chunk.ratio;
    }
    keys_finite_ = pack_now(k, call_.options.feature_map, call_.dtype);
    if (call_.rotary) {
      turn_rows<T>(call_, chunk, s_.k, rows, shape_.q_stride, s_.k_turned);
      scale_rows<T>(s_.k_turned, chunk.main, rows, shape_.q_stride, s_.k_main);
      if (call_.cosine)
        scale_rows<T>(s_.k_main, chunk.ratio, rows, shape_.q_stride,
                      s_.k_other);
      scale_rows<T>(s_.k, chunk.main, rows, shape_.q_stride, s_.plain_main);
    }
    pack_now(
        PackJob<T>{nullptr, key_rows(call_.inputs.v, unit_, chunk.position),
                   keys.real, rows, call_.value_dim, s_.v, shape_.v_stride},
        FeatureMap::kIdentity, call_.dtype);
  }

  template <int kVectors>
  HWY_INLINE void update(const Chunk<T>& chunk, int64_t c0) {
    const int main = chunk.main_part;
    update_panel<T, kVectors, kForwardDepth>(
        s_.v, shape_.v_stride, s_.k_main + c0, shape_.q_stride, chunk.size,
        state_.part(main).panel(c0), shape_.value_rows, ahead_);
    if (!call_.cosine) return;
    update_panel<T, kVectors, kForwardDepth>(
        s_.v, shape_.v_stride, s_.k_other + c0, shape_.q_stride, chunk.size,
        state_.part(1 - main).panel(c0), shape_.value_rows, ahead_);
  }
  void update_sums(const Chunk<T>& chunk) {
    const int main = chunk.main_part;
    add_to_sums<T>(s_.plain_main, shape_.q_stride, chunk.size, nullptr,
                   chunk.ratio, state_.sum(main),
                   call_.cosine ? state_.sum(1 - main) : nullptr);
  }

  void answer(const Chunk<T>& chunk, const Slots& queries, bool has_keys,
              bool has_state, bool updates) {
    const bool asked = queries.real != 0;
    const bool direct =
        asked && !call_.rotary &&
        direct_rows<T>(call_.dq, queries, chunk.size, shape_.q_stride);
    for (int64_t g = 0; g < call_.group; ++g) {
      const int64_t head = unit_.head * call_.group + g;
      const bool last = g + 1 == call_.group;
      const Rows to = query_rows(call_.dq, unit_, head, chunk.position);
      if (asked) prepare_queries(chunk, queries, head, has_keys);
      if (asked || (last && updates)) {
        const Reading<T> in = reading(chunk, asked, has_keys, has_state);
        Writer<T> writer = direct ? Writer<T>::direct(to, call_.stream)
                                  : Writer<T>::packed(s_.dq, shape_.q_stride);
        if (direct) writer.columns = call_.dim;
        read_and_update(chunk, head, in, writer, last && updates);
      }
      if (asked && call_.rotary) finish_turned(chunk, has_keys, has_state);
      if (queries.present != 0 && !direct) {
        write_rows<T>(call_.dtype, s_.dq, shape_.q_stride, s_.ones,
                      queries.present, queries.real, call_.dim, to,
                      call_.stream);
      }
    }
    if (updates) update_sums(chunk);
  }

  void look_at_queries(const Target& to) {
    if (!has_notes()) return add_gradients_ahead<T>(ahead_, call_, to);
    look_at_notes<T>(call_, to);
    add_queries_ahead(ahead_, call_, call_.d_out, to);
    if (reads_features()) add_queries_ahead(ahead_, call_, call_.inputs.q, to);
  }
  bool has_notes() const {
    return QueryNotes<T>::kPossible && call_.query_notes != nullptr;
  }
  QueryNotes<T> notes_of(int64_t head, const Chunk<T>& chunk) const {
    if (!has_notes()) return {};
    return {call_, unit_, head, chunk.position};
  }
  // Whether the derivative needs the features: notes of relu hold it.
  bool reads_features() const {
    return !has_notes() || call_.options.feature_map == FeatureMap::kElu1;
  }

  // g, r and the features of a head's queries, and their scores.
  void prepare_queries(const Chunk<T>& chunk, const Slots& queries,
                       int64_t head, bool has_keys) {
    const int64_t rows = round_up(chunk.size, 4);
    if (has_notes()) {
      take_notes(chunk, queries, head);
    } else {
      PackJob<T> job =
          gradient_job<T>(call_, unit_, head, chunk, queries, s_.scale, s_.r);
      job.out = s_.g;
      job.stride = shape_.v_stride;
      job.pack(job, 0, rows);
    }
    if (reads_features()) {
      pack_now(
          PackJob<T>{nullptr,
                     query_rows(call_.inputs.q, unit_, head, chunk.position),
                     queries.real, rows, call_.dim, s_.q, shape_.q_stride},
          call_.options.feature_map, call_.dtype);
    }
    if (!has_keys) return;
    triangle_dots<T, Triangle::kLower>(
        s_.g, shape_.v_stride, s_.v, shape_.v_stride, rows, shape_.v_stride,
        chunk.ratio, call_.cosine,
        call_.normalize && !call_.rotary ? s_.r : nullptr, s_.scores);
  }

  // g and r as the pass of dk and dv had them.
  void take_notes(const Chunk<T>& chunk, const Slots& queries, int64_t head) {
    const int64_t rows = round_up(chunk.size, 4);
    const QueryNotes<T> notes = notes_of(head, chunk);
    PackJob<T> job{
        nullptr,         query_rows(call_.d_out, unit_, head, chunk.position),
        queries.real,    rows,
        call_.value_dim, s_.g,
        shape_.v_stride};
    job.factor = notes.scale;
    pack_now(job, FeatureMap::kIdentity, call_.dtype);
    for (int64_t i = 0; i < rows; ++i)
      s_.r[i] = (queries.real >> i & 1) != 0 ? notes.r[i] : T{0};
  }

  Reading<T> reading(const Chunk<T>& chunk, bool asked, bool has_keys,
                     bool has_state) const {
    const int main = chunk.main_part;
    Reading<T> in;
    in.x = s_.g;
    in.x_stride = shape_.v_stride;
    in.rows = asked ? round_up(chunk.size, 4) : 0;
    in.depth = call_.value_dim;
    in.ratio = chunk.ratio;
    if (has_state) {
      in.main = state_.part(main);
      if (call_.cosine) in.other = state_.part(1 - main);
      // With rotary, r belongs to the plain features.
      if (call_.normalize && !call_.rotary) weigh_sums(chunk, in);
    }
    if (has_keys) {
      in.scores = s_.scores;
      in.y = s_.k_main;
      in.y_stride = shape_.q_stride;
      in.finite = keys_finite_;
    }
    return in;
  }
  void weigh_sums(const Chunk<T>& chunk, Reading<T>& in) const {
    in.weight = s_.r;
    in.sum_main = state_.sum(chunk.main_part);
    if (call_.cosine) in.sum_other = state_.sum(1 - chunk.main_part);
  }

  HWY_NOINLINE void read_and_update(const Chunk<T>& chunk, int64_t head,
                                    const Reading<T>& in,
                                    const Writer<T>& writer, bool updates) {
    const T* main = chunk.main;
    const FeatureMap map = call_.options.feature_map;
    const bool turned = call_.rotary;
    const auto notes = notes_of(head, chunk);
    for_panels<T>(shape_.q_stride, [&](auto vectors, int64_t c0) HWY_ATTR {
      constexpr int kVectors = decltype(vectors)::value;
      read_panel<T, kVectors, Triangle::kLower>(
          in, c0, ahead_, [&](auto& tile, int64_t r) COSFORMER_LAMBDA {
            tile.finish_rows(main + r);
            if (QueryNotes<T>::kPossible && notes.bits != nullptr) {
              times_bits(notes, r, c0, tile);
            } else if (!turned) {
              times_derivative(map, s_.q + r * shape_.q_stride + c0,
                               shape_.q_stride, tile);
            }
            writer.write(tile, r, c0);
          });
      if (updates) update<kVectors>(chunk, c0);
    });
  }

  // Rotary: dq is turned back; what r gives belongs to the plain features.
  void finish_turned(const Chunk<T>& chunk, bool has_keys, bool has_state) {
    const int64_t rows = round_up(chunk.size, 4);
    Reading<T> in;
    if (call_.normalize) {
      in = reading(chunk, true, has_keys, has_state);
      in.depth = 0;
      if (has_state) weigh_sums(chunk, in);
      in.y = s_.plain_main;
      if (has_keys) {
        triangle_dots<T, Triangle::kLower>(
            s_.g, shape_.v_stride, s_.v, shape_.v_stride, rows, 0, chunk.ratio,
            call_.cosine, s_.r, s_.scores);
      }
    }
    in.rows = rows;
    const T* main = chunk.main;
    for_panels<T>(shape_.q_stride, [&](auto vectors, int64_t c0) HWY_ATTR {
      read_panel<T, decltype(vectors)::value, Triangle::kLower>(
          in, c0, ahead_, [&](auto& tile, int64_t r) COSFORMER_LAMBDA {
            tile.finish_rows(main + r);
            tile.store(s_.dq_plain + r * shape_.q_stride + c0, shape_.q_stride);
          });
    });
    finish_gradient<T>(call_, chunk, s_.dq, s_.dq_plain, s_.q, shape_.q_stride);
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
    return static_cast<size_t>(
               DQueriesState<T>::elements(forward_shape<T>(call))) *
           sizeof(T);
  }
  static void load_state(const LinearCall& call, const Unit& unit,
                         void* memory) {
    zero_state<state_bytes>(call, memory);
    const ConstLinearStateView& given = call.inputs.state;
    if (given.kv_state == nullptr) return;
    const Shape shape = forward_shape<T>(call);
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
            &attend,
            kBackwardBlock};
  }
};

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_D_QUERIES_INL_H_
