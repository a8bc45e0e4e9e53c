// The forward of the softmax engine with AMX tiles (amx.h), for queries, keys
// and values of at most 24 bits, over the same plan and by the same rules as
// softmax_forward-inl.h: rows have a reference instead of a running maximum,
// raised where a row's weights in a tile sum to more than 2^30.
//
// A cell is 32 queries x a tile of 64 keys, whose scores take four registers
// twice. Scores go through memory, since tiles and vectors have no registers in
// common; the weights that come of them are split into terms, and multiplied
// with values, which were split when they were packed. What a block of queries
// has so far is kept in memory, too: each cell loads it and adds to it.
//
// Products of tiles run beside the vectors' work, if both are near enough in
// the program to be seen together: while one cell is scored and another one's
// values are added, the rows of a third one, between them, become weights.
//
// Numbers that cannot be split (infinities, NaN) are "strange": a sum of terms
// would make NaN of infinity times nothing. Rows that see a strange key, or are
// strange, have those scores anew, and their products with strange values, by
// plain multiply-adds; no bit of the other rows' results depends on it.
#if defined(COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_AMX_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_AMX_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_AMX_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_AMX_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numbers>

#include "kernels/simd/chunk-inl.h"
#include "kernels/simd/exp-inl.h"
#include "kernels/simd/softmax_amx_pack-inl.h"
#include "kernels/simd/softmax_amx_tile-inl.h"
#include "kernels/simd/softmax_bias-inl.h"
#include "kernels/simd/softmax_dropout-inl.h"
#include "kernels/simd/softmax_pack-inl.h"
#include "kernels/simd/softmax_packed-inl.h"
#include "kernels/simd/softmax_pass.h"
#include "kernels/simd/softmax_rows-inl.h"
#include "kernels/simd/softmax_tile-inl.h"

#if HWY_TARGET == HWY_AVX3  // machines with AMX have it

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

template <int kTerms, int kWeightTerms>
struct AmxScratch {
  AmxScratch(const SoftmaxCall& call, int64_t queries, Carver<float>& carver)
      : shape(call, kTerms),
        tiles(call, queries, shape.key_bytes / 4, shape.value_bytes / 4,
              carver),
        rows(round_up(queries, kCell), shape.width, carver),
        packer(call, shape, carver) {
    q = carver.take(round_up(queries, kCell) / kCell * shape.query_bytes / 4);
    scores = carver.take(kScoreBuffers * kCell * kForwardKeys);
    weights = carver.take(2 * weight_bytes() / 4);
    const int64_t widest = std::max(call.dim, call.value_dim);
    plain = carver.take(kCell * row_length<float>(widest));
    bias = carver.take(call.inputs.relative_bias == nullptr ? 0 : kTileKeys);
  }

  AmxShape shape;
  PackedTiles<float> tiles;
  RowResults<float> rows;
  AmxTilePacker<kTerms> packer;
  float* q;
  // [kCell][kForwardKeys]. With three terms more than the first cache is in use
  // anyway, and time is short: one for the new scores, one for those that
  // become weights.
  static constexpr int64_t kScoreBuffers = kTerms == 3 ? 2 : 1;
  float* scores;
  // Of two cells, one that is written and one that is read, tiles: [two of
  // rows][half][term].
  float* weights;
  float* plain;  // rows as they are
  float* bias;

  static constexpr int64_t weight_bytes() {
    return 2 * kHalves * kWeightTerms * kTileBytes;
  }
};

template <int kTerms, int kWeightTerms>
class AmxForwardRun {
 public:
  AmxForwardRun(const SoftmaxPlan& plan, const void* bias, void* memory)
      : plan_(plan),
        call_(plan.call()),
        bias_(static_cast<const float*>(bias)),
        carver_(memory),
        s_(call_, BlockRows<float>::longest(plan), carver_),
        block_(plan),
        scale_(static_cast<float>(call_.scale * std::numbers::log2e)),
        factor_(bias_ == nullptr ? scale_ : 1.0f) {}

  void run(int64_t begin, int64_t end) {
    const AmxTiles registers;
    for (int64_t i = begin; i < end; ++i) {
      const SoftmaxItem item = plan_.item(i);
      inner_.fill(plan_, item);
      attend(item);
    }
  }

