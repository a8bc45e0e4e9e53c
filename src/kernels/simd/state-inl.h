// The state inside the kernels: for each part (cosine, sine) panels of the
// columns of kv_state, each panel [rows][panel width] without gaps, so that a
// product runs through contiguous memory; then the sums of keys. Rows are
// padded to a multiple of 4, columns to whole vectors; what stands in the
// padding does not matter.
#if defined(COSFORMER_SRC_KERNELS_SIMD_STATE_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_STATE_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_STATE_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_STATE_INL_H_
#endif

#include <algorithm>

#include "kernels/simd/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

// A matrix in panels: element (r, c) of panel p, whose first column is c0 and
// whose width is w, at data[rows * c0 + r * w + (c - c0)].
template <typename T>
struct Panels {
  T* data;
  int64_t rows, columns;  // padded: a multiple of 4, whole vectors
  int64_t width_at(int64_t c0) const {
    return columns - c0 < kPanel<T> ? columns - c0 : kPanel<T>;
  }
  T* panel(int64_t c0) const { return data + rows * c0; }
};

// Brings the rows of a later chunk into the second-level cache, a few lines at
// every tile of the products: in one burst they would wait for each other.
// Heads apart, the rows of a head lie apart too, and the machine's own
// prefetching does not find them.
class Ahead {
 public:
  // For `rows` rows of each source, during `tiles` calls of tile().
  void start(int64_t rows, int64_t tiles) {
    rows_ = rows > 0 ? rows : 0;
    tiles_ = tiles;
    count_ = source_ = 0;
    lines_ = total_ = 0;
    left_ = per_tile_ = budget_ = 0;
  }
  void add(uintptr_t address, int64_t row_bytes, int64_t bytes) {
    // Of rows that do not begin with a line the last one may need one more.
    const uintptr_t first = address / kLine * kLine;
    const int64_t lines = static_cast<int64_t>(
        (address + static_cast<uintptr_t>(bytes) - first + kLine - 1) / kLine);
    sources_[count_] = {first, static_cast<uintptr_t>(row_bytes), lines};
    if (count_++ == 0) turn();
    total_ += lines * rows_;
    // Few: a division would take longer.
    while (per_tile_ * tiles_ < total_) ++per_tile_;
  }
  // Amid a tile.
  HWY_INLINE void step() { tile(); }
  // Whole rows: counted line by line, with all of this in memory from one to
  // the next, the prefetches of a chunk took up to a tenth of its time.
  HWY_INLINE void tile() {
    if (left_ == 0) return;
    int64_t budget = budget_ + per_tile_;
    while (budget > 0) {
      const char* at = reinterpret_cast<const char*>(at_);
      for (int64_t i = 0; i < lines_; ++i, at += kLine)
        __builtin_prefetch(at, 0, 2);
      budget -= lines_;
      at_ += stride_;
      if (--left_ == 0 && !turn()) break;
    }
    budget_ = budget;
  }

 private:
  static constexpr uintptr_t kLine = 64;
  struct Source {
    uintptr_t at, stride;
    int64_t lines;
  };
  // To the next source, where there is one.
  HWY_INLINE bool turn() {
    if (source_ == count_) return false;
    const Source& source = sources_[source_++];
    at_ = source.at;
    stride_ = source.stride;
    lines_ = source.lines;
    left_ = rows_;
    return true;
  }

  Source sources_[6];
  int count_ = 0, source_ = 0;
  uintptr_t at_ = 0, stride_ = 0;
  int64_t left_ = 0, lines_ = 0;  // rows of the source, lines of a row
  int64_t rows_ = 0, total_ = 0, tiles_ = 1, per_tile_ = 0, budget_ = 0;
};

// Tiles of a product of so many rows and columns.
template <typename T>
constexpr int64_t count_tiles(int64_t rows, int64_t columns) {
  const int64_t panels = (columns + kPanel<T> - 1) / kPanel<T>;
  const int64_t vectors = columns / kLanes<T>;
  const int64_t tile =
      rows_for(static_cast<int>(vectors < kMaxVectors ? vectors : kMaxVectors));
  return panels * ((rows + tile - 1) / tile);
}

// panels += A^T B over `depth` rows of packed chunks: the update of a state.
// Summed from zero and added at the end: short sums lose less to rounding, and
// the additions do not wait for the old state.
template <typename T>
HWY_NOINLINE void add_outer_products(const T* HWY_RESTRICT a, int64_t a_stride,
                                     const T* HWY_RESTRICT b, int64_t b_stride,
                                     int64_t depth, const Panels<T>& panels,
                                     Ahead& ahead) {
  for_panels<T>(panels.columns, [&](auto vectors, int64_t c0) HWY_ATTR {
    constexpr int kVectors = decltype(vectors)::value;
    constexpr int64_t kWidth = kVectors * kLanes<T>;
    T* panel = panels.panel(c0);
    for_row_tiles<kVectors>(panels.rows,
                            [&](auto rows, int64_t r) COSFORMER_LAMBDA {
                              Tile<T, decltype(rows)::value, kVectors> tile;
                              tile.zero();
                              tile.template multiply<Along::kColumn>(
                                  a + r, a_stride, b + c0, b_stride, depth);
                              tile.add_to(panel + r * kWidth, kWidth);
                              ahead.tile();
                            });
  });
}

// Row-major [rows][columns] into panels and back.
template <typename T>
void load_panels(const T* from, int64_t rows, int64_t columns,
                 const Panels<T>& to) {
  for (int64_t c0 = 0; c0 < to.columns; c0 += kPanel<T>) {
    const int64_t width = to.width_at(c0);
    const int64_t count = std::clamp<int64_t>(columns - c0, 0, width);
    for (int64_t r = 0; r < rows; ++r) {
      T* row = to.panel(c0) + r * width;
      std::copy_n(from + r * columns + c0, count, row);
    }
  }
}
// The transpose of row-major [rows][columns] into panels.
template <typename T>
void load_panels_across(const T* from, int64_t rows, int64_t columns,
                        const Panels<T>& to) {
  for (int64_t c0 = 0; c0 < rows; c0 += kPanel<T>) {
    const int64_t width = to.width_at(c0);
    const int64_t count = std::min(rows - c0, width);
    for (int64_t r = 0; r < columns; ++r)
      for (int64_t c = 0; c < count; ++c)
        to.panel(c0)[r * width + c] = from[(c0 + c) * columns + r];
  }
}
template <typename T>
void store_panels(const Panels<T>& from, int64_t rows, int64_t columns, T* to) {
  for (int64_t c0 = 0; c0 < columns; c0 += kPanel<T>) {
    const int64_t width = from.width_at(c0);
    const int64_t count = std::min(columns - c0, width);
    for (int64_t r = 0; r < rows; ++r)
      std::copy_n(from.panel(c0) + r * width, count, to + r * columns + c0);
  }
}

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_STATE_INL_H_
