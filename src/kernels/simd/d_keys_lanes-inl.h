// The gradients of keys and values (d_keys-inl.h) with a chunk's keys and
// values in the lanes (lanes-inl.h), for instruction sets of 16 of them.
//
// dv reads T as the forward reads its state. dk needs the other direction: rows
// of T are broadcast to the values, and a tile of 16 rows then runs through
// everything in registers: other state, times ratio, main state, pairs inside
// the chunk, the derivative, main; it is turned and written out. Its rows of T
// are updated right behind it, while they are in the first cache.
#if defined(COSFORMER_SRC_KERNELS_SIMD_D_KEYS_LANES_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_D_KEYS_LANES_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_D_KEYS_LANES_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_D_KEYS_LANES_INL_H_
#endif

#include "kernels/simd/backward-inl.h"
#include "kernels/simd/d_keys_scratch-inl.h"
#include "kernels/simd/lanes-inl.h"
#include "kernels/simd/panel-inl.h"
#include "kernels/simd/query_notes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

#if HWY_TARGET == HWY_AVX3
// Calls without rotary positions.
class DKeysInLanes {
 public:
  DKeysInLanes(const LinearCall& call, const Unit& unit, const void* state,
               void* scratch)
      : call_(call),
        unit_(unit),
        s_(*static_cast<DKeysScratch<float>*>(scratch)),
        shape_(s_.shape),
        state_(shape_, state) {}

  void add_queries(int64_t begin, int64_t end) {
    walk(begin, end, shape_.long_chunk, false, true, {}, [&](int64_t at) {
      chunk_ = s_.long_angles.chunk(begin, end, at);
      find_queries();
      if (queries_.real == 0) return;
      for (int64_t g = 0; g < call_.group; ++g) {
        pack_queries(unit_.head * call_.group + g);
        update_rows(0, shape_.rows);
        update_sums();
      }
    });
  }

  void read(int64_t begin, int64_t end) {
    walk(begin, end, shape_.long_chunk, true, false, {}, [&](int64_t at) {
      chunk_ = s_.long_angles.chunk(begin, end, at);
      find_keys();
      take({true, false, true, true, false});
    });
  }

  void attend(int64_t begin, int64_t end, const Next& next) {
    const bool given = call_.has_d_state_out();
    const bool alone =
        !given && !call_.wants_d_state() && is_alone(call_, unit_, begin, end);
    walk(begin, end, alone ? end - begin : shape_.chunk, true, true, next,
         [&](int64_t at) {
           chunk_ = alone ? s_.short_angles.alone(begin, end)
                          : s_.short_angles.chunk(begin, end, at);
           find_keys();
           find_queries();
           const bool later = given || at + chunk_.size < unit_.q_end();
           const bool keys_before =
               call_.wants_d_state() || at > unit_.row.kv_start;
           const bool asked = queries_.real != 0;
           for (int64_t g = 0; g < call_.group; ++g) {
             if (asked) pack_queries(unit_.head * call_.group + g);
             take({later, asked, g == 0, g + 1 == call_.group,
                   asked && keys_before});
           }
         });
  }

 private:
  static constexpr int64_t kLane = kGroup;
  // What the keys of a chunk learn from: the later queries (at a group's first
  // head) and the chunk's own; they are written at the last head.
  struct Turn {
    bool later, asked, first, last, updates;
  };

  template <class Take>
  void walk(int64_t begin, int64_t end, int64_t chunk, bool has_keys,
            bool has_queries, const Next& next, const Take& take) {
    if (begin >= end) return;
    rows_ = round_up(chunk, kGroup);
    s_.lay_out_lanes(call_, rows_);
    const int64_t tiles =
        (has_keys ? 2 * count_tiles<float>(chunk, shape_.v_stride) +
                        call_.parts * rows_ / kGroup * shape_.q_stride /
                            kGroup * (shape_.v_stride / kLane)
                  : 0) +
        (has_queries ? call_.group * call_.parts *
                           count_tiles<float>(shape_.rows, shape_.v_stride)
                     : 0);
    for (int64_t at = begin + (end - begin - 1) / chunk * chunk; at >= begin;
         at -= chunk) {
      const Target to = target_before(unit_, begin, at, chunk, next);
      ahead_.start(to.rows, tiles);
      if (has_keys) add_keys_ahead(ahead_, call_, to);
      if (has_queries) add_gradients_ahead<float>(ahead_, call_, to);
      take(at);
    }
  }