 private:
  static constexpr int64_t kLane = kLanes<float>;

  // Rows [t, t + rows) of the block and a tile of keys.
  struct Cell {
    int64_t t = 0, rows = 0;   // no rows: none
    int64_t from = 0, to = 0;  // halves that some row sees
    // The tile: elements of a list of the block.
    const IndexList* list = nullptr;
    int64_t first = 0, count = 0;
    const char *keys = nullptr, *values = nullptr;
    AmxShape::Note strange;
    bool partial = false;  // some row does not see all of the tile
    uint64_t bits[kCell];  // what each sees, if partial

    uint64_t of_row(int64_t r) const {
      return partial ? bits[r] : ~uint64_t{0};
    }
  };

  void attend(const SoftmaxItem& item) {
    item_ = item;
    rows_ = item.block->outer.count;
    queries_ = block_.queries_of(item);
    keys_ = block_.keys_of(call_.inputs.k, item);
    values_ = block_.keys_of(call_.inputs.v, item);
    s_.tiles.start(item.block->row, item.head / call_.group);
    start_rows();
    for (const IndexList& list : inner_.parts()) {
      for (int64_t first = 0; first < list.count; first += kForwardKeys) {
        const int64_t count = std::min(kForwardKeys, list.count - first);
        mask_.start(plan_, item, list, first, count);
        if (mask_.classify(0, rows_) == TileClass::kNone) continue;
        attend_tile(list, first, count);
      }
    }
    drain();
    block_.finish(s_.rows, [&](int64_t t) { return started_[t / kCell]; });
  }

  // Rows [t, t + kCell) as they are; which of them are strange.
  uint32_t pack_queries(int64_t t) {
    const int64_t end = std::min(t + kCell, rows_);
    const int64_t length = row_length<float>(call_.dim);
    const bool finite = pack_as_rows<float>(
        queries_, item_.block->outer, t, end,
        [&](int64_t x) { return block_.live(x); }, call_.dim, 1.0f, s_.plain);
    zero_row(s_.plain + (end - t) * length, (t + kCell - end) * length);
    uint32_t strange = 0;
    if (finite && can_split(s_.plain, kCell * length)) return strange;
    for (int64_t r = 0; r < end - t; ++r)
      strange |= uint32_t{!can_split(s_.plain + r * length, length)} << r;
    return strange;
  }

  void start_rows() {
    block_.start(item_, round_up(rows_, kCell), s_.rows);
    const Tag<float> d;
    const hn::RebindToUnsigned<Tag<float>> du;
    const int64_t length = row_length<float>(call_.dim);
    for (int64_t t = 0; t < rows_; t += kCell) {
      strange_rows_[t / kCell] = pack_queries(t);
      char* tiles =
          reinterpret_cast<char*>(s_.q) + t / kCell * s_.shape.query_bytes;
      for (int64_t r = 0; r < kCell; ++r) {
        const float* row = s_.plain + r * length;
        for (int64_t s = 0; s < s_.shape.steps; ++s) {
          const int64_t c = s * kTileDepth;
          const Vec<float> x = hn::Load(d, row + c);
          const Vec<float> y =
              c + kLane < length ? hn::Load(d, row + c + kLane) : hn::Zero(d);
          char* to =
              tiles +
              ((r / kTileRows * s_.shape.steps + s) * kTerms) * kTileBytes +
              r % kTileRows * kTileRowBytes;
          split_nearest<kTerms>(
              x, y, [&](auto term, Bits pairs) COSFORMER_LAMBDA {
                hn::Store(pairs, du,
                          reinterpret_cast<uint32_t*>(to + term * kTileBytes));
              });
        }
      }
    }
    std::fill_n(started_, kAmxBlockQueries / kCell, false);
  }

  void attend_tile(const IndexList& list, int64_t first, int64_t count) {
    pack_tile(list, first, count);
    for (int64_t t = 0; t < rows_; t += kCell) {
      if (!new_cell(t, list, first, count)) continue;
      cell_->keys = reinterpret_cast<const char*>(tile_.keys);
      cell_->values = reinterpret_cast<const char*>(tile_.values);
      cell_->strange = s_.packer.note_of(tile_);
      advance();
    }
  }

