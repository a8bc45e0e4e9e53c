// One token a row, in place: the kernels of one instruction set and type behind
// plain functions, and what runs them.
#ifndef COSFORMER_SRC_KERNELS_SIMD_DECODE_H_
#define COSFORMER_SRC_KERNELS_SIMD_DECODE_H_

#include <cstddef>

#include "kernels/dispatch.h"
#include "kernels/simd/call.h"

namespace cosformer::simd {

struct Decode {
  size_t (*scratch_bytes)(const LinearCall& call);
  void (*init_scratch)(const LinearCall& call, void* scratch);
  // The kv heads [begin, end) of a row: call.inputs.state is what the row
  // stands at, `state` (the same memory) is updated.
  void (*step)(const LinearCall& call, int64_t row, int64_t begin, int64_t end,
               const LinearStateView& state, void* scratch);
};

const Decode& decode_f32(Isa isa);
const Decode& decode_f64(Isa isa);

// Updates kv_state and k_sum and writes call.out; leaves state.position.
Status run_decode(const LinearCall& call, const Decode& decode,
                  const LinearStateView& state, Executor& executor);

}  // namespace cosformer::simd

#endif  // COSFORMER_SRC_KERNELS_SIMD_DECODE_H_
