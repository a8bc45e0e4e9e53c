// One query a head against the keys that it sees, read where they lie: scores,
// weights and the sum of values of at most kDecodeKeys keys at a time, with
// online normalisation.
//
// Floor: each key and value is read once from memory. What is done with one of
// dim 64 is 16 multiply-adds of a vector a query head, far below the time that
// its bytes take; so keys are not packed. Heads of a token are neighbours in
// memory: a few tokens are taken with all heads before the next ones, so that
// memory is read from its beginning to its end, and what comes next is fetched
// while these are at work.
#if defined(COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_DECODE_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_DECODE_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_DECODE_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_DECODE_INL_H_
#endif

#include <hwy/cache_control.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "kernels/simd/chunk-inl.h"
#include "kernels/simd/exp-inl.h"
#include "kernels/simd/softmax_decode.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

// Query heads that are taken together against keys that they share: what they
// load once then serves all of them.
inline constexpr int kMostHeads = 4;

template <typename T>
struct SoftmaxDecodeScratch {
  SoftmaxDecodeScratch(const SoftmaxDecodeCall& call, Carver<T>& carver)
      : q_stride(round_up(call.dim, kLanes<T>)),
        v_stride(round_up(call.value_dim, kLanes<T>)) {
    q = carver.take(call.heads * q_stride);
    out = carver.take(call.heads * v_stride);
    largest = carver.take(call.heads);
    sum = carver.take(call.heads);
    weights = carver.take(call.heads * kDecodeKeys);
  }
  int64_t q_stride, v_stride;
  T* q;    // [heads][q_stride], scaled, padded with zeros
  T* out;  // [heads][v_stride]
  T *largest, *sum;
  T* weights;  // [heads][kDecodeKeys]
};

// The last elements of a row, those from c on, in a vector whose others are
// zeros: at its end, as a load that ends with the row has them; at its
// beginning where the row is shorter than a vector.
template <typename T>
HWY_INLINE int64_t place_of_end(int64_t c, int64_t n) {
  return n >= kLanes<T> ? kLanes<T> - (n - c) : 0;
}
template <typename T, typename In>
HWY_INLINE Vec<T> load_end(const In* HWY_RESTRICT row, int64_t c, int64_t n) {
  const Tag<T> d;
  if (n >= kLanes<T>) {
    const auto before =
        hn::FirstN(d, static_cast<size_t>(place_of_end<T>(c, n)));
    return hn::IfThenZeroElse(before, load_wide(row + n - kLanes<T>));
  }
  In last[kLanes<T>] = {};
  std::memcpy(last, row + c, static_cast<size_t>(n - c) * sizeof(In));
  return load_wide(last);
}

// to[h stride] = the sum of lanes of sum[h]. Four of float are added up
// together, a third of the work of one after another.
template <typename T, int kCount>
HWY_INLINE void sum_lanes(const Vec<T>* sum, T* HWY_RESTRICT to,
                          int64_t stride) {
  const Tag<T> d;
#if HWY_TARGET != HWY_SCALAR
  if constexpr (kCount == 4 && sizeof(T) == 4) {
    const auto pair = [&](Vec<T> a, Vec<T> b) COSFORMER_LAMBDA {
      return hn::Add(hn::InterleaveLower(d, a, b),
                     hn::InterleaveUpper(d, a, b));
    };
    const Vec<T> all = pair(pair(sum[0], sum[2]), pair(sum[1], sum[3]));
    const auto fold = [&](auto x) COSFORMER_LAMBDA {
      const hn::Half<hn::DFromV<decltype(x)>> half;
      return hn::Add(hn::LowerHalf(half, x), hn::UpperHalf(half, x));
    };
    alignas(16) T four[4];
    const hn::CappedTag<T, 4> d4;
    if constexpr (kLanes<T> == 16) {
      hn::Store(fold(fold(all)), d4, four);
    } else if constexpr (kLanes<T> == 8) {
      hn::Store(fold(all), d4, four);
    } else {
      hn::Store(all, d4, four);
    }
    unroll<4>([&](auto h) COSFORMER_LAMBDA { to[h * stride] = four[h]; });
    return;
  }
#endif
  unroll<kCount>([&](auto h) COSFORMER_LAMBDA {
    to[h * stride] = hn::GetLane(hn::SumOfLanes(d, sum[h]));
  });
}

