// Where curves cross, what kinds are counted by, and the machine's floors.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <vector>

#include "base/format_text.h"
#include "bench/cases.h"
#include "bench/floors.h"
#include "bench/kinds.h"
#include "cosformer/bench.h"
#include "cosformer/kernels.h"

namespace cosformer {
namespace {

using bench_internal::linear_operations;
using bench_internal::softmax_operations;
using bench_internal::visible_pairs;
using Where = Crossover::Where;

LengthCurve power(double factor, double exponent,
                  const std::vector<double>& lengths) {
  LengthCurve curve;
  for (const double n : lengths) {
    curve.emplace_back(n, factor * std::pow(n, exponent));
  }
  return curve;
}

const std::vector<double> kLengths = {64, 256, 1024, 4096};

TEST(Crossover, IsExactForPowersOfTheLength) {
  // n^2 and 300 n cross at 300.
  const Crossover found =
      find_crossover(power(300, 1, kLengths), power(1, 2, kLengths));
  EXPECT_EQ(found.where, Where::kAt);
  EXPECT_NEAR(found.length, 300, 1e-9 * 300);
  // n^1.5 and 300 n: at 90,000, beyond what was measured.
  const Crossover later =
      find_crossover(power(300, 1, kLengths), power(1, 1.5, kLengths));
  EXPECT_EQ(later.where, Where::kAlwaysBehind);
  EXPECT_EQ(later.length, 4096);
}

TEST(Crossover, SaysWhenOneIsAlwaysAhead) {
  const Crossover found =
      find_crossover(power(1, 1, kLengths), power(1, 2, kLengths));
  EXPECT_EQ(found.where, Where::kAlwaysAhead);
  EXPECT_EQ(found.length, 64);
  EXPECT_EQ(to_text(found), "<= 64");
}

TEST(Crossover, TakesTheLastOfSeveral) {
  const LengthCurve reference = {{64, 1}, {128, 1}, {256, 1}, {512, 1}};
  const LengthCurve curve = {{64, 0.5}, {128, 2}, {256, 0.5}, {512, 2}};
  EXPECT_EQ(find_crossover(curve, reference).where, Where::kAlwaysBehind);
  const LengthCurve again = {{64, 0.5}, {128, 2}, {256, 0.5}, {512, 0.25}};
  const Crossover found = find_crossover(again, reference);
  EXPECT_EQ(found.where, Where::kAt);
  EXPECT_NEAR(found.length, std::sqrt(128.0 * 256.0), 1e-9);
}

TEST(Crossover, DoesNotTakeNoiseForALead) {
  const LengthCurve reference = power(1, 1, kLengths);
  const LengthCurve same = power(0.99, 1, kLengths);
  EXPECT_EQ(find_crossover(same, reference).where, Where::kAlwaysBehind);
  // The same up to 256, then clearly ahead: from 256 on.
  LengthCurve later = same;
  later[2].second *= 0.5;
  later[3].second *= 0.2;
  const Crossover found = find_crossover(later, reference);
  EXPECT_EQ(found.where, Where::kAt);
  EXPECT_NEAR(found.length, 256, 1e-9);
}

TEST(Crossover, ComparesOnlyLengthsThatBothHave) {
  // The reference stops at 1,024: nothing is said of 4,096.
  const LengthCurve shorter = power(1, 1, {64, 256, 1024});
  EXPECT_EQ(find_crossover(power(2, 1, kLengths), shorter).length, 1024);
  EXPECT_EQ(find_crossover({}, shorter).where, Where::kUnknown);
  EXPECT_EQ(find_crossover(power(1, 1, {32, 128}), shorter).where,
            Where::kUnknown);
  EXPECT_EQ(to_text({}), "-");
}

TEST(Crossover, IsWrittenByTwoDigitsWhereItIsInterpolated) {
  EXPECT_EQ(to_text({Where::kAt, 12345.6}), "12,000");
  EXPECT_EQ(to_text({Where::kAt, 98.7}), "99");
  EXPECT_EQ(to_text({Where::kAlwaysBehind, 16384}), "> 16,384");
}

// Counted one by one.
double pairs_by_hand(int64_t length, bool is_causal, int64_t window) {
  double pairs = 0;
  for (int64_t i = 0; i < length; ++i) {
    for (int64_t j = 0; j < length; ++j) {
      if (is_causal && j > i) continue;
      if (window >= 0 && std::abs(i - j) > window) continue;
      ++pairs;
    }
  }
  return pairs;
}

TEST(Floors, CountVisiblePairs) {
  for (const int64_t length : {1, 2, 7, 40}) {
    for (const int64_t window : {-1, 0, 1, 5, 39, 100}) {
      for (const bool causal : {true, false}) {
        EXPECT_EQ(visible_pairs(length, causal, window),
                  pairs_by_hand(length, causal, window))
            << length << " " << window << " " << causal;
      }
    }
  }
}

TEST(Floors, CountOperationsAsTheDesignDoes) {
  // A visible pair: 4 d forward, 10 d backward; cosFormer, with doubled
  // features, 8 d (d + 1) and 20 d (d + 1) a token.
  EXPECT_EQ(softmax_operations(10, 64, false), 10 * 4 * 64);
  EXPECT_EQ(softmax_operations(10, 64, true), 10 * (4 + 10) * 64);
  EXPECT_EQ(linear_operations(128, 64, false), 8 * 64 * 65);
  EXPECT_EQ(linear_operations(128, 64, true), (8 + 20) * 64 * 65);
}

TEST(Floors, LoopsGoOverAllMemory) {
  for (const std::string_view name : supported_isas()) {
    const Isa isa = isa_of(name);
    std::vector<float> data(640, 1.0f);
    bench_internal::update_memory(isa, data.data(), 640);
    for (const float x : data) ASSERT_EQ(x, 0.999f) << name;
    EXPECT_GT(bench_internal::fma_peak(isa, false), 1e8) << name;
    EXPECT_GT(bench_internal::read_memory(isa, data.data(), 640), 0) << name;
  }
}

TEST(Floors, ThreadsBeyondTheCoresAddNothing) {
  const std::vector<double> peaks(8, 1e11);
  EXPECT_DOUBLE_EQ(bench_internal::peak_of_all(peaks, 16), 8e11);
  EXPECT_DOUBLE_EQ(bench_internal::peak_of_all(peaks, 8), 8e11);
  EXPECT_DOUBLE_EQ(bench_internal::peak_of_all(peaks, 2), 2e11);
}

TEST(Cases, WorkIsKnownBeforeAnythingIsMade) {
  BenchOptions options;
  options.heads = 2;
  options.window = 16;
  for (const bool causal : {true, false}) {
    for (const BenchPass pass : {BenchPass::kForward, BenchPass::kBackward}) {
      const bench_internal::CaseMaker maker(options, pass, causal, 512, 16);
      for (const BenchKind& kind : bench_kinds()) {
        if (causal && !kind.no_causal.empty()) continue;
        const double work = maker.work(kind);  // nothing is made yet
        const auto made = maker.make(kind);
        ASSERT_TRUE(made.ok()) << made.status().message();
        if (kind.name == "bigbird") {
          EXPECT_LT(work, 2 * made->operations);
          EXPECT_GT(work, made->operations / 2);
        } else {
          EXPECT_EQ(work, made->operations) << kind.name;
        }
      }
    }
  }
  // Far more than any memory holds.
  const bench_internal::CaseMaker longest(options, BenchPass::kForward, true,
                                          int64_t{1} << 26, 1024);
  const bench_internal::CaseMaker step(options, BenchPass::kDecode, true,
                                       int64_t{1} << 26, 1024);
  for (const BenchKind& kind : bench_kinds()) {
    EXPECT_GT(longest.work(kind), 1e10) << kind.name;
    EXPECT_GE(step.work(kind), 1) << kind.name;
  }
}

TEST(FormatText, ThreeDigitsAndSizes) {
  EXPECT_EQ(three_digits(0.0012345), "0.00123");
  EXPECT_EQ(three_digits(9.999), "10.0");
  EXPECT_EQ(three_digits(12.345), "12.3");
  EXPECT_EQ(three_digits(999.6), "1,000");
  EXPECT_EQ(three_digits(123456), "123,000");
  EXPECT_EQ(three_digits(0), "0");
  EXPECT_EQ(byte_size(512), "512 B");
  EXPECT_EQ(byte_size(1536), "1.5 KiB");
  EXPECT_EQ(byte_size(int64_t{3} << 30), "3.0 GiB");
}

}  // namespace
}  // namespace cosformer