  // The rows from t on and the tile at hand. Returns whether they see any of
  // it.
  bool new_cell(int64_t t, const IndexList& list, int64_t first,
                int64_t count) {
    Cell& cell = *cell_;
    const int64_t rows = std::min(kCell, rows_ - t);
    const TileClass seen = mask_.classify(t, t + rows);
    if (seen == TileClass::kNone) return false;
    uint64_t some = bit_range(0, count).word[0], all = some;
    if (seen != TileClass::kFull) {
      TileBits bits[kCell];
      mask_.rows(t, t + rows, bits);
      some = 0;
      for (int64_t r = 0; r < rows; ++r) {
        cell.bits[r] = bits[r].word[0];
        some |= cell.bits[r];
        all &= cell.bits[r];
      }
      if (some == 0) return false;
    }
    cell.t = t;
    cell.from = std::countr_zero(some) / kCell;
    cell.to = (64 - std::countl_zero(some) + kCell - 1) / kCell;
    // Less than the whole tile, be it by its own end.
    cell.partial = all != ~uint64_t{0};
    if (cell.partial && seen == TileClass::kFull)
      std::fill_n(cell.bits, rows, some);
    cell.list = &list;
    cell.first = first;
    cell.count = count;
    cell.rows = rows;
    return true;
  }

  // Scores the new cell, makes weights of the scores of the one before it,
  // and adds the values of the one before that.
  void advance() {
    const Cell& scored = *scored_;
    Weighing w;
    w.scores = scores_at(1 - odd_, 0);
    w.weights = weights_at(1 - odd_, 0, 0);
    w.sums = s_.rows.sums + scored.t * kLane;
    w.reference = s_.rows.reference + scored.t;
    w.bits = scored.bits;
    w.from = scored.from;
    w.to = scored.to;
    w.factor = factor_;
    w.rows = scored.rows;
    if (scored.rows > 0 && is_rare(scored)) {
      for (int64_t r = 0; r < scored.rows; ++r) weigh_rare(scored, r);
      w.rows = 0;
    }
    if (scored.partial) {
      advance_by<true>(w);
    } else {
      advance_by<false>(w);
    }
    lower_rows();
    Cell* const done = weighed_;
    weighed_ = scored_;
    scored_ = cell_;
    cell_ = done;
    cell_->rows = 0;
    odd_ = 1 - odd_;
  }

  // The rows of a cell on their way from scores to weights, in locals: nothing
  // is called between the products, so that registers hold what it takes.
  struct Weighing {
    const float* scores;
    char* weights;
    float* sums;
    const float* reference;
    const uint64_t* bits;
    int64_t from, to;
    float factor;
    int64_t rows, row = 0;
    uint32_t large = 0;  // rows that sum to too much, to be done anew
  };

  // Rows without a reference, and all that few calls have.
  bool is_rare(const Cell& cell) const {
    if (bias_ != nullptr || call_.options.dropout_p > 0 ||
        cell.strange.strange_keys != 0 || strange_rows_[cell.t / kCell] != 0)
      return true;
    for (int64_t r = 0; r < cell.rows; ++r)
      if (s_.rows.seen[cell.t + r] != kSeen) return true;
    return false;
  }

