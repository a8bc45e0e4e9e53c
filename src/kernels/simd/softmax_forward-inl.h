// The forward of the softmax engine over the blocks of a plan
// (softmax_plan.h): queries of a block are packed once; its keys are packed a
// tile at a time (softmax_packed-inl.h keeps the tiles for the next block) and
// multiplied with all of its queries in turns that keep their weights in the
// first cache. While a tile is multiplied what the next one needs is brought
// into the second cache.
#if defined(COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_FORWARD_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_FORWARD_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_FORWARD_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_FORWARD_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <numbers>

#include "kernels/simd/chunk-inl.h"
#include "kernels/simd/softmax_bias-inl.h"
#include "kernels/simd/softmax_dropout-inl.h"
#include "kernels/simd/softmax_pack-inl.h"
#include "kernels/simd/softmax_packed-inl.h"
#include "kernels/simd/softmax_pass.h"
#include "kernels/simd/softmax_rows-inl.h"
#include "kernels/simd/softmax_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

// Queries of a block, and of a turn.
inline constexpr int64_t kBlockQueries = 288;
inline constexpr int64_t kTurn = 96;
static_assert(kTurn % kSoftmaxRows == 0 && kBlockQueries % kSoftmaxRows == 0);

// Rows that will be read soon, in pieces of what a step of a score tile asks
// for, a few pieces a tile: in a burst they would hold up the tiles' own loads.
class RowsAhead {
 public:
  static constexpr int64_t kPiece = 256;

  void clear() { parts_ = part_ = 0, offset_ = 0, count_ = 0; }
  void add(const HeadRows& rows, const IndexList& list, int64_t from,
           int64_t to, int64_t bytes) {
    if (from >= to) return;
    part_list_[parts_++] = {rows, &list, from, to, bytes};
    count_ += (to - from) * ((bytes + kPiece - 1) / kPiece);
  }
  // So that they are asked for within so many tiles.
  void spread(int64_t tiles) { per_tile_ = (count_ + tiles - 1) / tiles; }
  // The next pieces of a tile of this depth.
  const Prefetches* next(int64_t depth) {
    const int64_t most = std::min({per_tile_, kPrefetches, depth / 4});
    int64_t n = 0;
    while (n < most && part_ < parts_) pieces_.at[n++] = piece();
    pieces_.count = n;
    return &pieces_;
  }

 private:
  struct Part {
    HeadRows rows;
    const IndexList* list;
    int64_t at, end, bytes;
  };
  const char* piece() {
    Part& part = part_list_[part_];
    const char* at = part.rows.at((*part.list)[part.at]) + offset_;
    offset_ += kPiece;
    if (offset_ >= part.bytes) {
      offset_ = 0;
      if (++part.at == part.end) ++part_;
    }
    return at;
  }

  Part part_list_[3];
  int parts_ = 0, part_ = 0;
  int64_t offset_ = 0, count_ = 0, per_tile_ = 0;
  Prefetches pieces_;
};

template <typename T>
struct ForwardScratch {
  ForwardScratch(const SoftmaxCall& call, int64_t queries, Carver<T>& carver)
      : tiles(call, queries, carver),
        rows(round_up(queries, kSoftmaxRows), row_length<T>(call.value_dim),
             carver) {
    const int64_t padded = round_up(queries, kSoftmaxRows);
    k_length = row_length<T>(call.dim);
    v_length = row_length<T>(call.value_dim);
    q = carver.take(strips_size(padded, call.dim));
    weights = carver.take(kTurn * kForwardKeys);
    memory = carver.take(kLanes<T> * k_length);
    bias = carver.take(
        call.inputs.relative_bias == nullptr ? 0 : kSoftmaxRows * kForwardKeys);
    const int64_t per = static_cast<int64_t>(sizeof(T));

    bits = reinterpret_cast<TileBits*>(
        carver.take(kTurn * static_cast<int64_t>(sizeof(TileBits)) / per));
  }

