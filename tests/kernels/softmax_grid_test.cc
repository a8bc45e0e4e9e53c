// The softmax engine against the reference, over its whole option space and on
// every instruction set of this machine. A failure prints its point;
// COSFORMER_POINT="<that line>" runs it alone.
#include "tests/kernels/softmax_grid.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "tests/kernels/grid_fixture.h"

namespace cosformer {
namespace {

using testing::compare;
using testing::parse_softmax_point;
using testing::SoftmaxOutputs;
using testing::SoftmaxPoint;
using testing::SoftmaxProblem;
using testing::thinned;

class SoftmaxGrid : public testing::Grid<SoftmaxPoint> {};

std::vector<SoftmaxPoint> points_of(const std::vector<std::string>& texts) {
  std::vector<SoftmaxPoint> points;
  for (const std::string& text : texts) {
    const auto point = parse_softmax_point(text);
    EXPECT_TRUE(point.has_value()) << text;
    if (point) points.push_back(*point);
  }
  return points;
}

TEST_F(SoftmaxGrid, PairwiseCoverMatchesReference) {
  if (std::getenv("COSFORMER_POINT") != nullptr) GTEST_SKIP();
  check_all(thinned(testing::softmax_pairwise_points()));
}

TEST_F(SoftmaxGrid, RandomPointsMatchReference) {
  if (const char* text = std::getenv("COSFORMER_POINT")) {
    check_all(points_of({text}));
    return;
  }
  check_all(testing::softmax_random_points(testing::kSanitized ? 50 : 500, 3));
}

// Every width and length of small blocks, so that no remainder of a tile is
// left out.
TEST_F(SoftmaxGrid, EveryHeadDimAndValueDimMatchesReference) {
  if (std::getenv("COSFORMER_POINT") != nullptr) GTEST_SKIP();
  std::vector<SoftmaxPoint> points;
  for (int64_t dim = 1; dim <= 136; ++dim) {
    SoftmaxPoint point =
        *parse_softmax_point("q_len=37 kv_len=37 layout=offset");
    point.head_dim = dim;
    point.value_dim = dim * 53 % 137;
    point.causal = dim % 3 != 0;
    point.window = dim % 4 == 0 ? 3 : 0;
    point.reach = dim % 7 == 0 ? 20 : -1;
    point.dtype = dim % 5 == 0 ? DType::kFloat64 : DType::kFloat32;
    points.push_back(point);
  }
  check_all(thinned(points));
}

TEST_F(SoftmaxGrid, EveryLengthMatchesReference) {
  if (std::getenv("COSFORMER_POINT") != nullptr) GTEST_SKIP();
  std::vector<SoftmaxPoint> points;
  for (int64_t len = 0; len <= 290; ++len) {
    SoftmaxPoint point = *parse_softmax_point("head_dim=16 value_dim=20");
    point.q_len = len;
    point.kv_len = len % 4 == 0 ? len * 89 % 291 : len;
    point.causal = len % 3 != 0;
    point.dtype = len % 5 == 0 ? DType::kBFloat16 : DType::kFloat32;
    points.push_back(point);
  }
  check_all(thinned(points));
}

// Windows against lengths: shorter, longer, at the edges of tiles.
TEST_F(SoftmaxGrid, EveryWindowMatchesReference) {
  if (std::getenv("COSFORMER_POINT") != nullptr) GTEST_SKIP();
  for (const char* text :
       {"q_len=130 kv_len=130", "q_len=130 kv_len=130 causal=1",
        "q_len=40 kv_len=300 causal=1 starts=bottom-right dtype=float64",
        "batch=2 q_len=70 kv_len=100 starts=rows mask=holes dtype=bfloat16"}) {
    for (const int64_t reach : {0, 1, 2, 15, 16, 17, 63, 64, 65, 129, 130}) {
      for (const int64_t dilation : {1, 3, 16, 64, 200}) {
        SoftmaxProblem problem =
            testing::softmax_problem(str_cat(text, " head_dim=5 value_dim=6"));
        for (const auto& [left, right] :
             {std::pair{reach, reach}, std::pair<int64_t, int64_t>{reach, 0},
              std::pair<int64_t, int64_t>{-1, reach},
              std::pair<int64_t, int64_t>{reach, -1}}) {
          problem.options.has_window = true;
          problem.options.window_left = left;
          problem.options.window_right = right;
          problem.options.dilation = dilation;
          const SoftmaxOutputs want = testing::run_reference(problem);
          for (std::string_view isa : supported_isas()) {
            ASSERT_TRUE(force_isa(isa).ok());
            EXPECT_EQ(
                compare(problem, testing::run(problem, executor(1)), want), "")
                << isa << " " << text << " window (" << left << ", " << right
                << ") dilation " << dilation;
          }
        }
        if (testing::kSanitized && reach > 2) break;
      }
    }
  }
}

// Sizes and options at the edge of what is sensible.
TEST_F(SoftmaxGrid, EdgePointsMatchReference) {
  if (std::getenv("COSFORMER_POINT") != nullptr) GTEST_SKIP();
  check_all(points_of({
      "head_dim=1000 value_dim=777 q_len=20 kv_len=33 causal=1",
      "head_dim=513 value_dim=1 q_len=70 kv_len=70 causal=1 reach=3",
      "head_dim=1 value_dim=513 q_len=70 kv_len=70 window=both",
      "head_dim=256 value_dim=256 q_len=130 kv_len=130 causal=1 layout=offset "
      "dtype=bfloat16",
      "head_dim=256 value_dim=256 q_len=300 kv_len=300 causal=1 window=wide "
      "dtype=float64",
      // More keys than are kept packed.
      "head_dim=512 value_dim=300 q_len=300 kv_len=1400",
      "q_len=2 kv_len=2 causal=1",
      "q_len=1 kv_len=1 reach=0 dropout=50",
      "batch=0 q_len=10 kv_len=10 reach=2",
      "batch=40 q_len=3 kv_len=2 kv_heads=7 group=3 causal=1 mask=holes",
      "batch=3 q_len=0 kv_len=0 reach=4 window=both globals=first",
      "batch=3 q_len=0 kv_len=9 reach=4 block_size=8",
      "batch=3 q_len=9 kv_len=0 reach=4 globals=all",
      "q_len=1 kv_len=2000 head_dim=16 value_dim=16 group=3",
      "q_len=2000 kv_len=1 head_dim=16 value_dim=16 reach=1500",
      "q_len=1 kv_len=2000 head_dim=16 value_dim=16 causal=1 "
      "starts=bottom-right window=wide dilation=5",
      "q_len=1500 kv_len=1500 head_dim=8 value_dim=8 causal=1 starts=large "
      "threads=3",
      "q_len=1500 kv_len=1500 head_dim=8 value_dim=8 threads=3 window=both "
      "globals=scattered reach=40 dropout=10",
      "q_len=1200 kv_len=1200 head_dim=8 value_dim=8 causal=1 threads=3 "
      "packing=many block_size=64 block_heads=1 kv_heads=3",
      "q_len=1000 kv_len=1000 head_dim=8 value_dim=8 globals=all causal=1",
      "q_len=700 kv_len=700 head_dim=8 value_dim=8 globals=scattered "
      "window=left dilation=200",
      "q_len=700 kv_len=700 head_dim=8 value_dim=8 block_size=8 block_heads=1 "
      "kv_heads=2 group=2 globals=last window=self starts=negative",
  }));
}

// Few heads and many tokens: the sequence itself is cut and shared.
TEST_F(SoftmaxGrid, LongSequencesMatchReference) {
  if (std::getenv("COSFORMER_POINT") != nullptr) GTEST_SKIP();
  std::vector<SoftmaxPoint> points = points_of({
      "q_len=3100 kv_len=3100 causal=1",
      "q_len=3000 kv_len=3000 causal=1 mask=holes starts=negative reach=300 "
      "dtype=float64",
      "q_len=100 kv_len=9000 starts=rows dropout=50",
      "q_len=9000 kv_len=100 packing=one reach=100",
      "q_len=70 kv_len=9000 causal=1 starts=bottom-right",
      "q_len=4000 kv_len=4000 causal=1 window=wide globals=first",
      "q_len=4000 kv_len=4000 window=both dilation=5 globals=scattered",
      "q_len=4000 kv_len=4000 block_size=64 block_heads=1 kv_heads=2",
      "batch=2 q_len=2100 kv_len=300 causal=1 mask=left-padding window=wide",
      // Packed keys that several blocks and heads share.
      "batch=2 q_len=1000 kv_len=1000 kv_heads=2 group=3 causal=1 mask=holes",
      "batch=2 q_len=2000 kv_len=2000 causal=1 window=wide kv_heads=2 group=2 "
      "mask=left-padding",
      "q_len=900 kv_len=900 kv_heads=2 group=2 causal=1 packing=one",
      "q_len=1500 kv_len=1500 kv_heads=2 group=2 block_size=64 block_heads=1 "
      "mask=left-padding",
      "q_len=1500 kv_len=1500 kv_heads=2 group=2 causal=1 block_size=32 "
      "globals=first starts=negative",
      "batch=2 q_len=1500 kv_len=1500 kv_heads=2 group=2 window=wide "
      "globals=scattered mask=holes",
  });
  for (SoftmaxPoint& point : points) {
    point.head_dim = 3;
    point.value_dim = 2;
    point.threads = 3;
  }
  check_all(thinned(points));
}

// Queries and keys that stand far apart: nothing walks through the gap.
TEST_F(SoftmaxGrid, FarApartStartsMatchReference) {
  if (std::getenv("COSFORMER_POINT") != nullptr) GTEST_SKIP();
  constexpr int64_t kFar = int64_t{1} << 52;
  for (const char* text :
       {"causal=1", "causal=0", "window=both", "window=left-open dilation=5",
        "globals=first window=self", "block_size=16", "causal=1 reach=7"}) {
    for (const auto& [q_start, kv_start] :
         {std::pair{kFar, -kFar}, std::pair{-kFar, kFar}, std::pair{kFar, kFar},
          std::pair<int64_t, int64_t>{3000, 0},
          std::pair<int64_t, int64_t>{0, 3000},
          std::pair<int64_t, int64_t>{-70, -50}}) {
      SoftmaxProblem problem = testing::softmax_problem(
          str_cat("head_dim=3 value_dim=2 q_len=70 kv_len=110 ", text));
      // What is visible changes with the starts: nothing may hide there.
      testing::Random random(4);
      for (auto* x : {&problem.q, &problem.k, &problem.v, &problem.d_out})
        x->fill_normal(random);
      problem.q_start = {q_start};
      problem.kv_start = {kv_start};
      const SoftmaxOutputs want = testing::run_reference(problem);
      for (std::string_view isa : supported_isas()) {
        ASSERT_TRUE(force_isa(isa).ok());
        EXPECT_EQ(compare(problem, testing::run(problem, executor(2)), want),
                  "")
            << isa << " q_start=" << q_start << " kv_start=" << kv_start << " "
            << text;
      }
    }
  }
}

TEST_F(SoftmaxGrid, PointsSurviveTheirText) {
  for (const SoftmaxPoint& point : testing::softmax_random_points(20, 5)) {
    const std::string text = testing::describe(point);
    const auto parsed = parse_softmax_point(text);
    ASSERT_TRUE(parsed.has_value()) << text;
    EXPECT_EQ(testing::describe(*parsed), text);
  }
  EXPECT_FALSE(parse_softmax_point("batch=1 nonsense=3").has_value());
  EXPECT_FALSE(parse_softmax_point("window=narrow").has_value());
}

}  // namespace
}  // namespace cosformer
