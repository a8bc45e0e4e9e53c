// One token: S += k v^T, z += k, out = q S / max(q z, eps), in the caller's
// layout of the state, with k and q the features of the token's position (phi
// cos and phi sin, or phi).
//
// Floor: the state is read and written once, 2 x 2 d^2 numbers a head; the
// arithmetic hides behind that. So the state is taken in blocks of rows, in the
// order of memory; the row that k updates is used for the first query head
// while it is in registers, and further heads of a group read the block from
// the first-level cache. What a head begins with (features, sums, denominator)
// is made between two blocks of the head before it, while the state still
// flows.
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

// What a head's walk needs, made during the walk of the head before.
template <typename T>
struct DecodeHead {
  T* k;      // features of the key: [parts * dim]
  T* q;      // of the query heads of the group, q_stride apart
  T* v;      // the values
  T* scale;  // of each query head: 1 / denominator
};

template <typename T>
struct DecodeScratch {
  DecodeScratch(const LinearCall& call, Carver<T>& carver)
      : dim_stride(row_length<T>(call.dim)),
        q_stride(2 * dim_stride),
        v_stride(row_length<T>(call.value_dim)),
        is_rotary(call.rotary),
        angles(call, 1, carver.take(Angles<T>::size(call, 1))) {
    for (DecodeHead<T>& head : heads) {
      head.k = carver.take(q_stride);
      head.q = carver.take(call.group * q_stride);
      head.v = carver.take(4 * v_stride);
      head.scale = carver.take(call.group);
    }
    row = carver.take(4 * dim_stride);
    plain = carver.take(q_stride);
    out = carver.take(call.group * v_stride);
  }
  void start() {
    if (is_rotary) angles.start();
  }

  int64_t dim_stride, q_stride, v_stride;
  bool is_rotary;
  Angles<T> angles;        // for rotary positions
  DecodeHead<T> heads[2];  // the one that is walked and the next
  T* row;                  // one packed row, padded to 4
  T* plain;                // features before they are turned
  T* out;                  // of the query heads, v_stride apart
};

// Columns of a pass over the rows of a state, in vectors, at most: whole rows
// of head_dim 64 with AVX2, of 128 with AVX-512.
inline constexpr int kDecodeVectors = 8;
// Rows are taken in blocks of about so many bytes.
inline constexpr int64_t kDecodeBlock = 4096;

// Brings `bytes` bytes in.
inline void bring_in(const void* data, int64_t bytes) {
  const char* at = static_cast<const char*>(data);
  for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(at + b, 0, 3);
}