  PackedTiles<T> tiles;
  RowResults<T> rows;
  int64_t k_length, v_length;
  T* q;
  T* weights;  // [kTurn][kForwardKeys]
  T *memory, *bias;
  TileBits* bits;  // of the rows of a turn
};

template <typename T>
class ForwardRun {
 public:
  ForwardRun(const SoftmaxPlan& plan, const void* bias, void* memory)
      : plan_(plan),
        call_(plan.call()),
        bias_(static_cast<const T*>(bias)),
        carver_(memory),
        s_(call_, BlockRows<T>::longest(plan), carver_),
        block_(plan) {}

  void run(int64_t begin, int64_t end, int64_t next) {
    if (begin >= end) return;
    if (next >= plan_.num_items()) next = kNone;
    lists_[0].fill(plan_, plan_.item(begin));
    for (int64_t i = begin; i < end; ++i) {
      const InnerList& list = lists_[(i - begin) % 2];
      InnerList& filled = lists_[(i + 1 - begin) % 2];
      const int64_t then = i + 1 < end ? i + 1 : next;
      if (then != kNone) filled.fill(plan_, plan_.item(then));
      attend(plan_.item(i), list, filled, then);
    }
  }

 private:
  static constexpr int64_t kNone = -1;
  static constexpr int kRows = kSoftmaxRows;
  static constexpr int64_t kLane = kLanes<T>;
  static constexpr int64_t kStep = kTileStep<T>;
  static constexpr int64_t kGroups = kTurn / kRows;

  // A group of kRows rows of a turn in a tile: its columns [from, to),
  // multiples of kStep; those that some row does not see are masked. Values are
  // taken of [first, last), multiples of 4.
  struct Group {
    int64_t from = 0, to = 0;
    int64_t first = 0, last = 0;
    TileBits all;  // what every row sees
  };

  void attend(const SoftmaxItem& item, const InnerList& inner,
              const InnerList& next, int64_t next_item) {
    item_ = item;

    rows_ = item.block->outer.count;
    keys_ = block_.keys_of(call_.inputs.k, item);
    values_ = block_.keys_of(call_.inputs.v, item);
    s_.tiles.start(item.block->row, item.head / call_.group);
    start_rows();
    for (int part = 0; part < InnerList::kParts; ++part) {
      const IndexList& list = inner.parts()[part];
      for (int64_t first = 0; first < list.count; first += kForwardKeys) {
        const int64_t count = std::min(kForwardKeys, list.count - first);
        mask_.start(plan_, item, list, first, count);
        if (mask_.classify(0, rows_) == TileClass::kNone) continue;
        look_ahead(inner, part, first + count, next, next_item);
        attend_tile(list, first, count);
      }
    }
    block_.finish(s_.rows, [&](int64_t t) { return started_[t / kRows]; });
  }

  void start_rows() {
    const int64_t padded = round_up(rows_, kRows);
    block_.start(item_, padded, s_.rows);
    // Scores come as powers of 2.
    const T factor = static_cast<T>(call_.scale * std::numbers::log2e);
    pack_strips<T>(
        block_.queries_of(item_), item_.block->outer,
        [&](int64_t x) { return block_.live(x); }, call_.dim, factor, padded,
        s_.q);

    std::fill_n(started_, kBlockQueries / kRows, false);
  }

