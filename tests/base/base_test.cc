#include "cosformer/base.h"

#include <gtest/gtest.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

namespace cosformer {
namespace {

TEST(Philox, MatchesTheVectorsOfRandom123) {
  // kat_vectors of Random123: philox4x32 10 rounds.
  EXPECT_EQ(philox(0, 0, 0), (std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d,
                                                      0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox(~uint64_t{0}, ~uint64_t{0}, ~uint64_t{0}),
            (std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6,
                                     0x6d5451fd}));
  EXPECT_EQ(philox(0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88),
            (std::array<uint32_t, 4>{0xd16cfe09, 0x94fdcceb, 0x5001e420,
                                     0x24126ea1}));
}

TEST(Executor, RunsEachTaskOnceOnDistinctThreads) {
  for (int threads : {1, 2, 5}) {
    auto pool = make_thread_pool(threads);
    ASSERT_EQ(pool->num_threads(), threads);
    for (int64_t tasks : {0, 1, 3, 1000}) {
      std::vector<std::atomic<int>> count(static_cast<size_t>(tasks));
      std::vector<std::atomic<int>> in_use(static_cast<size_t>(threads));
      std::atomic<bool> shared{false};
      pool->run(tasks, [&](int64_t task, int thread) {
        if (in_use[static_cast<size_t>(thread)].fetch_add(1) != 0)
          shared = true;
        ++count[static_cast<size_t>(task)];
        in_use[static_cast<size_t>(thread)].fetch_sub(1);
      });
      for (const auto& c : count) EXPECT_EQ(c.load(), 1);
      EXPECT_FALSE(shared.load());
    }
  }
}

// What the tasks wrote is there when run() returns, also where several threads
// call the same pool at once.
TEST(Executor, ServesConcurrentCallers) {
  auto pool = make_thread_pool(3);
  std::vector<std::thread> callers;
  std::vector<int64_t> sums(4, 0);
  for (size_t c = 0; c < sums.size(); ++c) {
    callers.emplace_back([&pool, &sums, c] {
      for (int repeat = 0; repeat < 50; ++repeat) {
        std::vector<int64_t> results(200, 0);
        pool->run(200, [&results](int64_t task, int) {
          results[static_cast<size_t>(task)] = task;
        });
        for (int64_t result : results) sums[c] += result;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (int64_t sum : sums) EXPECT_EQ(sum, 50 * 199 * 100);
}

TEST(Executor, SerialRunsInOrderOnThreadZero) {
  std::vector<int64_t> order;
  serial_executor().run(5, [&order](int64_t task, int thread) {
    EXPECT_EQ(thread, 0);
    order.push_back(task);
  });
  EXPECT_EQ(order, (std::vector<int64_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(serial_executor().num_threads(), 1);
}

TEST(Executor, FewerThreadsThanAskedForAreNoError) {
  pthread_attr_t before, huge;
  ASSERT_EQ(pthread_getattr_default_np(&before), 0);
  ASSERT_EQ(pthread_attr_init(&huge), 0);
  // No address space holds such a stack: no thread can be made.
  ASSERT_EQ(pthread_attr_setstacksize(&huge, size_t{1} << 50), 0);
  ASSERT_EQ(pthread_setattr_default_np(&huge), 0);
  const auto pool = make_thread_pool(3);
  ASSERT_EQ(pthread_setattr_default_np(&before), 0);
  EXPECT_EQ(pool->num_threads(), 1);
  int64_t runs = 0;
  pool->run(10, [&runs](int64_t, int) { ++runs; });
  EXPECT_EQ(runs, 10);
}

TEST(Executor, ZeroThreadsMeansEveryCoreOfTheProcess) {
  EXPECT_GE(make_thread_pool(0)->num_threads(), 1);
}

TEST(AlignedBuffer, ThatCannotBeHasNoDataAndCountsNothing) {
  const size_t before = allocation_stats().current_bytes;
  // Sanitizers abort on sizes beyond any machine unless told otherwise: these
  // wrap around when rounded up.
  for (size_t bytes : {SIZE_MAX, SIZE_MAX - 1, SIZE_MAX - 100}) {
    const AlignedBuffer buffer(bytes);
    EXPECT_EQ(buffer.data(), nullptr);
    EXPECT_EQ(buffer.size(), 0u);
  }
  EXPECT_EQ(allocation_stats().current_bytes, before);
}

TEST(AlignedBuffer, MovesItsMemory) {
  const size_t before = allocation_stats().current_bytes;
  AlignedBuffer a(1000);
  void* data = a.data();
  AlignedBuffer b = std::move(a);
  EXPECT_EQ(b.data(), data);
  EXPECT_EQ(b.size(), 1000u);
  b = AlignedBuffer();
  EXPECT_EQ(allocation_stats().current_bytes, before);
}

TEST(ContiguousStrides, AreRowMajor) {
  EXPECT_EQ(contiguous_strides({2, 3, 4, 5}),
            (std::array<int64_t, 4>{60, 20, 5, 1}));
  EXPECT_EQ(contiguous_strides({0, 3, 1, 1}),
            (std::array<int64_t, 4>{3, 1, 1, 1}));
}

TEST(DType, HasANameAndASize) {
  EXPECT_EQ(name(DType::kBFloat16), "bfloat16");
  EXPECT_EQ(name(DType::kFloat64), "float64");
  EXPECT_EQ(size_of(DType::kFloat16), 2u);
  EXPECT_EQ(size_of(DType::kInt64), 8u);
  EXPECT_EQ(size_of(DType::kBool), 1u);
}

TEST(AlignedBuffer, IsAlignedAndCounted) {
  const size_t before = allocation_stats().current_bytes;
  {
    reset_peak_allocation();
    AlignedBuffer buffer(100);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 64, 0u);
    EXPECT_EQ(allocation_stats().current_bytes, before + 128);
  }
  EXPECT_EQ(allocation_stats().current_bytes, before);
  EXPECT_EQ(allocation_stats().peak_bytes, before + 128);
}

TEST(Result, HoldsAValueOrAStatus) {
  Result<int> good = 3;
  EXPECT_TRUE(good.ok());
  EXPECT_EQ(*good, 3);
  Result<int> bad = invalid_argument("found ", 2, ", expected ", 3);
  EXPECT_FALSE(bad.ok());
  EXPECT_EQ(bad.status().message(), "found 2, expected 3");
  EXPECT_EQ(bad.status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace cosformer
