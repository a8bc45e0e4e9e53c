// Queries in blocks of 4 rows by 4 features, one vector each, for instruction
// sets of 16 lanes:
//
//   element (r, f) at out[(r / 4) 4 stride + (f / 4) 16 + (r % 4) 4 + f % 4]
//
// Against 4 features of a key, spread over the vector's quarters by a load that
// costs no shuffle, a vector of products then belongs to 4 queries: what
// remains of a score is a sum of 4 lanes instead of 16, and 16 scores share
// 6 shuffles. The same blocks feed the readout, whose elements lie side by side
// in one line of the cache.
#if defined(COSFORMER_SRC_KERNELS_SIMD_QUERY_BLOCKS_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_QUERY_BLOCKS_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_QUERY_BLOCKS_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_QUERY_BLOCKS_INL_H_
#endif

#include "kernels/simd/dot_tile-inl.h"
#include "kernels/simd/pack_queue-inl.h"
#include "kernels/simd/panel-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

// Whether a type's queries are packed so.
template <typename T>
inline constexpr bool kInBlocks = HWY_TARGET == HWY_AVX3 && sizeof(T) == 4;
// Rows of a block; the sums and scales of rows lie so many elements apart, each
// as often.
inline constexpr int64_t kBlockRows = 4;

#if HWY_TARGET == HWY_AVX3
// What a chunk's queries see of themselves and of the state's sums.
struct BlockScores {
  const float* q;  // blocks
  int64_t q_stride, rows;
  const float *ratio, *main;
  bool cosine;
  // nullptr: none of this chunk.
  const float* k = nullptr;  // [rows][k_stride]
  int64_t k_stride = 0;
  float* scores = nullptr;  // blocks of rows of kScoresStride
  // So many keys, a multiple of kMaxChunk, lie before k, main and ratio and
  // are seen too: each kMaxChunk of them make a square of scores.
  int64_t before = 0;
  float* squares = nullptr;
  // Denominators, where normalize is set.
  bool normalize = false;
  float eps = 0;
  const float *sum_main, *sum_other;  // of the state: zeros where there is none
  // Element i at [kBlockRows i]: the denominators and main / denominator.
  // nullptr: neither is made.
  float *sums = nullptr, *scale = nullptr;
};

// Four rows of 16 features into four blocks.
HWY_INLINE void store_blocks(const Vec<float>* x, float* HWY_RESTRICT out) {
  const Tag<float> d;
  using V = Vec<float>;
  const V a = hn::ConcatLowerLower(d, x[1], x[0]);
  const V b = hn::ConcatLowerLower(d, x[3], x[2]);
  const V c = hn::ConcatUpperUpper(d, x[1], x[0]);
  const V e = hn::ConcatUpperUpper(d, x[3], x[2]);
  constexpr int kEven = 0x88, kOdd = 0xDD;  // of the 128-bit quarters
  hn::Store(V{_mm512_shuffle_f32x4(a.raw, b.raw, kEven)}, d, out);
  hn::Store(V{_mm512_shuffle_f32x4(a.raw, b.raw, kOdd)}, d, out + 16);
  hn::Store(V{_mm512_shuffle_f32x4(c.raw, e.raw, kEven)}, d, out + 32);
  hn::Store(V{_mm512_shuffle_f32x4(c.raw, e.raw, kOdd)}, d, out + 48);
}

