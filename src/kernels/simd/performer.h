// Performer's features on the linear engine: the kernels of one instruction set
// and type behind plain functions, and the walks that use them.
#ifndef COSFORMER_SRC_KERNELS_SIMD_PERFORMER_H_
#define COSFORMER_SRC_KERNELS_SIMD_PERFORMER_H_

#include <cstdint>

#include "cosformer/kernels.h"
#include "kernels/dispatch.h"

namespace cosformer::simd {

// Positions whose features are formed together: bits of a word.
inline constexpr int64_t kPerformerBlock = 64;

// Rows of packed arrays (features, head_dim, value_dim) are padded to this:
// whole vectors of every instruction set.
inline constexpr int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }

// Sizes of a call and its projection for the gradients: W in T, scaled by
// head_dim^(-1/4) so that it applies to x itself, [features][dim] in panels.
template <typename T>
struct PerformerProjection {
  int64_t features, dim, value_dim;
  T* along;
};

// What a backward needs beside the features (performer_block.h). T is what
// states are held in. Arrays of rows are [n][padded(columns)], contiguous and
// aligned.
template <typename T>
struct PerformerKernels {
  void (*pack_projection)(const T* projection,
                          const PerformerProjection<T>& to);
  // Rows first + r, r < n, of strided memory as T, zeros where the bit of valid
  // is 0; n rounded up to 4. out: [n][padded(dim)].
  void (*pack)(DType dtype, const void* data, int64_t first, int64_t stride,
               uint64_t valid, int64_t n, int64_t dim, T* out);
  // The way back, into the rows of `written`; zeros where `live` is 0.
  void (*write)(DType dtype, const T* in, uint64_t written, uint64_t live,
                int64_t dim, void* data, int64_t first, int64_t stride);
  // The states of the passes times a factor a feature: of d_keys, and of
  // d_queries, which is transposed.
  void (*rescale)(void* state, const PerformerProjection<T>& w,
                  const T* factor);
  void (*rescale_across)(void* state, const PerformerProjection<T>& w,
                         const T* factor);
  // d_features becomes d_logs, elementwise times the features; sums[r] = sum_f
  // of the result. n is rounded up to 4, with zeros.
  void (*log_gradients)(T* d_features, const T* features, int64_t n,
                        int64_t count, T* sums);
  // dx[r] = sum_f d_logs[r][f] W_f. n is rounded up to 4.
  void (*project_back)(const PerformerProjection<T>& w, const T* d_logs,
                       int64_t n, T* dx);
  // d_projection (panels of [features][dim]) += d_logs^T x.
  void (*add_projection_gradient)(const PerformerProjection<T>& w,
                                  const T* d_logs, const T* x, int64_t n,
                                  T* d_projection);
  // total[f][c] += the same, out of its panels.
  void (*collect_projection_gradient)(const PerformerProjection<T>& w,
                                      const T* d_projection, double* total);
};

const PerformerKernels<float>& performer_f32(Isa isa);
const PerformerKernels<double>& performer_f64(Isa isa);

// What a call reads and writes beside its inputs; nullptr = not wanted.
struct PerformerOutputs {
  View4 out;
  double* log_denominator = nullptr;
  PerformerStateView state_out;
};
struct PerformerGradients {
  ConstView4 out, d_out;
  const double* log_denominator = nullptr;
  ConstLinearStateView d_state_out;
  View4 dq, dk, dv;
  void* d_projection = nullptr;
  LinearStateView d_state_in;
};

// Preconditions: checked by the entry points (performer_attention.cc). States'
// places (start, position) are left to them.
Status run_performer_forward(const PerformerAttentionOptions& options,
                             const PerformerAttentionInputs& inputs,
                             const PerformerOutputs& outputs, Isa isa,
                             Executor& executor);
Status run_performer_backward(const PerformerAttentionOptions& options,
                              const PerformerAttentionInputs& inputs,
                              const PerformerGradients& gradients, Isa isa,
                              Executor& executor);
// Puts the keys' maxima into state.log_scale, rescales the sums, and steps.
Status run_performer_decode(const PerformerAttentionInputs& inputs,
                            const PerformerStateView& state, const View4& out,
                            Isa isa, Executor& executor);

}  // namespace cosformer::simd

#endif  // COSFORMER_SRC_KERNELS_SIMD_PERFORMER_H_
