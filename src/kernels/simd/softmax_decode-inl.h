// One query a head against the keys that it sees, read where they lie: scores,
// weights and the sum of values of at most kDecodeKeys keys at a time, with
// online normalisation.
//
// Floor: each key and value is read once from memory. What is done with one of
// dim 64 is 16 multiply-adds of a vector a query head, far below the time that
// its bytes take; so keys are not packed, and what comes next is fetched while
// these are at work.
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
    weights = carver.take(kMostHeads * kDecodeKeys);
  }
  int64_t q_stride, v_stride;
  T* q;    // [heads][q_stride], scaled, padded with zeros
  T* out;  // [heads][v_stride]
  T *largest, *sum;
  T* weights;  // [heads taken together][kDecodeKeys]
};

// The element of a row from c on, as a vector; beyond its end zeros.
template <typename T, typename In>
HWY_INLINE Vec<T> load_end(const In* HWY_RESTRICT row, int64_t c, int64_t n) {
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

// scores[h][t] = q_h . k_t for kHeads heads and n keys.
template <typename T, typename In, int kHeads>
HWY_INLINE void score_keys(const T* HWY_RESTRICT q, int64_t q_stride,
                           const In* const* HWY_RESTRICT k, int64_t n,
                           int64_t dim, T* HWY_RESTRICT scores) {
  const Tag<T> d;
  constexpr int64_t kLane = kLanes<T>;
  // A head alone takes turns with two sums: each step would wait for the
  // addition before it.
  constexpr int kSums = kHeads == 1 ? 2 : 1;
  for (int64_t t = 0; t < n; ++t) {
    const In* HWY_RESTRICT key = k[t];
    Vec<T> sum[kHeads * kSums];
    unroll<kHeads * kSums>([&](auto i)
                               COSFORMER_LAMBDA { sum[i] = hn::Zero(d); });
    const auto step = [&](int64_t c, Vec<T> x, auto turn) COSFORMER_LAMBDA {
      unroll<kHeads>([&](auto h) COSFORMER_LAMBDA {
        constexpr int kSum = h * kSums + turn;
        sum[kSum] = hn::MulAdd(hn::Load(d, q + h * q_stride + c), x, sum[kSum]);
      });
    };
    constexpr std::integral_constant<int, 0> kFirst;
    constexpr std::integral_constant<int, kSums - 1> kLast;
    int64_t c = 0;
    for (; c + 2 * kLane <= dim; c += 2 * kLane) {
      step(c, load_wide(key + c), kFirst);
      step(c + kLane, load_wide(key + c + kLane), kLast);
    }
    for (; c + kLane <= dim; c += kLane) step(c, load_wide(key + c), kFirst);
    if (c < dim) step(c, load_end<T>(key, c, dim), kLast);
    if constexpr (kSums == 2) sum[0] = hn::Add(sum[0], sum[1]);
    sum_lanes<T, kHeads>(sum, scores + t, kDecodeKeys);
  }
}

// out_h += sum_t weights[h][t] v_t for kHeads heads, kVectors whole vectors
// from c on.
template <typename T, typename In, int kHeads, int kVectors>
HWY_INLINE void add_values(const In* const* HWY_RESTRICT v, int64_t n,
                           int64_t c, const T* HWY_RESTRICT weights,
                           T* HWY_RESTRICT out, int64_t stride) {
  const Tag<T> d;
  Vec<T> sum[kHeads * kVectors];
  unroll<kHeads>([&](auto h) COSFORMER_LAMBDA {
    unroll<kVectors>([&](auto i) COSFORMER_LAMBDA {
      sum[h * kVectors + i] = hn::Load(d, out + h * stride + c + i * kLanes<T>);
    });
  });
  for (int64_t t = 0; t < n; ++t) {
    Vec<T> x[kVectors];
    unroll<kVectors>([&](auto i) COSFORMER_LAMBDA {
      x[i] = load_wide(v[t] + c + i * kLanes<T>);
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
        while ((count_ = keys.next(keys_)) > 0)
          add(h / call_.group, h, h + 1, false);
      }
      return;
    }
    DecodeKeys keys(call_, row_, 0, begin, end);
    while ((count_ = keys.next(keys_)) > 0) {
      for (int64_t kv = 0; kv < call_.kv_heads; ++kv) {
        add(kv, kv * call_.group, (kv + 1) * call_.group,
            kv + 1 < call_.kv_heads);
      }
    }
  }

  void write(T* partial) const {
    for (int64_t h = 0; h < call_.heads; ++h) {
      T* to = partial + h * (2 + call_.value_dim);
      to[0] = s_.largest[h];
      to[1] = s_.sum[h];
      std::copy_n(s_.out + h * s_.v_stride, call_.value_dim, to + 2);
    }
  }

 private:
  static constexpr double kLog2E = 1.4426950408889634;

  static const In* row_of(const View4& view, const DecodeRow& row, int64_t slot,
                          int64_t head) {
    return static_cast<const In*>(view.data) + row.row * view.stride[0] +
           slot * view.stride[1] + head * view.stride[2];
  }
  // The same row of the next head, which comes next.
  static HWY_INLINE void fetch(const In* row, int64_t elements) {
    constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(In));
    for (int64_t c = 0; c < elements; c += kLine) hwy::Prefetch(row + c);
  }

  // Query heads [begin, end) against the keys at hand of one kv head.
  HWY_NOINLINE void add(int64_t kv, int64_t begin, int64_t end,
                        bool fetch_next) {
    const View4 &keys = call_.cache.keys, &values = call_.cache.values;
    for (int64_t t = 0; t < count_; ++t) {
      k_[t] = row_of(keys, row_, keys_[t].slot, kv);
      v_[t] = row_of(values, row_, keys_[t].slot, kv);
      if (fetch_next) {
        fetch(k_[t] + keys.stride[2], call_.dim);
        fetch(v_[t] + values.stride[2], call_.value_dim);
      }
    }
    int64_t h = begin;
    for (; h + kMostHeads <= end; h += kMostHeads) add_heads<kMostHeads>(h);
    for (; h < end; ++h) add_heads<1>(h);
  }

  template <int kHeads>
  HWY_INLINE void add_heads(int64_t h) {
    score_keys<T, In, kHeads>(s_.q + h * s_.q_stride, s_.q_stride, k_, count_,
                              call_.dim, s_.weights);
    for (int64_t n = 0; n < kHeads; ++n)
      weigh(h + n, s_.weights + n * kDecodeKeys);
    add_values_of<kHeads>(h);
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
      const Vec<T> score = hn::Load(d, w + t);
      const Vec<T> weight = hn::IfThenZeroElse(
          hn::Eq(score, hn::Set(d, kNothing)),
          exp2_lanes<T>(hn::Sub(score, off), kLowestWeight<T>));
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
  HWY_INLINE void add_values_of(int64_t h) {
    T* HWY_RESTRICT out = s_.out + h * s_.v_stride;
    constexpr int64_t kLane = kLanes<T>;
    // Sums of 16 vectors, or 8, fit into the registers.
    constexpr int kVectors = HWY_TARGET == HWY_AVX3 || kHeads == 1 ? 4 : 2;
    const int64_t n = call_.value_dim;
    int64_t c = 0;
    for (; c + kVectors * kLane <= n; c += kVectors * kLane)
      add_values<T, In, kHeads, kVectors>(v_, count_, c, s_.weights, out,
                                          s_.v_stride);
    for (; c + kLane <= n; c += kLane)
      add_values<T, In, kHeads, 1>(v_, count_, c, s_.weights, out, s_.v_stride);
    if (c == n) return;
    const Tag<T> d;
    for (int64_t g = 0; g < kHeads; ++g) {
      const T* HWY_RESTRICT w = s_.weights + g * kDecodeKeys;
      T* HWY_RESTRICT last = out + g * s_.v_stride + c;
      Vec<T> sum = hn::Load(d, last);
      for (int64_t t = 0; t < count_; ++t)
        sum = hn::MulAdd(hn::Set(d, w[t]), load_end<T>(v_[t], c, n), sum);
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