  // What comes after the tile at hand, which ends at element `from` of a part.
  void look_ahead(const InnerList& inner, int part, int64_t from,
                  const InnerList& next, int64_t next_item) {
    ahead_.clear();
    if (!list_ahead(inner, part, from, item_) && next_item != kNone) {
      const SoftmaxItem item = plan_.item(next_item);
      const int64_t size = static_cast<int64_t>(size_of(call_.dtype));
      ahead_.add(block_.queries_of(item), item.block->outer, 0,
                 item.block->outer.count, call_.dim * size);
      list_ahead(next, 0, 0, item);
    }
    // Half of the block's tiles: under causality others see nothing.
    const int64_t groups = (rows_ + kRows - 1) / kRows;
    const int64_t tiles = groups * kForwardKeys / kPanel<T>;
    ahead_.spread((tiles + 1) / 2);
  }
  // The tile at element `from` of a part, or the first one of those behind it;
  // whether there is any.
  bool list_ahead(const InnerList& inner, int part, int64_t from,
                  const SoftmaxItem& item) {
    for (; part < InnerList::kParts; ++part, from = 0) {
      const IndexList& list = inner.parts()[part];
      if (from >= list.count) continue;
      tile_ahead(list, from, item);
      return true;
    }
    return false;
  }
  // Keys and values of a tile: packed ones, or their rows.
  void tile_ahead(const IndexList& list, int64_t first,
                  const SoftmaxItem& item) {
    const int64_t to = std::min(list.count, first + kForwardKeys);
    const T* values = nullptr;
    const T* keys = s_.tiles.find(list, first, to - first, item.block->row,
                                  item.head / call_.group, &values);
    if (keys != nullptr) {
      lines_ahead(keys, across_size<T>(kForwardKeys, call_.dim));
      lines_ahead(values, kForwardKeys * s_.v_length);
      return;
    }
    const int64_t size = static_cast<int64_t>(size_of(call_.dtype));
    ahead_.add(block_.keys_of(call_.inputs.k, item), list, first, to,
               call_.dim * size);
    ahead_.add(block_.keys_of(call_.inputs.v, item), list, first, to,
               call_.value_dim * size);
  }
  void lines_ahead(const T* data, int64_t count) {
    static constexpr IndexList kAll;
    ahead_.add({reinterpret_cast<const char*>(data), RowsAhead::kPiece}, kAll,
               0, count * static_cast<int64_t>(sizeof(T)) / RowsAhead::kPiece,
               RowsAhead::kPiece);
  }

  void attend_tile(const IndexList& list, int64_t first, int64_t count) {
    bool packed = false;
    for (int64_t begin = 0; begin < rows_; begin += kTurn) {
      const int64_t end = std::min(begin + kTurn, rows_);
      if (!group_rows(begin, end, count)) continue;
      if (!packed) pack_tile(list, first, count);
      packed = true;
      const int64_t groups = (end - begin + kRows - 1) / kRows;
      for (int64_t g = 0; g < groups; ++g)
        if (groups_[g].from < groups_[g].to)
          score_group(list, first, begin + g * kRows, g);
      add_values(begin, groups);
    }
  }

  void pack_tile(const IndexList& list, int64_t first, int64_t count) {
    bool packed;
    tile_ = s_.tiles.tile(list, first, count, &packed);
    if (packed) return;
    if (!PackedTiles<T>::is_run(list, first, count))
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
    pack_across<T>(keys_, list, first, count, real, call_.dim, tile_.keys,
                   s_.memory);
    *tile_.finite = pack_by_columns<T>(values_, list, first, count, real,
                                       call_.value_dim, tile_.values);
  }

  // What each group of rows [begin, end) sees of the tile; whether anything.
  bool group_rows(int64_t begin, int64_t end, int64_t count) {
    const TileClass seen = mask_.classify(begin, end);
    if (seen == TileClass::kNone) return false;
    const int64_t groups = (end - begin + kRows - 1) / kRows;
    const TileBits everything = bit_range(0, count);
    if (seen == TileClass::kFull) {
      std::fill_n(
          groups_, groups,
          Group{0, round_up(count, kStep), 0, round_up(count, 4), everything});
      std::fill_n(s_.bits, groups * kRows, everything);
      return true;
    }
    mask_.rows(begin, end, s_.bits);
    std::fill(s_.bits + (end - begin), s_.bits + groups * kRows, TileBits());
    bool any = false;
    for (int64_t g = 0; g < groups; ++g) {
      TileBits some, all = everything;
      const TileBits* bits = s_.bits + g * kRows;
      const int64_t rows = std::min<int64_t>(kRows, end - begin - g * kRows);
      for (int64_t r = 0; r < rows; ++r) {
        some = some | bits[r];
        all = all & bits[r];
      }
      groups_[g] = Group();
      if (!some.any()) continue;
      any = true;
      groups_[g].all = all;
      const int64_t low = some.word[0] != 0
                              ? std::countr_zero(some.word[0])
                              : 64 + std::countr_zero(some.word[1]);
      const int64_t high = some.word[1] != 0
                               ? 128 - std::countl_zero(some.word[1])
                               : 64 - std::countl_zero(some.word[0]);
      groups_[g].from = low / kStep * kStep;
      groups_[g].to = round_up(high, kStep);
      groups_[g].first = low / 4 * 4;
      groups_[g].last = round_up(high, 4);
    }
    return any;
  }