  template <bool kMasked>
  HWY_NOINLINE void advance_by(Weighing w) {
    const Cell& fresh = *cell_;
    const Cell& weighed = *weighed_;
    const auto between = [&](auto product) COSFORMER_LAMBDA {
      // As many rows as go into a product's time, all before the last one.
      constexpr int kRows = kTerms == 3   ? (product % 3 != 2)
                            : kTerms == 2 ? 2
                                          : 4;
      for (int i = 0; i < kRows && w.row < w.rows; ++i) weigh<kMasked>(w);
    };
    if (weighed.rows > 0) {
      bool& started = started_[weighed.t / kCell];
      amx_values<kTerms, kWeightTerms>(
          weights_at(odd_, 0, 0), weighed.values, weighed.from, weighed.to,
          s_.shape.columns, started, s_.rows.out + weighed.t * s_.shape.width,
          between);
      started = true;
      if (HWY_UNLIKELY(weighed.strange.strange_values != 0))
        add_strange_values(weighed);
    }
    // The new scores may take the place of the others.
    if (s_.kScoreBuffers == 1) weigh_rest<kMasked>(w);
    if (fresh.rows > 0) {
      const char* q = reinterpret_cast<const char*>(s_.q) +
                      fresh.t / kCell * s_.shape.query_bytes;
      for (int64_t half = fresh.from; half < fresh.to; ++half) {
        amx_scores<kTerms>(q, fresh.keys + half * s_.shape.key_bytes / kHalves,
                           s_.shape.steps, scores_at(odd_, 0) + half * kCell,
                           between);
      }
    }
    weigh_rest<kMasked>(w);
  }
  template <bool kMasked>
  HWY_INLINE void weigh_rest(Weighing& w) {
    while (w.row < w.rows) weigh<kMasked>(w);
    for (; w.large != 0; w.large &= w.large - 1) {
      const int64_t r = std::countr_zero(w.large);
      raise(*scored_, r, scores_at(1 - odd_, r));
    }
  }

  // The scores of the next row into weights that are split again, and the sum
  // of those that it sees.
  template <bool kMasked>
  static HWY_INLINE void weigh(Weighing& w) {
    const Tag<float> d;
    const int64_t r = w.row++;
    const float* HWY_RESTRICT scores = w.scores + r * kForwardKeys;
    char* to = w.weights + weight_offset(r, 0);
    const Vec<float> factor = hn::Set(d, w.factor);
    const Vec<float> by = hn::Set(d, w.reference[r]);
    Vec<float> sum = hn::Zero(d);
    const int64_t from = kMasked ? w.from : 0;
    const int64_t end = kMasked ? w.to : kHalves;
    for (int64_t half = from; half < end; ++half) {
      Vec<float> x[2];
      unroll<2>([&](auto n) COSFORMER_LAMBDA {
        const int64_t j = half * kCell + n * kLane;
        x[n] = weight_lanes<float>(
            hn::MulSub(hn::Load(d, scores + j), factor, by));
        if constexpr (kMasked)
          x[n] = hn::IfThenElseZero(lanes_of<float>(w.bits[r] >> j), x[n]);
        sum = hn::Add(sum, x[n]);
      });
      store_weights(to + half * kWeightTerms * kTileBytes, x[0], x[1]);
    }
    float* sums = w.sums + r * kLane;
    if (HWY_LIKELY(hn::AllTrue(
            d, hn::Le(sum, hn::Set(d, static_cast<float>(kLargeSum)))))) {
      hn::Store(hn::Add(sum, hn::Load(d, sums)), d, sums);
    } else {
      w.large |= uint32_t{1} << r;
    }
  }

  void drain() {
    cell_->rows = 0;
    advance();
    advance();
  }

  void pack_tile(const IndexList& list, int64_t first, int64_t count) {
    bool packed;
    tile_ = s_.tiles.tile(list, first, count, &packed);
    if (packed) return;
    drain();  // cells of a tile that may have been there
    if (!PackedTiles<float>::is_run(list, first, count))
      return pack_keys(list, first, count, mask_.real());
    // All of it, for those that see more.
    const SideView keys = plan_.keys(item_.block->row);
    const IndexList run = {list[first], 1,
                           std::min(kForwardKeys, keys.len - list[first])};
    TileBits real = mask_.real();
    for (int64_t c = count; c < run.count; ++c)
      if (keys.real(run[c])) real.word[c / 64] |= uint64_t{1} << (c % 64);
    pack_keys(run, 0, run.count, real);
  }
  void pack_keys(const IndexList& list, int64_t first, int64_t count,
                 const TileBits& real) {
    s_.packer.pack(keys_, values_, list, first, count, real, tile_);
  }

