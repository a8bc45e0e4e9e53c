// Linear attention, backward, what both of its passes need: the gradients of
// the outputs as the passes use them. With n_i = max(denominator_i, eps),
//
//   g_i = d_out_i / n_i
//   r_i = -(g_i . out_i), 0 where the denominator was clamped (or none is used)
//
// the gradient of the weight w_ij = (q_i.k_j) cos(a_i - a_j) is g_i.v_j + r_i.
// With rotary positions g_i.v_j belongs to the turned features and r_i to the
// plain ones, so the two are kept apart.
#if defined(COSFORMER_SRC_KERNELS_SIMD_BACKWARD_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_BACKWARD_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_BACKWARD_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_BACKWARD_INL_H_
#endif

#include <hwy/cache_control.h>

#include "kernels/simd/chunk-inl.h"
#include "kernels/simd/pack_queue-inl.h"
#include "kernels/simd/pass.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

// Positions a block, where several units take turns. A row of a head often lies
// on a page of its own (batch, sequence, heads): fewer rows of the passes' 6 to
// 7 tensors than the second level of a TLB has entries (2048 on Intel) stay
// there for the next head.
inline constexpr int64_t kBackwardBlock = 128;

// g of a query times job.main, that times job.ratio, and r.
// Of g as rounded: where one key is seen g.v + r is 0 but for the rounding of
// the output.
template <typename T, typename In>
HWY_NOINLINE bool pack_gradient_rows(const PackJob<T>& job, int64_t first,
                                     int64_t last_row) {
  const Tag<T> d;
  const Vec<T> zero = hn::Zero(d);
  constexpr int64_t kLane = kLanes<T>;
  const int64_t whole = job.dim - job.dim % kLane;
  const bool scaled = job.main != nullptr;
  // Not finite where g is not, whatever it is multiplied with.
  Vec<T> all = zero;
  for (int64_t r = first; r < last_row; ++r) {
    T* HWY_RESTRICT g = job.out + r * job.stride;
    T* HWY_RESTRICT other =
        job.other != nullptr ? job.other + r * job.stride : nullptr;
    int64_t c = 0;
    if (HWY_LIKELY((job.valid >> r & 1) != 0)) {
      const auto row = [r](const Rows& rows) HWY_ATTR {
        return static_cast<const In*>(rows.data) +
               (rows.first + r) * rows.stride;
      };
      const bool dotted = job.dot[r] != 0;
      const In* HWY_RESTRICT from = row(job.from);
      const In* HWY_RESTRICT with = dotted ? row(job.with) : from;
      const Vec<T> factor = hn::Set(d, job.factor[r]);
      const Vec<T> main = hn::Set(d, scaled ? job.main[r] : T{1});
      const Vec<T> ratio = hn::Set(d, other != nullptr ? job.ratio[r] : T{0});
      Vec<T> dot = zero;
      const auto put = [&](Vec<T> x, Vec<T> y) COSFORMER_LAMBDA {
        x = hn::Mul(x, factor);
        dot = hn::MulAdd(x, y, dot);
        if (scaled) x = hn::Mul(x, main);
        hn::Store(x, d, g + c);
        if (other != nullptr) hn::Store(hn::Mul(x, ratio), d, other + c);
      };
      for (; c < whole; c += kLane)
        put(load_wide(from + c), load_wide(with + c));
      if (HWY_UNLIKELY(c < job.dim)) {
        HWY_ALIGN T last[2 * kLane];
        load_last<T, In>(from + c, job.dim - c, last);
        load_last<T, In>(with + c, job.dim - c, last + kLane);
        put(hn::Load(d, last), hn::Load(d, last + kLane));
        c += kLane;
      }
      if (dotted) job.dot[r] = -hn::GetLane(hn::SumOfLanes(d, dot));
      all = hn::Add(all, dot);
    }
    for (; c < job.stride; c += kLane) {
      hn::Store(zero, d, g + c);
      if (other != nullptr) hn::Store(zero, d, other + c);
    }
  }
  return all_finite(all);
}
template <typename T>
HWY_INLINE auto pack_gradient_for(DType dtype) {
  if constexpr (sizeof(T) == 8) {
    return &pack_gradient_rows<T, double>;
  } else {
    switch (dtype) {
      case DType::kBFloat16:
        return &pack_gradient_rows<T, BFloat16>;
      case DType::kFloat16:
        return &pack_gradient_rows<T, Float16>;
      default:
        return &pack_gradient_rows<T, float>;
    }
  }
}

