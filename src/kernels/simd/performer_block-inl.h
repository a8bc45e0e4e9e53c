// Performer's forward on a block of positions (performer_block.h), where
// positions are columns and features are rows:
//
//   L = W x' - |x'|^2 / 2         a product, its rows features
//   m_f = max_j L_fj of keys      over lanes, where any lies above the last m_f
//   c_i = max_f (L_fi + m_f)      of queries, over rows
//   and, a strip of features at a time, all of it in the first-level cache:
//     K = exp(L - m), Q = exp(L + m - c)
//     P += Q^T K,  out += Q^T S,  S += K V
//   out += lower triangle of P times V
//
// So one layout serves every product without a transpose, and of everything as
// wide as the features only L and S leave the first-level cache.
//
// Floor: W x' of q and k, Q^T S and K V: 8 m d operations a token and head, of
// m features. P costs 1/16 of that in pieces of 32 tokens, exponentials about
// 1/12.
//
// A float32 logarithm of size A is wrong by about 1e-7 A, and so is a weight.
// Where the lengths of x' and of the rows of W leave a logarithm below a limit
// for every row of a block, logarithms are float32; else the block's are double
// (a product at half the speed), and only their differences from the maxima are
// rounded.
#if defined(COSFORMER_SRC_KERNELS_SIMD_PERFORMER_BLOCK_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_PERFORMER_BLOCK_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_PERFORMER_BLOCK_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_PERFORMER_BLOCK_INL_H_
#endif

#include <hwy/cache_control.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <type_traits>

#include "kernels/simd/exp-inl.h"
#include "kernels/simd/pack-inl.h"
#include "kernels/simd/performer_block.h"
#include "kernels/simd/performer_products-inl.h"
#include "kernels/simd/state-inl.h"
#include "kernels/simd/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

// e^x for x up to 80, of any size below; NaN stays.
template <typename T>
HWY_INLINE Vec<T> exp_lanes(Vec<T> x) {
  const Tag<T> d;
#if HWY_TARGET == HWY_AVX3
  // -infinity would come back as NaN. Of the two x is second: NaN goes through.
  x = hn::Max(hn::Set(d, T{-800}), x);
#endif
  return exp2_lanes<T>(hn::Mul(x, hn::Set(d, std::numbers::log2e_v<T>)));
}

template <typename T>
struct PerformerBlock {
  using Features = PerformerFeatures<T>;
  using Logs = PerformerLogs<T>;
  using Piece = PerformerPiece<T>;
  using Sums = PerformerSums<T>;
  using Work = PerformerWork<T>;
  using Products = PerformerProducts<T>;
  static constexpr int64_t kColumns = kPerformerBlock;
  static constexpr int64_t kPiece = kPerformerPiece;
  static constexpr int64_t kLane = kLanes<T>;

  static int64_t value_stride(int64_t value_dim) {
    return row_length<T>(value_dim);
  }
  static Panels<T> panels(const Features& f, const Sums& s) {
    return {s.kv, f.rows(), row_length<T>(f.value_dim)};
  }

  static void load_state(const Features& f, const T* kv, const T* sum,
                         const T* log_scale, const Sums& to) {
    const Panels<T> state = panels(f, to);
    std::fill_n(state.data, state.rows * state.columns, T{0});
    std::fill_n(to.sum, f.rows(), T{0});
    std::fill_n(to.maxima, f.rows(), -std::numeric_limits<T>::infinity());
    if (kv == nullptr) return;
    load_panels<T>(kv, f.count, f.value_dim, state);
    std::copy_n(sum, f.count, to.sum);
    std::copy_n(log_scale, f.count, to.maxima);
  }
  static void store_state(const Features& f, const Sums& from, T* kv, T* sum,
                          T* log_scale) {
    store_panels<T>(panels(f, from), f.count, f.value_dim, kv);
    std::copy_n(from.sum, f.count, sum);
    std::copy_n(from.maxima, f.count, log_scale);
  }

  // --- Logarithms ------------------------------------------------------------

