// The last step of a gradient's rows: what a state gave them, its sums and the
// products inside the chunk, a tile at a time, handed over finished.
#if defined(COSFORMER_SRC_KERNELS_SIMD_GATHER_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_GATHER_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_GATHER_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_GATHER_INL_H_
#endif

#include "kernels/simd/call.h"
#include "kernels/simd/dot_tile-inl.h"
#include "kernels/simd/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

// What is added up for the rows of a gradient: what they hold (nullptr:
// nothing), the sums of the state, and the products inside the chunk.
template <typename T>
struct Gathering {
  const T* from = nullptr;
  int64_t stride = 0, rows = 0;
  const T *sum_main = nullptr, *sum_other = nullptr;
  const T *ratio = nullptr, *ones = nullptr;
  const T *scores = nullptr, *y = nullptr;
  bool finite = true;  // y is

  void add_inside(const T* s, const T* b, bool b_finite) {
    scores = s;
    y = b;
    finite = b_finite;
  }
};
template <typename T, class Finish>
HWY_NOINLINE void gather_rows(const Gathering<T>& in, const Finish& finish) {
  for_panels<T>(in.stride, [&](auto vectors, int64_t c0) HWY_ATTR {
    constexpr int kVectors = decltype(vectors)::value;
    const auto take = [&](auto rows, int64_t r) COSFORMER_LAMBDA {
      constexpr int kRows = decltype(rows)::value;
      Tile<T, kRows, kVectors> tile;
      if (in.from != nullptr) {
        tile.load(in.from + r * in.stride + c0, in.stride);
      } else {
        tile.zero();
      }
      if (in.sum_main != nullptr) {
        tile.template multiply<Along::kRow>(in.ones + r, 1, in.sum_main + c0, 0,
                                            1);
      }
      if (in.sum_other != nullptr) {
        tile.template multiply<Along::kRow>(in.ratio + r, 1, in.sum_other + c0,
                                            0, 1);
      }
      if (in.scores != nullptr) {
        tile.template multiply<Along::kRow>(
            in.scores + r * kScoresStride + r, kScoresStride,
            in.y + r * in.stride + c0, in.stride, in.rows - r);
      }
      finish(tile, r, c0);
    };
    if (in.finite || in.scores == nullptr) {
      for_row_tiles<kVectors>(in.rows, take);
    } else {
      for (int64_t r = 0; r < in.rows; ++r)
        take(std::integral_constant<int, 1>(), r);
    }
  });
}

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_GATHER_INL_H_