// kUpdate: S[f] += k[f] v. out (+)= sum_f q[f] S[f]. S: [features][columns], of
// which `count` columns (at most kVectors whole vectors) from s on. bring: as
// many rows again, behind these, are brought in meanwhile.
template <typename T, int kVectors, bool kUpdate, bool kTail>
HWY_INLINE void decode_columns(T* HWY_RESTRICT s, int64_t columns,
                               int64_t features, int64_t count,
                               const T* HWY_RESTRICT k, const T* HWY_RESTRICT q,
                               const T* HWY_RESTRICT v, bool first, bool bring,
                               T* HWY_RESTRICT out) {
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
    if (bring) {
      bring_in(s + (features + f) * columns,
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

// The same for all columns of a block of rows.
template <typename T, bool kUpdate>
HWY_NOINLINE void decode_block(T* HWY_RESTRICT s, int64_t columns,
                               int64_t features, const T* HWY_RESTRICT k,
                               const T* HWY_RESTRICT q, const T* HWY_RESTRICT v,
                               bool first, bool bring, T* HWY_RESTRICT out) {
  constexpr int64_t kLane = kLanes<T>;
  int64_t c = 0;
  const auto columns_of = [&](auto vectors) COSFORMER_LAMBDA {
    constexpr int kVectors = decltype(vectors)::value;
    for (; c + kVectors * kLane <= columns; c += kVectors * kLane) {
      decode_columns<T, kVectors, kUpdate, false>(
          s + c, columns, features, kVectors * kLane, k, q, v + c, first,
          bring && c == 0, out + c);
    }
  };
  columns_of(std::integral_constant<int, kDecodeVectors>());
  columns_of(std::integral_constant<int, 4>());
  columns_of(std::integral_constant<int, 2>());
  columns_of(std::integral_constant<int, 1>());
  if (c < columns) {
    decode_columns<T, 1, kUpdate, true>(s + c, columns, features, columns - c,
                                        k, q, v + c, first, bring && c == 0,
                                        out + c);
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
        first_sum_(static_cast<T*>(state.k_sum) + call.k_sum_at(unit_)),
        simple_(!call.rotary && call.dim % kLanes<T> == 0 &&
                call.value_dim % kLanes<T> == 0) {
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

  // The heads [begin, end).
  void walk(int64_t begin, int64_t end) {
    if (begin >= end) return;
    const DecodeHead<T>* now = &s_.heads[0];
    const DecodeHead<T>* next = &s_.heads[1];
    prepare(begin, *now);
    for (int64_t head = begin; head < end; ++head) {
      step(head, *now, head + 1 < end ? next : nullptr);
      std::swap(now, next);
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

  int64_t features() const { return call_.parts * call_.dim; }

  // Walks the state of a head; prepares the next one (unless nullptr).
  void step(int64_t head, const DecodeHead<T>& now, const DecodeHead<T>* next) {
    unit_.head = head;
    T* kv = static_cast<T*>(state_.kv_state) + call_.kv_state_at(unit_);
    if (next != nullptr) look_ahead(head + 1);
    const int64_t rows = std::max<int64_t>(
        8, kDecodeBlock / (call_.value_dim * static_cast<int64_t>(sizeof(T))));
    const int64_t blocks = (features() + rows - 1) / rows;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t f = b * rows;
      // The machine's own prefetching begins anew at the next head, whose
      // state lies behind this one.
      walk_block(kv + f * call_.value_dim, f, std::min(rows, features() - f),
                 next != nullptr && b + 1 == blocks, now);
      if (next != nullptr && b == (blocks - 1) / 2) prepare(head + 1, *next);
    }
    for (int64_t g = 0; g < call_.group; ++g)
      write(s_.out + g * s_.v_stride, now.scale[g], head * call_.group + g);
  }

  // `rows` rows of the state from feature f on.
  void walk_block(T* kv, int64_t f, int64_t rows, bool bring,
                  const DecodeHead<T>& now) {
    bool updated = !has_key_;
    for (int64_t g = 0; g < call_.group; ++g) {
      const T* q = now.q + g * s_.q_stride + f;
      T* out = s_.out + g * s_.v_stride;
      if (!updated) {
        decode_block<T, true>(kv, call_.value_dim, rows, now.k + f, q, now.v,
                              f == 0, bring, out);
        updated = true;
      } else if (has_query_) {
        decode_block<T, false>(kv, call_.value_dim, rows, now.k + f, q, now.v,
                               f == 0, false, out);
      }
    }
  }

  void write(const T* HWY_RESTRICT in, T scale, int64_t head) const {
    const Tag<T> d;
    const Rows to = out_.of(head);
    if (has_query_ && size_of(call_.dtype) == sizeof(T) &&
        call_.value_dim == s_.v_stride) {
      T* HWY_RESTRICT out = static_cast<T*>(const_cast<void*>(to.data));
      const Vec<T> factor = hn::Set(d, scale);
      // As in write_rows, adding 0 makes -0 a 0.
      for (int64_t c = 0; c < s_.v_stride; c += kLanes<T>) {
        hn::StoreU(hn::MulAdd(hn::Load(d, in + c), factor, hn::Zero(d)), d,
                   out + c);
      }
      return;
    }
    write_rows<T>(call_.dtype, in, s_.v_stride, &scale, 1, has_query_ ? 1 : 0,
                  call_.value_dim, to, false);
  }

  // The rows of a head lie far apart, and by the machine's own prefetching each
  // would be waited for.
  void look_ahead(int64_t head) const {
    k_.bring(head);
    v_.bring(head);
    for (int64_t g = 0; g < call_.group; ++g) q_.bring(head * call_.group + g);
    bring_in(sum_of(head), features() * static_cast<int64_t>(sizeof(T)));
  }

  T* sum_of(int64_t head) const { return first_sum_ + head * features(); }

  HWY_NOINLINE void prepare(int64_t head, const DecodeHead<T>& to) {
    if (!simple_) return prepare_any(head, to);
    if constexpr (sizeof(T) == 8) {
      prepare_vectors_of<double>(head, to);
    } else if (call_.dtype == DType::kBFloat16) {
      prepare_vectors_of<BFloat16>(head, to);
    } else if (call_.dtype == DType::kFloat16) {
      prepare_vectors_of<Float16>(head, to);
    } else {
      prepare_vectors_of<float>(head, to);
    }
  }
  T scale_of(Vec<T> lanes) const {
    return scale_of(hn::GetLane(hn::SumOfLanes(Tag<T>(), lanes)));
  }
  T scale_of(T total) const {
    if (!call_.normalize) return T{1};
    const T eps = static_cast<T>(call_.options.eps);
    return 1 / (total < eps ? eps : total);
  }

  template <typename In>
  HWY_INLINE void prepare_vectors_of(int64_t head, const DecodeHead<T>& to) {
    switch (call_.options.feature_map) {
      case FeatureMap::kRelu:
        return prepare_vectors<In, FeatureMap::kRelu>(head, to);
      case FeatureMap::kElu1:
        return prepare_vectors<In, FeatureMap::kElu1>(head, to);
      case FeatureMap::kIdentity:
        return prepare_vectors<In, FeatureMap::kIdentity>(head, to);
    }
  }
  // Where the rows are whole vectors that are not turned.
  template <typename In, FeatureMap kMap>
  HWY_INLINE void prepare_vectors(int64_t head, const DecodeHead<T>& to) {
    const Tag<T> d;
    constexpr int64_t kLane = kLanes<T>;
    const int64_t dim = call_.dim, value_dim = call_.value_dim;
    const bool two = call_.parts == 2;
    T* HWY_RESTRICT sum = sum_of(head);
    const Vec<T> cos = hn::Set(d, part_[0]), sin = hn::Set(d, part_[1]);
    if (has_key_) {
      const In* HWY_RESTRICT v = static_cast<const In*>(v_.of(head).data);
      for (int64_t c = 0; c < value_dim; c += kLane)
        hn::Store(load_wide(v + c), d, to.v + c);
      const In* HWY_RESTRICT k = static_cast<const In*>(k_.of(head).data);
      T* HWY_RESTRICT features = to.k;
      for (int64_t c = 0; c < dim; c += kLane) {
        const Vec<T> x = feature<kMap, T>(load_wide(k + c));
        const auto part = [&](int64_t at, Vec<T> scale) COSFORMER_LAMBDA {
          const Vec<T> scaled = hn::Mul(x, scale);
          hn::Store(scaled, d, features + at);
          hn::StoreU(hn::Add(hn::LoadU(d, sum + at), scaled), d, sum + at);
        };
        part(c, cos);
        if (two) part(dim + c, sin);
      }
    }
    for (int64_t g = 0; g < call_.group; ++g) {
      const In* HWY_RESTRICT q =
          static_cast<const In*>(q_.of(head * call_.group + g).data);
      T* HWY_RESTRICT features = to.q + g * s_.q_stride;
      Vec<T> total[2] = {hn::Zero(d), hn::Zero(d)};
      for (int64_t c = 0; c < dim; c += kLane) {
        const Vec<T> x =
            has_query_ ? feature<kMap, T>(load_wide(q + c)) : hn::Zero(d);
        const auto part = [&](int64_t at, Vec<T> scale,
                              Vec<T>& to_add) COSFORMER_LAMBDA {
          const Vec<T> scaled = hn::Mul(x, scale);
          hn::Store(scaled, d, features + at);
          to_add = hn::MulAdd(scaled, hn::LoadU(d, sum + at), to_add);
        };
        part(c, cos, total[0]);
        if (two) part(dim + c, sin, total[1]);
      }
      to.scale[g] = scale_of(hn::Add(total[0], total[1]));
    }
  }

  // Whatever they are.
  HWY_NOINLINE void prepare_any(int64_t head, const DecodeHead<T>& to) {
    T* sum = sum_of(head);
    if (has_key_) {
      pack_rows<T>(FeatureMap::kIdentity, call_.dtype, v_.of(head), 1, 1,
                   call_.value_dim, to.v, s_.v_stride);
      add_key(load_features(k_.of(head), to.k), sum);
    }
    for (int64_t g = 0; g < call_.group; ++g) {
      T* q = to.q + g * s_.q_stride;
      if (has_query_) {
        const T* plain = load_features(q_.of(head * call_.group + g), q);
        to.scale[g] = scale_of(product(plain, sum));
      } else {
        std::fill_n(q, features(), T{0});
        to.scale[g] = 0;
      }
    }
  }
  // phi of a row, times the cosine and the sine of its position, into
  // `features`; returns those before they are turned.
  const T* load_features(const Rows& from, T* features) {
    pack_rows<T>(call_.options.feature_map, call_.dtype, from, 1, 1, call_.dim,
                 s_.row, s_.dim_stride);
    if (!call_.rotary) {
      scale_parts(s_.row, features);
      return features;
    }
    scale_parts(s_.row, s_.plain);
    rotate_rows<T>(s_.row, turn_.rotary_cos, turn_.rotary_sin,
                   call_.options.rotary_interleaved, false, 1, call_.dim,
                   s_.dim_stride, s_.row);
    scale_parts(s_.row, features);
    return s_.plain;
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
  void add_key(const T* HWY_RESTRICT k, T* HWY_RESTRICT sum) const {
    const Tag<T> d;
    int64_t f = 0;
    for (; f + kLanes<T> <= features(); f += kLanes<T>)
      hn::StoreU(hn::Add(hn::LoadU(d, sum + f), hn::Load(d, k + f)), d,
                 sum + f);
    for (; f < features(); ++f) sum[f] += k[f];
  }
  T product(const T* HWY_RESTRICT q, const T* HWY_RESTRICT sum) const {
    const Tag<T> d;
    Vec<T> lanes = hn::Zero(d);
    int64_t f = 0;
    for (; f + kLanes<T> <= features(); f += kLanes<T>)
      lanes = hn::MulAdd(hn::Load(d, q + f), hn::LoadU(d, sum + f), lanes);
    T total = hn::GetLane(hn::SumOfLanes(d, lanes));
    for (; f < features(); ++f) total += q[f] * sum[f];
    return total;
  }

  const LinearCall& call_;
  const LinearStateView& state_;
  DecodeScratch<T>& s_;
  Unit unit_;
  Chunk<T> turn_{};     // rotary
  T part_[2] = {1, 0};  // cosine and sine
  Source k_, v_, q_, out_;
  T* first_sum_;  // of head 0
  bool simple_;   // rows are whole vectors that are not turned
  bool has_key_, has_query_;
};

template <typename T>
struct DecodeEntry {
  static void step(const LinearCall& call, int64_t row, int64_t begin,
                   int64_t end, const LinearStateView& state, void* scratch) {
    DecodeRow<T> decode(call, row, state, scratch);
    decode.walk(begin, end);
  }
  static constexpr Decode make() {
    return {&scratch_bytes<T, DecodeScratch<T>>,
            &init_scratch<T, DecodeScratch<T>>, &step};
  }
};

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_DECODE_INL_H_
