// Gradients of Performer's features (performer.h). Loops without intrinsics are
// left to the compiler, which knows the target here.
#if defined(COSFORMER_SRC_KERNELS_SIMD_PERFORMER_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_PERFORMER_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_PERFORMER_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_PERFORMER_INL_H_
#endif

#include <algorithm>
#include <cmath>

#include "kernels/simd/d_keys_scratch-inl.h"
#include "kernels/simd/pack-inl.h"
#include "kernels/simd/performer.h"
#include "kernels/simd/state-inl.h"
#include "kernels/simd/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

// out[r][c] = sum_k a[r][k] b[k][c] for rows r < rows, a multiple of 4.
template <typename T>
HWY_NOINLINE void multiply_rows(const T* HWY_RESTRICT a, int64_t a_stride,
                                int64_t rows, int64_t depth, const Panels<T>& b,
                                T* HWY_RESTRICT out, int64_t out_stride) {
  for_panels<T>(b.columns, [&](auto vectors, int64_t c0) HWY_ATTR {
    constexpr int kVectors = decltype(vectors)::value;
    for_row_tiles<kVectors>(rows, [&](auto count, int64_t r) COSFORMER_LAMBDA {
      Tile<T, decltype(count)::value, kVectors> tile;
      tile.zero();
      tile.template multiply<Along::kRow>(
          a + r * a_stride, a_stride, b.panel(c0), kVectors * kLanes<T>, depth);
      tile.store(out + r * out_stride + c0, out_stride);
    });
  });
}

template <typename T>
struct PerformerEntry {
  using Projection = PerformerProjection<T>;

  static Panels<T> along(const Projection& w, T* data) {
    return {data, round_up(w.features, 4), padded(w.dim)};
  }

  static void pack_projection(const T* projection, const Projection& w) {
    const double scale = std::pow(static_cast<double>(w.dim), -0.25);
    const Panels<T> back = along(w, w.along);
    std::fill_n(back.data, back.rows * back.columns, T{0});
    load_panels<T>(projection, w.features, w.dim, back);
    for (int64_t i = 0; i < back.rows * back.columns; ++i)
      back.data[i] = static_cast<T>(scale * static_cast<double>(back.data[i]));
  }

  static void pack(DType dtype, const void* data, int64_t first, int64_t stride,
                   uint64_t valid, int64_t n, int64_t dim, T* out) {
    // Rows that only fill up the last tile are not there to read.
    const uint64_t there = n < 64 ? (uint64_t{1} << n) - 1 : ~uint64_t{0};
    pack_rows<T>(FeatureMap::kIdentity, dtype, Rows{data, first, stride},
                 valid & there, round_up(n, 4), dim, out, padded(dim));
  }

  static void write(DType dtype, const T* in, uint64_t written, uint64_t live,
                    int64_t dim, void* data, int64_t first, int64_t stride) {
    T ones[kPerformerBlock];
    std::fill_n(ones, kPerformerBlock, T{1});
    // Half a word at a time: rows are shifted out of it.
    constexpr int64_t kHalf = kPerformerBlock / 2;
    constexpr uint64_t kLow = (uint64_t{1} << kHalf) - 1;
    for (int64_t r = 0; r < kPerformerBlock; r += kHalf) {
      write_rows<T>(dtype, in + r * padded(dim), padded(dim), ones,
                    written >> r & kLow, live >> r & kLow, dim,
                    Rows{data, first + r, stride}, false);
    }
  }

  static void rescale(void* state, const Projection& w, const T* factor) {
    const Tag<T> d;
    const int64_t rows = d_keys_panel_rows(round_up(w.features, 4));
    const Panels<T> panels{static_cast<T*>(state), rows,
                           row_length<T>(w.value_dim)};
    T* sum = panels.data + rows * panels.columns;
    for (int64_t f = 0; f < w.features; ++f) {
      if (factor[f] == T{1}) continue;
      const Vec<T> scale = hn::Set(d, factor[f]);
      sum[f] *= factor[f];
      for (int64_t c0 = 0; c0 < panels.columns; c0 += kPanel<T>) {
        const int64_t width = panels.width_at(c0);
        T* row = panels.panel(c0) + f * width;
        for (int64_t c = 0; c < width; c += kLanes<T>)
          hn::Store(hn::Mul(hn::Load(d, row + c), scale), d, row + c);
      }
    }
  }