  // The scores of a row that a strange number takes part in.
  HWY_NOINLINE void strange_scores(const Cell& cell, int64_t r,
                                   float* HWY_RESTRICT scores) {
    const bool all = is_strange(cell.t + r);
    uint64_t bits = cell.of_row(r);
    if (!all) bits &= cell.strange.strange_keys;
    if (bits == 0) return;
    const Tag<float> d;
    const auto every = [](int64_t) { return true; };
    const int64_t length = row_length<float>(call_.dim);
    float* key = s_.plain + length;
    pack_as_rows<float>(queries_, item_.block->outer, cell.t + r,
                        cell.t + r + 1, every, call_.dim, 1.0f, s_.plain);
    for (; bits != 0; bits &= bits - 1) {
      const int64_t j = std::countr_zero(bits);
      pack_as_rows<float>(keys_, *cell.list, cell.first + j, cell.first + j + 1,
                          every, call_.dim, 1.0f, key);
      Vec<float> sum = hn::Zero(d);
      for (int64_t c = 0; c < length; c += kLane)
        sum = hn::MulAdd(hn::Load(d, s_.plain + c), hn::Load(d, key + c), sum);
      scores[j] = hn::GetLane(hn::SumOfLanes(d, sum));
    }
  }
  bool is_strange(int64_t row) const {
    return (strange_rows_[row / kCell] >> (row % kCell) & 1) != 0;
  }

  // Weights times values that the tile has as zeros.
  HWY_NOINLINE void add_strange_values(const Cell& cell) {
    const Tag<float> d;
    const int64_t length = row_length<float>(call_.value_dim);
    for (uint64_t keys = cell.strange.strange_values; keys != 0;
         keys &= keys - 1) {
      const int64_t j = std::countr_zero(keys);
      bool packed = false;
      for (int64_t r = 0; r < cell.rows; ++r) {
        if ((cell.of_row(r) >> j & 1) == 0) continue;
        if (!packed) {
          pack_as_rows<float>(
              values_, *cell.list, cell.first + j, cell.first + j + 1,
              [](int64_t) { return true; }, call_.value_dim, 1.0f, s_.plain);
        }
        packed = true;
        const Vec<float> w = hn::Set(d, weight(r, j));
        float* out = s_.rows.out + (cell.t + r) * s_.shape.width;
        for (int64_t c = 0; c < length; c += kLane) {
          hn::Store(
              hn::MulAdd(w, hn::Load(d, s_.plain + c), hn::Load(d, out + c)), d,
              out + c);
        }
      }
    }
  }

  float* scores_at(int64_t odd, int64_t r) const {
    return s_.scores + (odd % s_.kScoreBuffers * kCell + r) * kForwardKeys;
  }

  // Turns the scores of a cell's row into weights, whatever it takes.
  HWY_NOINLINE void weigh_rare(const Cell& cell, int64_t r) {
    const Tag<float> d;
    const int64_t row = cell.t + r;
    float* HWY_RESTRICT scores = scores_at(1 - odd_, r);
    if (cell.strange.strange_keys != 0 || strange_rows_[cell.t / kCell] != 0)
      strange_scores(cell, r, scores);
    if (bias_ != nullptr) add_bias(cell, r, scores);
    if (s_.rows.seen[row] != kSeen) set_reference(row, scores, cell.of_row(r));
    Vec<float> sum = hn::Zero(d);
    weigh_rare_from(cell, r, scores, sum);
    if (!hn::AllTrue(d,
                     hn::Le(sum, hn::Set(d, static_cast<float>(kLargeSum))))) {
      raise(cell, r, scores);
      return;
    }
    float* sums = s_.rows.sums + row * kLane;
    hn::Store(hn::Add(sum, hn::Load(d, sums)), d, sums);
  }