// Rows of a cache: elements [0, dim) from each pointer on plus offset. What
// lies `ahead` elements behind one is fetched with it.
template <typename In>
struct DecodeRows {
  const In* const* at;
  int64_t offset, ahead, dim;

  HWY_INLINE const In* row(int64_t t) const { return at[t] + offset; }
  HWY_INLINE void fetch(int64_t t) const {
    constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(In));
    const In* next = row(t) + ahead;
    for (int64_t c = 0; c < dim; c += kLine) hwy::Prefetch(next + c);
  }
};

// scores[h][t] = q_h . k_t for kHeads heads and kKeys keys from t on: 4 sums.
template <typename T, typename In, int kHeads, int kKeys>
HWY_INLINE void score_tile_of(const T* HWY_RESTRICT q, int64_t q_stride,
                              const DecodeRows<In>& k, int64_t t,
                              T* HWY_RESTRICT scores) {
  const Tag<T> d;
  constexpr int64_t kLane = kLanes<T>;
  const int64_t dim = k.dim;
  Vec<T> sum[kHeads * kKeys];
  unroll<kHeads * kKeys>([&](auto i)
                             COSFORMER_LAMBDA { sum[i] = hn::Zero(d); });
  const auto step = [&](int64_t c, auto&& load) COSFORMER_LAMBDA {
    Vec<T> x[kKeys];
    unroll<kKeys>([&](auto i) COSFORMER_LAMBDA { x[i] = load(k.row(t + i)); });
    unroll<kHeads>([&](auto h) COSFORMER_LAMBDA {
      const Vec<T> qv = hn::Load(d, q + h * q_stride + c);
      unroll<kKeys>([&](auto i) COSFORMER_LAMBDA {
        sum[h * kKeys + i] = hn::MulAdd(qv, x[i], sum[h * kKeys + i]);
      });
    });
  };
  int64_t c = 0;
  for (; c + kLane <= dim; c += kLane) {
    step(c, [&](const In* row)
                COSFORMER_LAMBDA { return Vec<T>(load_wide(row + c)); });
  }
  if (c < dim) {
    step(c, [&](const In* row)
                COSFORMER_LAMBDA { return load_end<T>(row, c, dim); });
  }
  unroll<kKeys>([&](auto i) COSFORMER_LAMBDA { k.fetch(t + i); });
  sum_lanes<T, kHeads * kKeys>(sum, scores + t, kKeys > 1 ? 1 : kDecodeKeys);
}

// The same for keys [begin, end).
template <typename T, typename In, int kHeads>
HWY_INLINE void score_keys(const T* HWY_RESTRICT q, int64_t q_stride,
                           const DecodeRows<In>& k, int64_t begin, int64_t end,
                           T* HWY_RESTRICT scores) {
  constexpr int kKeys = kHeads == 1 ? 4 : 1;
  int64_t t = begin;
  for (; t + kKeys <= end; t += kKeys)
    score_tile_of<T, In, kHeads, kKeys>(q, q_stride, k, t, scores);
  for (; t < end; ++t)
    score_tile_of<T, In, kHeads, 1>(q, q_stride, k, t, scores);
}

