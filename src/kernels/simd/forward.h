// The forward kernels of one instruction set and type, behind plain functions:
// sizes are bytes, states and scratch are opaque. forward_schedule.cc cuts the
// work.
#ifndef COSFORMER_SRC_KERNELS_SIMD_FORWARD_H_
#define COSFORMER_SRC_KERNELS_SIMD_FORWARD_H_

#include <cstddef>

#include "kernels/dispatch.h"
#include "kernels/simd/call.h"

namespace cosformer::simd {

struct ForwardKernels {
  // An internal state (of a unit) and the scratch of a thread.
  size_t (*state_bytes)(const LinearCall& call);
  size_t (*scratch_bytes)(const LinearCall& call);
  void (*init_scratch)(const LinearCall& call, void* scratch);

  // The state that the call was given, or zeros.
  void (*load_state)(const LinearCall& call, const Unit& unit, void* state);
  void (*zero_state)(const LinearCall& call, void* state);
  void (*store_state)(const LinearCall& call, const Unit& unit,
                      const void* state, const LinearStateView& to);
  // to += from.
  void (*add_state)(const LinearCall& call, const void* from, void* to);

  // Adds the keys at positions [begin, end) to the state.
  void (*add_keys)(const LinearCall& call, const Unit& unit, int64_t begin,
                   int64_t end, void* state, void* scratch);
  // Answers the queries at [begin, end) from the state alone.
  void (*read)(const LinearCall& call, const Unit& unit, int64_t begin,
               int64_t end, const void* state, void* scratch);
  // Both, causally: a query sees the state and the keys up to its position.
  void (*attend)(const LinearCall& call, const Unit& unit, int64_t begin,
                 int64_t end, void* state, void* scratch);
};

const ForwardKernels& forward_kernels_f32(Isa isa);
const ForwardKernels& forward_kernels_f64(Isa isa);

// Writes call.out, call.denominator and the kv_state and k_sum of state_out.
Status run_forward(const LinearCall& call, const ForwardKernels& kernels,
                   const LinearStateView& state_out, Executor& executor);

}  // namespace cosformer::simd

#endif  // COSFORMER_SRC_KERNELS_SIMD_FORWARD_H_