  // By the row's reference as it is: adds them to sum.
  HWY_INLINE void weigh_rare_from(const Cell& cell, int64_t r,
                                  const float* HWY_RESTRICT scores,
                                  Vec<float>& sum) {
    const Tag<float> d;
    const Vec<float> factor = hn::Set(d, factor_);
    const Vec<float> by = hn::Set(d, s_.rows.reference[cell.t + r]);
    uint64_t kept = ~uint64_t{0};
    if (call_.options.dropout_p > 0) kept = keeps(cell, r);
    for (int64_t half = cell.from; half < cell.to; ++half) {
      const int64_t j = half * kCell;
      Vec<float> w[2];
      unroll<2>([&](auto n) COSFORMER_LAMBDA {
        const Vec<float> x =
            hn::MulSub(hn::Load(d, scores + j + n * kLane), factor, by);
        w[n] = weight_lanes<float>(x);
        if (HWY_UNLIKELY(bias_ != nullptr))
          w[n] = zero_where_far<float>(x, w[n]);
      });
      if (cell.partial) {
        unroll<2>([&](auto n) COSFORMER_LAMBDA {
          w[n] = hn::IfThenElseZero(
              lanes_of<float>(cell.bits[r] >> (j + n * kLane)), w[n]);
        });
      }
      // In the order of weigh(): the same bits.
      sum = hn::Add(hn::Add(sum, w[0]), w[1]);
      if (kept != ~uint64_t{0}) {
        unroll<2>([&](auto n) COSFORMER_LAMBDA {
          w[n] = hn::IfThenElseZero(lanes_of<float>(kept >> (j + n * kLane)),
                                    w[n]);
        });
      }
      store_weights(weights_at(1 - odd_, r, half), w[0], w[1]);
    }
  }

  // Scales a row's scores and adds the biases.
  HWY_NOINLINE void add_bias(const Cell& cell, int64_t r,
                             float* HWY_RESTRICT scores) {
    const Tag<float> d;
    const AttentionRow& row = plan_.row(item_.block->row);
    const BiasTable<float> table(call_, bias_, item_.head);
    const int64_t x = item_.block->outer[cell.t + r];
    const float* biases = table.row(*cell.list, cell.first, cell.count,
                                    row.kv_start - row.q_start - x, s_.bias);
    const Vec<float> scale = hn::Set(d, scale_);
    for (int64_t j = 0; j < cell.count; j += kLane) {
      hn::Store(
          hn::MulAdd(hn::Load(d, scores + j), scale, hn::LoadU(d, biases + j)),
          d, scores + j);
    }
  }

  // The keys of a cell that dropout leaves to a row.
  HWY_NOINLINE uint64_t keeps(const Cell& cell, int64_t r) {
    const AttentionRow& row = plan_.row(item_.block->row);
    const DropoutRows dropout(call_, item_.block->row, item_.head);
    return dropout
        .keeps(row.q_start + item_.block->outer[cell.t + r], *cell.list,
               cell.first, cell.count, row.kv_start)
        .word[0];
  }

  // The weights of a row in a buffer, of their first term.
  char* weights_at(int64_t odd, int64_t r, int64_t half) const {
    return reinterpret_cast<char*>(s_.weights) + odd * s_.weight_bytes() +
           weight_offset(r, half);
  }
  static int64_t weight_offset(int64_t r, int64_t half) {
    return (r / kTileRows * kHalves + half) * kWeightTerms * kTileBytes +
           r % kTileRows * kTileRowBytes;
  }
  static HWY_INLINE void store_weights(char* to, Vec<float> x, Vec<float> y) {
    const hn::RebindToUnsigned<Tag<float>> du;
    split_cut<kWeightTerms>(x, y, [&](auto term, Bits pairs) COSFORMER_LAMBDA {
      hn::Store(pairs, du, reinterpret_cast<uint32_t*>(to + term * kTileBytes));
    });
  }
  // Of the cell whose values are added: the sum of the terms.
  float weight(int64_t r, int64_t j) const {
    const uint32_t* pairs =
        reinterpret_cast<const uint32_t*>(weights_at(odd_, r, j / kCell)) +
        j % kTileRows;
    float sum = 0;
    for (int64_t term = kWeightTerms - 1; term >= 0; --term) {
      const uint32_t pair = pairs[term * kTileBytes / 4];
      sum += std::bit_cast<float>(j % kCell >= kTileRows ? pair & 0xffff0000u
                                                         : pair << 16);
    }
    return sum;
  }

  // The first score that the row sees or, where that is not finite, the
  // largest that is.
  HWY_NOINLINE void set_reference(int64_t row, const float* scores,
                                  uint64_t bits) {
    if (bits == 0) return;
    float reference = scores[std::countr_zero(bits)] * factor_;
    if (!std::isfinite(reference)) {
      reference = -std::numeric_limits<float>::infinity();
      for (; bits != 0; bits &= bits - 1) {
        const float x = scores[std::countr_zero(bits)] * factor_;
        if (std::isfinite(x) && x > reference) reference = x;
      }
    }
    if (!std::isfinite(reference)) {
      s_.rows.seen[row] = kNothingFinite;  // from 0 for now
      return;
    }
    s_.rows.reference[row] = reference;
    s_.rows.seen[row] = kSeen;
  }

