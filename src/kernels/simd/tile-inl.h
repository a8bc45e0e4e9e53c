// The one product that the linear engine is made of, in registers:
//
//   acc[r][c] += sum_k A(r, k) B(k, c)      r < kRows, c < kVectors x lanes
//
// A is read one element at a time and spread over a vector (a broadcast load is
// free beside a multiply-add), B in whole vectors. Per step a tile loads kRows
// + kVectors times for kRows x kVectors multiply-adds, so the widest tile that
// the registers hold is the best one: 4 x 4 of 32 registers with AVX-512, 6 x 2
// of 16 with AVX2; narrow panels take more rows, or their few accumulators
// would wait for each other.
//
// Rows come in multiples of 4 (callers pad with zeros), and 6 a + 4 b makes all
// of those, so that two row counts a width serve every size.
#if defined(COSFORMER_SRC_KERNELS_SIMD_TILE_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_TILE_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_TILE_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_TILE_INL_H_
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>
#include <utility>

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Lambdas do not inherit the target's attributes.
#undef COSFORMER_LAMBDA
#define COSFORMER_LAMBDA __attribute__((always_inline)) HWY_ATTR

template <typename T>
using Tag = hn::ScalableTag<T>;
template <typename T>
using Vec = hn::Vec<Tag<T>>;
template <typename T>
inline constexpr int64_t kLanes = HWY_LANES(T);

#if HWY_TARGET == HWY_AVX2
inline constexpr int kMaxVectors = 2;
constexpr int rows_for(int) { return 6; }
inline constexpr int64_t kShortChunk = 12;
#elif HWY_TARGET == HWY_AVX3
inline constexpr int kMaxVectors = 4;
constexpr int rows_for(int vectors) { return vectors > 2 ? 4 : 8; }
inline constexpr int64_t kShortChunk = 8;
#else
inline constexpr int kMaxVectors = 2;
constexpr int rows_for(int) { return 4; }
inline constexpr int64_t kShortChunk = 8;
#endif

// Columns of a panel, and its rows' padding.
template <typename T>
inline constexpr int64_t kPanel = kMaxVectors * kLanes<T>;
constexpr int64_t round_up(int64_t n, int64_t to) {
  return (n + to - 1) / to * to;
}
// The length of a packed row of n elements: whole vectors, and whole tiles of
// rows where it is read across.
template <typename T>
constexpr int64_t row_length(int64_t n) {
  return round_up(n, kLanes<T> < 4 ? 4 : kLanes<T>);
}

template <int... I, class F>
HWY_INLINE void unroll_indices(std::integer_sequence<int, I...>, F&& f) {
  (f(std::integral_constant<int, I>()), ...);
}
template <int N, class F>
HWY_INLINE void unroll(F&& f) {
  unroll_indices(std::make_integer_sequence<int, N>(), f);
}

// Keeps the compiler from seeing where a pointer comes from: of rows that lie
// one runtime stride apart gcc would keep the offset of every element that a
// step of a product reads.
template <typename T>
HWY_INLINE T* hide(T* p) {
  asm("" : "+r"(p));
  return p;
}

// How A lies in memory: element (r, k) at a[r * stride + k], or at
// a[k * stride + r] (its transpose, read across), or in blocks of 4 by 4
// (at_row).
enum class Along { kRow, kColumn, kBlocks };

// Row r of rows that lie along memory or in blocks (query_blocks-inl.h).
template <Along kAlong, typename T>
HWY_INLINE const T* at_row(const T* rows, int64_t stride, int64_t r) {
  if constexpr (kAlong == Along::kBlocks)
    return rows + r / 4 * 4 * stride + r % 4 * 4;
  return rows + r * stride;
}

template <typename T, int kRows, int kVectors>
struct Tile {
  static constexpr int64_t kLane = kLanes<T>;
  static constexpr int64_t kColumns = kVectors * kLane;
  Vec<T> acc[kRows * kVectors];

