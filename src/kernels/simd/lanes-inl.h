// Rows of a chunk laid out across, for instruction sets of 16 lanes: a group of
// 16 rows in the lanes, one element of all of them after the other,
//
//   across[e] = (x_0[e], x_1[e], ..., x_15[e])
//
// What they are multiplied with is broadcast, an element at a time, which costs
// the load ports nothing that the multiply-adds need, and no lanes are left to
// be added up: where shuffles take a multiply-add's place that (DotTile) costs
// nearly as much as the products themselves. The price is to turn a chunk's
// rows on their way in, and what is made of them on its way out.
#if defined(COSFORMER_SRC_KERNELS_SIMD_LANES_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_LANES_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_LANES_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_LANES_INL_H_
#endif

#include "kernels/simd/dot_tile-inl.h"
#include "kernels/simd/pack_queue-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

// Whether a type's keys are laid out so for dk and dv.
template <typename T>
inline constexpr bool kInLanes = HWY_TARGET == HWY_AVX3 && sizeof(T) == 4;
// Rows of a group.
inline constexpr int64_t kGroup = 16;

#if HWY_TARGET == HWY_AVX3
// Of each quarter of 4 vectors the transpose.
HWY_INLINE void transpose_quarters(Vec<float>* x) {
  const Tag<float> d;
  const hn::Repartition<double, Tag<float>> dd;
  const auto a = hn::BitCast(dd, hn::InterleaveLower(d, x[0], x[1]));
  const auto b = hn::BitCast(dd, hn::InterleaveLower(d, x[2], x[3]));
  const auto c = hn::BitCast(dd, hn::InterleaveUpper(d, x[0], x[1]));
  const auto e = hn::BitCast(dd, hn::InterleaveUpper(d, x[2], x[3]));
  x[0] = hn::BitCast(d, hn::InterleaveLower(dd, a, b));
  x[1] = hn::BitCast(d, hn::InterleaveUpper(dd, a, b));
  x[2] = hn::BitCast(d, hn::InterleaveLower(dd, c, e));
  x[3] = hn::BitCast(d, hn::InterleaveUpper(dd, c, e));
}

// Of 16 vectors the transpose.
HWY_INLINE void transpose_square(Vec<float>* x) {
  using V = Vec<float>;
  unroll<4>([&](auto i) COSFORMER_LAMBDA { transpose_quarters(x + 4 * i); });
  // x[4 i + m] holds, of rows 4 i ... 4 i + 3, column m of each quarter.
  unroll<4>([&](auto m) COSFORMER_LAMBDA {
    V &x0 = x[m], &x1 = x[4 + m], &x2 = x[8 + m], &x3 = x[12 + m];
    const V a{_mm512_shuffle_f32x4(x0.raw, x1.raw, 0x44)};
    const V b{_mm512_shuffle_f32x4(x0.raw, x1.raw, 0xEE)};
    const V c{_mm512_shuffle_f32x4(x2.raw, x3.raw, 0x44)};
    const V e{_mm512_shuffle_f32x4(x2.raw, x3.raw, 0xEE)};
    x0 = V{_mm512_shuffle_f32x4(a.raw, c.raw, 0x88)};
    x1 = V{_mm512_shuffle_f32x4(a.raw, c.raw, 0xDD)};
    x2 = V{_mm512_shuffle_f32x4(b.raw, e.raw, 0x88)};
    x3 = V{_mm512_shuffle_f32x4(b.raw, e.raw, 0xDD)};
  });
}

