// The peak memory of a call: torch's CPU tensors and the kernels' buffers.
#ifndef COSFORMER_SRC_BENCH_MEMORY_H_
#define COSFORMER_SRC_BENCH_MEMORY_H_

#include <cstdint>
#include <functional>

namespace cosformer::bench_internal {

// Bytes that run() held at most beyond what was held before: torch's tensors
// and the kernels' buffers each counted at their own peak, so their sum is an
// upper bound. Puts a counting allocator under torch's CPU tensors at the first
// call, for good; tensors from before are not counted when they are freed.
int64_t peak_bytes(const std::function<void()>& run);

}  // namespace cosformer::bench_internal

#endif  // COSFORMER_SRC_BENCH_MEMORY_H_