  void find_queries() {
    queries_ = query_slots(call_, unit_, chunk_.position, chunk_.size);
  }
  void find_keys() {
    keys_ = seen_key_slots(call_, unit_, chunk_.position, chunk_.size);
    if (keys_.real == 0) return;
    const int64_t rows = round_up(chunk_.size, kGroup);
    pack_across({nullptr, key_rows(call_.inputs.k, unit_, chunk_.position),
                 keys_.real, rows, call_.dim, s_.k_across, shape_.q_stride},
                call_.options.feature_map, call_.dtype);
    pack_across(
        {nullptr, key_rows(call_.inputs.v, unit_, chunk_.position), keys_.real,
         rows, call_.value_dim, s_.v_across, shape_.v_stride},
        FeatureMap::kIdentity, call_.dtype);
  }
  void pack_queries(int64_t head) {
    const int64_t rows = round_up(chunk_.size, 4);
    QueryRows<float>& queries = s_.queries[0];
    finite_ = pack_now(
        PackJob<float>{
            nullptr, query_rows(call_.inputs.q, unit_, head, chunk_.position),
            queries_.real, rows, call_.dim, queries.q, shape_.q_stride},
        call_.options.feature_map, call_.dtype);
    PackJob<float> job = gradient_job<float>(
        call_, unit_, head, chunk_, queries_, queries.scale, queries.r);
    job.main = chunk_.main;
    job.out = queries.g_main;
    job.other = queries.g_other;
    job.ratio = chunk_.ratio;
    job.stride = shape_.v_stride;
    finite_ = job.pack(job, 0, rows) && finite_;
    queries.finish(chunk_);
    if (call_.query_notes == nullptr) return;
    leave_notes<float>({call_, unit_, head, chunk_.position}, queries_.real,
                       chunk_.size, queries.scale, queries.r, queries.q,
                       shape_.q_stride);
  }

  void take(const Turn& turn) {
    const bool answers = keys_.real != 0;
    if (answers && turn.asked) score();
    if (answers && call_.dv.data != nullptr) answer_values(turn);
    const bool has_dk = answers && call_.dk.data != nullptr;
    if (has_dk) {
      answer_keys(turn);
    } else if (turn.updates) {
      update_rows(0, shape_.rows);
    }
    if (turn.updates) update_sums();
    if (!answers && turn.last) {
      write_scratch(call_.dv, s_.dv, shape_.v_stride);
      write_scratch(call_.dk, s_.dk, shape_.q_stride);
    }
  }

  void score() {
    const QueryRows<float>& queries = s_.queries[0];
    const auto score = [&](const float* across, const float* rows,
                           int64_t stride, const float* add, float* out) {
      const auto f = call_.cosine ? &score_across<true> : &score_across<false>;
      f(across, rows, stride, round_up(chunk_.size, 4), chunk_.ratio, add, out);
    };
    score(s_.k_across, queries.q, shape_.q_stride, nullptr, s_.key_scores);
    score(s_.v_across, queries.g_main, shape_.v_stride,
          call_.normalize ? queries.r_main : nullptr, s_.value_scores);
  }

