#include "kernels/simd/softmax_pass.h"

#include <algorithm>

#include "kernels/simd/schedule.h"

namespace cosformer::simd {
namespace {

Status no_memory(size_t bytes) {
  return Status(StatusCode::kOutOfMemory,
                str_cat("softmax_attention: cannot allocate ", bytes,
                        " bytes of working memory"));
}

}  // namespace

Status run_softmax_forward(const SoftmaxCall& call,
                           const SoftmaxForward& forward, Executor& executor) {
  const SoftmaxPlan plan(call, Side::kQueries, forward.block_rows);
  const int64_t items = plan.num_items();
  if (items == 0) return Status();
  int64_t queries = 0;
  for (const SoftmaxBlock& block : plan.blocks())
    queries = std::max(queries, block.outer.count);
  const int64_t bias_elements = forward.bias_elements(call);
  const AlignedBuffer bias(static_cast<size_t>(bias_elements) *
                           (call.dtype == DType::kFloat64 ? 8 : 4));
  const size_t scratch_bytes = forward.scratch_bytes(call, queries);
  const Pieces scratch(executor.num_threads(), scratch_bytes);
  if (scratch.failed()) return no_memory(scratch_bytes);
  for (int t = 0; t < executor.num_threads(); ++t)
    forward.start(call, queries, scratch[t]);
  if (bias_elements > 0) {
    if (bias.data() == nullptr) return no_memory(bias.size());
    forward.expand_bias(call, bias.data());
  }
  // Tasks of a few neighbouring items, which share keys, by shape alone.
  constexpr int64_t kTasks = 256;
  const int64_t share = (items + kTasks - 1) / kTasks;
  executor.run((items + share - 1) / share, [&](int64_t task, int thread) {
    const int64_t next = (task + executor.num_threads()) * share;
    forward.run(plan, task * share, std::min(items, (task + 1) * share), next,
                bias_elements > 0 ? bias.data() : nullptr, scratch[thread]);
  });
  return Status();
}

}  // namespace cosformer::simd