// x[e] = column e of 16 rows, `apart` elements apart. The quarters of vectors
// are put together by loads, which leave the shuffles half of the work.
HWY_INLINE void load_columns(const float* HWY_RESTRICT rows, int64_t apart,
                             Vec<float>* x) {
  using V = Vec<float>;
  unroll<4>([&](auto m) COSFORMER_LAMBDA {
    const float* HWY_RESTRICT p = rows + m * apart;
    unroll<4>([&](auto b) COSFORMER_LAMBDA {
      __m512 y = _mm512_castps128_ps512(_mm_loadu_ps(p + 4 * b));
      y = _mm512_mask_broadcast_f32x4(y, 0x00F0,
                                      _mm_loadu_ps(p + 4 * apart + 4 * b));
      y = _mm512_mask_broadcast_f32x4(y, 0x0F00,
                                      _mm_loadu_ps(p + 8 * apart + 4 * b));
      y = _mm512_mask_broadcast_f32x4(y, 0xF000,
                                      _mm_loadu_ps(p + 12 * apart + 4 * b));
      x[4 * b + m] = V{y};
    });
  });
  unroll<4>([&](auto b) COSFORMER_LAMBDA { transpose_quarters(x + 4 * b); });
}

// The job's rows, whole groups of them, across: [rows / kGroup][stride]
// [kGroup] at job.out. Rows that are not valid are zeros.
template <typename In, FeatureMap kMap>
HWY_NOINLINE void pack_across_as(const PackJob<float>& job) {
  const Tag<float> d;
  constexpr int64_t kLane = kLanes<float>;
  constexpr uint64_t kAll = (uint64_t{1} << kGroup) - 1;
  const int64_t whole = job.dim - job.dim % kLane;
  const int64_t apart = job.from.stride;
  for (int64_t g = 0; g < job.rows; g += kGroup) {
    const In* HWY_RESTRICT rows =
        static_cast<const In*>(job.from.data) + (job.from.first + g) * apart;
    const uint64_t valid = job.valid >> g & kAll;
    float* HWY_RESTRICT out = job.out + g * job.stride;
    for (int64_t c = 0; c < job.stride; c += kLane, out += kLane * kGroup) {
      Vec<float> x[kGroup];
      if (HWY_LIKELY(valid == kAll && c < whole)) {
        if constexpr (std::is_same_v<In, float>) {
          load_columns(rows + c, apart, x);
          unroll<kGroup>([&](auto e) COSFORMER_LAMBDA {
            hn::Store(feature<kMap, float>(x[e]), d, out + e * kGroup);
          });
          continue;
        }
        unroll<kGroup>([&](auto i) COSFORMER_LAMBDA {
          x[i] = feature<kMap, float>(load_wide(rows + i * apart + c));
        });
      } else {
        HWY_ALIGN float row[kGroup * kLane];
        for (int64_t i = 0; i < kGroup; ++i) {
          Vec<float> y = hn::Zero(d);
          if ((valid >> i & 1) != 0 && c < whole) {
            y = feature<kMap, float>(load_wide(rows + i * apart + c));
          } else if ((valid >> i & 1) != 0) {
            load_last<float, In>(rows + i * apart + c, job.dim - c,
                                 row + i * kLane);
            y = hn::IfThenElseZero(
                hn::FirstN(d, static_cast<size_t>(job.dim - c)),
                feature<kMap, float>(hn::Load(d, row + i * kLane)));
          }
          hn::Store(y, d, row + i * kLane);
        }
        unroll<kGroup>([&](auto i) COSFORMER_LAMBDA {
          x[i] = hn::Load(d, row + i * kLane);
        });
      }
      transpose_square(x);
      unroll<kGroup>([&](auto e) COSFORMER_LAMBDA {
        hn::Store(x[e], d, out + e * kGroup);
      });
    }
  }
}
template <typename In>
HWY_INLINE void pack_across_of(const PackJob<float>& job, FeatureMap map) {
  switch (map) {
    case FeatureMap::kRelu:
      return pack_across_as<In, FeatureMap::kRelu>(job);
    case FeatureMap::kElu1:
      return pack_across_as<In, FeatureMap::kElu1>(job);
    case FeatureMap::kIdentity:
      break;
  }
  return pack_across_as<In, FeatureMap::kIdentity>(job);
}
inline void pack_across(const PackJob<float>& job, FeatureMap map,
                        DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return pack_across_of<BFloat16>(job, map);
    case DType::kFloat16:
      return pack_across_of<Float16>(job, map);
    default:
      return pack_across_of<float>(job, map);
  }
}

