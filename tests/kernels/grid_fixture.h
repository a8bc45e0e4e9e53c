// The public entry points against the reference at points of an engine's option
// space, on every instruction set of this machine.
#ifndef COSFORMER_TESTS_KERNELS_GRID_FIXTURE_H_
#define COSFORMER_TESTS_KERNELS_GRID_FIXTURE_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "cosformer/kernels.h"
#include "tests/kernels/comparison.h"

namespace cosformer::testing {

struct SoftmaxPoint;

// Of the engine whose problems are made from P.
template <typename P>
class Grid : public ::testing::Test {
 protected:
  ~Grid() override { EXPECT_TRUE(force_isa("").ok()); }

  Executor& executor(int64_t threads) {
    auto& pool = pools_[threads];
    if (pool == nullptr) pool = make_thread_pool(static_cast<int>(threads));
    return *pool;
  }

  // On AMX tiles an engine that uses none has the kernels of AVX-512.
  static constexpr bool kUsesTiles = std::is_same_v<P, SoftmaxPoint>;

  // Returns whether the point passed everywhere.
  bool check(const P& point) {
    const auto problem = make_problem(point);
    const auto want = run_reference(problem);
    bool good = true;
    for (std::string_view isa : supported_isas()) {
      if (isa == "amx" && !kUsesTiles) continue;
      const Status forced = force_isa(isa);
      EXPECT_TRUE(forced.ok()) << forced.message();
      const auto got = run(problem, executor(point.threads), point.layout);
      const std::string difference = compare(problem, got, want, &margins_);
      if (!difference.empty()) {
        good = false;
        ADD_FAILURE() << "isa=" << isa << "\n"
                      << problem.text << "\n"
                      << difference;
      }
    }
    return good;
  }

  void check_all(const std::vector<P>& points) {
    int failed = 0;
    for (const P& point : points) {
      failed += check(point) ? 0 : 1;
      if (failed == 20) break;  // more would say no more
    }
    RecordProperty("points", static_cast<int>(points.size()));
    std::printf(
        "%zu points; largest error / allowed: out %.2f, gradients "
        "%.2f\n",
        points.size(), margins_.out, margins_.gradients);
  }

 private:
  std::map<int64_t, std::unique_ptr<Executor>> pools_;
  Margins margins_;
};

}  // namespace cosformer::testing

#endif  // COSFORMER_TESTS_KERNELS_GRID_FIXTURE_H_