  HWY_INLINE void zero() {
    unroll<kRows * kVectors>(
        [&](auto i) COSFORMER_LAMBDA { acc[i] = hn::Zero(Tag<T>()); });
  }
  HWY_INLINE void load(const T* HWY_RESTRICT from, int64_t stride) {
    unroll<kRows>([&](auto r) COSFORMER_LAMBDA {
      unroll<kVectors>([&](auto n) COSFORMER_LAMBDA {
        acc[r * kVectors + n] =
            hn::Load(Tag<T>(), from + r * stride + n * kLane);
      });
    });
  }
  HWY_INLINE void store(T* HWY_RESTRICT to, int64_t stride) const {
    unroll<kRows>([&](auto r) COSFORMER_LAMBDA {
      unroll<kVectors>([&](auto n) COSFORMER_LAMBDA {
        hn::Store(acc[r * kVectors + n], Tag<T>(), to + r * stride + n * kLane);
      });
    });
  }
  HWY_INLINE void add_to(T* HWY_RESTRICT to, int64_t stride) const {
    unroll<kRows>([&](auto r) COSFORMER_LAMBDA {
      unroll<kVectors>([&](auto n) COSFORMER_LAMBDA {
        T* HWY_RESTRICT at = to + r * stride + n * kLane;
        hn::Store(hn::Add(acc[r * kVectors + n], hn::Load(Tag<T>(), at)),
                  Tag<T>(), at);
      });
    });
  }
  HWY_INLINE void store_unaligned(T* HWY_RESTRICT to, int64_t stride) const {
    unroll<kRows>([&](auto r) COSFORMER_LAMBDA {
      unroll<kVectors>([&](auto n) COSFORMER_LAMBDA {
        hn::StoreU(acc[r * kVectors + n], Tag<T>(),
                   to + r * stride + n * kLane);
      });
    });
  }
  // The first `columns` columns only.
  HWY_INLINE void store_columns(T* HWY_RESTRICT to, int64_t stride,
                                int64_t columns) const {
    unroll<kVectors>([&](auto n) COSFORMER_LAMBDA {
      const int64_t left = columns - n * kLane;
      if (left <= 0) return;
      const auto some = hn::FirstN(
          Tag<T>(), static_cast<size_t>(left < kLane ? left : kLane));
      unroll<kRows>([&](auto r) COSFORMER_LAMBDA {
        hn::BlendedStore(acc[r * kVectors + n], some, Tag<T>(),
                         to + r * stride + n * kLane);
      });
    });
  }
  // Past the caches.
  HWY_INLINE void stream(T* HWY_RESTRICT to, int64_t stride) const {
    unroll<kRows>([&](auto r) COSFORMER_LAMBDA {
      unroll<kVectors>([&](auto n) COSFORMER_LAMBDA {
        hn::Stream(acc[r * kVectors + n], Tag<T>(),
                   to + r * stride + n * kLane);
      });
    });
  }
  // Row r times scale[r kApart]; a zero is 0, never -0: the sign of a zero
  // would tell of keys that do not count.
  template <int kApart = 1>
  HWY_INLINE void finish_rows(const T* HWY_RESTRICT scale) {
    const Vec<T> zero = hn::Zero(Tag<T>());
    unroll<kRows>([&](auto r) COSFORMER_LAMBDA {
      const Vec<T> s = hn::Set(Tag<T>(), scale[r * kApart]);
      unroll<kVectors>([&](auto n) COSFORMER_LAMBDA {
        acc[r * kVectors + n] = hn::MulAdd(acc[r * kVectors + n], s, zero);
      });
    });
  }
  // Row r times scale[r].
  HWY_INLINE void scale_rows(const T* HWY_RESTRICT scale) {
    unroll<kRows>([&](auto r) COSFORMER_LAMBDA {
      const Vec<T> s = hn::Set(Tag<T>(), scale[r]);
      unroll<kVectors>([&](auto n) COSFORMER_LAMBDA {
        acc[r * kVectors + n] = hn::Mul(acc[r * kVectors + n], s);
      });
    });
  }