  void score_group(const IndexList& list, int64_t first, int64_t t, int64_t g) {
    const Group& group = groups_[g];
    ScoreTile<T> tile;
    tile.q = s_.q + t * kStrip;
    tile.strip_stride = round_up(rows_, kRows) * kStrip;
    tile.depth = round_up(call_.dim, 4);
    tile.bits = s_.bits + g * kRows;
    tile.reference = s_.rows.reference + t;
    tile.seen = s_.rows.seen + t;
    tile.sums = s_.rows.sums + t * kLane;
    tile.out = started_[t / kRows] ? s_.rows.out + t * s_.v_length : nullptr;
    tile.out_stride = s_.v_length;
    const T* bias[kRows];
    tile.bias = bias_ == nullptr ? nullptr : bias;
    T* weights = s_.weights + g * kRows * kForwardKeys;
    for (int64_t p = group.from / kPanel<T> * kPanel<T>; p < group.to;
         p += kPanel<T>) {
      const int64_t from = std::max(group.from, p);
      const int64_t to = std::min(group.to, p + kPanel<T>);
      tile.keys = tile_.keys + p * s_.k_length + from - p;
      tile.weights = weights + from;
      tile.column = from;
      tile.before = from - group.from;
      tile.prefetch = ahead_.next(tile.depth);
      if (bias_ != nullptr)
        bias_rows(list, first + from, std::min(to, list.count - first) - from,
                  t, bias);
      const TileBits columns = bit_range(from, to);
      const bool masked = (group.all & columns) != columns;
      const bool unseen = any_unseen(tile.seen);
      for_vectors<T>((to - from) / kLane, [&](auto vectors) HWY_ATTR {
        constexpr int kVectors = decltype(vectors)::value;
        if (unseen) {
          score_tile<T, kVectors, true, true>(tile);
        } else if (masked) {
          score_tile<T, kVectors, true, false>(tile);
        } else {
          score_tile<T, kVectors, false, false>(tile);
        }
      });
    }
    if (call_.options.dropout_p > 0) drop(list, first, t, group, weights);
  }

  static bool any_unseen(const uint8_t* seen) {
    bool unseen = false;
    unroll<kRows>([&](auto r) { unseen |= seen[r] != kSeen; });
    return unseen;
  }

  // Biases of the rows from t on, of keys [at, at + count) of the list.
  void bias_rows(const IndexList& list, int64_t at, int64_t count, int64_t t,
                 const T** rows) {
    const AttentionRow& row = plan_.row(item_.block->row);
    const BiasTable<T> table(call_, bias_, item_.head);
    for (int r = 0; r < kRows; ++r) {
      const int64_t x = item_.block->outer[std::min(t + r, rows_ - 1)];
      rows[r] = table.row(list, at, count, row.kv_start - row.q_start - x,
                          s_.bias + r * kForwardKeys);
    }
  }

