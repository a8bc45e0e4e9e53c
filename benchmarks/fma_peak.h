// The machine's floor for arithmetic: multiply-adds a second on one core.
#ifndef COSFORMER_BENCHMARKS_FMA_PEAK_H_
#define COSFORMER_BENCHMARKS_FMA_PEAK_H_

#include "kernels/dispatch.h"

namespace cosformer::benchmarks {

// Seconds of processor time that this thread has used: what other programs take
// of a busy machine does not count.
double thread_seconds();

// Floating-point operations a second that independent multiply-adds reach on
// this instruction set, float32 or float64. Takes about half a millisecond.
double fma_peak(Isa isa, bool is_double);

}  // namespace cosformer::benchmarks

#endif  // COSFORMER_BENCHMARKS_FMA_PEAK_H_