  // Takes the row's reference up to the largest score that it sees in the
  // cell, what it has so far down, and its weights anew.
  HWY_NOINLINE void raise(const Cell& cell, int64_t r,
                          const float* HWY_RESTRICT scores) {
    const Tag<float> d;
    const int64_t row = cell.t + r;
    const uint64_t bits = cell.of_row(r);
    float& reference = s_.rows.reference[row];
    float* HWY_RESTRICT sums = s_.rows.sums + row * kLane;
    float largest = reference;
    for (uint64_t left = bits; left != 0; left &= left - 1) {
      const float x = scores[std::countr_zero(left)] * factor_;
      if (x > largest) largest = x;  // not where it is NaN
    }
    if (largest > reference) {
      const float below = reference - largest;
      const float down = below < kLowestWeight<float> ? 0.0f : std::exp2(below);
      reference = largest;
      for (int64_t c = 0; c < kLane; ++c) sums[c] *= down;
      lowered_[num_lowered_++] = {row, down};
    }
    Vec<float> sum = hn::Load(d, sums);
    weigh_rare_from(cell, r, scores, sum);
    hn::Store(sum, d, sums);
  }
  // What rows had when their reference was raised, once the cells before it
  // are in.
  void lower_rows() {
    for (int64_t i = 0; i < num_lowered_; ++i) {
      if (!started_[lowered_[i].row / kCell]) continue;
      float* HWY_RESTRICT out = s_.rows.out + lowered_[i].row * s_.shape.width;
      for (int64_t c = 0; c < s_.shape.width; ++c) out[c] *= lowered_[i].by;
    }
    num_lowered_ = 0;
  }

  const SoftmaxPlan& plan_;
  const SoftmaxCall& call_;
  const float* bias_;
  Carver<float> carver_;
  AmxScratch<kTerms, kWeightTerms> s_;
  BlockRows<float> block_;
  // Scores become powers of 2 by a factor: the scale, or where there is a
  // bias, which is added to scaled ones, nothing more.
  const float scale_, factor_;
  InnerList inner_;
  TileMask mask_;

  SoftmaxItem item_;
  int64_t rows_ = 0;
  HeadRows queries_, keys_, values_;
  PackedTile<float> tile_{};  // at hand
  // New, with scores, with weights. Scores and weights are written into one
  // buffer of two, by turns.
  Cell cells_[3];
  Cell *cell_ = cells_, *scored_ = cells_ + 1, *weighed_ = cells_ + 2;
  int64_t odd_ = 0;
  struct {
    int64_t row;
    float by;
  } lowered_[kCell];
  int64_t num_lowered_ = 0;
  // Of groups of rows: which are strange, whether their output holds
  // something.
  uint32_t strange_rows_[kAmxBlockQueries / kCell];
  bool started_[kAmxBlockQueries / kCell];
};

template <int kTerms, int kWeightTerms>
SoftmaxForward make_amx_forward() {
  using Scratch = AmxScratch<kTerms, kWeightTerms>;
  SoftmaxForward forward{};
  forward.block_rows = kAmxBlockQueries;
  forward.bias_elements = &bias_elements<float>;
  forward.expand_bias = &expand_bias<float>;
  forward.scratch_bytes = [](const SoftmaxCall& call, int64_t queries) {
    Carver<float> counter(nullptr);
    const Scratch counted(call, queries, counter);
    return counter.bytes();
  };
  forward.start = [](const SoftmaxCall& call, int64_t queries, void* scratch) {
    Carver<float> carver(scratch);
    Scratch s(call, queries, carver);
    s.tiles.forget();
  };
  forward.run = [](const SoftmaxPlan& plan, int64_t begin, int64_t end, int64_t,
                   const void* bias, void* scratch) {
    AmxForwardRun<kTerms, kWeightTerms>(plan, bias, scratch).run(begin, end);
  };
  return forward;
}

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HWY_TARGET == HWY_AVX3

#endif  // COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_AMX_INL_H_
