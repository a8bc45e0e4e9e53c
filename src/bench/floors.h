// The machine's floors: multiply-adds a second, and plain loops over memory.
#ifndef COSFORMER_SRC_BENCH_FLOORS_H_
#define COSFORMER_SRC_BENCH_FLOORS_H_

#include <cstdint>
#include <vector>

#include "kernels/dispatch.h"

namespace cosformer::bench_internal {

// Seconds of processor time that this thread has used: what other programs take
// of a busy machine does not count.
double thread_seconds();

// Floating-point operations a second that independent multiply-adds reach on
// this instruction set, float32 or float64, on the calling thread. Takes about
// half a millisecond.
double fma_peak(Isa isa, bool is_double);

// What so many threads reach at once: the sum of their peaks, each of which is
// by its own processor time, as if it had a core to itself. More threads than
// cores have but a part of one, and the kernels' runs are on the wall clock.
double peak_of_all(const std::vector<double>& peaks, int64_t cores);

// Plain loops over memory, in the vectors of this instruction set: multiplies
// every element in place (what a step does to a state), or adds them all up
// (what it does to cached keys and values). count: a multiple of 64.
void update_memory(Isa isa, float* data, int64_t count);
float read_memory(Isa isa, const float* data, int64_t count);

}  // namespace cosformer::bench_internal

#endif  // COSFORMER_SRC_BENCH_FLOORS_H_