// As pack_now, without a second output.
template <typename In, FeatureMap kMap>
HWY_NOINLINE void pack_blocks_as(const PackJob<float>& job) {
  const Tag<float> d;
  constexpr int64_t kLane = kLanes<float>;
  const int64_t whole = job.dim - job.dim % kLane;
  for (int64_t r = 0; r < job.rows; r += kBlockRows) {
    float* HWY_RESTRICT out = job.out + r * job.stride;
    const In* HWY_RESTRICT rows = static_cast<const In*>(job.from.data) +
                                  (job.from.first + r) * job.from.stride;
    const int64_t apart = job.from.stride;
    const uint64_t valid = job.valid >> r & 15;
    int64_t c = 0;
    Vec<float> x[kBlockRows];
    if (HWY_LIKELY(valid == 15)) {
      for (; c < whole; c += kLane) {
        unroll<kBlockRows>([&](auto i) COSFORMER_LAMBDA {
          x[i] = feature<kMap, float>(load_wide(rows + i * apart + c));
        });
        store_blocks(x, out + c * kBlockRows);
      }
    }
    for (; c < job.stride; c += kLane) {
      for (int64_t i = 0; i < kBlockRows; ++i) {
        x[i] = hn::Zero(d);
        if ((valid >> i & 1) == 0) continue;
        if (c < whole) {
          x[i] = feature<kMap, float>(load_wide(rows + i * apart + c));
        } else {
          HWY_ALIGN float last[kLane];
          load_last<float, In>(rows + i * apart + c, job.dim - c, last);
          x[i] = hn::IfThenElseZero(
              hn::FirstN(d, static_cast<size_t>(job.dim - c)),
              feature<kMap, float>(hn::Load(d, last)));
        }
      }
      store_blocks(x, out + c * kBlockRows);
    }
  }
}
template <typename In>
HWY_INLINE void pack_blocks_of(const PackJob<float>& job, FeatureMap map) {
  switch (map) {
    case FeatureMap::kRelu:
      return pack_blocks_as<In, FeatureMap::kRelu>(job);
    case FeatureMap::kElu1:
      return pack_blocks_as<In, FeatureMap::kElu1>(job);
    case FeatureMap::kIdentity:
      break;
  }
  return pack_blocks_as<In, FeatureMap::kIdentity>(job);
}
HWY_INLINE void pack_blocks(const PackJob<float>& job, FeatureMap map,
                            DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return pack_blocks_of<BFloat16>(job, map);
    case DType::kFloat16:
      return pack_blocks_of<Float16>(job, map);
    default:
      return pack_blocks_of<float>(job, map);
  }
}

// Packed rows into blocks.
inline void block_rows(const float* HWY_RESTRICT in, int64_t rows,
                       int64_t stride, float* HWY_RESTRICT out) {
  const Tag<float> d;
  for (int64_t r = 0; r < rows; r += kBlockRows) {
    for (int64_t c = 0; c < stride; c += kLanes<float>) {
      Vec<float> x[kBlockRows];
      unroll<kBlockRows>([&](auto i) COSFORMER_LAMBDA {
        x[i] = hn::Load(d, in + (r + i) * stride + c);
      });
      store_blocks(x, out + r * stride + c * kBlockRows);
    }
  }
}

// Lane 4 i + n is the sum of the lanes 4 i ... 4 i + 3 of x[n].
HWY_INLINE Vec<float> sum_quarters(const Vec<float>* x) {
  const Tag<float> d;
  const hn::Repartition<double, Tag<float>> dd;
  const auto ab = hn::BitCast(dd, hn::Add(hn::InterleaveLower(d, x[0], x[1]),
                                          hn::InterleaveUpper(d, x[0], x[1])));
  const auto ce = hn::BitCast(dd, hn::Add(hn::InterleaveLower(d, x[2], x[3]),
                                          hn::InterleaveUpper(d, x[2], x[3])));
  return hn::Add(hn::BitCast(d, hn::InterleaveLower(dd, ab, ce)),
                 hn::BitCast(d, hn::InterleaveUpper(dd, ab, ce)));
}

// acc[i * kRows + j]: partial products of block i of the queries with row j.
template <int kQueries, int kRows>
HWY_INLINE void block_dots(const float* HWY_RESTRICT q, int64_t q_stride,
                           const float* HWY_RESTRICT k, int64_t k_stride,
                           int64_t depth, Vec<float>* acc) {
  const Tag<float> d;
  unroll<kQueries * kRows>([&](auto n)
                               COSFORMER_LAMBDA { acc[n] = hn::Zero(d); });
  for (int64_t f = 0; f < depth; f += 8, q += 32, k += 8) {
    unroll<2>([&](auto half) COSFORMER_LAMBDA {
      Vec<float> a[kQueries];
      unroll<kQueries>([&](auto i) COSFORMER_LAMBDA {
        a[i] = hn::Load(d, q + i * kBlockRows * q_stride + 16 * half);
      });
      unroll<kRows>([&](auto j) COSFORMER_LAMBDA {
        const Vec<float> b = hn::LoadDup128(d, k + j * k_stride + 4 * half);
        unroll<kQueries>([&](auto i) COSFORMER_LAMBDA {
          acc[i * kRows + j] = hn::MulAdd(a[i], b, acc[i * kRows + j]);
        });
      });
    });
  }
}

