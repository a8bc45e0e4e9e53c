// One token: S += k v^T, z += k, out = q S / max(q z, eps), in the caller's
// layout of the state, with k and q the features of the token's position (phi
// cos and phi sin, or phi).
//
// Floor: the state is read and written once, 2 x 2 d^2 numbers a head; the
// arithmetic hides behind that. So the row of S that k updates is used for the
// first query head while it is in registers; further heads of a group read it
// from the first-level cache. Whole rows are taken, in the order of memory: in
// two halves AVX2 reached half the speed from memory on. What is left is what a
// head begins and ends with, during which the state does not flow: the rows and
// the state of the next head are brought in before.
#if defined(COSFORMER_SRC_KERNELS_SIMD_DECODE_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_DECODE_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_DECODE_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_DECODE_INL_H_
#endif

#include <cmath>
#include <numbers>

#include "kernels/simd/chunk-inl.h"
#include "kernels/simd/decode.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

template <typename T>
struct DecodeScratch {
  DecodeScratch(const LinearCall& call, Carver<T>& carver)
      : q_stride(row_length<T>(call.dim)),
        v_stride(row_length<T>(call.value_dim)),
        is_rotary(call.rotary),
        angles(call, 1, carver.take(Angles<T>::size(call, 1))) {
    row = carver.take(4 * q_stride);
    features = carver.take(2 * q_stride);
    plain_features = call.rotary ? carver.take(2 * q_stride) : features;
    v = carver.take(4 * v_stride);
    out = carver.take(v_stride);
    q = carver.take(2 * q_stride);
    plain_q = call.rotary ? carver.take(2 * q_stride) : q;
  }
  void start() {
    if (is_rotary) angles.start();
  }

  int64_t q_stride, v_stride;
  bool is_rotary;
  Angles<T> angles;              // for rotary positions
  T* row;                        // one packed row, padded to 4
  T *features, *plain_features;  // of the key: [parts * dim]
  T *q, *plain_q;                // of a query
  T *v, *out;
};

// Columns of a pass over the rows of a state, in vectors, at most: whole rows
// of head_dim 64 with AVX2, of 128 with AVX-512.
inline constexpr int kDecodeVectors = 8;
// Wider states are taken in blocks of rows of about so many bytes, so that
// memory is read once, in order.
inline constexpr int64_t kDecodeBlock = 8192;
// Bytes of the next head's state that are brought in.
inline constexpr int64_t kDecodeBring = 8192;

// Brings `bytes` bytes in.
inline void bring_in(const void* data, int64_t bytes) {
  const char* at = static_cast<const char*>(data);
  for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(at + b, 0, 3);
}

// kUpdate: S[f] += k[f] v. out (+)= sum_f q[f] S[f]. S: [features][columns], of
// which `count` columns (at most kVectors whole vectors) from s on. During the
// last `ahead` rows those behind the state are brought in.
template <typename T, int kVectors, bool kUpdate, bool kTail>
HWY_INLINE void decode_columns(T* HWY_RESTRICT s, int64_t columns,
                               int64_t features, int64_t count,
                               const T* HWY_RESTRICT k, const T* HWY_RESTRICT q,
                               const T* HWY_RESTRICT v, bool first,
                               T* HWY_RESTRICT out, int64_t ahead) {
  const Tag<T> d;
  constexpr int64_t kLane = kLanes<T>;
  // Of few columns each has two sums, or a row would wait for the additions of
  // the one before it.
  constexpr int kSums = kVectors < 4 ? 2 : 1;
  // Where the registers do not hold the values, they are operands in memory.
  constexpr bool kHold = kVectors <= 4 || HWY_TARGET == HWY_AVX3;
  Vec<T> value[kVectors], sum[kSums * kVectors];
  unroll<kVectors>([&](auto n) COSFORMER_LAMBDA {
    if constexpr (kHold) value[n] = hn::Load(d, v + n * kLane);
    sum[n] = first ? hn::Zero(d) : hn::Load(d, out + n * kLane);
    if constexpr (kSums == 2) sum[kVectors + n] = hn::Zero(d);
  });
  const auto mask = hn::FirstN(d, static_cast<size_t>(count));
  const auto step = [&](int64_t f, auto half) COSFORMER_LAMBDA {
    T* HWY_RESTRICT row = s + f * columns;
    const Vec<T> kf = hn::Set(d, k[f]), qf = hn::Set(d, q[f]);
    unroll<kVectors>([&](auto n) COSFORMER_LAMBDA {
      constexpr int kSum = half * kVectors + n;
      Vec<T> x =
          kTail ? hn::MaskedLoad(mask, d, row) : hn::LoadU(d, row + n * kLane);
      if constexpr (kUpdate) {
        x = hn::MulAdd(kf, kHold ? value[n] : hn::Load(d, v + n * kLane), x);
        if constexpr (kTail) {
          hn::BlendedStore(x, mask, d, row);
        } else {
          hn::StoreU(x, d, row + n * kLane);
        }
      }
      sum[kSum] = hn::MulAdd(qf, x, sum[kSum]);
    });
  };
  int64_t f = 0;
  for (; f + 2 <= features; f += 2) {
    if (f >= features - ahead) {
      bring_in(s + (f + ahead) * columns,
               2 * columns * static_cast<int64_t>(sizeof(T)));
    }
    step(f, std::integral_constant<int, 0>());
    step(f + 1, std::integral_constant<int, kSums - 1>());
  }
  if (f < features) step(f, std::integral_constant<int, 0>());
  unroll<kVectors>([&](auto n) COSFORMER_LAMBDA {
    if constexpr (kSums == 2) sum[n] = hn::Add(sum[n], sum[kVectors + n]);
    hn::Store(sum[n], d, out + n * kLane);
  });
}

