// Torch's threads behind the kernels' Executor.
#include "ops/executor.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "cosformer/ops.h"

namespace cosformer {
namespace {

class ThreadsTest : public ::testing::Test {
 protected:
  ThreadsTest() : before_(at::get_num_threads()) { at::set_num_threads(2); }
  ~ThreadsTest() override { at::set_num_threads(before_); }

 private:
  int before_;
};

// Two tasks that wait for each other end only when two threads run them at
// once: a build without OpenMP would run them one after the other.
TEST_F(ThreadsTest, TwoThreadsRunAtTheSameTime) {
  std::atomic<int> arrived{0}, met{0};
  ops::torch_executor().run(2, [&](int64_t, int) {
    ++arrived;
    const auto end =
        std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (arrived < 2 && std::chrono::steady_clock::now() < end)
      std::this_thread::yield();
    if (arrived == 2) ++met;
  });
  EXPECT_EQ(met, 2);
}

TEST_F(ThreadsTest, EachTaskRunsOnceAndThreadNumbersAreNotShared) {
  EXPECT_EQ(ops::torch_executor().num_threads(), 2);
  std::vector<std::atomic<int>> runs(1000);
  std::vector<std::atomic<int>> busy(2);
  std::atomic<bool> shared{false};
  ops::torch_executor().run(1000, [&](int64_t task, int thread) {
    if (busy[thread].fetch_add(1) != 0) shared = true;
    ++runs[task];
    --busy[thread];
  });
  for (const auto& count : runs) EXPECT_EQ(count, 1);
  EXPECT_FALSE(shared);
}

TEST_F(ThreadsTest, SerialInsideAParallelRegion) {
  std::atomic<int> wrong{0};
  at::parallel_for(0, 2, 1, [&](int64_t, int64_t) {
    if (at::in_parallel_region() && ops::torch_executor().num_threads() != 1)
      ++wrong;
  });
  EXPECT_EQ(wrong, 0);
}

TEST_F(ThreadsTest, TheOperatorUsesThem) {
  // As many bits alike with one thread and two.
  const at::Tensor q = at::randn({1, 700, 3, 32});
  LinearAttentionArgs args;
  args.is_causal = true;
  args.reweight_len = 700;
  const at::Tensor two = std::get<0>(linear_attention(q, q, q, args));
  at::set_num_threads(1);
  EXPECT_TRUE(two.equal(std::get<0>(linear_attention(q, q, q, args))));
}

}  // namespace
}  // namespace cosformer