  static void project(const Features& f, DType dtype, const void* data,
                      int64_t first, int64_t stride, uint64_t real, int64_t n,
                      bool keys, double limit,
                      const PerformerAhead next[kPerformerAhead],
                      const Work& work, Logs& to) {
    const int64_t rows = round_up(n, 4), width = padded(f.dim);
    // Rows that only fill up the last tile are not there to read.
    const uint64_t there = n < 64 ? (uint64_t{1} << n) - 1 : ~uint64_t{0};
    pack_rows<T>(FeatureMap::kIdentity, dtype, Rows{data, first, stride},
                 real & there, rows, f.dim, work.rows, width);
    transpose_vectors<T>(work.rows, width, rows, f.dim, work.x, kColumns);
    // What fills up the last vector is multiplied too: memory left by others
    // may hold numbers that cost hundreds of cycles each.
    const int64_t filled = std::min(kColumns, round_up(rows, kLane));
    for (int64_t c = 0; rows < filled && c < f.dim; ++c)
      std::fill(work.x + c * kColumns + rows, work.x + c * kColumns + filled,
                T{0});
    Ahead ahead;
    ahead.start(next[0].rows, f.rows() / rows_for(kMaxVectors) + 1);
    for (int i = 0; i < kPerformerAhead && next[i].rows > 0; ++i) {
      ahead.add(reinterpret_cast<uintptr_t>(next[i].data), next[i].row_bytes,
                next[i].bytes);
    }
    if constexpr (std::is_same_v<T, float>) {
      norms<float>(work.x, f.dim, n, to.half_norm);
      to.wide = limit < 0;
      for (int64_t j = 0; j < n; ++j) {
        // |W_f.x'| + |x'|^2 / 2, at most. A row that is not finite decides
        // nothing: what it holds must not reach the others.
        const double most =
            f.reach * std::sqrt(2 * to.half_norm[j]) + to.half_norm[j];
        if (most > limit && std::isfinite(most)) to.wide = true;
      }
      if (!to.wide) {
        return multiply<float>(f, work.x, n, real, keys, work, to, ahead);
      }
      for (int64_t i = 0; i < f.dim * kColumns; ++i)
        work.wide_x[i] = static_cast<double>(work.x[i]);
      project_double(f, work.wide_x, n, real, keys, work, to, ahead);
    } else {
      project_double(f, work.x, n, real, keys, work, to, ahead);
    }
  }

  static bool load_values(DType dtype, const void* data, int64_t first,
                          int64_t stride, uint64_t real, int64_t n,
                          int64_t value_dim, T* to) {
    const uint64_t there = n < 64 ? (uint64_t{1} << n) - 1 : ~uint64_t{0};
    const int64_t rows = round_up(n, 4), width = row_length<T>(value_dim);
    // A tile of a piece that ends with the block may begin anywhere.
    std::fill_n(to + rows * width, (kPerformerRows - rows) * width, T{0});
    return pack_rows<T>(FeatureMap::kIdentity, dtype, Rows{data, first, stride},
                        real & there, rows, value_dim, to, width);
  }

  // --- Maxima ----------------------------------------------------------------

  static int64_t raise(const Features& f, const Logs& keys, uint64_t real,
                       int64_t from, int64_t to, double bound, bool seen,
                       const Work& work, T* maxima) {
    return keys.wide ? raise_by(f, static_cast<const double*>(keys.logs), real,
                                from, to, bound, seen, work, maxima)
                     : raise_by(f, static_cast<const T*>(keys.logs), real, from,
                                to, bound, seen, work, maxima);
  }

  static void rescale(const Features& f, const T* before, const Sums& state) {
    const Tag<T> d;
    const Panels<T> kv = panels(f, state);
    for (int64_t i = 0; i < f.count; ++i) {
      // Most stay as they are.
      while (i + kLane <= f.count &&
             hn::AllTrue(d, hn::Eq(hn::LoadU(d, before + i),
                                   hn::LoadU(d, state.maxima + i))))
        i += kLane;
      if (i >= f.count) return;
      if (before[i] == state.maxima[i]) continue;
      const T factor =
          static_cast<T>(std::exp(static_cast<double>(before[i]) -
                                  static_cast<double>(state.maxima[i])));
      const Vec<T> scale = hn::Set(d, factor);
      state.sum[i] *= factor;
      for (int64_t c0 = 0; c0 < kv.columns; c0 += kPanel<T>) {
        const int64_t width = kv.width_at(c0);
        T* row = kv.panel(c0) + i * width;
        for (int64_t c = 0; c < width; c += kLane)
          hn::Store(hn::Mul(hn::Load(d, row + c), scale), d, row + c);
      }
    }
  }

