// The public entry points against the reference, over the engine's whole
// option space and on every instruction set of this machine. A failure prints
// its point; COSFORMER_POINT="<that line>" runs it alone.
#include "tests/kernels/grid.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "tests/kernels/compare.h"
#include "tests/kernels/grid_fixture.h"

namespace cosformer {
namespace {

using testing::compare;
using testing::Outputs;
using testing::Point;
using testing::Problem;
using testing::thinned;

class LinearGrid : public testing::Grid<Point> {};

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

// Every width and length of small blocks, so that no remainder of a tile is
// left out.
TEST_F(LinearGrid, EveryHeadDimAndValueDimMatchesReference) {
  if (std::getenv("COSFORMER_POINT") != nullptr) GTEST_SKIP();
  std::vector<Point> points;
  for (int64_t dim = 1; dim <= 136; ++dim) {
    Point point = *testing::parse_point(
        "q_len=37 kv_len=37 cosine=exact state=both layout=offset");
    point.head_dim = dim;
    point.value_dim = dim * 53 % 137;
    point.causal = dim % 3 != 0;
    point.feature_map = dim % 2 == 0 ? FeatureMap::kRelu : FeatureMap::kElu1;
    point.dtype = dim % 5 == 0 ? DType::kFloat64 : DType::kFloat32;
    points.push_back(point);
  }
  check_all(thinned(points));
}

TEST_F(LinearGrid, EveryLengthMatchesReference) {
  if (std::getenv("COSFORMER_POINT") != nullptr) GTEST_SKIP();
  std::vector<Point> points;
  for (int64_t len = 0; len <= 140; ++len) {
    Point point =
        *testing::parse_point("head_dim=16 value_dim=20 cosine=exact");
    point.q_len = len;
    point.kv_len = len % 4 == 0 ? len * 89 % 141 : len;
    point.causal = len % 3 != 0;
    point.dtype = len % 5 == 0 ? DType::kBFloat16 : DType::kFloat32;
    points.push_back(point);
  }
  check_all(thinned(points));
}

// Sizes and options at the edge of what is sensible.
TEST_F(LinearGrid, EdgePointsMatchReference) {
  if (std::getenv("COSFORMER_POINT") != nullptr) GTEST_SKIP();
  std::vector<Point> points;
  for (const char* text : {
           "head_dim=1000 value_dim=777 q_len=20 kv_len=33 causal=1",
           "head_dim=513 value_dim=1 q_len=70 kv_len=70 cosine=exact causal=1",
           "head_dim=1 value_dim=513 q_len=70 kv_len=70 cosine=exact",
           "head_dim=258 value_dim=300 q_len=66 kv_len=66 rotary=half "
           "state=both "
           "causal=1 cosine=far",
           "head_dim=256 value_dim=256 q_len=130 kv_len=130 causal=1 "
           "cosine=exact layout=offset dtype=bfloat16",
           "q_len=2 kv_len=2 cosine=exact causal=1",
           "q_len=1 kv_len=1 cosine=exact causal=1 state=both",
           "batch=0 q_len=10 kv_len=10 state=both",
           "batch=40 q_len=3 kv_len=2 kv_heads=7 group=3 causal=1 mask=holes",
           "batch=3 q_len=0 kv_len=0 state=both causal=1",
           "batch=3 q_len=0 kv_len=9 state=both cosine=far",
           "batch=3 q_len=9 kv_len=0 state=both cosine=far",
           "batch=3 q_len=9 kv_len=0",
           "q_len=1 kv_len=2000 head_dim=16 value_dim=16 cosine=exact",
           "q_len=2000 kv_len=1 head_dim=16 value_dim=16 cosine=exact",
           "q_len=1 kv_len=2000 head_dim=16 value_dim=16 causal=1 "
           "starts=bottom-right cosine=exact",
           "q_len=1500 kv_len=1500 head_dim=8 value_dim=8 causal=1 "
           "cosine=exact "
           "starts=large threads=3",
           "q_len=1500 kv_len=1500 head_dim=8 value_dim=8 cosine=far threads=3 "
           "state=both feature_map=elu1",
           "q_len=1200 kv_len=1200 head_dim=8 value_dim=8 causal=1 threads=3 "
           "packing=many state=both cosine=far",
       }) {
    const auto point = testing::parse_point(text);
    ASSERT_TRUE(point.has_value()) << text;
    points.push_back(*point);
  }
  check_all(points);
}

// Causal walks that fit into one chunk, which then needs no state, and those
// that just do not; with outputs that tiles cannot write themselves.
TEST_F(LinearGrid, ShortCausalWalksMatchReference) {
  if (std::getenv("COSFORMER_POINT") != nullptr) GTEST_SKIP();
  std::vector<Point> points;
  for (const char* text :
       {"cosine=far", "cosine=exact", "feature_map=elu1 group=2",
        "cosine=far dtype=bfloat16", "cosine=far mask=holes batch=2",
        "cosine=far mask=query-only dtype=float16", "value_dim=40 head_dim=40",
        "cosine=far value_dim=20 packing=many",
        "cosine=far starts=rows batch=3", "cosine=far starts=bottom-right",
        "cosine=far state=out"}) {
    for (int64_t len : {1, 31, 48, 63, 64, 65}) {
      auto point = testing::parse_point(text);
      ASSERT_TRUE(point.has_value()) << text;
      point->q_len = point->kv_len = len;
      point->causal = true;
      points.push_back(*point);
    }
  }
  check_all(points);
}

// Causal walks in pairs of several chunks, up to where a state takes over
// (192 tokens at head_dim 64 with the cosine, 96 without; fewer with groups).
TEST_F(LinearGrid, CausalWalksInPairsMatchReference) {
  if (std::getenv("COSFORMER_POINT") != nullptr) GTEST_SKIP();
  std::vector<Point> points;
  for (const char* text :
       {"cosine=far kv_heads=2", "cosine=exact", "feature_map=elu1",
        "cosine=far group=3", "cosine=far dtype=bfloat16",
        "cosine=far mask=holes batch=2", "cosine=far dtype=float64",
        "cosine=far mask=query-only dtype=float16", "cosine=far normalized=0",
        "cosine=far packing=many", "cosine=far starts=rows batch=3",
        "cosine=far starts=bottom-right", "cosine=far state=out",
        "cosine=far rotary=half"}) {
    for (int64_t len : {80, 96, 97, 127, 128, 161, 192, 193}) {
      auto point = testing::parse_point(text);
      ASSERT_TRUE(point.has_value()) << text;
      point->q_len = point->kv_len = len;
      point->head_dim = 64;
      point->value_dim = len % 2 == 0 ? 64 : 72;
      point->causal = true;
      points.push_back(*point);
    }
  }
  check_all(thinned(points));
}

// Few heads and many tokens: the sequence itself is cut and shared.
TEST_F(LinearGrid, LongSequencesMatchReference) {
  if (std::getenv("COSFORMER_POINT") != nullptr) GTEST_SKIP();
  std::vector<Point> points;
  for (const char* text : {
           "q_len=4300 kv_len=4300 causal=1 cosine=exact state=both",
           "q_len=4097 kv_len=4097 causal=1 feature_map=elu1 mask=holes "
           "state=both starts=negative dtype=float64",
           "q_len=100 kv_len=9000 feature_map=elu1 starts=rows state=both",
           "q_len=9000 kv_len=100 cosine=far packing=one",
           "q_len=70 kv_len=9000 causal=1 starts=bottom-right cosine=exact "
           "state=out",
           "q_len=9000 kv_len=70 causal=1 cosine=far starts=large",
           "batch=2 q_len=4100 kv_len=300 causal=1 feature_map=elu1 "
           "mask=left-padding",
       }) {
    Point point = *testing::parse_point(text);
    point.head_dim = 3;
    point.value_dim = 2;
    point.threads = 3;
    points.push_back(point);
  }
  check_all(thinned(points));
}

// Queries and keys that stand far apart: nothing walks through the gap.
TEST_F(LinearGrid, FarApartStartsMatchReference) {
  if (std::getenv("COSFORMER_POINT") != nullptr) GTEST_SKIP();
  constexpr int64_t kFar = int64_t{1} << 52;
  for (const auto& [q_start, kv_start] :
       {std::pair{kFar, -kFar}, std::pair{-kFar, kFar}, std::pair{kFar, kFar},
        std::pair<int64_t, int64_t>{3000, 0}}) {
    for (int64_t len : {70, 2200}) {
      Problem problem = testing::make_problem(*testing::parse_point(str_cat(
          "causal=1 feature_map=elu1 head_dim=3 value_dim=2 state=out q_len=",
          len, " kv_len=", len + 40)));
      problem.q_start = {q_start};
      problem.kv_start = {kv_start};
      const Outputs want = testing::run_reference(problem);
      for (std::string_view isa : supported_isas()) {
        ASSERT_TRUE(force_isa(isa).ok());
        EXPECT_EQ(compare(problem, testing::run(problem, executor(2)), want),
                  "")
            << isa << " q_start=" << q_start << " kv_start=" << kv_start
            << " q_len=" << len;
      }
    }
  }
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