// kQueries blocks of queries from `row` on: their ratios and main factors, each
// four times, and what becomes their denominators.
template <bool kCosine, int kQueries>
struct QueryBlocks {
  static constexpr int kSums = kCosine ? 2 : 1;
  Vec<float> ratio[kQueries], main[kQueries], sum[kQueries];

  HWY_INLINE QueryBlocks(const BlockScores& in, int64_t row) {
    const Tag<float> d;
    alignas(64) static constexpr int32_t kSpread[16] = {0, 0, 0, 0, 1, 1, 1, 1,
                                                        2, 2, 2, 2, 3, 3, 3, 3};
    const auto spread = hn::SetTableIndices(d, kSpread);
    unroll<kQueries>([&](auto i) COSFORMER_LAMBDA {
      ratio[i] = hn::TableLookupLanes(
          hn::LoadDup128(d, in.ratio + row + i * kBlockRows), spread);
      main[i] = hn::TableLookupLanes(
          hn::LoadDup128(d, in.main + row + i * kBlockRows), spread);
      sum[i] = hn::Zero(d);
    });
  }

  // The scores of block i with the keys from `column` on; diagonal: the keys at
  // the block's own positions. to: the first block's scores with the keys from
  // 0 on.
  template <bool kDiagonal>
  HWY_INLINE void finish(const BlockScores& in, int i, int64_t column,
                         const Vec<float>* products, float* HWY_RESTRICT to) {
    const Tag<float> d;
    Vec<float> x = sum_quarters(products);
    if constexpr (kCosine) {
      x = hn::Mul(x, hn::MulAdd(ratio[i], hn::LoadDup128(d, in.ratio + column),
                                hn::Set(d, 1.0f)));
    }
    // What is not finite beyond the triangle stays there.
    if constexpr (kDiagonal) {
      constexpr uint16_t kLower = 0xF731;  // j <= i, a bit each
      x = Vec<float>{_mm512_maskz_mov_ps(kLower, x.raw)};
    }
    hn::Store(x, d, to + i * kBlockRows * kScoresStride + column * kBlockRows);
    sum[i] = hn::MulAdd(x, hn::LoadDup128(d, in.main + column), sum[i]);
  }
  // Of block i: products with the sums of the state.
  HWY_INLINE void add_state(int i, const Vec<float>* products) {
    sum[i] = hn::Add(sum[i], products[0]);
    if constexpr (kCosine) sum[i] = hn::MulAdd(ratio[i], products[1], sum[i]);
  }
  HWY_INLINE void store(const BlockScores& in, int64_t row) const {
    const Tag<float> d;
    const Vec<float> eps = hn::Set(d, in.eps);
    unroll<kQueries>([&](auto i) COSFORMER_LAMBDA {
      const int64_t at = (row + i * kBlockRows) * kBlockRows;
      if (!in.normalize) return hn::Store(main[i], d, in.scale + at);
      Vec<float> x = hn::Add(sum[i], hn::Shuffle1032(sum[i]));
      x = hn::Add(x, hn::Shuffle2301(x));
      // Adding 0 makes -0 a 0.
      x = hn::MulAdd(x, main[i], hn::Zero(d));
      hn::Store(x, d, in.sums + at);
      // NaN goes through.
      hn::Store(hn::Div(main[i], hn::IfThenElse(hn::Lt(x, eps), eps, x)), d,
                in.scale + at);
    });
  }
};

