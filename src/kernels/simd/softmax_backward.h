// The backward of the softmax engine as its driver sees it: the kernels of one
// instruction set and type behind plain functions.
//
// A task takes some of the key blocks of a row (softmax_plan.h, keys outside)
// against one query head: keys and the sums of dk and dv stay in the
// second-level cache while the queries pass, and dq is summed up in memory.
// delta_i = d_out_i . out_i is formed once for all of them.
#ifndef COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_BACKWARD_H_
#define COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_BACKWARD_H_

#include <cstddef>
#include <cstdint>

#include "kernels/dispatch.h"
#include "kernels/simd/softmax_plan.h"

namespace cosformer::simd {

// Keys of a block, at most.
inline constexpr int64_t kMostBackwardKeys = 512;
// Padding of a block's sums of dk and dv, rows.
inline constexpr int64_t kBackwardSlots = 16;

// Keys of a block of this call: as many as fit into a second-level cache of 1
// MB with their sums, for queries are packed again for each block; fewer where
// few units (rows and kv heads) leave blocks to be dealt out, or where blocks
// of a pattern differ in what sees them.
int64_t backward_keys(const SoftmaxCall& call, int64_t units);

struct SoftmaxBackwardTask {
  const SoftmaxPlan* plan = nullptr;
  int64_t block_keys = 0;  // of the plan
  int64_t row = 0, head = 0;
  // Blocks [first_block, last_block) of the plan, every block_step-th.
  int64_t first_block = 0, last_block = 0, block_step = 1;
  const void* delta = nullptr;  // [batch, q_len, heads]
  // Sums, zeroed by the task: rows of q_row_bytes, q_len of them and 4 more.
  void* dq = nullptr;
  // With several query heads a kv head the sums over these, by block: block b
  // at slot[b], rows of q_row_bytes and v_row_bytes. Else nullptr.
  void* dk_sum = nullptr;
  void* dv_sum = nullptr;
  const int64_t* slot = nullptr;
  bool is_first_head = true, is_last_head = true;  // of the kv head
  double* d_bias = nullptr;  // [2 reach + 1], added to; nullptr = not wanted
  void* scratch = nullptr;
};

struct SoftmaxBackwardKernels {
  // Packed rows of q, k and their gradients, of v and d_out and dv.
  size_t (*q_row_bytes)(const SoftmaxCall& call);
  size_t (*v_row_bytes)(const SoftmaxCall& call);
  size_t (*scratch_bytes)(const SoftmaxCall& call, int64_t block_keys);
  // delta of the tokens [begin, end) of [batch x q_len].
  void (*deltas)(const SoftmaxCall& call, int64_t begin, int64_t end,
                 void* delta);
  void (*run)(const SoftmaxBackwardTask& task);
  // Writes dq of a row's queries [begin, end): the sum of `count` buffers in
  // order, the first of which is changed.
  void (*write_dq)(const SoftmaxPlan& plan, int64_t row, int64_t head,
                   int64_t begin, int64_t end, void* const* sums,
                   int64_t count);
};

const SoftmaxBackwardKernels& softmax_backward_f32(Isa isa);
const SoftmaxBackwardKernels& softmax_backward_f64(Isa isa);

// Cuts the call into tasks and runs it.
Status run_softmax_backward(const SoftmaxCall& call,
                            const SoftmaxBackwardKernels& kernels,
                            Executor& executor);

}  // namespace cosformer::simd

#endif  // COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_BACKWARD_H_