// Sums of kRows rows, a group in the lanes of each.
template <int kRows>
struct AcrossTile {
  Vec<float> acc[kRows];

  // Row r: from[r] in every lane (nullptr: 0).
  HWY_INLINE void fill(const float* HWY_RESTRICT from) {
    const Tag<float> d;
    unroll<kRows>([&](auto r) COSFORMER_LAMBDA {
      acc[r] = from != nullptr ? hn::Set(d, from[r]) : hn::Zero(d);
    });
  }
  HWY_INLINE void load(const float* HWY_RESTRICT from) {
    unroll<kRows>([&](auto r) COSFORMER_LAMBDA {
      acc[r] = hn::Load(Tag<float>(), from + r * kGroup);
    });
  }
  HWY_INLINE void store(float* HWY_RESTRICT to) const {
    unroll<kRows>([&](auto r) COSFORMER_LAMBDA {
      hn::Store(acc[r], Tag<float>(), to + r * kGroup);
    });
  }
  // Lane n times by[n], plus add[r] (nullptr: 0).
  HWY_INLINE void scale_add(const float* HWY_RESTRICT by,
                            const float* HWY_RESTRICT add) {
    const Tag<float> d;
    const Vec<float> s = hn::LoadU(d, by);
    unroll<kRows>([&](auto r) COSFORMER_LAMBDA {
      acc[r] = hn::MulAdd(acc[r], s,
                          add != nullptr ? hn::Set(d, add[r]) : hn::Zero(d));
    });
  }
  // acc[r] += sum_e b_r[e] across[e], e < columns, a multiple of 4; b: rows
  // kStride apart.
  template <int64_t kStride>
  HWY_INLINE void multiply(const float* HWY_RESTRICT across,
                           const float* HWY_RESTRICT b, int64_t columns) {
    const Tag<float> d;
    for (int64_t c = 0; c < columns; c += 4) {
      unroll<4>([&](auto s) COSFORMER_LAMBDA {
        const Vec<float> x = hn::Load(d, across + s * kGroup);
        unroll<kRows>([&](auto r) COSFORMER_LAMBDA {
          acc[r] = hn::MulAdd(hn::Set(d, b[r * kStride + s]), x, acc[r]);
        });
      });
      across = hide(across + 4 * kGroup);
      b = hide(b + 4);
    }
  }
  // The same of rows a distance apart that is not known. Every fourth has a
  // pointer: with one for all, gcc would compute the address of every element
  // anew.
  HWY_INLINE void multiply(const float* HWY_RESTRICT across,
                           const float* HWY_RESTRICT b, int64_t stride,
                           int64_t columns) {
    const Tag<float> d;
    constexpr int kPointers = (kRows + 3) / 4;
    const float* p[kPointers];
    unroll<kPointers>(
        [&](auto i) COSFORMER_LAMBDA { p[i] = hide(b + 4 * i * stride); });
    int64_t thrice = 3 * stride;
    asm("" : "+r"(thrice));
    for (int64_t c = 0; c < columns; c += 4) {
      unroll<4>([&](auto s) COSFORMER_LAMBDA {
        const Vec<float> x = hn::Load(d, across + s * kGroup);
        unroll<kRows>([&](auto r) COSFORMER_LAMBDA {
          constexpr int kIn = r % 4;
          const float* q = p[r / 4] + s;
          acc[r] = hn::MulAdd(
              hn::Set(d, kIn == 3 ? q[thrice] : q[kIn * stride]), x, acc[r]);
        });
      });
      across = hide(across + 4 * kGroup);
      unroll<kPointers>([&](auto i)
                            COSFORMER_LAMBDA { p[i] = hide(p[i] + 4); });
    }
  }
  // acc[r] += sum_i b_i[r] weights_i, rows of kScoresStride and `stride`. Where
  // b is not finite a lane takes no row before its own.
  HWY_INLINE void add_pairs(const float* HWY_RESTRICT weights,
                            const float* HWY_RESTRICT b, int64_t stride,
                            int64_t rows, bool finite) {
    const Tag<float> d;
    const auto step = [&](const Vec<float> w) COSFORMER_LAMBDA {
      unroll<kRows>([&](auto r) COSFORMER_LAMBDA {
        acc[r] = hn::MulAdd(hn::Set(d, b[r]), w, acc[r]);
      });
      weights += kScoresStride;
      b = hide(b + stride);
    };
    int64_t i = 0;
    if (HWY_UNLIKELY(!finite)) {
      for (; i < rows && i < kGroup;
           ++i, weights += kScoresStride, b += stride) {
        const auto seen = hn::FirstN(d, static_cast<size_t>(i + 1));
        const Vec<float> w = hn::Load(d, weights);
        unroll<kRows>([&](auto r) COSFORMER_LAMBDA {
          acc[r] = hn::IfThenElse(seen, hn::MulAdd(hn::Set(d, b[r]), w, acc[r]),
                                  acc[r]);
        });
      }
    }
    for (; i + 4 <= rows; i += 4) {
      unroll<4>([&](auto) COSFORMER_LAMBDA { step(hn::Load(d, weights)); });
    }
  }
};