  HWY_NOINLINE void answer_values(const Turn& turn) {
    const int64_t rows = round_up(chunk_.size, 4);
    const bool direct =
        turn.last &&
        direct_rows<float>(call_.dv, keys_, chunk_.size, shape_.v_stride);
    const Writer<float> writer =
        this->writer(direct, call_.dv, s_.dv, shape_.v_stride);
    const int main = chunk_.main_part;
    for_panels<float>(shape_.v_stride, [&](auto vectors, int64_t c0) HWY_ATTR {
      constexpr int kVectors = decltype(vectors)::value;
      constexpr int64_t kWidth = kVectors * kLane;
      const auto answer = [&](auto count, int64_t r) COSFORMER_LAMBDA {
        Tile<float, decltype(count)::value, kVectors> tile;
        if (turn.first) {
          tile.zero();
        } else {
          tile.load(s_.dv + r * shape_.v_stride + c0, shape_.v_stride);
        }
        if (turn.first && turn.later) {
          const float* k =
              s_.k_across + r / kGroup * kGroup * shape_.q_stride + r % kGroup;
          if (call_.cosine) {
            tile.template multiply<Along::kColumn>(
                k, kGroup, state_.part(1 - main).panel(c0), kWidth, call_.dim);
            ahead_.step();
            tile.scale_rows(chunk_.ratio + r);
          }
          tile.template multiply<Along::kColumn>(
              k, kGroup, state_.part(main).panel(c0), kWidth, call_.dim);
          ahead_.step();
        }
        if (turn.asked) {
          tile.template multiply<Along::kColumn>(
              s_.key_scores + r * kScoresStride + r, kScoresStride,
              s_.queries[0].g_main + r * shape_.v_stride + c0, shape_.v_stride,
              rows - r);
        }
        if (turn.last) tile.finish_rows(chunk_.main + r);
        writer.write(tile, r, c0);
      };
      if (HWY_LIKELY(finite_ || !turn.asked)) {
        for_row_tiles<kVectors>(rows, answer);
      } else {
        for (int64_t r = 0; r < rows; ++r)
          answer(std::integral_constant<int, 1>(), r);
      }
    });
    if (turn.last && !direct) write_scratch(call_.dv, s_.dv, shape_.v_stride);
  }

  HWY_NOINLINE void answer_keys(const Turn& turn) {
    const bool direct =
        turn.last && chunk_.size % kGroup == 0 &&
        direct_rows<float>(call_.dk, keys_, chunk_.size, shape_.q_stride);
    const Writer<float> writer =
        this->writer(direct, call_.dk, s_.dk, shape_.q_stride);
    for_across_tiles(shape_.rows, [&](auto count, int64_t f) COSFORMER_LAMBDA {
      constexpr int kRows = decltype(count)::value;
      for (int64_t g = 0; g < chunk_.size; g += kGroup) {
        AcrossTile<kRows> tile;
        add_up(turn, f, g, tile);
        if (turn.last) {
          write_tile(f, g, tile, writer);
        } else {
          tile.store(s_.dk_across + g * shape_.q_stride + f * kGroup);
        }
      }
      if (turn.updates) update_rows(f, kRows);
    });
    if (turn.last && !direct) write_scratch(call_.dk, s_.dk, shape_.q_stride);
  }
  // The sums of rows f ... of T and the keys of group g.
  template <int kRows>
  HWY_INLINE void add_up(const Turn& turn, int64_t f, int64_t g,
                         AcrossTile<kRows>& tile) {
    const int main = chunk_.main_part;
    if (!turn.first) {
      tile.load(s_.dk_across + g * shape_.q_stride + f * kGroup);
    } else if (turn.later) {
      const float* v = s_.v_across + g * shape_.v_stride;
      if (call_.cosine) {
        tile.fill(state_.sum(1 - main) + f);
        read_state(v, state_.part(1 - main), f, tile);
        tile.scale_add(chunk_.ratio + g, state_.sum(main) + f);
      } else {
        tile.fill(state_.sum(main) + f);
      }
      read_state(v, state_.part(main), f, tile);
    } else {
      tile.fill(nullptr);
    }
    if (!turn.asked) return;
    tile.add_pairs(s_.value_scores + g * kScoresStride + g,
                   s_.queries[0].q + g * shape_.q_stride + f, shape_.q_stride,
                   round_up(chunk_.size, 4) - g, finite_);
  }
  // tile += rows f ... of a part of T times the values.
  template <int kRows>
  HWY_INLINE void read_state(const float* HWY_RESTRICT v,
                             const Panels<float>& state, int64_t f,
                             AcrossTile<kRows>& tile) {
    const auto read = [&](auto vectors, int64_t c0) COSFORMER_LAMBDA {
      constexpr int64_t kWidth = decltype(vectors)::value * kLane;
      const float* HWY_RESTRICT rows = state.panel(c0) + f * kWidth;
      for (int64_t c = 0; c < kWidth; c += kLane) {
        tile.template multiply<kWidth>(v + (c0 + c) * kGroup, rows + c, kLane);
        ahead_.step();
      }
    };
    int64_t c0 = 0;
    for (; c0 + kPanel<float> <= state.columns; c0 += kPanel<float>)
      read(std::integral_constant<int, kMaxVectors>(), c0);
    if (c0 == state.columns) return;
    for_vectors<float>((state.columns - c0) / kLane,
                       [&](auto vectors)
                           COSFORMER_LAMBDA { read(vectors, c0); });
  }
  // A finished tile, turned. Features behind the tile's are zeros.
  template <int kRows>
  HWY_INLINE void write_tile(int64_t f, int64_t g, AcrossTile<kRows>& tile,
                             const Writer<float>& writer) {
    const Tag<float> d;
    const float* HWY_RESTRICT features =
        s_.k_across + g * shape_.q_stride + f * kGroup;
    const FeatureMap map = call_.options.feature_map;
    if (map != FeatureMap::kIdentity) {
      unroll<kRows>([&](auto r) COSFORMER_LAMBDA {
        tile.acc[r] = times_derivative<float>(
            map, hn::Load(d, features + r * kGroup), tile.acc[r]);
      });
    }
    const Vec<float> main = hn::LoadU(d, chunk_.main + g);
    Tile<float, static_cast<int>(kGroup), 1> rows;
    unroll<static_cast<int>(kGroup)>([&](auto r) COSFORMER_LAMBDA {
      if constexpr (r < kRows) {
        rows.acc[r] = hn::MulAdd(tile.acc[r], main, hn::Zero(d));
      } else {
        rows.acc[r] = hn::Zero(d);
      }
    });
    transpose_square(rows.acc);
    writer.write(rows, g, f);
  }

