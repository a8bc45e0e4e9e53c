// One token: S += k v^T, z += k, out = q S / max(q z, eps), in the caller's
// layout of the state, with k and q the features of the token's position (phi
// cos and phi sin, or phi).
//
// Floor: the state is read and written once, 2 x 2 d^2 numbers a head; the
// arithmetic hides behind that. So the row of S that k updates is used for the
// first query head while it is in registers; further heads of a group read it
// from the first-level cache.
#if defined(COSFORMER_SRC_KERNELS_SIMD_DECODE_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_DECODE_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_DECODE_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_DECODE_INL_H_
#endif

#include "kernels/simd/chunk-inl.h"
#include "kernels/simd/decode.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

template <typename T>
struct DecodeScratch {
  DecodeScratch(const LinearCall& call, Carver<T>& carver)
      : q_stride(row_length<T>(call.dim)),
        v_stride(row_length<T>(call.value_dim)),
        angles(call, 1, carver.take(Angles<T>::size(call, 1))) {
    row = carver.take(4 * q_stride);
    features = carver.take(2 * q_stride);
    plain_features = call.rotary ? carver.take(2 * q_stride) : features;
    v = carver.take(4 * v_stride);
    out = carver.take(v_stride);
    q = carver.take(2 * q_stride);
    plain_q = call.rotary ? carver.take(2 * q_stride) : q;
  }
  void start() { angles.start(); }

  int64_t q_stride, v_stride;
  Angles<T> angles;
  T* row;                        // one packed row, padded to 4
  T *features, *plain_features;  // of the key: [parts * dim]
  T *q, *plain_q;                // of a query
  T *v, *out;
};