  // A: rows from `first`, an even number (or the tile has one row), on.
  template <Along kAlong>
  HWY_INLINE void multiply_rows(const T* HWY_RESTRICT rows, int64_t stride,
                                int64_t first, const T* HWY_RESTRICT b,
                                int64_t b_stride, int64_t depth) {
    if constexpr (kAlong == Along::kBlocks) {
      constexpr int kPairs = (kRows + 1) / 2;
      const T* pairs[kPairs];
      unroll<kPairs>([&](auto i) COSFORMER_LAMBDA {
        pairs[i] = hide(at_row<kAlong>(rows, stride, first + 2 * i));
      });
      run(depth, b, b_stride, [&](auto r, int64_t k, auto i) COSFORMER_LAMBDA {
        return pairs[r / 2][4 * k + r % 2 * 4 + i];
      });
    } else {
      multiply<kAlong>(rows + first * stride, stride, b, b_stride, depth);
    }
  }
  template <Along kAlong>
  HWY_INLINE void multiply(const T* HWY_RESTRICT a, int64_t a_stride,
                           const T* HWY_RESTRICT b, int64_t b_stride,
                           int64_t depth) {
    if constexpr (kAlong == Along::kRow) {
      const T* rows[kRows];
      unroll<kRows>([&](auto r)
                        COSFORMER_LAMBDA { rows[r] = hide(a + r * a_stride); });
      run(depth, b, b_stride, [&](auto r, int64_t k, auto i) COSFORMER_LAMBDA {
        return rows[r][k + i];
      });
    } else {
      run(depth, b, b_stride, [&](auto r, int64_t, auto) COSFORMER_LAMBDA {
        const T x = a[r];
        if (r == kRows - 1) a = hide(a + a_stride);
        return x;
      });
    }
  }

 private:
  // acc += element(r, k, i) x row k + i of b; k: a multiple of 4, i < 4.
  template <class Element>
  HWY_INLINE void run(int64_t depth, const T* HWY_RESTRICT b, int64_t b_stride,
                      const Element& element) {
    const auto step = [&](int64_t k, auto i) COSFORMER_LAMBDA {
      Vec<T> bv[kVectors];
      unroll<kVectors>([&](auto n) COSFORMER_LAMBDA {
        bv[n] = hn::Load(Tag<T>(), b + n * kLane);
      });
      b = hide(b + b_stride);
      unroll<kRows>([&](auto r) COSFORMER_LAMBDA {
        const Vec<T> av = hn::Set(Tag<T>(), element(r, k, i));
        unroll<kVectors>([&](auto n) COSFORMER_LAMBDA {
          acc[r * kVectors + n] = hn::MulAdd(av, bv[n], acc[r * kVectors + n]);
        });
      });
      pin();
    };
    int64_t k = 0;
    for (; k + 4 <= depth; k += 4)
      unroll<4>([&](auto i) COSFORMER_LAMBDA { step(k, i); });
    for (int64_t i = 0; k + i < depth; ++i) step(k, i);
  }

  // gcc spills one of twelve accumulators of AVX2 without it.
  HWY_INLINE void pin() {
#if HWY_TARGET == HWY_AVX2 && !defined(__clang__)
    if constexpr (kRows * kVectors == 12) {
      asm(""
          : "+x"(acc[0].raw), "+x"(acc[1].raw), "+x"(acc[2].raw),
            "+x"(acc[3].raw), "+x"(acc[4].raw), "+x"(acc[5].raw),
            "+x"(acc[6].raw), "+x"(acc[7].raw), "+x"(acc[8].raw),
            "+x"(acc[9].raw), "+x"(acc[10].raw), "+x"(acc[11].raw));
    }
#endif
  }
};

// Calls tile(rows, first row) for each tile of `rows` rows, a multiple of 4.
template <int kVectors, class F>
HWY_INLINE void for_row_tiles(int64_t rows, F&& tile) {
  constexpr int kRows = rows_for(kVectors);
  int64_t r = 0;
  if constexpr (kRows != 4) {
    for (; rows - r >= kRows && !(kRows == 6 && rows - r == 8); r += kRows)
      tile(std::integral_constant<int, kRows>(), r);
  }
  for (; r < rows; r += 4) tile(std::integral_constant<int, 4>(), r);
}

// Calls panel(vectors, first column) for each panel of `columns` columns, a
// multiple of the lanes. Balanced: a last panel of one vector would wait for
// its own additions.
template <typename T, class F>
HWY_INLINE void for_vectors(int64_t vectors, F&& f) {
  if constexpr (kMaxVectors == 4) {
    if (vectors == 4) return f(std::integral_constant<int, 4>());
    if (vectors == 3) return f(std::integral_constant<int, 3>());
  }
  if (vectors == 2) return f(std::integral_constant<int, 2>());
  f(std::integral_constant<int, 1>());
}
template <typename T, class F>
HWY_INLINE void for_panels(int64_t columns, F&& panel) {
  for (int64_t c = 0; c < columns; c += kPanel<T>) {
    const int64_t left = (columns - c) / kLanes<T>;
    for_vectors<T>(left < kMaxVectors ? left : kMaxVectors,
                   [&](auto vectors) HWY_ATTR { panel(vectors, c); });
  }
}

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_TILE_INL_H_