  static void find_tops(const Features& f, const Logs& queries, int64_t begin,
                        int64_t n, const T* maxima, double* top) {
    HWY_ALIGN T narrow[kColumns + kLane];
    HWY_ALIGN double wide[kColumns + kLane];
    tops(f, queries, begin, n, maxima, narrow, wide, top);
  }

  // --- Features as rows ------------------------------------------------------

  static void form_rows(const Features& f, const Logs& logs, int64_t begin,
                        int64_t n, const T* maxima, const double* shift,
                        const Work& work, T* out, int64_t out_stride) {
    HWY_ALIGN T narrow[kPiece + kLane] = {};
    HWY_ALIGN double wide[kPiece + kLane] = {};
    for (int64_t j = 0; j < n; j += kPiece) {
      const int64_t columns = std::min(kPiece, n - j);
      for (int64_t l = 0; shift != nullptr && l < columns; ++l) {
        wide[l] = shift[j + l];
        narrow[l] = static_cast<T>(shift[j + l]);
      }
      for (int64_t f0 = 0; f0 < f.count; f0 += kPerformerStrip) {
        const int64_t rows = std::min(kPerformerStrip, f.count - f0);
        if (shift != nullptr) {
          form<true>(logs, f0, rows, begin + j, columns, maxima, narrow, wide,
                     nullptr, work.queries);
        } else {
          form<false>(logs, f0, rows, begin + j, columns, maxima, nullptr,
                      nullptr, nullptr, work.queries);
        }
        transpose_vectors<T>(work.queries, kPiece, round_up(rows, 4), columns,
                             out + j * out_stride + f0, out_stride);
      }
    }
  }

  // --- A piece ---------------------------------------------------------------

  static void attend(const Features& f, const Piece& p, const Work& work,
                     const Sums& state) {
    const int64_t rows = round_up(p.n, 4);
    const int64_t v_stride = row_length<T>(f.value_dim);
    const bool asks = p.queries != nullptr, has_keys = p.keys != nullptr;
    const T* v = has_keys ? p.v + p.begin * v_stride : nullptr;
    T* out = asks ? p.out + p.begin * v_stride : nullptr;
    const Panels<T> kv = panels(f, state);
    // By column: what queries are shifted by, ones' bits of real keys, sums.
    HWY_ALIGN T top[kPiece + kLane];
    HWY_ALIGN T live[kPiece];
    HWY_ALIGN T denominator[kPiece];
    HWY_ALIGN double wide_top[kPiece + kLane];
    if (asks) {
      tops(f, *p.queries, p.begin, p.n, state.maxima, top, wide_top, p.top);
      std::fill_n(denominator, kPiece, T{0});
      std::fill_n(out, rows * v_stride, T{0});
      if (has_keys) std::fill_n(work.scores, kPiece * kPiece, T{0});
    }
    if (has_keys) fill_live(p, live);
    for (int64_t f0 = 0; f0 < f.count; f0 += kPerformerStrip) {
      const int64_t depth = std::min(kPerformerStrip, f.count - f0);
      if (asks) {
        form<true>(*p.queries, f0, depth, p.begin, p.n, state.maxima, top,
                   wide_top, nullptr, work.queries);
      }
      if (has_keys) {
        form<false>(*p.keys, f0, depth, p.begin, p.n, state.maxima, nullptr,
                    nullptr, live, work.keys);
      }
      if (asks && has_keys) Products::add_scores(work, rows, depth);
      if (asks && p.read) {
        Products::read_strip(work.queries, rows, depth, kv, f0, out, v_stride);
        Products::add_denominators(work.queries, depth, state.sum + f0,
                                   denominator);
      }
      if (has_keys && p.update)
        Products::update_strip(work.keys, p.n, depth, v, v_stride, kv, f0,
                               state.sum);
    }
    if (!asks) return;
    if (has_keys) {
      Products::add_triangle(work.scores, p.n, rows, denominator);
      Products::add_own_values(work.scores, v, v_stride, p.n, rows, p.finite,
                               out);
    }
    std::copy_n(denominator, p.n, p.denominator + p.begin);
  }