// out_h += sum_t weights[h][t] v_t for kHeads heads and keys [begin, end),
// kVectors whole vectors from c on.
template <typename T, typename In, int kHeads, int kVectors>
HWY_INLINE void add_values(const DecodeRows<In>& v, int64_t begin, int64_t end,
                           int64_t c, const T* HWY_RESTRICT weights,
                           T* HWY_RESTRICT out, int64_t stride) {
  const Tag<T> d;
  Vec<T> sum[kHeads * kVectors];
  unroll<kHeads>([&](auto h) COSFORMER_LAMBDA {
    unroll<kVectors>([&](auto i) COSFORMER_LAMBDA {
      sum[h * kVectors + i] = hn::Load(d, out + h * stride + c + i * kLanes<T>);
    });
  });
  for (int64_t t = begin; t < end; ++t) {
    const In* HWY_RESTRICT row = v.row(t) + c;
    Vec<T> x[kVectors];
    unroll<kVectors>([&](auto i) COSFORMER_LAMBDA {
      x[i] = load_wide(row + i * kLanes<T>);
    });
    unroll<kHeads>([&](auto h) COSFORMER_LAMBDA {
      const Vec<T> w = hn::Set(d, weights[h * kDecodeKeys + t]);
      unroll<kVectors>([&](auto i) COSFORMER_LAMBDA {
        sum[h * kVectors + i] = hn::MulAdd(w, x[i], sum[h * kVectors + i]);
      });
    });
  }
  unroll<kHeads>([&](auto h) COSFORMER_LAMBDA {
    unroll<kVectors>([&](auto i) COSFORMER_LAMBDA {
      hn::Store(sum[h * kVectors + i], d, out + h * stride + c + i * kLanes<T>);
    });
  });
}

template <typename T, typename In>
class SoftmaxDecoder {
 public:
  SoftmaxDecoder(const SoftmaxDecodeCall& call, const DecodeRow& row,
                 SoftmaxDecodeScratch<T>& scratch)
      : call_(call), row_(row), s_(scratch) {
    const T scale = static_cast<T>(call.scale * kLog2E);
    const ConstView4& q = call.inputs.q;
    const Tag<T> d;
    for (int64_t h = 0; h < call.heads; ++h) {
      const In* from = static_cast<const In*>(q.data) + row.row * q.stride[0] +
                       h * q.stride[2];
      T* to = s_.q + h * s_.q_stride;
      for (int64_t c = 0; c < call.dim; c += kLanes<T>) {
        const Vec<T> x = c + kLanes<T> <= call.dim
                             ? load_wide(from + c)
                             : load_end<T>(from, c, call.dim);
        hn::Store(hn::Mul(x, hn::Set(d, scale)), d, to + c);
      }
      s_.largest[h] = -std::numeric_limits<T>::infinity();
      s_.sum[h] = 0;
    }
    std::fill_n(s_.out, call.heads * s_.v_stride, T{0});
  }

  void attend(int64_t begin, int64_t end) {
    if (call_.heads_differ()) {
      for (int64_t h = 0; h < call_.heads; ++h) {
        DecodeKeys keys(call_, row_, h, begin, end);
        while ((count_ = keys.next(keys_)) > 0) add(h, h + 1);
      }
      return;
    }
    DecodeKeys keys(call_, row_, 0, begin, end);
    while ((count_ = keys.next(keys_)) > 0) add(0, call_.heads);
  }

  void write(T* partial) const {
    for (int64_t h = 0; h < call_.heads; ++h) {
      T* to = partial + h * (2 + call_.value_dim);
      to[0] = s_.largest[h];
      to[1] = s_.sum[h];
      const int64_t n = call_.value_dim, whole = n / kLanes<T> * kLanes<T>;
      const T* from = s_.out + h * s_.v_stride;
      std::copy_n(from, whole, to + 2);
      if (whole == n) continue;
      std::copy_n(from + whole + place_of_end<T>(whole, n), n - whole,
                  to + 2 + whole);
    }
  }

 private:
  static constexpr double kLog2E = 1.4426950408889634;

  // Keys that are taken with all heads before the next ones.
  static constexpr int64_t kTogether = 8;

  // Rows of the keys at hand of a kv head.
  DecodeRows<In> rows_of(const View4& view, const In* const* rows,
                         int64_t kv) const {
    // At least so much memory ahead, and all heads of the keys at hand.
    constexpr int64_t kAhead = 8192;
    const int64_t token = std::max<int64_t>(
        1, view.size[2] * view.size[3] * static_cast<int64_t>(sizeof(In)));
    const int64_t tokens = std::max(kTogether, (kAhead + token - 1) / token);
    return {rows, kv * view.stride[2], tokens * row_.step * view.stride[1],
            view.size[3]};
  }