template <typename T, bool kUpdate>
HWY_NOINLINE void decode_head(T* HWY_RESTRICT s, int64_t columns,
                              int64_t features, const T* HWY_RESTRICT k,
                              const T* HWY_RESTRICT q, const T* HWY_RESTRICT v,
                              T* HWY_RESTRICT out) {
  constexpr int64_t kLane = kLanes<T>;
  const int64_t row_bytes = columns * static_cast<int64_t>(sizeof(T));
  const bool whole = columns <= kDecodeVectors * kLane;
  const int64_t block =
      whole ? features : std::max<int64_t>(8, kDecodeBlock / row_bytes);
  // The machine's own prefetching begins anew at the next head, whose state
  // lies behind this one.
  const int64_t ahead =
      kUpdate && whole ? std::min(features, kDecodeBring / row_bytes) : 0;
  for (int64_t f = 0; f < features; f += block) {
    const int64_t rows = std::min(block, features - f);
    T* HWY_RESTRICT at = s + f * columns;
    const bool first = f == 0;
    int64_t c = 0;
    const auto columns_of = [&](auto vectors) COSFORMER_LAMBDA {
      constexpr int kVectors = decltype(vectors)::value;
      for (; c + kVectors * kLane <= columns; c += kVectors * kLane) {
        decode_columns<T, kVectors, kUpdate, false>(
            at + c, columns, rows, kVectors * kLane, k + f, q + f, v + c, first,
            out + c, c == 0 ? ahead : 0);
      }
    };
    columns_of(std::integral_constant<int, kDecodeVectors>());
    columns_of(std::integral_constant<int, 4>());
    columns_of(std::integral_constant<int, 2>());
    columns_of(std::integral_constant<int, 1>());
    if (c < columns) {
      decode_columns<T, 1, kUpdate, true>(at + c, columns, rows, columns - c,
                                          k + f, q + f, v + c, first, out + c,
                                          c == 0 ? ahead : 0);
    }
  }
}

template <typename T>
class DecodeRow {
 public:
  DecodeRow(const LinearCall& call, int64_t row, const LinearStateView& state,
            void* scratch)
      : call_(call),
        state_(state),
        s_(*static_cast<DecodeScratch<T>*>(scratch)),
        unit_(make_unit(call, row, 0)) {
    const int64_t position = unit_.row.kv_start;
    if (call.rotary) turn_ = s_.angles.chunk(position, position + 1, position);
    if (call.cosine) {
      const int64_t m = call.options.reweight_len;
      const double angle =
          std::numbers::pi / 2 *
          (static_cast<double>(position % (4 * m)) / static_cast<double>(m));
      part_[0] = static_cast<T>(std::cos(angle));
      part_[1] = static_cast<T>(std::sin(angle));
    }
    const LinearAttentionInputs& in = call_.inputs;
    k_ = source(in.k, row);
    v_ = source(in.v, row);
    q_ = source(in.q, row);
    out_ = source(call_.out, row);
    has_key_ = key_slots(call_, unit_, unit_.row.kv_start, 1).real != 0;
    // The query sees its own key and those of the state.
    const uint8_t* mask = in.query_mask;
    has_query_ = mask == nullptr || mask[row * in.query_mask_stride] != 0;
    if (!has_key_ && unit_.row.state_position == unit_.row.state_start)
      has_query_ = false;
  }