// Two blocks of queries (one, where their number is odd) with the keys before
// them, their own, and the sums of the state. The last three are one loop: a
// few products alone would wait for each other.
template <bool kCosine, int kQueries>
HWY_INLINE void score_blocks(const BlockScores& in, int64_t row) {
  using V = Vec<float>;
  using Blocks = QueryBlocks<kCosine, kQueries>;
  constexpr int kSums = Blocks::kSums;
  const Tag<float> d;
  Blocks blocks(in, row);
  const float* q = in.q + row * in.q_stride;
  // Keys from `from` to `column`.
  const auto whole = [&](int64_t from, int64_t column,
                         float* to) COSFORMER_LAMBDA {
    for (int64_t j = from; j < column; j += 8) {
      V acc[kQueries * 8];
      block_dots<kQueries, 8>(q, in.q_stride, in.k + j * in.k_stride,
                              in.k_stride, in.q_stride, acc);
      unroll<kQueries>([&](auto i) COSFORMER_LAMBDA {
        blocks.template finish<false>(in, i, j, acc + i * 8, to);
        blocks.template finish<false>(in, i, j + 4, acc + i * 8 + 4, to);
      });
    }
  };
  float* to = in.squares + row * kScoresStride;
  for (int64_t j = -in.before; j < 0; j += kMaxChunk, to += kSquare)
    whole(j, j + kMaxChunk, to - j * kBlockRows);
  to = in.scores + row * kScoresStride;
  whole(0, row, to);
  const int64_t column = row;
  V own[kQueries * 4], last[4], state[kQueries * kSums];
  for (V& x : own) x = hn::Zero(d);
  for (V& x : last) x = hn::Zero(d);
  for (V& x : state) x = hn::Zero(d);
  const float* HWY_RESTRICT k = in.k + column * in.k_stride;
  const float* HWY_RESTRICT sum_main = in.sum_main;
  const float* HWY_RESTRICT sum_other = in.sum_other;
  for (int64_t f = 0; f < in.q_stride; f += 4, q += 16) {
    V a[kQueries];
    unroll<kQueries>([&](auto i) COSFORMER_LAMBDA {
      a[i] = hn::Load(d, q + i * kBlockRows * in.q_stride);
    });
    unroll<4>([&](auto j) COSFORMER_LAMBDA {
      const V b = hn::LoadDup128(d, k + j * in.k_stride + f);
      unroll<kQueries>([&](auto i) COSFORMER_LAMBDA {
        own[i * 4 + j] = hn::MulAdd(a[i], b, own[i * 4 + j]);
      });
    });
    if constexpr (kQueries == 2) {
      unroll<4>([&](auto j) COSFORMER_LAMBDA {
        const V b = hn::LoadDup128(d, k + (4 + j) * in.k_stride + f);
        last[j] = hn::MulAdd(a[1], b, last[j]);
      });
    }
    unroll<kSums>([&](auto n) COSFORMER_LAMBDA {
      const V b = hn::LoadDup128(d, (n == 0 ? sum_main : sum_other) + f);
      unroll<kQueries>([&](auto i) COSFORMER_LAMBDA {
        state[i * kSums + n] = hn::MulAdd(a[i], b, state[i * kSums + n]);
      });
    });
  }
  blocks.template finish<true>(in, 0, column, own, to);
  if constexpr (kQueries == 2) {
    blocks.template finish<false>(in, 1, column, own + 4, to);
    blocks.template finish<true>(in, 1, column + 4, last, to);
  }
  unroll<kQueries>(
      [&](auto i) COSFORMER_LAMBDA { blocks.add_state(i, state + i * kSums); });
  if (in.scale != nullptr) blocks.store(in, row);
}

// Blocks of queries that see the state alone.
template <bool kCosine, int kQueries>
HWY_INLINE void scale_blocks(const BlockScores& in, int64_t row) {
  using Blocks = QueryBlocks<kCosine, kQueries>;
  constexpr int kSums = Blocks::kSums;
  Blocks blocks(in, row);
  if (in.normalize) {
    Vec<float> acc[kQueries * kSums];
    block_dots<kQueries, kSums>(in.q + row * in.q_stride, in.q_stride,
                                in.sum_main, in.sum_other - in.sum_main,
                                in.q_stride, acc);
    unroll<kQueries>(
        [&](auto i) COSFORMER_LAMBDA { blocks.add_state(i, acc + i * kSums); });
  }
  blocks.store(in, row);
}

template <bool kCosine>
HWY_NOINLINE void score_all_blocks_as(const BlockScores& in) {
  int64_t row = 0;
  if (in.k == nullptr) {
    for (; row + 16 <= in.rows; row += 16) scale_blocks<kCosine, 4>(in, row);
    for (; row < in.rows; row += 4) scale_blocks<kCosine, 1>(in, row);
    return;
  }
  for (; row + 8 <= in.rows; row += 8) score_blocks<kCosine, 2>(in, row);
  if (row < in.rows) score_blocks<kCosine, 1>(in, row);
}
inline void score_all_blocks(const BlockScores& in) {
  if (in.cosine) return score_all_blocks_as<true>(in);
  score_all_blocks_as<false>(in);
}
#endif

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_QUERY_BLOCKS_INL_H_
