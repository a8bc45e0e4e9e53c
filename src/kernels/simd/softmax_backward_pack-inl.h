// What the backward of the softmax engine needs beside softmax_pack-inl.h: rows
// of an index list in runs, bits of what is visible turned from keys to
// queries, and products of rows in place.
#if defined(COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_BACKWARD_PACK_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_BACKWARD_PACK_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_BACKWARD_PACK_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_BACKWARD_PACK_INL_H_
#endif

#include <algorithm>
#include <cstring>

#include "kernels/simd/softmax_pack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

inline constexpr double kLog2E = 1.4426950408889634;

// The step between the elements [first, first + count) of a list, 0 where they
// are not evenly spaced.
inline int64_t run_step(const IndexList& list, int64_t first, int64_t count) {
  if (list.list == nullptr) return list.step;
  return list[first + count - 1] - list[first] == count - 1 ? 1 : 0;
}

// Row `index` of `rows` and those `step` apart behind it.
inline Rows rows_from(const Rows& rows, DType dtype, int64_t index,
                      int64_t step) {
  return {static_cast<const char*>(rows.data) +
              (rows.first + index) * rows.stride *
                  static_cast<int64_t>(size_of(dtype)),
          0, rows.stride * step};
}

// Calls piece(t, count, rows) for runs of at most 64 evenly spaced
// elements [t, t + count) of list[first ..].
template <class F>
void for_listed_rows(const Rows& rows, DType dtype, const IndexList& list,
                     int64_t first, int64_t count, F&& piece) {
  for (int64_t t = 0; t < count;) {
    int64_t n = std::min(count - t, 64 - t % 64);
    int64_t step = run_step(list, first + t, n);
    if (step == 0) {
      // As far as they are neighbours.
      step = 1;
      int64_t same = 1;
      while (same < n && list[first + t + same] == list[first + t] + same)
        ++same;
      n = same;
    }
    piece(t, n, rows_from(rows, dtype, list[first + t], step));
    t += n;
  }
}

// Bit c of word r becomes bit r of word c, by halves (Hacker's Delight, 7-3).
inline void transpose_bits(uint64_t (&words)[64]) {
  uint64_t mask = 0x00000000FFFFFFFF;
  for (int half = 32; half != 0; half >>= 1, mask ^= mask << half) {
    for (int r = 0; r < 64; r = ((r | half) + 1) & ~half) {
      const uint64_t swapped = ((words[r] >> half) ^ words[r | half]) & mask;
      words[r | half] ^= swapped;
      words[r] ^= swapped << half;
    }
  }
}

// sum_c a[c] b[c] of two rows in memory.
template <typename T, typename In>
HWY_NOINLINE T dot_rows(const In* HWY_RESTRICT a, const In* HWY_RESTRICT b,
                        int64_t n) {
  const Tag<T> d;
  constexpr int64_t kLane = kLanes<T>;
  Vec<T> sum = hn::Zero(d);
  int64_t c = 0;
  for (; c + kLane <= n; c += kLane)
    sum = hn::MulAdd(load_wide(a + c), load_wide(b + c), sum);
  if (c < n) {
    In x[kLane] = {}, y[kLane] = {};
    std::memcpy(x, a + c, static_cast<size_t>(n - c) * sizeof(In));
    std::memcpy(y, b + c, static_cast<size_t>(n - c) * sizeof(In));
    sum = hn::MulAdd(load_wide(x), load_wide(y), sum);
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_BACKWARD_PACK_INL_H_
