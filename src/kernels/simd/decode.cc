#include "kernels/simd/decode.h"

#include <algorithm>
#include <vector>

#include "kernels/simd/schedule.h"

namespace cosformer::simd {

Status run_decode(const LinearCall& call, const Decode& decode,
                  const LinearStateView& state, Executor& executor) {
  // Heads of a row that share its angles; a task should not be shorter than
  // handing it out.
  constexpr int64_t kHeadsPerTask = 8;
  const int64_t rows = num_rows(call.inputs);
  const int64_t per_row = (call.kv_heads + kHeadsPerTask - 1) / kHeadsPerTask;
  if (rows == 0) return Status();
  const int threads = executor.num_threads();
  const size_t bytes = decode.scratch_bytes(call);
  const Pieces scratch(threads, bytes);
  if (scratch.failed())
    return out_of_memory(static_cast<size_t>(threads) * bytes);
  std::vector<char> started(static_cast<size_t>(threads), false);
  executor.run(rows * per_row, [&](int64_t task, int thread) {
    if (!started[static_cast<size_t>(thread)]) {
      decode.init_scratch(call, scratch[thread]);
      started[static_cast<size_t>(thread)] = true;
    }
    const int64_t begin = task % per_row * kHeadsPerTask;
    decode.step(call, task / per_row, begin,
                std::min(begin + kHeadsPerTask, call.kv_heads), state,
                scratch[thread]);
  });
  return Status();
}

}  // namespace cosformer::simd
