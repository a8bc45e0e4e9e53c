// A pass over the sequence with a state that is carried along: the kernels of
// one instruction set and type behind plain functions, and what cuts their
// work. Three passes make the engine:
//
//   forward       from the first position on: keys go into the state, queries
//                 read it
//   d_queries     the same for dq, with the gradients of the outputs as queries
//   d_keys        from the last position back: queries go into the state, keys
//                 read it (dk, dv)
//
// Sizes are bytes; states and scratch are opaque.
#ifndef COSFORMER_SRC_KERNELS_SIMD_PASS_H_
#define COSFORMER_SRC_KERNELS_SIMD_PASS_H_

#include <cstddef>

#include "kernels/dispatch.h"
#include "kernels/simd/call.h"

namespace cosformer::simd {

struct Pass {
  bool from_the_end;  // and queries, not keys, go into the state

  // A state (of a unit) and the scratch of a thread.
  size_t (*state_bytes)(const LinearCall& call);
  size_t (*scratch_bytes)(const LinearCall& call);
  void (*init_scratch)(const LinearCall& call, void* scratch);

  // What the call was given for the state before the pass, or zeros.
  void (*load_state)(const LinearCall& call, const Unit& unit, void* state);
  void (*zero_state)(const LinearCall& call, void* state);
  // Gives the caller the state after the pass, where it is wanted.
  void (*store_state)(const LinearCall& call, const Unit& unit,
                      const void* state);
  // to += from.
  void (*add_state)(const LinearCall& call, const void* from, void* to);

  // Puts what stands at positions [begin, end) into the state.
  void (*accumulate)(const LinearCall& call, const Unit& unit, int64_t begin,
                     int64_t end, void* state, void* scratch);
  // Answers what reads at [begin, end) from the state alone.
  void (*read)(const LinearCall& call, const Unit& unit, int64_t begin,
               int64_t end, const void* state, void* scratch);
  // Both, causally: what reads sees the state and, in [begin, end), what a
  // causal mask lets it see.
  void (*attend)(const LinearCall& call, const Unit& unit, int64_t begin,
                 int64_t end, const Next& next, void* state, void* scratch);

  // Positions of a unit before the next one's turn in a causal walk: a divisor
  // of kBlock. (Others bring no rows in ahead across the end of a block.)
  int64_t block = kBlock;

  // Of d_keys: bytes of what it can leave for d_queries (call.query_notes);
  // nullptr: it leaves nothing.
  size_t (*note_bytes)(const LinearCall& call) = nullptr;
};

const Pass& forward_f32(Isa isa);
const Pass& forward_f64(Isa isa);
const Pass& d_queries_f32(Isa isa);
const Pass& d_queries_f64(Isa isa);
const Pass& d_keys_f32(Isa isa);
const Pass& d_keys_f64(Isa isa);

// Cuts the pass into tasks (schedule.h) and runs it.
Status run_pass(const LinearCall& call, const Pass& pass, Executor& executor);

}  // namespace cosformer::simd

#endif  // COSFORMER_SRC_KERNELS_SIMD_PASS_H_
