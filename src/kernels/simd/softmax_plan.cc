#include "kernels/simd/softmax_plan.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "kernels/call_check.h"

namespace cosformer::simd {
namespace {

// Positions stay below 2^53, and so does what is added to them.
int64_t distance(int64_t steps, int64_t dilation) {
  return std::min(steps, kMaxPosition / dilation) * dilation;
}

std::vector<int32_t> globals_of(const SideView& side) {
  std::vector<int32_t> found;
  if (side.global_mask == nullptr) return found;
  for (int64_t x = 0; x < side.len; ++x)
    if (side.is_global(x)) found.push_back(static_cast<int32_t>(x));
  return found;
}

int64_t floor_div(int64_t n, int64_t by) {
  return n >= 0 ? n / by : -((by - 1 - n) / by);
}

bool holds(const IndexList& run, int64_t y) {
  return y >= run.first && (y - run.first) % run.step == 0 &&
         (y - run.first) / run.step < run.count;
}

}  // namespace

SoftmaxCall::SoftmaxCall(const SoftmaxAttentionOptions& o,
                         const SoftmaxAttentionInputs& in)
    : options(o),
      inputs(in),
      dtype(in.q.dtype),
      dim(in.q.size[3]),
      value_dim(in.v.size[3]),
      heads(in.q.size[2]),
      kv_heads(in.k.size[2]),
      group(kv_heads > 0 ? heads / kv_heads : 1),
      scale(o.scale != 0 ? o.scale
                         : 1 / std::sqrt(static_cast<double>(in.q.size[3]))) {}

int64_t IndexList::count_below(int64_t limit, int64_t from, int64_t to) const {
  if (list != nullptr)
    return std::lower_bound(list + from, list + to, limit) - (list + from);
  const int64_t steps =
      step == 1 ? limit - first : floor_div(limit - first + step - 1, step);
  return std::clamp<int64_t>(steps - from, 0, to - from);
}

SoftmaxPlan::SoftmaxPlan(const SoftmaxCall& call, Side outer, int64_t outer_len)
    : call_(call), side_(outer) {
  const SoftmaxAttentionOptions& o = call.options;
  if (o.has_window) {
    dilation_ = o.dilation;
    // Of a key seen from a query; seen from the key, sides are swapped.
    const int64_t left =
        outer == Side::kQueries ? o.window_left : o.window_right;
    const int64_t right =
        outer == Side::kQueries ? o.window_right : o.window_left;
    reach_.has_before = left >= 0;
    reach_.has_after = right >= 0;
    if (left >= 0) reach_.before = distance(left, dilation_);
    if (right >= 0) reach_.after = distance(right, dilation_);
  }
  const int64_t rows = cosformer::num_rows(call.inputs);
  rows_.reserve(static_cast<size_t>(rows));
  for (int64_t r = 0; r < rows; ++r)
    rows_.push_back(attention_row(call.inputs, r));
  outer_globals_.resize(static_cast<size_t>(rows));
  inner_globals_.resize(static_cast<size_t>(rows));
  for (int64_t r = 0; r < rows; ++r) add_row(r, outer_len);
  row_begin_.push_back(static_cast<int64_t>(blocks_.size()));
}

SideView SoftmaxPlan::queries(int64_t r) const {
  const AttentionRow& row = this->row(r);
  const SoftmaxAttentionInputs& in = call_.inputs;
  SideView side;
  side.len = row.q_len;
  side.start = row.q_start;
  if (in.query_mask != nullptr)
    side.mask = in.query_mask + row.batch * in.query_mask_stride + row.q_offset;
  if (in.global_mask != nullptr) {
    side.global_mask =
        in.global_mask + row.batch * in.global_mask_stride + row.kv_offset;
    side.global_shift = row.q_start - row.kv_start;
    side.global_len = row.kv_len;
  }
  return side;
}

SideView SoftmaxPlan::keys(int64_t r) const {
  const AttentionRow& row = this->row(r);
  const SoftmaxAttentionInputs& in = call_.inputs;
  SideView side = queries(r);
  side.len = row.kv_len;
  side.start = row.kv_start;
  side.mask =
      in.key_mask == nullptr
          ? nullptr
          : in.key_mask + row.batch * in.key_mask_stride + row.kv_offset;
  side.global_shift = 0;
  return side;
}

SoftmaxItem SoftmaxPlan::item(int64_t i) const {
  // The row whose items hold i: the last that begins at or before it.
  const auto after =
      std::upper_bound(row_begin_.begin(), row_begin_.end(), i / call_.heads);
  const size_t r = static_cast<size_t>(after - row_begin_.begin()) - 1;
  const int64_t begin = row_begin_[r], blocks = row_begin_[r + 1] - begin;
  const int64_t rest = i - begin * call_.heads;
  return {&blocks_[static_cast<size_t>(begin + rest % blocks)], rest / blocks};
}

bool SoftmaxPlan::block_visible(int64_t head, int64_t outer_block,
                                int64_t inner_block) const {
  const SoftmaxAttentionInputs& in = call_.inputs;
  const int64_t h = in.block_mask_heads == 1 ? 0 : head;
  const int64_t q = side_ == Side::kQueries ? outer_block : inner_block;
  const int64_t k = side_ == Side::kQueries ? inner_block : outer_block;
  return q >= 0 && q < in.q_blocks && k >= 0 && k < in.kv_blocks &&
         in.block_mask[(h * in.q_blocks + q) * in.kv_blocks + k] != 0;
}

int64_t SoftmaxPlan::outer_pattern_blocks() const {
  return side_ == Side::kQueries ? call_.inputs.q_blocks
                                 : call_.inputs.kv_blocks;
}
int64_t SoftmaxPlan::inner_pattern_blocks() const {
  return side_ == Side::kQueries ? call_.inputs.kv_blocks
                                 : call_.inputs.q_blocks;
}

// Pattern blocks differ in what they see: few of them to a block, or its list
// grows by what most of its rows do not see, and its tiles become partial ones.
void SoftmaxPlan::add_row(int64_t r, int64_t outer_len) {
  constexpr int64_t kFewRows = 24;
  row_begin_.push_back(static_cast<int64_t>(blocks_.size()));
  const SideView outer = outer_side(r);
  const size_t at = static_cast<size_t>(r);
  outer_globals_[at] = globals_of(outer);
  inner_globals_[at] = globals_of(inner_side(r));
  const bool by_blocks = call_.inputs.block_mask != nullptr;
  int64_t len = outer_len;
  const int64_t size = call_.inputs.block_size;
  if (by_blocks) {
    len = std::min(len, std::max(size, kFewRows));
    if (size < len) len = len / size * size;
  }
  const int64_t classes = std::min(dilation_, std::max<int64_t>(outer.len, 1));
  for (int64_t c = 0; c < classes; ++c) {
    for (int64_t x = c; x < outer.len;) {
      int64_t count =
          std::min(len, (outer.len - x + dilation_ - 1) / dilation_);
      if (by_blocks && dilation_ == 1) {
        // To the next boundary of pattern blocks that is in reach.
        const int64_t end = outer.start + x + count;
        const int64_t boundary = floor_div(end, size) * size;
        if (boundary > outer.start + x) {
          count = std::min(count, boundary - outer.start - x);
        }
      }
      SoftmaxBlock block;
      block.row = r;
      block.outer = {x, dilation_, count, nullptr};
      blocks_.push_back(block);
      x += count * dilation_;
    }
  }
  const std::vector<int32_t>& globals = outer_globals_[at];
  const int64_t n = static_cast<int64_t>(globals.size());
  for (int64_t x = 0; x < n; x += outer_len) {
    SoftmaxBlock block;
    block.row = r;
    block.outer.count = std::min(outer_len, n - x);
    block.outer.list = globals.data() + x;
    block.is_global = true;
    blocks_.push_back(block);
  }
}

void InnerList::add(const std::vector<int32_t>& sorted) {
  if (sorted.empty()) return;
  result_.clear();
  std::set_union(merged_.begin(), merged_.end(), sorted.begin(), sorted.end(),
                 std::back_inserter(result_));
  merged_.swap(result_);
}

void InnerList::fill(const SoftmaxPlan& plan, const SoftmaxItem& item) {
  const SoftmaxBlock& block = *item.block;
  const SoftmaxCall& call = plan.call();
  const SideView outer = plan.outer_side(block.row);
  const SideView inner = plan.inner_side(block.row);
  IndexList& list = parts_[1];
  parts_[0] = list = IndexList();
  const int64_t shift = outer.start - inner.start;
  // Outer indices that count, as the inner indices at their positions.
  int64_t low = 0, high = block.outer.count - 1;
  const auto counts = [&](int64_t t) {
    const int64_t x = block.outer[t];
    return outer.real(x) && (block.is_global || !outer.is_global(x));
  };
  while (low <= high && !counts(low)) ++low;
  while (high >= low && !counts(high)) --high;
  if (low > high) return;
  low = block.outer[low] + shift;
  high = block.outer[high] + shift;

  int64_t from = 0, to = inner.len;  // by mask and causality
  if (call.options.is_causal && plan.side() == Side::kQueries)
    to = std::min(to, high + 1);
  if (call.options.is_causal && plan.side() == Side::kKeys)
    from = std::max(from, low);
  while (from < to && !inner.real(from)) ++from;
  while (to > from && !inner.real(to - 1)) --to;
  if (from >= to) return;
  if (!plan.has_pattern() || block.is_global) {
    list = {from, 1, to - from, nullptr};
    return;
  }

  IndexList run;
  if (call.options.has_window) {
    const int64_t step = plan.dilation();
    const SoftmaxPlan::Reach& reach = plan.reach();
    int64_t first =
        reach.has_before ? std::max(from, low - reach.before) : from;
    const int64_t end =
        reach.has_after ? std::min(to, high + reach.after + 1) : to;
    // Up to the residue of the block's positions; of neighbours down to a whole
    // tile, so that blocks share packed tiles.
    first += (((low - first) % step) + step) % step;
    if (plan.side() == Side::kQueries && step == 1)
      first -= (first - from) % kForwardKeys;
    run = {first, step,
           end > first ? (end - first + step - 1) / step : int64_t{0}, nullptr};
  }
  const std::vector<int32_t>& globals = plan.inner_globals(block.row);
  merged_.clear();
  part_.clear();
  for (auto y = std::lower_bound(globals.begin(), globals.end(), from);
       y != globals.end() && *y < to; ++y)
    if (inner.real(*y)) part_.push_back(*y);
  if (call.inputs.block_mask == nullptr) {
    list = run;
    for (int32_t y : part_)
      if (!holds(run, y)) merged_.push_back(y);
    parts_[0].count = static_cast<int64_t>(merged_.size());
    parts_[0].list = merged_.data();
    return;
  }
  for (int64_t t = 0; t < run.count; ++t)
    merged_.push_back(static_cast<int32_t>(run[t]));
  add(part_);
  part_.clear();
  const int64_t size = call.inputs.block_size;
  const int64_t first_block =
      std::max<int64_t>(0, floor_div(low + inner.start, size));
  const int64_t last_block = std::min(plan.outer_pattern_blocks() - 1,
                                      floor_div(high + inner.start, size));
  const int64_t b0 = std::max<int64_t>(0, floor_div(from + inner.start, size));
  const int64_t b1 = std::min(plan.inner_pattern_blocks() - 1,
                              floor_div(to - 1 + inner.start, size));
  // Keys in whole blocks, those that take no part too: so they make the same
  // tiles for all queries.
  const int64_t least = plan.side() == Side::kQueries ? 0 : from;
  for (int64_t b = b0; b <= b1; ++b) {
    bool seen = false;
    for (int64_t a = first_block; a <= last_block && !seen; ++a)
      seen = plan.block_visible(item.head, a, b);
    if (!seen) continue;
    const int64_t end = std::min(to, (b + 1) * size - inner.start);
    for (int64_t y = std::max(least, b * size - inner.start); y < end; ++y)
      part_.push_back(static_cast<int32_t>(y));
  }
  add(part_);
  list.count = static_cast<int64_t>(merged_.size());
  list.list = merged_.data();
}

void TileMask::start(const SoftmaxPlan& plan, const SoftmaxItem& item,
                     const IndexList& inner, int64_t first, int64_t count) {
  const SoftmaxCall& call = plan.call();
  const bool same_block = plan_ == &plan && block_ == item.block;
  plan_ = &plan;
  block_ = item.block;
  head_ = item.head;
  inner_ = inner;
  first_ = first;
  count_ = count;
  bits_of_block_ = kNoBlock;
  if (!same_block) {
    outer_side_ = plan.outer_side(block_->row);
    inner_side_ = plan.inner_side(block_->row);
    shift_ = outer_side_.start - inner_side_.start;
    outer_plain_ = true;
    if (outer_side_.mask != nullptr || outer_side_.global_mask != nullptr) {
      for (int64_t t = 0; t < block_->outer.count && outer_plain_; ++t)
        outer_plain_ = takes_part(block_->outer[t]);
    }
    all_pairs_ = !plan.has_pattern() || block_->is_global;
  }
  const auto set_bits = [&](TileBits& bits, auto&& holds) {
    bits = TileBits();
    for (int64_t c = 0; c < count; ++c) {
      if (holds(inner[first + c])) bits.word[c / 64] |= uint64_t{1} << (c % 64);
    }
  };
  real_ = bit_range(0, count);
  if (inner_side_.mask != nullptr)
    set_bits(real_, [&](int64_t y) { return inner_side_.mask[y] != 0; });
  plain_ = all_pairs_;
  if (all_pairs_) return;
  residue_ = bit_range(0, count);
  const int64_t step = plan.dilation();
  if (call.options.has_window && step > 1 && inner.list != nullptr) {
    const int64_t at = block_->outer.first + shift_;
    set_bits(residue_, [&](int64_t y) { return (y - at) % step == 0; });
  }
  global_ = TileBits();
  if (inner_side_.global_mask != nullptr)
    set_bits(global_, [&](int64_t y) { return inner_side_.is_global(y); });
  plain_ = !global_.any() && call.inputs.block_mask == nullptr;
}

bool TileMask::takes_part(int64_t x) const {
  return outer_side_.real(x) &&
         (block_->is_global || !outer_side_.is_global(x));
}

TileMask::Range TileMask::causal(int64_t x) const {
  if (!plan_->call().options.is_causal) return {0, count_};
  return plan_->side() == Side::kQueries ? Range{0, below(x + shift_ + 1)}
                                         : Range{below(x + shift_), count_};
}

TileMask::Range TileMask::window(int64_t x) const {
  const SoftmaxPlan::Reach& reach = plan_->reach();
  return {reach.has_before ? below(x + shift_ - reach.before) : 0,
          reach.has_after ? below(x + shift_ + reach.after + 1) : count_};
}

TileClass TileMask::classify(int64_t from, int64_t to) {
  if (from >= to || !real_.any()) return TileClass::kNone;
  // Intervals move with the position: the ends tell.
  const int64_t a = block_->outer[from], b = block_->outer[to - 1];
  const auto around_both = [](const Range& x, const Range& y) {
    return bit_range(std::min(x.from, y.from), std::max(x.to, y.to));
  };
  const auto within_both = [](const Range& x, const Range& y) {
    return bit_range(std::max(x.from, y.from), std::min(x.to, y.to));
  };
  const Range ca = causal(a), cb = causal(b);
  TileBits any = around_both(ca, cb), all = within_both(ca, cb);
  const TileBits whole = bit_range(0, count_);
  if (!all_pairs_ && global_ != whole) {
    TileBits some = global_, every = global_;
    if (plan_->call().options.has_window) {
      const Range wa = window(a), wb = window(b);
      some = some | (around_both(wa, wb) & residue_);
      every = every | (within_both(wa, wb) & residue_);
    }
    if (plan_->call().inputs.block_mask != nullptr) {
      const int64_t size = plan_->call().inputs.block_size;
      const int64_t first = floor_div(a + outer_side_.start, size);
      const int64_t last = floor_div(b + outer_side_.start, size);
      // Of many blocks some row is likely to see something, and none all.
      constexpr int64_t kFew = 8;
      if (last - first < kFew) {
        TileBits of_blocks = whole;
        for (int64_t block = first; block <= last; ++block) {
          fill_block_bits(block);
          some = some | block_bits_;
          of_blocks = of_blocks & block_bits_;
        }
        every = every | of_blocks;
      } else {
        some = whole;
      }
    }
    any = any & some;
    all = all & every;
  }
  if (!(any & real_).any()) return TileClass::kNone;
  return outer_plain_ && (all & real_) == whole ? TileClass::kFull
                                                : TileClass::kPartial;
}

void TileMask::fill_block_bits(int64_t outer_block) {
  if (bits_of_block_ == outer_block) return;
  bits_of_block_ = outer_block;
  block_bits_ = TileBits();
  const int64_t size = plan_->call().inputs.block_size;
  int64_t end = std::numeric_limits<int64_t>::min();  // of the block at hand
  bool seen = false;
  for (int64_t c = 0; c < count_; ++c) {
    const int64_t position = inner_[first_ + c] + inner_side_.start;
    if (position >= end) {
      const int64_t b = floor_div(position, size);
      end = (b + 1) * size;
      seen = plan_->block_visible(head_, outer_block, b);
    }
    if (seen) block_bits_.word[c / 64] |= uint64_t{1} << (c % 64);
  }
}

TileBits TileMask::row(int64_t t) {
  const int64_t x = block_->outer[t];
  if (!outer_plain_ && !takes_part(x)) return TileBits();
  const Range c = causal(x);
  const TileBits allowed = bit_range(c.from, c.to) & real_;
  if (all_pairs_ || !allowed.any()) return allowed;
  TileBits bits = global_;
  if (plan_->call().options.has_window) {
    const Range w = window(x);
    bits = bits | (bit_range(w.from, w.to) & residue_);
  }
  if (plan_->call().inputs.block_mask != nullptr) {
    fill_block_bits(
        floor_div(x + outer_side_.start, plan_->call().inputs.block_size));
    bits = bits | block_bits_;
  }
  return bits & allowed;
}

// How far before and behind its own position a row of a plain block sees.
TileMask::Range TileMask::around() const {
  const SoftmaxAttentionOptions& o = plan_->call().options;
  const SoftmaxPlan::Reach& reach = plan_->reach();
  const int64_t far = 2 * kMaxPosition;  // beyond every element
  const bool queries = plan_->side() == Side::kQueries;
  int64_t before = far, after = far;
  if (!all_pairs_ && reach.has_before) before = reach.before;
  if (!all_pairs_ && reach.has_after) after = reach.after;
  if (o.is_causal && queries) after = std::min<int64_t>(after, 0);
  if (o.is_causal && !queries) before = std::min<int64_t>(before, 0);
  return {before, after};
}

bool TileMask::columns(int64_t from, int64_t to, TileBits* out) const {
  const auto neighbours = [](const IndexList& list) {
    return list.list == nullptr && list.step == 1;
  };
  if (!plain_ || !outer_plain_ || !neighbours(block_->outer) ||
      !neighbours(inner_) || real_ != bit_range(0, count_))
    return false;
  const auto [before, after] = around();
  // Row t stands at element t + own of the tile.
  const int64_t own =
      block_->outer.first + from + shift_ - inner_.first - first_;
  for (int64_t c = 0; c < count_; ++c) {
    *out++ = bit_range(std::max<int64_t>(c - after - own, 0),
                       std::min(c + before - own + 1, to - from));
  }
  return true;
}

void TileMask::rows(int64_t from, int64_t to, TileBits* out) {
  const bool run = block_->outer.list == nullptr && inner_.list == nullptr;
  if (!plain_ || !outer_plain_ || !run) {
    for (int64_t t = from; t < to; ++t) *out++ = row(t);
    return;
  }
  // Intervals of a run that move by a constant from row to row: in elements of
  // the tile, those of the row's own position and what the window adds.
  const int64_t step = inner_.step;
  const auto [before, after] = around();
  const int64_t origin = inner_.first + first_ * step;
  for (int64_t t = from; t < to; ++t) {
    const int64_t at = block_->outer[t] + shift_ - origin;
    // The first element not below at - before, the first beyond at + after.
    int64_t low = at - before, high = at + after + 1;
    if (step > 1) {
      low = floor_div(low + step - 1, step);
      high = floor_div(high + step - 1, step);
    }
    *out++ =
        bit_range(std::max<int64_t>(low, 0), std::min<int64_t>(high, count_)) &
        real_;
  }
}

}  // namespace cosformer::simd
