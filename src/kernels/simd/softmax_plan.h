// What a call of the softmax engine visits, whatever its options: the one place
// that knows masks, packing, causality and patterns.
//
// Rows of products ("outer": queries in the forward, either side in the
// backward) are cut into blocks; each block lists the inner indices (keys) that
// any of its outer ones see, each once and ascending in two parts, so that it
// is packed and multiplied in tiles whatever the pattern. A dilated window is
// taken by residue classes modulo the dilation, where it is a plain band.
// Global outer tokens form blocks of their own, which see everything.
//
// A tile is a run of at most kTileKeys of a part of a block's inner list.
// Whether an element of it counts comes from TileMask alone, as bits by row.
//
//   SoftmaxPlan plan(call, Side::kQueries, 288);
//   for item i of plan.num_items(), in any order or thread:
//     inner.fill(plan, plan.item(i));
//     for each list of inner.parts():
//       for first = 0, kTileKeys, .. < list.count:
//         mask.start(plan, item, list, first, count)
//         mask.classify(row range), mask.row(outer row)
//
// Planning takes time and memory O(queries + keys) a row; an inner list is
// expanded when its block is worked on.
#ifndef COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_PLAN_H_
#define COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_PLAN_H_

#include <cstdint>
#include <limits>
#include <vector>

#include "cosformer/kernels.h"
#include "kernels/check.h"

namespace cosformer::simd {

// A call's sizes and options, whatever the instruction set.
struct SoftmaxCall {
  SoftmaxCall(const SoftmaxAttentionOptions& options,
              const SoftmaxAttentionInputs& inputs);

  SoftmaxAttentionOptions options;
  SoftmaxAttentionInputs inputs;
  DType dtype;
  int64_t dim, value_dim, heads, kv_heads, group;
  double scale;

  View4 out;
  void* log_sum_exp = nullptr;
  bool stream = false;  // outputs past the caches

  // Backward.
  ConstView4 saved_out, d_out;
  const void* saved_log_sum_exp = nullptr;
  View4 dq, dk, dv;
  void* d_relative_bias = nullptr;
};

enum class Side { kQueries, kKeys };

// Ascending indices of a row's queries or keys: first + t step, or list[t].
struct IndexList {
  int64_t first = 0, step = 1, count = 0;
  const int32_t* list = nullptr;

  int64_t operator[](int64_t t) const {
    return list != nullptr ? list[t] : first + t * step;
  }
  // Of the elements [from, to), how many are below `limit`.
  int64_t count_below(int64_t limit, int64_t from, int64_t to) const;
};

struct SoftmaxBlock {
  int64_t row = 0;
  IndexList outer;
  // Of global tokens, which see whatever causality allows. Other blocks skip
  // the global tokens among their indices.
  bool is_global = false;
};

// A block and a query head.
struct SoftmaxItem {
  const SoftmaxBlock* block = nullptr;
  int64_t head = 0;
};

// One side of a row: the queries or the keys.
struct SideView {
  int64_t len = 0, start = 0;     // indices, and the position of index 0
  const uint8_t* mask = nullptr;  // by index, nonzero = takes part
  // Global tokens: whether index x is one is global_mask[x + global_shift],
  // where that is in [0, global_len).
  const uint8_t* global_mask = nullptr;
  int64_t global_shift = 0, global_len = 0;

  bool real(int64_t x) const { return mask == nullptr || mask[x] != 0; }
  bool is_global(int64_t x) const {
    const int64_t at = x + global_shift;
    return global_mask != nullptr && at >= 0 && at < global_len &&
           global_mask[at] != 0;
  }
};

class SoftmaxPlan {
 public:
  // outer_len: outer indices a block, at most.
  SoftmaxPlan(const SoftmaxCall& call, Side outer, int64_t outer_len);

  int64_t num_rows() const { return static_cast<int64_t>(rows_.size()); }
  const AttentionRow& row(int64_t r) const {
    return rows_[static_cast<size_t>(r)];
  }
  SideView queries(int64_t row) const;
  SideView keys(int64_t row) const;
  SideView outer_side(int64_t row) const {
    return side_ == Side::kQueries ? queries(row) : keys(row);
  }
  SideView inner_side(int64_t row) const {
    return side_ == Side::kQueries ? keys(row) : queries(row);
  }
  Side side() const { return side_; }
  const SoftmaxCall& call() const { return call_; }

  // Blocks of all rows, a row's one after another.
  const std::vector<SoftmaxBlock>& blocks() const { return blocks_; }
  // Each block once for each query head: row by row, head by head.
  int64_t num_items() const {
    return static_cast<int64_t>(blocks_.size()) * call_.heads;
  }
  SoftmaxItem item(int64_t i) const;