  void update_sums() {
    if (!call_.normalize) return;
    const QueryRows<float>& queries = s_.queries[0];
    const int main = chunk_.main_part;
    add_to_sums<float>(queries.q, shape_.q_stride, chunk_.size, queries.r_main,
                       chunk_.ratio, state_.sum(main),
                       call_.cosine ? state_.sum(1 - main) : nullptr);
  }
  // Rows f ... of both parts.
  HWY_NOINLINE void update_rows(int64_t f, int64_t rows) {
    const QueryRows<float>& queries = s_.queries[0];
    const int main = chunk_.main_part;
    for_panels<float>(shape_.v_stride, [&](auto vectors, int64_t c0) HWY_ATTR {
      constexpr int kVectors = decltype(vectors)::value;
      const auto update = [&](const float* g, int part) HWY_ATTR {
        update_panel<float, kVectors, kGroup>(
            queries.q + f, shape_.q_stride, g + c0, shape_.v_stride,
            chunk_.size, state_.part(part).panel(c0) + f * kVectors * kLane,
            rows, ahead_);
      };
      update(queries.g_main, main);
      if (call_.cosine) update(queries.g_other, 1 - main);
    });
  }

  Writer<float> writer(bool direct, const View4& view, float* packed,
                       int64_t stride) const {
    if (!direct) return Writer<float>::packed(packed, stride);
    Writer<float> writer = Writer<float>::direct(
        key_rows(view, unit_, chunk_.position), call_.stream);
    writer.columns = view.size[3];
    return writer;
  }
  void write_scratch(const View4& view, const float* rows, int64_t stride) {
    if (view.data == nullptr || keys_.present == 0) return;
    write_rows<float>(call_.dtype, rows, stride, s_.ones, keys_.present,
                      keys_.real, view.size[3],
                      key_rows(view, unit_, chunk_.position), call_.stream);
  }

  const LinearCall& call_;
  const Unit& unit_;
  DKeysScratch<float>& s_;
  const Shape& shape_;
  DKeysState<float> state_;
  // At hand.
  Chunk<float> chunk_{};
  Slots keys_, queries_;
  bool finite_ = true;
  int64_t rows_ = 0;
  Ahead ahead_;
};
#endif

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_D_KEYS_LANES_INL_H_