// The job that packs g and r of the real queries of a head in a chunk; zeros
// elsewhere. scale, r: of `rows` elements, scale for 1 / n. The job's outputs
// are the caller's to add.
template <typename T>
PackJob<T> gradient_job(const LinearCall& call, const Unit& unit, int64_t head,
                        const Chunk<T>& chunk, const Slots& queries, T* scale,
                        T* r) {
  const int64_t rows = round_up(chunk.size, 4);
  const T* denominator = static_cast<const T*>(call.saved_denominator);
  const int64_t first_token = unit.row.batch * call.inputs.q.size[1] +
                              unit.row.q_offset + chunk.position -
                              unit.row.q_start;
  const T eps = static_cast<T>(call.options.eps);
  for (int64_t i = 0; i < rows; ++i) {
    r[i] = 0;
    scale[i] = 0;
    if (i >= chunk.size || (queries.real >> i & 1) == 0) continue;
    scale[i] = 1;
    if (!call.normalize) continue;
    const T sum = denominator[(first_token + i) * call.heads + head];
    const bool clamped = sum < eps;
    scale[i] = T{1} / (clamped ? eps : sum);
    r[i] = clamped ? T{0} : T{1};
  }
  PackJob<T> job{};
  job.pack = pack_gradient_for<T>(call.dtype);
  job.from = query_rows(call.d_out, unit, head, chunk.position);
  job.valid = queries.real;
  job.rows = rows;
  job.dim = call.value_dim;
  job.factor = scale;
  if (call.normalize)
    job.with = query_rows(call.saved_out, unit, head, chunk.position);
  job.dot = r;
  return job;
}

// What both passes read of the queries of a later chunk.
template <typename T>
void add_gradients_ahead(Ahead& ahead, const LinearCall& call,
                         const Target& to) {
  add_queries_ahead(ahead, call, call.inputs.q, to);
  add_queries_ahead(ahead, call, call.d_out, to);
  if (!call.normalize) return;
  add_queries_ahead(ahead, call, call.saved_out, to);
  const AttentionRow& row = to.unit->row;
  const int64_t token = row.batch * call.inputs.q.size[1] + row.q_offset +
                        to.position - row.q_start;
  const int64_t size = static_cast<int64_t>(sizeof(T));
  const int64_t at = token * call.heads + to.unit->head * call.group;
  ahead.add(reinterpret_cast<uintptr_t>(call.saved_denominator) +
                static_cast<uintptr_t>(at * size),
            call.heads * size, call.group * size);
}

// Gradients times the derivative of the feature map, given the features.
// Features of 0 or less have none with relu; elu + 1 has its own value up to 1,
// then 1.
template <typename T>
HWY_INLINE Vec<T> times_derivative(FeatureMap map, Vec<T> features, Vec<T> y) {
  const Tag<T> d;
  switch (map) {
    case FeatureMap::kRelu:
      return hn::IfThenZeroElse(hn::Le(features, hn::Zero(d)), y);
    case FeatureMap::kElu1:
      return hn::IfThenElse(hn::Lt(features, hn::Set(d, T{1})),
                            hn::Mul(y, features), y);
    case FeatureMap::kIdentity:
      break;
  }
  return y;
}
// The same of a tile.
template <typename T, int kRows, int kVectors>
HWY_INLINE void times_derivative(FeatureMap map, const T* HWY_RESTRICT features,
                                 int64_t stride,
                                 Tile<T, kRows, kVectors>& tile) {
  if (map == FeatureMap::kIdentity) return;
  unroll<kRows>([&](auto r) COSFORMER_LAMBDA {
    unroll<kVectors>([&](auto n) COSFORMER_LAMBDA {
      Vec<T>& y = tile.acc[r * kVectors + n];
      y = times_derivative<T>(
          map, hn::Load(Tag<T>(), features + r * stride + n * kLanes<T>), y);
    });
  });
}

// x = (x turned back + plain) x the derivative of the feature map, given the
// features. turned: whether x is to be turned back; plain may be nullptr.
template <typename T>
HWY_NOINLINE void finish_gradient(const LinearCall& call, const Chunk<T>& chunk,
                                  T* x, const T* plain, const T* features,
                                  int64_t stride) {
  const Tag<T> d;
  if (call.rotary) {
    rotate_rows<T>(x, chunk.rotary_cos, chunk.rotary_sin,
                   call.options.rotary_interleaved, true, chunk.size, call.dim,
                   stride, x);
  }
  for (int64_t at = 0; at < chunk.size * stride; at += kLanes<T>) {
    Vec<T> y = hn::Load(d, x + at);
    if (plain != nullptr) y = hn::Add(y, hn::Load(d, plain + at));
    hn::Store(times_derivative<T>(call.options.feature_map,
                                  hn::Load(d, features + at), y),
              d, x + at);
  }
}

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_BACKWARD_INL_H_
