// The rules of advise() on measurements made by hand. The rest of a layer 512
// wide takes 72 x 512^2 operations a token at 80% of 1e11 a second: 236
// microseconds a token.
#include <gtest/gtest.h>

#include <string>

#include "cosformer/bench.h"
#include "made_report.h"

namespace cosformer {
namespace {

constexpr double kRest = 72.0 * 512 * 512 / 0.8e11;  // seconds a token

// Exact softmax is as dear as the rest of the layer at 2,000 tokens; a window,
// performer and the others are cheap; decoding costs a microsecond a token.
BenchReport usual() {
  const double softmax = kRest / 2000 / 3;
  return made_report({{"sdpa", quadratic(3 * softmax)},
                      {"softmax", quadratic(softmax)},
                      {"window", linear(kRest / 10)},
                      {"performer", linear(kRest / 8)},
                      {"linear", linear(kRest / 50)},
                      {"cosformer", linear(kRest / 30)}},
                     {{"sdpa", linear(1e-6)},
                      {"softmax", linear(1e-6)},
                      {"window", constant(5e-5)},
                      {"performer", constant(2e-5)},
                      {"linear", constant(4e-6)},
                      {"cosformer", constant(5e-6)}});
}

AdviseOptions at(int64_t length) {
  AdviseOptions options;
  options.length = length;
  return options;
}

Advice advice_of(const AdviseOptions& options, const BenchReport& report) {
  auto advice = advise(options, report);
  EXPECT_TRUE(advice.ok()) << advice.status().message();
  return advice.ok() ? *advice : Advice{};
}

const KindAdvice& of(const Advice& advice, const std::string& kind) {
  for (const KindAdvice& each : advice.kinds) {
    if (each.kind == kind) return each;
  }
  throw std::runtime_error("no " + kind);
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Advise, ExactSoftmaxWhileItsCostIsBearable) {
  const BenchReport report = usual();
  const Advice advice = advice_of(at(1024), report);
  EXPECT_EQ(advice.kind, "softmax");
  EXPECT_NEAR(advice.rest_of_layer, kRest * 1024, 1e-9);
  EXPECT_EQ(advice.softmax_bearable.where, Crossover::Where::kAt);
  EXPECT_NEAR(advice.softmax_bearable.length, 2000, 1);
  EXPECT_TRUE(contains(advice.reason, "0.512 times as long")) << advice.reason;
  EXPECT_TRUE(advice.agrees);
}

TEST(Advise, AWindowWhileItsLayersReachOverTheLength) {
  const BenchReport report = usual();
  // 12 layers of 512 reach 6,144 tokens.
  EXPECT_EQ(advice_of(at(6144), report).kind, "window");
  EXPECT_TRUE(advice_of(at(6144), report).agrees);
  EXPECT_EQ(advice_of(at(6145), report).kind, "performer");
  AdviseOptions shallow = at(4096);
  shallow.layers = 4;
  EXPECT_EQ(advice_of(shallow, report).kind, "performer");
}

TEST(Advise, LinearKindsByTheirLossWhereTheyAreBearable) {
  BenchReport report = usual();
  for (BenchPoint& p : report.points) {
    if (p.kind == "performer") p.seconds *= 20;
  }
  const Advice advice = advice_of(at(32768), report);
  EXPECT_EQ(advice.kind, "linear");
  EXPECT_TRUE(advice.agrees);
  EXPECT_EQ(advice.rule_of_thumb, "linear");
}

TEST(Advise, TheCheapestWhereNothingIsBearable) {
  BenchReport report = usual();
  for (BenchPoint& p : report.points) p.seconds *= 1000;
  EXPECT_EQ(advice_of(at(4096), report).kind, "linear");
}

TEST(Advise, SaysWhereTheRuleOfThumbDiffers) {
  BenchReport report = usual();
  for (BenchPoint& p : report.points) {
    if (p.kind == "softmax") p.seconds /= 10;
  }
  const Advice advice = advice_of(at(4096), report);
  EXPECT_EQ(advice.kind, "softmax");
  EXPECT_EQ(advice.rule_of_thumb, "window");
  EXPECT_FALSE(advice.agrees);
  EXPECT_EQ(advice.softmax_bearable.where, Crossover::Where::kAlwaysBehind);
  EXPECT_TRUE(contains(advice_text(advice, at(4096), report), "differs"));
}

TEST(Advise, InterpolatesAndExtrapolatesOnLogLogLines) {
  const BenchReport report = usual();
  const Advice between = advice_of(at(512), report);
  const auto& inside = of(between, "softmax").training;
  ASSERT_TRUE(inside);
  EXPECT_NEAR(inside->seconds, kRest / 2000 * 512 * 512, 1e-9);
  EXPECT_FALSE(inside->is_extrapolated);
  const Advice beyond = advice_of(at(65536), report);
  const auto& outside = of(beyond, "softmax").training;
  ASSERT_TRUE(outside);
  EXPECT_NEAR(outside->seconds, kRest / 2000 * 65536.0 * 65536.0, 1e-6);
  EXPECT_TRUE(outside->is_extrapolated);
  EXPECT_NEAR(of(beyond, "linear").decode->seconds, 4e-6, 1e-12);
}

TEST(Advise, LinesEndAtSixteenTimesTheLongestLength) {
  BenchReport report = usual();
  EXPECT_TRUE(advise(at(65536), report).ok());
  EXPECT_EQ(advise(at(65537), report).status().message(),
            "length: found 65537, expected at most 65536, 16 times the longest "
            "measured, 4096: measure longer by more --seconds or `cosformer "
            "bench --lengths`");
  // A kind that was measured less far than others.
  for (BenchPoint& p : report.points) {
    if (p.kind == "softmax" && p.length > 256) p.left_out = "no time";
  }
  const Advice advice = advice_of(at(4097), report);
  EXPECT_EQ(of(advice, "softmax").excluded,
            "measured up to 256 tokens, which tells up to 4,096");
  EXPECT_FALSE(of(advice, "softmax").training);
  EXPECT_EQ(of(advice, "linear").excluded, "");
  EXPECT_TRUE(check_advise_bench(at(16 * 16384)).ok());
  EXPECT_TRUE(contains(check_advise_bench(at(16 * 16384 + 1)).message(),
                       "expected at most 262144"));
}

TEST(Advise, LargeOptionsSaturate) {
  BenchReport report = usual();
  report.options.window = int64_t{1} << 26;
  report.options.num_features = int64_t{1} << 26;
  AdviseOptions options = at(1000);
  options.layers = int64_t{1} << 37;  // x window: 2^63
  const Advice deep = advice_of(options, report);
  for (const KindAdvice& each : deep.kinds) {
    EXPECT_GT(each.state_bytes, int64_t{1} << 50) << each.kind;
    EXPECT_GT(each.training_bytes, int64_t{1} << 50) << each.kind;
  }
  EXPECT_EQ(of(deep, "performer").state_bytes, 9'000'000'000'000'000'000);
  // The window reaches over all.
  for (BenchPoint& p : report.points) {
    if (p.kind == "softmax") p.seconds *= 1e6;
  }
  EXPECT_EQ(advice_of(options, report).kind, "window");
}

TEST(Advise, OneIsNotPlural) {
  BenchReport report = usual();
  report.options.heads = 1;
  AdviseOptions options = at(1);
  options.layers = 1;
  options.heads = 2;
  const std::string text =
      advice_text(advice_of(options, report), options, report);
  for (const char* part : {"for 1 token, causal, 2 heads of 64, 1 layer, batch",
                           "from the 1 head and", "the one layer"}) {
    EXPECT_TRUE(contains(text, part)) << text;
  }
  for (const char* part : {" 1 tokens", " 1 layers", " 1 heads"}) {
    EXPECT_FALSE(contains(text, part)) << text;
  }
}

TEST(Advise, ScalesToHeadsAndBatch) {
  const BenchReport report = usual();
  AdviseOptions options = at(1024);
  options.heads = 16;
  options.batch = 3;
  const Advice advice = advice_of(options, report);
  const double one =
      of(advice_of(at(1024), report), "softmax").training->seconds;
  EXPECT_NEAR(of(advice, "softmax").training->seconds, 6 * one, 1e-9);
  // Twice the width is four times the rest of a layer.
  EXPECT_NEAR(advice.rest_of_layer, 3 * 4 * kRest * 1024, 1e-6);
}

TEST(Advise, DecodingWeighsTheReadingOfTheWeights) {
  // 12 x 512^2 weights of 4 bytes at 1e10 bytes a second: 1.26 milliseconds, so
  // a cache is bearable up to 1,258 tokens at a microsecond each.
  AdviseOptions options = at(1024);
  options.is_decoding = true;
  const BenchReport report = usual();
  Advice advice = advice_of(options, report);
  EXPECT_EQ(advice.kind, "softmax");
  EXPECT_NEAR(advice.rest_of_layer, 12.0 * 512 * 512 * 4 / 1e10, 1e-9);
  EXPECT_NEAR(advice.softmax_bearable.length, 1258, 1);
  options.length = 4096;
  EXPECT_EQ(advice_of(options, report).kind, "window");
}

TEST(Advise, WhatDoesNotFitIsMarkedAndNotChosen) {
  AdviseOptions options = at(1000);
  options.is_decoding = true;
  options.layers = 2;
  // Keys and values of 8 heads of 64 in float32, two layers; the window's ring
  // is shorter.
  const int64_t cache = 1000 * 2 * 8 * 64 * 4 * 2;
  const BenchReport report = usual();
  options.memory = cache;
  const Advice fits = advice_of(options, report);
  EXPECT_EQ(of(fits, "softmax").state_bytes, cache);
  EXPECT_EQ(of(fits, "softmax").excluded, "");
  EXPECT_EQ(of(fits, "window").state_bytes, 513 * 2 * 8 * 64 * 4 * 2);
  EXPECT_EQ(of(fits, "cosformer").state_bytes, 8 * 2 * 64 * 65 * 4 * 2);
  EXPECT_EQ(fits.kind, "softmax");
  options.memory = cache - 1;
  const Advice less = advice_of(options, report);
  EXPECT_TRUE(contains(of(less, "softmax").excluded, "does not fit"));
  EXPECT_EQ(less.kind, "window");
  options.memory = 1;
  const Advice none = advice_of(options, report);
  EXPECT_EQ(none.kind, "");
  EXPECT_TRUE(contains(advice_text(none, options, report), "none of these"));
}

TEST(Advise, TrainingKeepsWhatTheBackwardReads) {
  const Advice advice = advice_of(at(1024), usual());
  // Queries, keys, values and outputs of 12 layers, and one layer's peak.
  EXPECT_EQ(of(advice, "linear").training_bytes,
            4 * 1024 * 512 * 4 * 12 + 1024 * 100);
}

TEST(Advise, AKindWithoutTheFormSaysWhy) {
  BenchReport report = usual();
  report.options.kinds.push_back("linformer");
  const Advice causal = advice_of(at(256), report);
  EXPECT_TRUE(contains(of(causal, "linformer").excluded, "no causal form"));
  EXPECT_TRUE(contains(advice_text(causal, at(256), report), "no causal form"));
}

TEST(Advise, NamesWhatAReportLacks) {
  const BenchReport report = usual();
  AdviseOptions options = at(256);
  options.head_dim = 128;
  EXPECT_TRUE(contains(advise(options, report).status().message(),
                       "no head_dim 128, only 64"));
  options = at(256);
  options.threads = 2;
  EXPECT_TRUE(contains(advise(options, report).status().message(),
                       "with 2 threads, only with 1"));
  BenchReport both = report;
  both.options.threads = {1, 2};
  EXPECT_TRUE(contains(advise(at(256), both).status().message(),
                       "1, 2: choose one by --threads"));
  options = at(256);
  options.is_causal = false;
  EXPECT_TRUE(contains(advise(options, report).status().message(),
                       "no non-causal measurement"));
  options = at(0);
  EXPECT_TRUE(
      contains(advise(options, report).status().message(), "length: found 0"));
  options = at(256);
  options.threads = -1;
  EXPECT_TRUE(contains(validate(options).message(), "threads: found -1"));
  options = at(int64_t{1} << 40);
  options.batch = int64_t{1} << 40;
  EXPECT_TRUE(contains(advise(options, report).status().message(),
                       "length x head-dim x heads x layers x batch: found"));
}

TEST(Advise, TheTextPointsToTheLosses) {
  const BenchReport report = usual();
  const std::string text =
      advice_text(advice_of(at(256), report), at(256), report);
  EXPECT_TRUE(contains(text, "Speed is not quality"));
  EXPECT_TRUE(contains(text, "docs/training.md"));
  EXPECT_TRUE(contains(text, "what each gives up"));
}

TEST(BenchJson, ReadsBackWhatItWrote) {
  BenchReport report = usual();
  report.points[3].left_out = "no time";
  report.points[3].predicted = 12;
  const std::string text = to_json(report);
  auto read = bench_report_from_json(text, "bench.json");
  ASSERT_TRUE(read.ok()) << read.status().message();
  EXPECT_EQ(to_json(*read), text);
  EXPECT_EQ(bench_markdown(*read), bench_markdown(report));
}

TEST(BenchJson, NothingIsEmpty) {
  const BenchReport good = usual();
  BenchReport report = good;
  const auto message = [&] {
    const auto read = bench_report_from_json(to_json(report), "b.json");
    return read.ok() ? "" : read.status().message();
  };
  report.options.kinds.clear();
  EXPECT_TRUE(contains(message(), "options.kinds: found an empty array"));
  report = good;
  report.peaks.clear();
  EXPECT_TRUE(contains(message(), "b.json: peaks: found an empty array"));
  report = good;
  report.points.clear();
  EXPECT_TRUE(contains(message(), "b.json: points: found an empty array"));
}

TEST(BenchJson, RefusesDeepNesting) {
  for (const int depth : {100, 200000}) {
    std::string arrays(static_cast<size_t>(depth), '[');
    arrays += std::string(static_cast<size_t>(depth), ']');
    for (const std::string& text : {arrays, "{\"peaks\": " + arrays + "}"}) {
      const auto read = bench_report_from_json(text, "b.json");
      ASSERT_FALSE(read.ok());
      EXPECT_TRUE(contains(read.status().message(), "more than 64 deep"))
          << read.status().message();
    }
  }
}

TEST(BenchJson, ErrorsNameTheKey) {
  const std::string good = to_json(usual());
  const auto broken = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    text.replace(at, from.size(), to);
    const auto read = bench_report_from_json(text, "b.json");
    EXPECT_FALSE(read.ok()) << to;
    return read.ok() ? "" : read.status().message();
  };
  EXPECT_EQ(broken("\"format_version\": 1", "\"format_version\": 9"),
            "b.json: format_version: found 9, expected 1");
  EXPECT_EQ(broken("\"heads\": 8", "\"heads\": \"8\""),
            "b.json: options.heads: found \"8\", expected a whole number, 0 or "
            "more");
  EXPECT_EQ(broken("\"heads\": 8", "\"heds\": 8"),
            "b.json: options.heads: missing");
  EXPECT_EQ(broken("\"pass\": \"forward\"", "\"pass\": \"sideways\""),
            "b.json: points[0].pass: found \"sideways\", expected forward, "
            "backward or decode");
  EXPECT_EQ(broken("\"kind\": \"cosformer\"", "\"kind\": \"cosfromer\""),
            "b.json: points[0].kind: unknown kind \"cosfromer\"");
  EXPECT_TRUE(contains(broken("\"threads\": [\n   1\n  ]", "\"threads\": [0]"),
                       "options: threads: found 0"));
  EXPECT_EQ(broken("\"length\": 256", "\"length\": 64"),
            "b.json: points: found cosformer, forward, length 64 twice, "
            "expected each point once");
  EXPECT_EQ(broken("\"heads\": 8", "\"heads\": [8, [9]]"),
            "b.json: options.heads: found an array, expected a whole number, 0 "
            "or more");
  EXPECT_EQ(broken("\"heads\": 8", "\"heads\": 9007199254740993"),
            "b.json: options.heads: found 9007199254740993, expected a whole "
            "number below 2^53");
  EXPECT_EQ(
      broken("\"flops\": 100000000000.0", "\"flops\": 1e300"),
      "b.json: peaks[0].flops: found 1e+300, expected a number below 2^53");
  broken("\"flops\": 100000000000.0", "\"flops\": 1e999");
  EXPECT_EQ(broken("\"threads\": [\n   1\n  ]", "\"threads\": []"),
            "b.json: options.threads: found an empty array, expected at least "
            "one");
  EXPECT_EQ(broken("\"threads\": [\n   1\n  ]", "\"threads\": [1, 2]"),
            "b.json: peaks: found none of threads 2, expected one of each in "
            "options.threads");
  EXPECT_TRUE(contains(bench_report_from_json("{", "b.json").status().message(),
                       "b.json: not JSON"));
  EXPECT_TRUE(
      contains(bench_report_from_json("[]", "b.json").status().message(),
               "expected an object"));
}

}  // namespace
}  // namespace cosformer
