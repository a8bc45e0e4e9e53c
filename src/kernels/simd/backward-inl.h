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
#include "kernels/simd/pass.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

// out[r] = in[r] * scale[r] over whole packed rows; whether all are finite.
template <typename T>
HWY_NOINLINE bool scale_rows_finite(const T* HWY_RESTRICT in,
                                    const T* HWY_RESTRICT scale, int64_t rows,
                                    int64_t stride, T* HWY_RESTRICT out) {
  const Tag<T> d;
  const Vec<T> zero = hn::Zero(d);
  Vec<T> finite = zero;
  for (int64_t r = 0; r < rows; ++r) {
    const Vec<T> s = hn::Set(d, scale[r]);
    for (int64_t c = 0; c < stride; c += kLanes<T>) {
      const Vec<T> x = hn::Mul(hn::Load(d, in + r * stride + c), s);
      finite = hn::MulAdd(x, zero, finite);
      hn::Store(x, d, out + r * stride + c);
    }
  }
  return hn::AllTrue(d, hn::Eq(finite, zero));
}

// Packs g of the real queries of a head in a chunk, times factor[i], and
// r_i times factor[i]; zeros elsewhere. d_out and out: packed rows to work in.
// Returns whether g is finite.
template <typename T>
bool pack_output_gradients(const LinearCall& call, const Unit& unit,
                           int64_t head, const Chunk<T>& chunk,
                           const Slots& queries, const T* factor, T* d_out,
                           T* out, T* scale, T* g, int64_t stride, T* r) {
  const Tag<T> d;
  const int64_t rows = round_up(chunk.size, 4);
  pack_rows<T>(FeatureMap::kIdentity, call.dtype,
               query_rows(call.d_out, unit, head, chunk.position), queries.real,
               rows, call.value_dim, d_out, stride);
  if (call.normalize) {
    pack_rows<T>(FeatureMap::kIdentity, call.dtype,
                 query_rows(call.saved_out, unit, head, chunk.position),
                 queries.real, rows, call.value_dim, out, stride);
  }
  const T* denominator = static_cast<const T*>(call.saved_denominator);
  const int64_t first_token = unit.row.batch * call.inputs.q.size[1] +
                              unit.row.q_offset + chunk.position -
                              unit.row.q_start;
  const T eps = static_cast<T>(call.options.eps);
  for (int64_t i = 0; i < rows; ++i) {
    r[i] = 0;
    scale[i] = 0;
    if (i >= chunk.size || (queries.real >> i & 1) == 0) continue;
    scale[i] = factor[i];
    if (!call.normalize) continue;
    const T sum = denominator[(first_token + i) * call.heads + head];
    const bool clamped = sum < eps;
    scale[i] = factor[i] / (clamped ? eps : sum);
    r[i] = clamped ? T{0} : T{1};
  }
  const bool finite = scale_rows_finite<T>(d_out, scale, rows, stride, g);
  // Of g as rounded: where one key is seen g.v + r is 0 but for the rounding of
  // the output.
  for (int64_t i = 0; i < rows; ++i) {
    if (r[i] == 0) continue;
    const Vec<T> lanes =
        dot_lanes(g + i * stride, out + i * stride, stride, hn::Zero(d));
    r[i] = -hn::GetLane(hn::SumOfLanes(d, lanes));
  }
  return finite;
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

// x = (x turned back + plain) x the derivative of the feature map, given the
// features. Features of 0 or less have none with relu; elu + 1 has its own
// value up to 1, then 1. turned: whether x is to be turned back; plain may be
// nullptr.
template <typename T>
HWY_NOINLINE void finish_gradient(const LinearCall& call, const Chunk<T>& chunk,
                                  T* x, const T* plain, const T* features,
                                  int64_t stride) {
  const Tag<T> d;
  const Vec<T> zero = hn::Zero(d), one = hn::Set(d, T{1});
  if (call.rotary) {
    rotate_rows<T>(x, chunk.rotary_cos, chunk.rotary_sin,
                   call.options.rotary_interleaved, true, chunk.size, call.dim,
                   stride, x);
  }
  for (int64_t at = 0; at < chunk.size * stride; at += kLanes<T>) {
    Vec<T> y = hn::Load(d, x + at);
    if (plain != nullptr) y = hn::Add(y, hn::Load(d, plain + at));
    const Vec<T> f = hn::Load(d, features + at);
    switch (call.options.feature_map) {
      case FeatureMap::kRelu:
        y = hn::IfThenZeroElse(hn::Le(f, zero), y);
        break;
      case FeatureMap::kElu1:
        y = hn::IfThenElse(hn::Lt(f, one), hn::Mul(y, f), y);
        break;
      case FeatureMap::kIdentity:
        break;
    }
    hn::Store(y, d, x + at);
  }
}

// x[i] += a_i (main + ratio_i other), rows of `stride`; a_i = 1 where weight is
// nullptr. other may be nullptr.
template <typename T>
HWY_INLINE void add_sums(const T* HWY_RESTRICT main,
                         const T* HWY_RESTRICT other,
                         const T* HWY_RESTRICT ratio,
                         const T* HWY_RESTRICT weight, int64_t rows,
                         int64_t stride, T* HWY_RESTRICT x) {
  const Tag<T> d;
  for (int64_t i = 0; i < rows; ++i) {
    const Vec<T> t = hn::Set(d, ratio[i]);
    const Vec<T> w = hn::Set(d, weight != nullptr ? weight[i] : T{1});
    for (int64_t c = 0; c < stride; c += kLanes<T>) {
      Vec<T> y = hn::Load(d, main + c);
      if (other != nullptr) y = hn::MulAdd(t, hn::Load(d, other + c), y);
      hn::Store(hn::MulAdd(w, y, hn::Load(d, x + i * stride + c)), d,
                x + i * stride + c);
    }
  }
}

// out = in^T, both in panels; out.rows = in.columns.
template <typename T>
HWY_INLINE void transpose_panels(const Panels<T>& in, const Panels<T>& out) {
  for (int64_t c0 = 0; c0 < in.columns; c0 += kPanel<T>) {
    const int64_t width = in.width_at(c0);
    for (int64_t r0 = 0; r0 < in.rows; r0 += kPanel<T>) {
      const int64_t out_width = out.width_at(r0);
      transpose<T>(in.panel(c0) + r0 * width, width,
                   in.rows - r0 < out_width ? in.rows - r0 : out_width, width,
                   out.panel(r0) + c0 * out_width, out_width);
    }
  }
}

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_BACKWARD_INL_H_