  bool has_pattern() const {
    return call_.options.has_window || call_.inputs.global_mask != nullptr ||
           call_.inputs.block_mask != nullptr;
  }
  // The window from an outer position, in positions: [-before, after], and
  // whether it is bounded there.
  struct Reach {
    int64_t before = 0, after = 0;
    bool has_before = false, has_after = false;
  };
  const Reach& reach() const { return reach_; }
  int64_t dilation() const { return dilation_; }
  // Global indices of a row's inner side, ascending.
  const std::vector<int32_t>& inner_globals(int64_t row) const {
    return inner_globals_[static_cast<size_t>(row)];
  }
  // Whether the blocks of an outer and an inner position see each other.
  bool block_visible(int64_t head, int64_t outer_block,
                     int64_t inner_block) const;
  // Blocks of the pattern on each side.
  int64_t outer_pattern_blocks() const;
  int64_t inner_pattern_blocks() const;

 private:
  void add_row(int64_t r, int64_t outer_len);

  const SoftmaxCall& call_;
  Side side_;
  Reach reach_;
  int64_t dilation_ = 1;
  std::vector<AttentionRow> rows_;
  std::vector<SoftmaxBlock> blocks_;
  std::vector<int64_t> row_begin_;  // of a row's blocks
  std::vector<std::vector<int32_t>> outer_globals_, inner_globals_;
};

// The inner indices that a block sees: memory that a thread reuses.
class InnerList {
 public:
  static constexpr int kParts = 2;

  void fill(const SoftmaxPlan& plan, const SoftmaxItem& item);
  // Global tokens outside of a window, then the rest: among its neighbours one
  // of them would leave no tile of the window whole.
  const IndexList (&parts() const)[kParts] { return parts_; }

 private:
  void add(const std::vector<int32_t>& sorted);

  IndexList parts_[kParts];
  std::vector<int32_t> merged_, part_, result_;
};

inline constexpr int64_t kTileKeys = 128;

// Keys of a forward's tile, a panel of AVX-512: packed keys and values and the
// weights of a turn then fit into a first cache of 48 KB together, or nearly.
inline constexpr int64_t kForwardKeys = 64;
static_assert(kForwardKeys <= kTileKeys);

// A bit for each element of a tile's row.
struct TileBits {
  uint64_t word[2] = {0, 0};

  bool any() const { return (word[0] | word[1]) != 0; }
  bool operator==(const TileBits&) const = default;
};
inline TileBits operator|(const TileBits& a, const TileBits& b) {
  return {{a.word[0] | b.word[0], a.word[1] | b.word[1]}};
}
inline TileBits operator&(const TileBits& a, const TileBits& b) {
  return {{a.word[0] & b.word[0], a.word[1] & b.word[1]}};
}
// Bits [from, to).
inline TileBits bit_range(int64_t from, int64_t to) {
  const auto below = [](int64_t n) {
    return n <= 0    ? uint64_t{0}
           : n >= 64 ? ~uint64_t{0}
                     : (uint64_t{1} << n) - 1;
  };
  if (to <= from) return TileBits();
  return {{below(to) & ~below(from), below(to - 64) & ~below(from - 64)}};
}

enum class TileClass { kNone, kPartial, kFull };

class TileMask {
 public:
  // The tile of the block's inner elements [first, first + count).
  void start(const SoftmaxPlan& plan, const SoftmaxItem& item,
             const IndexList& inner, int64_t first, int64_t count);
  // Of outer rows [from, to) of the block: kNone and kFull are certain,
  // kPartial may turn out to be any.
  TileClass classify(int64_t from, int64_t to);
  // The visible elements of outer row t.
  TileBits row(int64_t t);
  // Those of outer rows [from, to).
  void rows(int64_t from, int64_t to, TileBits* out);
  // For each element of the tile the rows [from, to), at most kTileKeys, that
  // see it. Returns false, and does nothing, unless those are intervals.
  bool columns(int64_t from, int64_t to, TileBits* out) const;
  // Inner elements that take part at all (the others must be packed as zeros).
  const TileBits& real() const { return real_; }

 private:
  struct Range {
    int64_t from, to;
  };
  int64_t below(int64_t limit) const {
    return inner_.count_below(limit, first_, first_ + count_);
  }
  // Whether the block answers row x, and whether that one sees anything.
  bool takes_part(int64_t x) const;
  Range causal(int64_t x) const;
  Range window(int64_t x) const;
  Range around() const;
  void fill_block_bits(int64_t outer_block);

  const SoftmaxPlan* plan_ = nullptr;
  const SoftmaxBlock* block_ = nullptr;
  int64_t head_ = 0;
  IndexList inner_;
  int64_t first_ = 0, count_ = 0;
  SideView outer_side_, inner_side_;
  int64_t shift_ = 0;  // from an outer index to the inner one at its position
  bool all_pairs_ = false;    // no pattern binds this block
  bool plain_ = false;        // causality and a window alone: intervals
  bool outer_plain_ = false;  // every row of the block takes part in it
  TileBits real_, residue_, global_, block_bits_;
  // No block of positions, which may be negative.
  static constexpr int64_t kNoBlock = std::numeric_limits<int64_t>::min();
  int64_t bits_of_block_ = kNoBlock;
};

}  // namespace cosformer::simd

#endif  // COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_PLAN_H_