  static void write(DType dtype, const T* out, const T* scale, uint64_t written,
                    uint64_t live, int64_t value_dim, void* data, int64_t first,
                    int64_t stride, bool stream) {
    // Half a word at a time: rows are shifted out of it.
    constexpr int64_t kHalf = kColumns / 2;
    constexpr uint64_t kLow = (uint64_t{1} << kHalf) - 1;
    const int64_t v_stride = row_length<T>(value_dim);
    for (int64_t r = 0; r < kColumns; r += kHalf) {
      write_rows<T>(dtype, out + r * v_stride, v_stride, scale + r,
                    written >> r & kLow, live >> r & kLow, value_dim,
                    Rows{data, first + r, stride}, stream);
    }
    if (stream) hwy::FlushStream();
  }

  static constexpr PerformerBlockKernels<T> make() {
    return {&value_stride, &load_state, &store_state, &project,
            &load_values,  &raise,      &rescale,     &form_rows,
            &find_tops,    &attend,     &write};
  }

 private:
  static constexpr double kLowest = -std::numeric_limits<double>::infinity();

  template <typename L>
  static void norms(const L* HWY_RESTRICT x, int64_t dim, int64_t n,
                    double* half_norm) {
    const Tag<L> d;
    const double scale = 0.5 / std::sqrt(static_cast<double>(dim));
    for (int64_t j = 0; j < n; j += kLanes<L>) {
      Vec<L> sum = hn::Zero(d);
      for (int64_t c = 0; c < dim; ++c) {
        const Vec<L> y = hn::Load(d, x + c * kColumns + j);
        sum = hn::MulAdd(y, y, sum);
      }
      HWY_ALIGN L squares[kLanes<L>];
      hn::Store(sum, d, squares);
      for (int64_t l = 0; l < std::min(kLanes<L>, n - j); ++l)
        half_norm[j + l] = scale * static_cast<double>(squares[l]);
    }
  }

  static void project_double(const Features& f, const double* x, int64_t n,
                             uint64_t real, bool keys, const Work& work,
                             Logs& to, Ahead& ahead) {
    to.wide = !std::is_same_v<T, double>;
    norms<double>(x, f.dim, n, to.half_norm);
    multiply<double>(f, x, n, real, keys, work, to, ahead);
  }

  template <typename L>
  static HWY_NOINLINE void multiply(const Features& f, const L* HWY_RESTRICT x,
                                    int64_t n, uint64_t real, bool keys,
                                    const Work& work, Logs& to, Ahead& ahead) {
    const Tag<L> d;
    HWY_ALIGN L shift[kColumns];
    for (int64_t j = 0; j < kColumns; ++j) {
      shift[j] = !keys ? L{0}
                 : j < n && (real >> j & 1) != 0
                     ? static_cast<L>(-to.half_norm[j])
                     : static_cast<L>(kLowest);
    }
    const Vec<L> scale =
        hn::Set(d, static_cast<L>(std::pow(static_cast<double>(f.dim), -0.25)));
    L* HWY_RESTRICT logs = static_cast<L*>(to.logs);
    const int64_t columns =
        std::min(kColumns, round_up(n, kLanes<L>)) / kLanes<L>;
    for_vectors<L>(
        std::min<int64_t>(columns, kMaxVectors), [&](auto vectors) HWY_ATTR {
          constexpr int kVectors = decltype(vectors)::value;
          constexpr int64_t kWidth = kVectors * kLanes<L>;
          for_row_tiles<kVectors>(
              f.rows(), [&](auto count, int64_t r) COSFORMER_LAMBDA {
                constexpr int kRows = decltype(count)::value;
                const L* w;
                if constexpr (std::is_same_v<L, T>) {
                  w = f.projection + r * f.dim;
                } else {
                  for (int64_t i = 0; i < kRows * f.dim; ++i)
                    work.wide_w[i] =
                        static_cast<double>(f.projection[r * f.dim + i]);
                  w = work.wide_w;
                }
                for (int64_t c0 = 0; c0 < columns * kLanes<L>; c0 += kWidth) {
                  Tile<L, kRows, kVectors> tile;
                  tile.zero();
                  multiply_pinned<Along::kRow>(tile, w, f.dim, x + c0, kColumns,
                                               f.dim);
                  unroll<kVectors>([&](auto v) COSFORMER_LAMBDA {
                    const Vec<L> add = hn::Load(d, shift + c0 + v * kLanes<L>);
                    unroll<kRows>([&](auto i) COSFORMER_LAMBDA {
                      Vec<L>& acc = tile.acc[i * kVectors + v];
                      acc = hn::MulAdd(acc, scale, add);
                    });
                  });
                  tile.store(logs + r * kColumns + c0, kColumns);
                }
                ahead.tile();
              });
        });
  }