  // Query heads [begin, end), whole groups or one, against the keys at hand.
  HWY_NOINLINE void add(int64_t begin, int64_t end) {
    const View4 &keys = call_.cache.keys, &values = call_.cache.values;
    for (int64_t t = 0; t < count_; ++t) {
      const auto at = [&](const View4& view) {
        return static_cast<const In*>(view.data) + row_.row * view.stride[0] +
               keys_[t].slot * view.stride[1];
      };
      k_[t] = at(keys);
      v_[t] = at(values);
    }
    for_heads(begin, end,
              [&](auto heads, int64_t h, int64_t from, int64_t to) HWY_ATTR {
                score_keys<T, In, decltype(heads)::value>(
                    s_.q + h * s_.q_stride, s_.q_stride,
                    rows_of(keys, k_, h / call_.group), from, to,
                    s_.weights + h * kDecodeKeys);
              });
    for (int64_t h = begin; h < end; ++h)
      weigh(h, s_.weights + h * kDecodeKeys);
    for_heads(begin, end,
              [&](auto heads, int64_t h, int64_t from, int64_t to) HWY_ATTR {
                add_values_of<decltype(heads)::value>(
                    rows_of(values, v_, h / call_.group), h, from, to);
              });
  }

  // Calls f(heads, first head, keys [from, to)) for all heads of a few keys,
  // then for the next keys.
  template <class F>
  HWY_INLINE void for_heads(int64_t begin, int64_t end, F&& f) {
    for (int64_t from = 0; from < count_; from += kTogether) {
      const int64_t to = std::min(count_, from + kTogether);
      for (int64_t h = begin; h < end;) {
        // To the end of those that share a kv head.
        const int64_t left =
            std::min(end, (h / call_.group + 1) * call_.group) - h;
        if (left >= kMostHeads) {
          f(std::integral_constant<int, kMostHeads>(), h, from, to);
          h += kMostHeads;
        } else {
          f(std::integral_constant<int, 1>(), h, from, to);
          ++h;
        }
      }
    }
  }

  // Scores become weights off the largest so far; what was summed before
  // follows it.
  HWY_NOINLINE void weigh(int64_t h, T* HWY_RESTRICT w) {
    const Tag<T> d;
    if (call_.inputs.relative_bias != nullptr) {
      const int64_t reach = call_.inputs.relative_reach;
      const T* bias = static_cast<const T*>(call_.inputs.relative_bias) +
                      h * (2 * reach + 1) + reach;
      for (int64_t t = 0; t < count_; ++t) {
        const int64_t behind = row_.position - keys_[t].position;
        w[t] += bias[-std::min(behind, reach)] * static_cast<T>(kLog2E);
      }
    }
    T largest = s_.largest[h];
    for (int64_t t = 0; t < count_; ++t) largest = std::max(largest, w[t]);
    constexpr T kNothing = -std::numeric_limits<T>::infinity();
    const int64_t whole = round_up(count_, kLanes<T>);
    std::fill(w + count_, w + whole, kNothing);
    // Where all scores are -infinity so is the largest: then nothing is known
    // of the weights but that they are 0.
    const Vec<T> off = hn::Set(d, largest == kNothing ? T{0} : largest);
    Vec<T> sum = hn::Zero(d);
    for (int64_t t = 0; t < whole; t += kLanes<T>) {
      const Vec<T> x = hn::Sub(hn::Load(d, w + t), off);
      const Vec<T> weight =
          zero_where_far<T>(x, exp2_lanes<T>(x, kLowestWeight<T>));
      sum = hn::Add(sum, weight);
      hn::Store(weight, d, w + t);
    }
    if (s_.largest[h] != kNothing && s_.largest[h] != largest) {
      const T scale =
          hn::GetLane(exp2_lanes<T>(hn::Set(d, s_.largest[h] - largest)));
      s_.sum[h] *= scale;
      T* HWY_RESTRICT out = s_.out + h * s_.v_stride;
      for (int64_t c = 0; c < s_.v_stride; ++c) out[c] *= scale;
    }
    s_.largest[h] = largest;
    s_.sum[h] += hn::GetLane(hn::SumOfLanes(d, sum));
    if (call_.options.dropout_p > 0) drop(h, w);
  }

