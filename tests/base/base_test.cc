#include "cosformer/base.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
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