// kUpdate: S[f] += k[f] v. out = sum_f q[f] S[f]. S: [features][columns], of
// which `count` columns (at most kVectors whole vectors) from s on.
template <typename T, int kVectors, bool kUpdate, bool kTail>
HWY_INLINE void decode_columns(T* HWY_RESTRICT s, int64_t columns,
                               int64_t features, int64_t count,
                               const T* HWY_RESTRICT k, const T* HWY_RESTRICT q,
                               const T* HWY_RESTRICT v, T* HWY_RESTRICT out) {
  const Tag<T> d;
  constexpr int64_t kLane = kLanes<T>;
  // Two sums a column, or each step would wait for the addition before it.
  Vec<T> value[kVectors], sum[2 * kVectors];
  unroll<kVectors>([&](auto n) COSFORMER_LAMBDA {
    value[n] = hn::Load(d, v + n * kLane);
    sum[n] = sum[kVectors + n] = hn::Zero(d);
  });
  const auto mask = hn::FirstN(d, static_cast<size_t>(count));
  const auto step = [&](int64_t f, auto half) COSFORMER_LAMBDA {
    T* HWY_RESTRICT row = s + f * columns;
    const Vec<T> qf = hn::Set(d, q[f]);
    unroll<kVectors>([&](auto n) COSFORMER_LAMBDA {
      constexpr int kSum = half * kVectors + n;
      Vec<T> x =
          kTail ? hn::MaskedLoad(mask, d, row) : hn::LoadU(d, row + n * kLane);
      if constexpr (kUpdate) {
        x = hn::MulAdd(hn::Set(d, k[f]), value[n], x);
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
    step(f, std::integral_constant<int, 0>());
    step(f + 1, std::integral_constant<int, 1>());
  }
  if (f < features) step(f, std::integral_constant<int, 0>());
  unroll<kVectors>([&](auto n) COSFORMER_LAMBDA {
    hn::Store(hn::Add(sum[n], sum[kVectors + n]), d, out + n * kLane);
  });
}

template <typename T, bool kUpdate>
HWY_NOINLINE void decode_head(T* HWY_RESTRICT s, int64_t columns,
                              int64_t features, const T* HWY_RESTRICT k,
                              const T* HWY_RESTRICT q, const T* HWY_RESTRICT v,
                              T* HWY_RESTRICT out) {
  constexpr int64_t kLane = kLanes<T>;
  constexpr int kWide = 4;
  int64_t c = 0;
  for (; c + kWide * kLane <= columns; c += kWide * kLane) {
    decode_columns<T, kWide, kUpdate, false>(
        s + c, columns, features, kWide * kLane, k, q, v + c, out + c);
  }
  for (; c + kLane <= columns; c += kLane) {
    decode_columns<T, 1, kUpdate, false>(s + c, columns, features, kLane, k, q,
                                         v + c, out + c);
  }
  if (c < columns) {
    decode_columns<T, 1, kUpdate, true>(s + c, columns, features, columns - c,
                                        k, q, v + c, out + c);
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
        unit_(make_unit(call, row, 0)),
        chunk_(s_.angles.chunk(unit_.row.kv_start, unit_.row.kv_start + 1,
                               unit_.row.kv_start)) {
    // (cos, sin) from (main, ratio).
    const T main = chunk_.main[0], other = main * chunk_.ratio[0];
    part_[0] = chunk_.main_part == 0 ? main : other;
    part_[1] = chunk_.main_part == 0 ? other : main;
  }

  void step(int64_t head) {
    unit_.head = head;
    const int64_t features = call_.parts * call_.dim;
    T* kv = static_cast<T*>(state_.kv_state) + call_.kv_state_at(unit_);
    T* sum = static_cast<T*>(state_.k_sum) + call_.k_sum_at(unit_);
    const int64_t position = unit_.row.kv_start;
    const Slots key = key_slots(call_, unit_, position, 1);
    // The query sees its own key and those of the state.
    Slots query{1, 1};
    const uint8_t* mask = call_.inputs.query_mask;
    if (mask != nullptr)
      query.real = mask[unit_.row.batch * call_.inputs.query_mask_stride] != 0;
    if (key.real == 0 && unit_.row.state_position == unit_.row.state_start)
      query.real = 0;

    if (key.real != 0) {
      load_features(key_rows(call_.inputs.k, unit_, position), s_.features,
                    s_.plain_features);
      pack_rows<T>(FeatureMap::kIdentity, call_.dtype,
                   key_rows(call_.inputs.v, unit_, position), 1, 4,
                   call_.value_dim, s_.v, s_.v_stride);
      for (int64_t f = 0; f < features; ++f) sum[f] += s_.plain_features[f];
    }
    bool updated = key.real == 0;
    for (int64_t g = 0; g < call_.group; ++g) {
      const int64_t h = head * call_.group + g;
      const Rows to = query_rows(call_.out, unit_, h, unit_.row.q_start);
      if (query.real != 0) {
        load_features(query_rows(call_.inputs.q, unit_, h, unit_.row.q_start),
                      s_.q, s_.plain_q);
      } else {
        std::fill_n(s_.q, features, T{0});
        std::fill_n(s_.plain_q, features, T{0});
      }
      if (!updated) {
        decode_head<T, true>(kv, call_.value_dim, features, s_.features, s_.q,
                             s_.v, s_.out);
        updated = true;
      } else if (query.real != 0) {
        decode_head<T, false>(kv, call_.value_dim, features, s_.features, s_.q,
                              s_.v, s_.out);
      }
      const T scale = call_.normalize ? 1 / norm(sum, features) : T{1};
      write_rows<T>(call_.dtype, s_.out, s_.v_stride, &scale, 1, query.real,
                    call_.value_dim, to, false);
    }
  }

 private:
  // phi of a row, times the cosine and the sine of its position.
  void load_features(const Rows& from, T* features, T* plain) {
    pack_rows<T>(call_.options.feature_map, call_.dtype, from, 1, 4, call_.dim,
                 s_.row, s_.q_stride);
    scale_parts(s_.row, plain);
    if (!call_.rotary) return;
    rotate_rows<T>(s_.row, chunk_.rotary_cos, chunk_.rotary_sin,
                   call_.options.rotary_interleaved, false, 1, call_.dim,
                   s_.q_stride, s_.row);
    scale_parts(s_.row, features);
  }
  void scale_parts(const T* HWY_RESTRICT in, T* HWY_RESTRICT out) const {
    for (int p = 0; p < call_.parts; ++p) {
      const T scale = call_.cosine ? part_[p] : T{1};
      for (int64_t f = 0; f < call_.dim; ++f)
        out[p * call_.dim + f] = in[f] * scale;
    }
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
  Chunk<T> chunk_;
  T part_[2];
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