// Calls f(count, first) for the tiles of `rows` rows, a multiple of 4.
template <class F>
HWY_INLINE void for_across_tiles(int64_t rows, F&& f) {
  int64_t r = 0;
  for (; rows - r >= 16; r += 16) f(std::integral_constant<int, 16>(), r);
  if (rows - r == 12) f(std::integral_constant<int, 12>(), r);
  if (rows - r == 8) f(std::integral_constant<int, 8>(), r);
  if (rows - r == 4) f(std::integral_constant<int, 4>(), r);
}

// Scores inside a chunk, of the queries at or behind each key, queries along
// memory and keys across:
//
//   out[i][j] = (a_j . b_i + add_i)(1 + ratio_i ratio_j)     j <= i, else 0
//
// where what lies beyond the triangle is selected away, whatever it holds. Of
// groups of keys that lie behind a query nothing is written. add: nullptr = 0.
// across: the keys' rows; b: the queries', rows of `stride`, a multiple of 4 of
// them. out: rows of kScoresStride.
template <bool kCosine>
HWY_NOINLINE void score_across(const float* HWY_RESTRICT across,
                               const float* HWY_RESTRICT b, int64_t stride,
                               int64_t rows, const float* HWY_RESTRICT ratio,
                               const float* HWY_RESTRICT add,
                               float* HWY_RESTRICT out) {
  const Tag<float> d;
  const Vec<float> one = hn::Set(d, 1.0f);
  for (int64_t g = 0; g < rows; g += kGroup) {
    const Vec<float> t = hn::LoadU(d, ratio + g);
    for_across_tiles(rows - g, [&](auto count, int64_t r) COSFORMER_LAMBDA {
      constexpr int kRows = decltype(count)::value;
      const int64_t i0 = g + r;
      AcrossTile<kRows> tile;
      tile.fill(add != nullptr ? add + i0 : nullptr);
      tile.multiply(across + g * stride, b + i0 * stride, stride, stride);
      unroll<kRows>([&](auto i) COSFORMER_LAMBDA {
        Vec<float>& x = tile.acc[i];
        if constexpr (kCosine)
          x = hn::Mul(x, hn::MulAdd(hn::Set(d, ratio[i0 + i]), t, one));
        if (r < kGroup) {
          x = hn::IfThenElseZero(hn::FirstN(d, static_cast<size_t>(r + i + 1)),
                                 x);
        }
        hn::Store(x, d, out + (i0 + i) * kScoresStride + g);
      });
    });
  }
}
#endif

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_LANES_INL_H_
