// Results below the least normal number as zeros, while it lives. Exponentials
// of large negative numbers, and products of them, end there; on some
// processors each such result costs a hundred cycles and more.
#ifndef COSFORMER_SRC_KERNELS_SIMD_FLUSH_TINY_H_
#define COSFORMER_SRC_KERNELS_SIMD_FLUSH_TINY_H_

#include <cstdint>
#include <functional>

#include "cosformer/base.h"

#ifdef __SSE2__
#include <xmmintrin.h>
#endif

namespace cosformer::simd {

#ifdef __SSE2__
// Of the thread that makes it, and ends it.
class FlushTiny {
 public:
  FlushTiny() : before_(_mm_getcsr()) {
    if ((before_ & kFlush) == 0) _mm_setcsr(before_ | kFlush);
  }
  ~FlushTiny() {
    if ((before_ & kFlush) == 0) _mm_setcsr(_mm_getcsr() & ~kFlush);
  }
  FlushTiny(const FlushTiny&) = delete;
  FlushTiny& operator=(const FlushTiny&) = delete;

 private:
  static constexpr unsigned kFlush = _MM_FLUSH_ZERO_ON;
  const unsigned before_;
};
#else
class FlushTiny {
 public:
  FlushTiny() {}  // so that it counts as used
};
#endif

// Another executor, whose tasks flush tiny results.
class FlushingExecutor final : public Executor {
 public:
  explicit FlushingExecutor(Executor& executor) : executor_(executor) {}
  int num_threads() const override { return executor_.num_threads(); }
  void run(int64_t num_tasks,
           const std::function<void(int64_t task, int thread)>& task) override {
    executor_.run(num_tasks, [&](int64_t i, int thread) {
      const FlushTiny flush;
      task(i, thread);
    });
  }

 private:
  Executor& executor_;
};

}  // namespace cosformer::simd

#endif  // COSFORMER_SRC_KERNELS_SIMD_FLUSH_TINY_H_