  // Makes the weights that dropout takes 0; the sums keep them.
  void drop(const IndexList& list, int64_t first, int64_t t, const Group& group,
            T* HWY_RESTRICT weights) {
    const Tag<T> d;
    const AttentionRow& row = plan_.row(item_.block->row);
    const DropoutRows dropout(call_, item_.block->row, item_.head);
    const int64_t count = std::min(group.to, list.count - first) - group.from;
    for (int64_t r = 0; r < std::min<int64_t>(kRows, rows_ - t); ++r) {
      const TileBits keeps =
          dropout.keeps(row.q_start + item_.block->outer[t + r], list,
                        first + group.from, count, row.kv_start);
      T* HWY_RESTRICT w = weights + r * kForwardKeys + group.from;
      for (int64_t c = 0; c < count; c += kLane) {
        const auto lanes = lanes_of<T>(keeps.word[c / 64] >> (c % 64));
        hn::Store(hn::IfThenElseZero(lanes, hn::Load(d, w + c)), d, w + c);
      }
    }
  }

  void add_values(int64_t begin, int64_t groups) {
    const bool finite = *tile_.finite;
    for_panels<T>(s_.v_length, [&](auto vectors, int64_t c) HWY_ATTR {
      constexpr int kVectors = decltype(vectors)::value;
      constexpr int64_t kWidth = kVectors * kLane;
      const T* values = tile_.values + c * kForwardKeys;
      for (int64_t g = 0; g < groups; ++g) {
        const Group& group = groups_[g];
        if (group.from >= group.to) continue;
        const int64_t t = begin + g * kRows;
        const bool add = started_[t / kRows];
        const T* weights = s_.weights + g * kRows * kForwardKeys;
        T* out = s_.rows.out + t * s_.v_length + c;
        const TileBits columns = bit_range(group.from, group.to);
        if (!finite && (group.all & columns) != columns) {
          for (int r = 0; r < kRows; ++r) {
            const TileBits& bits = s_.bits[g * kRows + r];
            value_row(weights + r * kForwardKeys, bits, values, kWidth, add,
                      out + r * s_.v_length);
          }
          continue;
        }
        weights += group.first;
        const T* from = values + group.first * kWidth;
        const int64_t keys = group.last - group.first;
        if (add) {
          value_tile<T, kVectors, true>(weights, from, keys, out, s_.v_length);
        } else {
          value_tile<T, kVectors, false>(weights, from, keys, out, s_.v_length);
        }
      }
    });
    for (int64_t g = 0; g < groups; ++g)
      if (groups_[g].from < groups_[g].to) started_[begin / kRows + g] = true;
  }

  const SoftmaxPlan& plan_;
  const SoftmaxCall& call_;
  const T* bias_;
  Carver<T> carver_;
  ForwardScratch<T> s_;
  BlockRows<T> block_;
  InnerList lists_[2];
  TileMask mask_;
  RowsAhead ahead_;

  SoftmaxItem item_;

  int64_t rows_ = 0;
  HeadRows keys_, values_;
  PackedTile<T> tile_{};                 // at hand
  bool started_[kBlockQueries / kRows];  // groups that hold something
  Group groups_[kGroups];                // of the turn and tile at hand
};

template <typename T>
SoftmaxForward make_softmax_forward() {
  SoftmaxForward forward{};
  forward.block_rows = kBlockQueries;
  forward.bias_elements = &bias_elements<T>;
  forward.expand_bias = &expand_bias<T>;
  forward.scratch_bytes = [](const SoftmaxCall& call, int64_t queries) {
    Carver<T> counter(nullptr);
    const ForwardScratch<T> counted(call, queries, counter);
    return counter.bytes();
  };
  forward.start = [](const SoftmaxCall& call, int64_t queries, void* scratch) {
    Carver<T> carver(scratch);
    ForwardScratch<T>(call, queries, carver).tiles.forget();
  };
  forward.run = [](const SoftmaxPlan& plan, int64_t begin, int64_t end,
                   int64_t next, const void* bias, void* scratch) {
    ForwardRun<T>(plan, bias, scratch).run(begin, end, next);
  };
  return forward;
}

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_FORWARD_INL_H_