  // The largest of columns [from, to) and of `top`; NaN left out.
  template <typename L>
  static HWY_INLINE L row_maximum(const L* HWY_RESTRICT row, int64_t from,
                                  int64_t to, L top) {
    const Tag<L> d;
    const Vec<L> start = hn::Set(d, top);
    Vec<L> most = start;
    int64_t j = from;
    for (; j + kLanes<L> <= to; j += kLanes<L>)
      most = hn::Max(hn::LoadU(d, row + j), most);
    if (j < to) {
      const auto inside = hn::FirstN(d, static_cast<size_t>(to - j));
      most = hn::IfThenElse(inside, hn::Max(hn::LoadU(d, row + j), most), most);
    }
    if (hn::AllTrue(d, hn::Eq(most, start))) return top;
    return hn::GetLane(hn::MaxOfLanes(d, most));
  }

  // x as T, or the next larger numbers.
  template <typename L>
  static T rounded_up(L x) {
    T up = static_cast<T>(x);
    if constexpr (!std::is_same_v<T, L>) {
      if (static_cast<L>(up) < x)
        up += std::fabs(up) * std::numeric_limits<T>::epsilon();
    }
    return up;
  }

  template <typename L>
  static int64_t raise_by(const Features& f, const L* HWY_RESTRICT logs,
                          uint64_t real, int64_t from, int64_t to, double bound,
                          bool seen, const Work& work, T* maxima) {
    const uint64_t left = real & ~uint64_t{0} << from;
    if (left == 0 || __builtin_ctzll(left) >= to) return to;
    const int64_t first = __builtin_ctzll(left);
    const bool with_first = first == from || !seen;
    // What the first query that sees any key sees at least.
    const auto base = [&](int64_t i) {
      const double before = static_cast<double>(maxima[i]);
      const double x = static_cast<double>(logs[i * kColumns + first]);
      return with_first && x > before ? x : before;
    };
    // Maxima of all columns; where one rises too far, the columns before that.
    int64_t end = to;
    for (int64_t i = 0; i < f.count; ++i) {
      const L* row = logs + i * kColumns;
      const L most = row_maximum<L>(row, from, to, static_cast<L>(maxima[i]));
      work.risen[i] = rounded_up<L>(most);
      if (most == static_cast<L>(maxima[i])) continue;
      const double limit = bound + base(i);
      if (!(static_cast<double>(most) > limit)) continue;
      for (int64_t j = first + 1; j < end; ++j)
        if (static_cast<double>(row[j]) > limit) end = j;
    }
    for (int64_t i = 0; end < to && i < f.count; ++i) {
      work.risen[i] = rounded_up<L>(row_maximum<L>(
          logs + i * kColumns, from, end, static_cast<L>(maxima[i])));
    }
    std::copy_n(work.risen, f.count, maxima);
    return end;
  }

