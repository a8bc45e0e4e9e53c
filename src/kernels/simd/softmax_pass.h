// The kernels of the softmax engine of one instruction set and type behind
// plain functions.
#ifndef COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_PASS_H_
#define COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_PASS_H_

#include <cstddef>

#include "kernels/dispatch.h"
#include "kernels/simd/softmax_plan.h"

namespace cosformer::simd {

struct SoftmaxForward {
  int64_t block_rows;  // queries a block of the plan
  // Elements of the biases of all heads, made ready (expand_bias); 0 = none.
  int64_t (*bias_elements)(const SoftmaxCall& call);
  void (*expand_bias)(const SoftmaxCall& call, void* bias);
  // The scratch of a thread, for blocks of at most so many queries, and tiles
  // of at most so many keys.
  size_t (*scratch_bytes)(const SoftmaxCall& call, int64_t queries);
  // Readies the scratch for the items of a plan.
  void (*start)(const SoftmaxCall& call, int64_t queries, void* scratch);
  // Items [begin, end) of the plan. next: what the thread is likely to do then,
  // to be brought into its cache; beyond the items: nothing.
  void (*run)(const SoftmaxPlan& plan, int64_t begin, int64_t end, int64_t next,
              const void* bias, void* scratch);
};

const SoftmaxForward& softmax_forward_f32(Isa isa);
const SoftmaxForward& softmax_forward_f64(Isa isa);
// On AMX tiles, for inputs of this type, no double.
const SoftmaxForward& softmax_forward_amx(DType dtype);

Status run_softmax_forward(const SoftmaxCall& call,
                           const SoftmaxForward& forward, Executor& executor);

}  // namespace cosformer::simd

#endif  // COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_PASS_H_
