// The public entry points against the reference, over the engine's whole
// option space and on every instruction set of this machine. A failure prints
// its point; COSFORMER_POINT="<that line>" runs it alone.
#include "tests/kernels/grid.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <string>

#include "tests/kernels/compare.h"

namespace cosformer {
namespace {

using testing::compare;
using testing::Margins;
using testing::Outputs;
using testing::Point;
using testing::Problem;

class LinearGrid : public ::testing::Test {
 protected:
  ~LinearGrid() override { EXPECT_TRUE(force_isa("").ok()); }

  Executor& executor(int64_t threads) {
    auto& pool = pools_[threads];
    if (pool == nullptr) pool = make_thread_pool(static_cast<int>(threads));
    return *pool;
  }

  // Returns whether the point passed everywhere.
  bool check(const Point& point) {
    const Problem problem = testing::make_problem(point);
    const Outputs want = testing::run_reference(problem);
    bool good = true;
    for (std::string_view isa : supported_isas()) {
      const Status forced = force_isa(isa);
      EXPECT_TRUE(forced.ok()) << forced.message();
      const Outputs got =
          testing::run(problem, executor(point.threads), point.layout);
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

  void check_all(const std::vector<Point>& points) {
    int failed = 0;
    for (const Point& point : points) {
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

// One in ten, spread evenly, where everything is slow.
std::vector<Point> thinned(const std::vector<Point>& points) {
  if (!testing::kSanitized) return points;
  std::vector<Point> few;
  for (size_t i = 0; i < points.size(); i += 10) few.push_back(points[i]);
  return few;
}

TEST_F(LinearGrid, PairwiseCoverMatchesReference) {
  if (std::getenv("COSFORMER_POINT") != nullptr) GTEST_SKIP();
  check_all(thinned(testing::pairwise_points()));
}

TEST_F(LinearGrid, RandomPointsMatchReference) {
  if (const char* text = std::getenv("COSFORMER_POINT")) {
    const auto point = testing::parse_point(text);
    ASSERT_TRUE(point.has_value()) << text;
    check_all({*point});
    return;
  }
  check_all(testing::random_points(testing::kSanitized ? 50 : 500, 3));
}

TEST_F(LinearGrid, PointsSurviveTheirText) {
  for (const Point& point : testing::random_points(20, 5)) {
    const std::string text = testing::describe(point);
    const auto parsed = testing::parse_point(text);
    ASSERT_TRUE(parsed.has_value()) << text;
    EXPECT_EQ(testing::describe(*parsed), text);
  }
  EXPECT_FALSE(testing::parse_point("batch=1 nonsense=3").has_value());
}

}  // namespace
}  // namespace cosformer