  // top[j] = max_f (L_fj + m_f), 0 where nothing was seen: as T or double, what
  // the logarithms are, and as double from `begin` on.
  static void tops(const Features& f, const Logs& queries, int64_t begin,
                   int64_t n, const T* maxima, T* narrow, double* wide,
                   double* kept) {
    if (queries.wide) {
      tops_of<double>(f, static_cast<const double*>(queries.logs) + begin, n,
                      maxima, wide);
      std::copy_n(wide, n, kept + begin);
    } else {
      tops_of<T>(f, static_cast<const T*>(queries.logs) + begin, n, maxima,
                 narrow);
      for (int64_t j = 0; j < n; ++j)
        kept[begin + j] = static_cast<double>(narrow[j]);
    }
  }
  template <typename L>
  static HWY_NOINLINE void tops_of(const Features& f,
                                   const L* HWY_RESTRICT logs, int64_t n,
                                   const T* HWY_RESTRICT maxima, L* top) {
    const Tag<L> d;
    const Vec<L> lowest = hn::Set(d, static_cast<L>(kLowest));
    for (int64_t j = 0; j < n; j += kLanes<L>) {
      Vec<L> most[4] = {lowest, lowest, lowest, lowest};
      const auto take = [&](int64_t i, int64_t at) COSFORMER_LAMBDA {
        const Vec<L> m = hn::Set(d, static_cast<L>(maxima[i]));
        most[at] = hn::Max(hn::Add(hn::LoadU(d, logs + i * kColumns + j), m),
                           most[at]);
      };
      int64_t i = 0;
      for (; i + 4 <= f.count; i += 4) {
        take(i, 0);
        take(i + 1, 1);
        take(i + 2, 2);
        take(i + 3, 3);
      }
      for (; i < f.count; ++i) take(i, 0);
      const Vec<L> all =
          hn::Max(hn::Max(most[0], most[1]), hn::Max(most[2], most[3]));
      hn::StoreU(hn::IfThenZeroElse(hn::Eq(all, lowest), all), d, top + j);
    }
  }

  static void fill_live(const Piece& p, T* live) {
    using Bits = hwy::MakeUnsigned<T>;
    for (int64_t j = 0; j < kPiece; ++j) {
      const bool is_live = j < p.n && (p.real_keys >> (p.begin + j) & 1) != 0;
      const Bits bits = is_live ? ~Bits{0} : Bits{0};
      std::memcpy(live + j, &bits, sizeof(bits));
    }
  }

  // Features [f0, f0 + rows) of a piece's columns, [rows][kPiece].
  template <bool kQueries>
  static void form(const Logs& from, int64_t f0, int64_t rows, int64_t begin,
                   int64_t n, const T* maxima, const T* top,
                   const double* wide_top, const T* live, T* out) {
    const int64_t at = f0 * kColumns + begin;
    if (from.wide) {
      form_as<double, kQueries>(static_cast<const double*>(from.logs) + at,
                                rows, n, maxima + f0, wide_top, live, out);
    } else {
      form_as<T, kQueries>(static_cast<const T*>(from.logs) + at, rows, n,
                           maxima + f0, top, live, out);
    }
  }
  template <typename L, bool kQueries>
  static HWY_NOINLINE void form_as(const L* HWY_RESTRICT logs, int64_t rows,
                                   int64_t n, const T* HWY_RESTRICT maxima,
                                   const L* HWY_RESTRICT top,
                                   const T* HWY_RESTRICT live,
                                   T* HWY_RESTRICT out) {
    const Tag<T> d;
    for (int64_t i = 0; i < rows; ++i) {
      const L* HWY_RESTRICT in = logs + i * kColumns;
      T* HWY_RESTRICT to = out + i * kPiece;
      const L m = static_cast<L>(maxima[i]);
      // Where no key was seen yet, none is live.
      const L column = kQueries || m == static_cast<L>(kLowest) ? m : -m;
      const auto lanes = [&](int64_t j) COSFORMER_LAMBDA {
        Vec<T> x;
        if constexpr (std::is_same_v<L, T>) {
          x = hn::Add(hn::LoadU(d, in + j), hn::Set(d, column));
          if constexpr (kQueries) x = hn::Sub(x, hn::Load(d, top + j));
        } else {
          HWY_ALIGN T narrow[kLane];
          for (int64_t l = 0; l < kLane; ++l) {
            narrow[l] =
                static_cast<T>(kQueries ? (in[j + l] + column) - top[j + l]
                                        : in[j + l] + column);
          }
          x = hn::Load(d, narrow);
        }
        x = exp_lanes<T>(x);
        if (!kQueries && live != nullptr) x = hn::And(x, hn::Load(d, live + j));
        hn::Store(x, d, to + j);
      };
      if (n == kPiece) {
        unroll<static_cast<int>(kPiece / kLane)>(
            [&](auto v) COSFORMER_LAMBDA { lanes(v * kLane); });
      } else {
        for (int64_t j = 0; j < n; j += kLane) lanes(j);
      }
    }
    if constexpr (!kQueries)
      std::fill_n(out + rows * kPiece, (round_up(rows, 4) - rows) * kPiece,
                  T{0});
  }
};

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_PERFORMER_BLOCK_INL_H_
