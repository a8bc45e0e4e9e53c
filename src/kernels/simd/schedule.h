// How a call is cut. A unit is a row and a kv head; with enough units each is
// taken whole, and a task walks a few of them together, a block of positions of
// each in turn, so that memory is read in order while their states stay in the
// second-level cache. (Which units share a task changes no result, so that may
// follow the number of threads.) Where units are few their sequences are cut
// into segments, by shape alone: the segments' sums are formed in parallel,
// added up in order, and then all segments run in parallel, each from the state
// before it.
#ifndef COSFORMER_SRC_KERNELS_SIMD_SCHEDULE_H_
#define COSFORMER_SRC_KERNELS_SIMD_SCHEDULE_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/simd/call.h"

namespace cosformer::simd {

struct Span {
  int64_t begin = 0, end = 0;  // positions
  int64_t size() const { return end - begin; }
};

inline Span query_span(const Unit& unit) {
  return {unit.row.q_start, unit.q_end()};
}
inline Span key_span(const Unit& unit) {
  return {unit.row.kv_start, unit.kv_end()};
}

// The positions that a causal walk visits: those of queries and keys. The gap
// between the two, where there is one, is skipped.
struct Walk {
  explicit Walk(const Unit& unit) {
    Span a = query_span(unit), b = key_span(unit);
    if (a.size() == 0) a = b;
    if (b.size() == 0) b = a;
    if (b.begin < a.begin) std::swap(a, b);
    if (a.end >= b.begin) {
      first = {a.begin, std::max(a.end, b.end)};
      second = {first.end, first.end};
    } else {
      first = a;
      second = b;
    }
  }
  int64_t size() const { return first.size() + second.size(); }
  // Calls visit(begin, end) for the blocks of the steps [from, to) of the walk.
  // Blocks are counted from each part's begin: the cut depends on neither
  // length nor segments as long as these are whole blocks. (A short walk may be
  // taken otherwise: is_alone in chunk-inl.h.)
  template <typename Visit>
  void blocks(int64_t from, int64_t to, int64_t block, bool from_the_end,
              const Visit& visit) const {
    const int64_t gap = first.size();
    if (from_the_end) {
      for_blocks(second, from - gap, to - gap, block, true, visit);
      for_blocks(first, from, to, block, true, visit);
    } else {
      for_blocks(first, from, to, block, false, visit);
      for_blocks(second, from - gap, to - gap, block, false, visit);
    }
  }

  Span first, second;

 private:
  template <typename Visit>
  static void for_blocks(const Span& span, int64_t from, int64_t to,
                         int64_t block, bool from_the_end, const Visit& visit) {
    from = std::max<int64_t>(from, 0);
    to = std::min(to, span.size());
    while (from < to) {
      if (from_the_end) {
        const int64_t begin = std::max(from, (to - 1) / block * block);
        visit(span.begin + begin, span.begin + to);
        to = begin;
      } else {
        const int64_t end = std::min(to, (from / block + 1) * block);
        visit(span.begin + from, span.begin + end);
        from = end;
      }
    }
  }
};

// Steps a segment where a walk of so many steps is cut; all of it where not.
inline int64_t segment_size(int64_t units, int64_t steps) {
  constexpr int64_t kEnoughUnits = 4, kSegments = 16, kLeast = 2048;
  if (units >= kEnoughUnits || steps < 2 * kLeast)
    return std::max<int64_t>(steps, 1);
  const int64_t per_segment =
      std::max(kLeast, (steps * units + kSegments - 1) / kSegments);
  return (per_segment + kBlock - 1) / kBlock * kBlock;
}

// Units a task, given the bytes of one's states.
inline int64_t units_per_task(int64_t units, size_t state_bytes, int threads) {
  constexpr size_t kCache = 640 << 10;  // of a second-level cache of 1 MB
  const int64_t fit = std::max<int64_t>(
      1, static_cast<int64_t>(kCache / std::max<size_t>(state_bytes, 1)));
  const int64_t share = std::max<int64_t>(1, units / std::max(threads, 1));
  return std::min(fit, share);
}

// All units of a call, row by row.
inline std::vector<Unit> units_of(const LinearCall& call) {
  std::vector<Unit> units;
  const int64_t rows = num_rows(call.inputs);
  units.reserve(static_cast<size_t>(rows * call.kv_heads));
  for (int64_t row = 0; row < rows; ++row) {
    Unit unit = make_unit(call, row, 0);
    for (unit.head = 0; unit.head < call.kv_heads; ++unit.head)
      units.push_back(unit);
  }
  return units;
}

// Memory for `count` pieces of `bytes` each, every piece aligned.
class Pieces {
 public:
  Pieces(int64_t count, size_t bytes)
      : stride_((bytes + 127) / 64 * 64),
        buffer_(static_cast<size_t>(count) * stride_) {}
  bool failed() const { return buffer_.data() == nullptr; }
  void* operator[](int64_t i) const {
    return buffer_.as<char>() + static_cast<size_t>(i) * stride_;
  }

 private:
  size_t stride_;
  AlignedBuffer buffer_;
};

inline Status out_of_memory(size_t bytes) {
  return Status(StatusCode::kOutOfMemory,
                str_cat("linear_attention: cannot allocate ", bytes,
                        " bytes of working memory"));
}

}  // namespace cosformer::simd

#endif  // COSFORMER_SRC_KERNELS_SIMD_SCHEDULE_H_