  void step(int64_t head) {
    unit_.head = head;
    const int64_t features = call_.parts * call_.dim;
    T* kv = static_cast<T*>(state_.kv_state) + call_.kv_state_at(unit_);
    T* sum = static_cast<T*>(state_.k_sum) + call_.k_sum_at(unit_);
    look_ahead(head + 1, sum + features);
    if (has_key_) {
      load_features(k_.of(head), s_.features, s_.plain_features);
      pack_rows<T>(FeatureMap::kIdentity, call_.dtype, v_.of(head), 1, 1,
                   call_.value_dim, s_.v, s_.v_stride);
      add_key(features, sum);
    }
    bool updated = !has_key_;
    for (int64_t g = 0; g < call_.group; ++g) {
      const int64_t h = head * call_.group + g;
      if (has_query_) {
        load_features(q_.of(h), s_.q, s_.plain_q);
      } else {
        std::fill_n(s_.q, features, T{0});
        std::fill_n(s_.plain_q, features, T{0});
      }
      if (!updated) {
        decode_head<T, true>(kv, call_.value_dim, features, s_.features, s_.q,
                             s_.v, s_.out);
        updated = true;
      } else if (has_query_) {
        decode_head<T, false>(kv, call_.value_dim, features, s_.features, s_.q,
                              s_.v, s_.out);
      }
      const T scale = call_.normalize ? 1 / norm(sum, features) : T{1};
      write_rows<T>(call_.dtype, s_.out, s_.v_stride, &scale, 1,
                    has_query_ ? 1 : 0, call_.value_dim, out_.of(h), false);
    }
  }

 private:
  // The heads of the row's token.
  struct Source {
    const char* at;
    int64_t head_bytes, bytes;
    Rows of(int64_t head) const { return {at + head * head_bytes, 0, 0}; }
    void bring(int64_t head) const { bring_in(at + head * head_bytes, bytes); }
  };
  static Source source(const ConstView4& view, int64_t row) {
    const int64_t size = static_cast<int64_t>(size_of(view.dtype));
    return {static_cast<const char*>(view.data) + row * view.stride[0] * size,
            view.stride[2] * size, view.size[3] * size};
  }

  // What the head after this one begins with: its rows lie far apart, and by
  // the machine's own prefetching each would be waited for.
  void look_ahead(int64_t head, const T* sum) const {
    if (head == call_.kv_heads) return;
    k_.bring(head);
    v_.bring(head);
    for (int64_t g = 0; g < call_.group; ++g) q_.bring(head * call_.group + g);
    bring_in(sum, call_.parts * call_.dim * static_cast<int64_t>(sizeof(T)));
  }

  // phi of a row, times the cosine and the sine of its position.
  void load_features(const Rows& from, T* features, T* plain) {
    pack_rows<T>(call_.options.feature_map, call_.dtype, from, 1, 1, call_.dim,
                 s_.row, s_.q_stride);
    scale_parts(s_.row, plain);
    if (!call_.rotary) return;
    rotate_rows<T>(s_.row, turn_.rotary_cos, turn_.rotary_sin,
                   call_.options.rotary_interleaved, false, 1, call_.dim,
                   s_.q_stride, s_.row);
    scale_parts(s_.row, features);
  }
  // in: padded; out: padded behind its last part.
  void scale_parts(const T* HWY_RESTRICT in, T* HWY_RESTRICT out) const {
    const Tag<T> d;
    for (int p = 0; p < call_.parts; ++p, out += call_.dim) {
      const Vec<T> scale = hn::Set(d, part_[p]);
      for (int64_t f = 0; f < call_.dim; f += kLanes<T>)
        hn::StoreU(hn::Mul(hn::Load(d, in + f), scale), d, out + f);
    }
  }
  void add_key(int64_t features, T* HWY_RESTRICT sum) const {
    const Tag<T> d;
    int64_t f = 0;
    for (; f + kLanes<T> <= features; f += kLanes<T>) {
      hn::StoreU(
          hn::Add(hn::LoadU(d, sum + f), hn::Load(d, s_.plain_features + f)), d,
          sum + f);
    }
    for (; f < features; ++f) sum[f] += s_.plain_features[f];
  }
  T norm(const T* HWY_RESTRICT sum, int64_t features) const {
    const Tag<T> d;
    Vec<T> lanes = hn::Zero(d);
    int64_t f = 0;
    for (; f + kLanes<T> <= features; f += kLanes<T>) {
      lanes =
          hn::MulAdd(hn::Load(d, s_.plain_q + f), hn::LoadU(d, sum + f), lanes);
    }
    T total = hn::GetLane(hn::SumOfLanes(d, lanes));
    for (; f < features; ++f) total += s_.plain_q[f] * sum[f];
    const T eps = static_cast<T>(call_.options.eps);
    return total < eps ? eps : total;
  }

  const LinearCall& call_;
  const LinearStateView& state_;
  DecodeScratch<T>& s_;
  Unit unit_;
  Chunk<T> turn_{};     // rotary
  T part_[2] = {1, 0};  // cosine and sine
  Source k_, v_, q_, out_;
  bool has_key_, has_query_;
};

template <typename T>
struct DecodeEntry {
  static void step(const LinearCall& call, int64_t row, int64_t begin,
                   int64_t end, const LinearStateView& state, void* scratch) {
    DecodeRow<T> decode(call, row, state, scratch);
    for (int64_t head = begin; head < end; ++head) decode.step(head);
  }
  static constexpr Decode make() {
    return {&scratch_bytes<T, DecodeScratch<T>>,
            &init_scratch<T, DecodeScratch<T>>, &step};
  }
};

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_DECODE_INL_H_
