#include "ops/executor.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>

// Without -fopenmp at::parallel_for runs serially and says nothing.
#ifndef _OPENMP
#error "src/ops/executor.cc must be compiled with OpenMP"
#endif

namespace cosformer::ops {
namespace {

class TorchExecutor final : public Executor {
 public:
  int num_threads() const override {
    return at::in_parallel_region() ? 1 : at::get_num_threads();
  }

  void run(int64_t num_tasks,
           const std::function<void(int64_t, int)>& task) override {
    const int64_t workers = std::min<int64_t>(num_tasks, num_threads());
    if (workers <= 1) {
      for (int64_t i = 0; i < num_tasks; ++i) task(i, 0);
      return;
    }
    // Each worker takes the next task: tasks differ in cost.
    std::atomic<int64_t> next{0};
    at::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
      for (int64_t worker = begin; worker < end; ++worker) {
        for (int64_t i = next.fetch_add(1); i < num_tasks;
             i = next.fetch_add(1)) {
          task(i, static_cast<int>(worker));
        }
      }
    });
  }
};

}  // namespace

Executor& torch_executor() {
  static TorchExecutor executor;
  return executor;
}

}  // namespace cosformer::ops