  void drop(int64_t h, T* HWY_RESTRICT w) {
    const double p = call_.options.dropout_p;
    for (int64_t t = 0; t < count_; ++t) {
      const bool stays =
          softmax_dropout_keeps(p, call_.options.dropout_seed, row_.row, h,
                                row_.position, keys_[t].position);
      w[t] *= stays ? static_cast<T>(1 / (1 - p)) : T{0};
    }
  }

  template <int kHeads>
  HWY_INLINE void add_values_of(const DecodeRows<In>& v, int64_t h,
                                int64_t begin, int64_t end) {
    T* HWY_RESTRICT out = s_.out + h * s_.v_stride;
    const T* HWY_RESTRICT weights = s_.weights + h * kDecodeKeys;
    constexpr int64_t kLane = kLanes<T>;
    // Sums of 16 vectors, or 8, fit into the registers.
    constexpr int kVectors = HWY_TARGET == HWY_AVX3 || kHeads == 1 ? 4 : 2;
    const int64_t n = v.dim;
    for (int64_t t = begin; t < end; ++t) v.fetch(t);
    int64_t c = 0;
    for (; c + kVectors * kLane <= n; c += kVectors * kLane)
      add_values<T, In, kHeads, kVectors>(v, begin, end, c, weights, out,
                                          s_.v_stride);
    for (; c + kLane <= n; c += kLane)
      add_values<T, In, kHeads, 1>(v, begin, end, c, weights, out, s_.v_stride);
    if (c == n) return;
    const Tag<T> d;
    for (int64_t g = 0; g < kHeads; ++g) {
      const T* HWY_RESTRICT w = weights + g * kDecodeKeys;
      T* HWY_RESTRICT last = out + g * s_.v_stride + c;
      Vec<T> sum = hn::Load(d, last);
      for (int64_t t = begin; t < end; ++t)
        sum = hn::MulAdd(hn::Set(d, w[t]), load_end<T>(v.row(t), c, n), sum);
      hn::Store(sum, d, last);
    }
  }

  const SoftmaxDecodeCall& call_;
  const DecodeRow& row_;
  SoftmaxDecodeScratch<T>& s_;
  int64_t count_ = 0;
  DecodeKey keys_[kDecodeKeys];
  const In* k_[kDecodeKeys];
  const In* v_[kDecodeKeys];
};

template <typename T>
struct SoftmaxDecodeEntry {
  static size_t scratch_bytes(const SoftmaxDecodeCall& call) {
    Carver<T> counter(nullptr);
    const SoftmaxDecodeScratch<T> scratch(call, counter);
    return counter.bytes();
  }
  template <typename In>
  static void attend_as(const SoftmaxDecodeCall& call, const DecodeRow& row,
                        int64_t begin, int64_t end, void* memory,
                        void* partial) {
    Carver<T> carver(memory);
    SoftmaxDecodeScratch<T> scratch(call, carver);
    SoftmaxDecoder<T, In> decoder(call, row, scratch);
    decoder.attend(begin, end);
    decoder.write(static_cast<T*>(partial));
  }
  static void attend(const SoftmaxDecodeCall& call, const DecodeRow& row,
                     int64_t begin, int64_t end, void* scratch, void* partial) {
    if constexpr (sizeof(T) == 8) {
      attend_as<double>(call, row, begin, end, scratch, partial);
    } else if (call.dtype == DType::kBFloat16) {
      attend_as<BFloat16>(call, row, begin, end, scratch, partial);
    } else if (call.dtype == DType::kFloat16) {
      attend_as<Float16>(call, row, begin, end, scratch, partial);
    } else {
      attend_as<float>(call, row, begin, end, scratch, partial);
    }
  }
  static constexpr SoftmaxDecode make() { return {&scratch_bytes, &attend}; }
};

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_DECODE_INL_H_