  static void rescale_across(void* state, const Projection& w,
                             const T* factor) {
    const int64_t rows = round_up(w.value_dim, 4);
    const Panels<T> panels{static_cast<T*>(state), rows,
                           row_length<T>(w.features)};
    T* HWY_RESTRICT sum = panels.data + rows * panels.columns;
    for (int64_t f = 0; f < w.features; ++f) sum[f] *= factor[f];
    for (int64_t f0 = 0; f0 < panels.columns; f0 += kPanel<T>) {
      const int64_t width = panels.width_at(f0);
      const int64_t count = std::min(width, w.features - f0);
      for (int64_t r = 0; r < w.value_dim; ++r) {
        T* HWY_RESTRICT row = panels.panel(f0) + r * width;
        for (int64_t c = 0; c < count; ++c) row[c] *= factor[f0 + c];
      }
    }
  }

  static void log_gradients(T* HWY_RESTRICT d_logs,
                            const T* HWY_RESTRICT features, int64_t n,
                            int64_t count, T* HWY_RESTRICT sums) {
    const Tag<T> d;
    const int64_t stride = padded(count);
    for (int64_t r = 0; r < n; ++r) {
      Vec<T> sum = hn::Zero(d);
      for (int64_t f = 0; f < stride; f += kLanes<T>) {
        T* at = d_logs + r * stride + f;
        Vec<T> x =
            hn::Mul(hn::Load(d, at), hn::Load(d, features + r * stride + f));
        // What stands in the padding does not matter.
        if (f + kLanes<T> > count) {
          const auto inside = hn::FirstN(
              d, static_cast<size_t>(std::max<int64_t>(count - f, 0)));
          x = hn::IfThenElseZero(inside, x);
        }
        hn::Store(x, d, at);
        sum = hn::Add(sum, x);
      }
      sums[r] = hn::GetLane(hn::SumOfLanes(d, sum));
    }
    // A tile reads whole groups of 4 rows.
    for (int64_t r = n; r < round_up(n, 4); ++r)
      std::fill_n(d_logs + r * stride, stride, T{0});
  }

  static void project_back(const Projection& w, const T* d_logs, int64_t n,
                           T* dx) {
    multiply_rows<T>(d_logs, padded(w.features), round_up(n, 4), w.features,
                     along(w, w.along), dx, padded(w.dim));
  }

  static void add_projection_gradient(const Projection& w, const T* d_logs,
                                      const T* x, int64_t n, T* d_projection) {
    Ahead ahead;
    ahead.start(0, 1);
    add_outer_products<T>(d_logs, padded(w.features), x, padded(w.dim), n,
                          along(w, d_projection), ahead);
  }

  static void collect_projection_gradient(const Projection& w,
                                          const T* d_projection,
                                          double* total) {
    const double scale = std::pow(static_cast<double>(w.dim), -0.25);
    const Panels<T> from = along(w, const_cast<T*>(d_projection));
    for (int64_t c0 = 0; c0 < w.dim; c0 += kPanel<T>) {
      const int64_t width = from.width_at(c0);
      for (int64_t f = 0; f < w.features; ++f)
        for (int64_t c = c0; c < std::min(c0 + width, w.dim); ++c)
          total[f * w.dim + c] +=
              scale * static_cast<double>(from.panel(c0)[f * width + c - c0]);
    }
  }

  static constexpr PerformerKernels<T> make() {
    return {&pack_projection,
            &pack,
            &write,
            &rescale,
            &rescale_across,
            &log_gradients,
            &project_back,
            &add_projection_gradient,
            &collect_projection_gradient};
  }
};

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_PERFORMER_INL_H_
