// Sizes, lengths and types at the edges of the softmax engine; threads, splits
// and memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "tests/kernels/cover.h"
#include "tests/kernels/softmax_problem.h"
#include "tests/kernels/tokens.h"

namespace cosformer {
namespace {

using testing::all_finite;
using testing::bits_of;
using testing::cut;
using testing::for_each_isa;
using testing::relative_error;
using testing::softmax_problem;
using testing::SoftmaxOutputs;
using testing::SoftmaxProblem;
using testing::Tensor;
using testing::values_of;

SoftmaxOutputs run_all(const SoftmaxProblem& p) {
  SoftmaxOutputs o = run(p, serial_executor());
  EXPECT_TRUE(o.status.ok()) << o.status.message();
  return o;
}
void scale_by(Tensor& x, double factor) {
  testing::for_each_element(x, [&](int64_t b, int64_t s, int64_t h, int64_t c) {
    x.set(b, s, h, c, factor * x.get(b, s, h, c));
  });
}

// One head of `len` tokens: made without asking which of them nothing sees,
// which is quadratic.
SoftmaxProblem of_length(int64_t len, const std::string& text) {
  SoftmaxProblem p = softmax_problem(
      str_cat("q_len=4 kv_len=4 head_dim=64 value_dim=64 ", text));
  for (Tensor SoftmaxProblem::* x :
       {&SoftmaxProblem::q, &SoftmaxProblem::k, &SoftmaxProblem::v,
        &SoftmaxProblem::d_out}) {
    p.*x = Tensor({1, len, 1, (p.*x).size()[3]}, p.q.dtype());
    (p.*x).fill(0.5);
  }
  if (!p.global_mask.empty()) {
    p.global_mask.assign(static_cast<size_t>(len), 0);
    p.global_mask[0] = 1;
  }
  return p;
}

TEST(SoftmaxNumerics, ValueOneGivesOneWhereverAKeyIsSeen) {
  for_each_isa([] {
    for (const char* text :
         {"causal=1", "", "reach=20", "window=both causal=1",
          "window=left dilation=5 globals=scattered", "block_size=16 reach=3",
          "causal=1 mask=holes", "dtype=float64", "dtype=bfloat16 group=2",
          "dtype=float16 window=wide", "head_dim=3 causal=1", "packing=many",
          "starts=rows causal=1"}) {
      SoftmaxProblem p = softmax_problem(
          str_cat("q_len=200 kv_len=200 kv_heads=2 head_dim=32 ", text));
      p.v.fill(1);
      const SoftmaxOutputs o = run_forward(p, serial_executor());
      ASSERT_TRUE(o.status.ok()) << o.status.message();
      int64_t reached = 0;
      for (int64_t s = 0; s < p.q.size()[1]; ++s)
        for (int64_t h = 0; h < p.q.size()[2]; ++h) {
          const double got = o.out.get(0, s, h, 0);
          if (o.log_sum_exp.get(0, s, h, 0) == -testing::kInf) {
            EXPECT_EQ(got, 0);
            continue;
          }
          ++reached;
          EXPECT_NEAR(got, 1.0, 2e-6) << text << " s=" << s << " h=" << h;
        }
      EXPECT_GT(reached, p.q.size()[1] / 4) << text;
    }
  });
}

TEST(SoftmaxNumerics, QueriesAndKeysOfSize1e4StayFinite) {
  for_each_isa([] {
    for (const char* text : {"causal=1", "", "window=both reach=9",
                             "dtype=float64", "globals=first causal=1"}) {
      SoftmaxProblem p =
          softmax_problem(str_cat("q_len=300 kv_len=300 head_dim=64 ", text));
      scale_by(p.q, 1e4);
      scale_by(p.k, 1e4);
      const SoftmaxOutputs o = run_all(p);
      EXPECT_TRUE(all_finite(o.out) && all_finite(o.log_sum_exp)) << text;
      EXPECT_TRUE(all_finite(o.dq) && all_finite(o.dk) && all_finite(o.dv));
      // Scores of 1e8 are a few units apart in float32: all weight is on the
      // largest, which both find.
      EXPECT_LE(relative_error(o.out.values(), run_reference(p).out.values()),
                1e-5)
          << text;
    }
  });
}

// Scores of some tens: where the running maximum rises tile after tile.
TEST(SoftmaxNumerics, PeakedRowsMatchReference) {
  for_each_isa([] {
    for (const char* text :
         {"causal=1", "dtype=float64 causal=1", "reach=5", "window=wide"}) {
      SoftmaxProblem p =
          softmax_problem(str_cat("q_len=400 kv_len=400 head_dim=16 ", text));
      // Keys grow along the sequence; so does every row's maximum.
      testing::for_each_element(
          p.k, [&p](int64_t b, int64_t s, int64_t h, int64_t c) {
            p.k.set(b, s, h, c,
                    p.k.get(b, s, h, c) * 0.02 * static_cast<double>(s));
          });
      const SoftmaxOutputs o = run_all(p), want = run_reference(p);
      // float32 scores of size 30 are exact to 4e-6.
      const double allowed = p.q.dtype() == DType::kFloat64 ? 1e-12 : 2e-5;
      for (Tensor SoftmaxOutputs::* x :
           {&SoftmaxOutputs::out, &SoftmaxOutputs::log_sum_exp,
            &SoftmaxOutputs::dq, &SoftmaxOutputs::dk, &SoftmaxOutputs::dv})
        EXPECT_LE(relative_error((o.*x).values(), (want.*x).values()), allowed)
            << text;
    }
  });
}

// A scale below 0 prefers the least alike.
TEST(SoftmaxNumerics, NegativeScalesMatchReference) {
  for_each_isa([] {
    SoftmaxProblem p = softmax_problem("q_len=70 kv_len=70 causal=1 reach=3");
    p.options.scale = -0.5;
    EXPECT_EQ(compare(p, run_all(p), run_reference(p)), "");
  });
}

// A bias of -infinity, or far below any score, is a weight of 0 wherever the
// row's other keys stand: most rows see such a key first.
TEST(SoftmaxNumerics, ABiasOfMinusInfinityIsAWeightOfZero) {
  for_each_isa([] {
    for (const char* text : {"causal=1", "causal=0"}) {
      for (const double hidden : {-testing::kInf, -1e9, -1e30}) {
        SoftmaxProblem p = softmax_problem(
            str_cat("q_len=300 kv_len=300 kv_heads=2 reach=299 ", text));
        // Only the key itself and the 40 before it weigh.
        for (int64_t h = 0; h < 2; ++h)
          for (int64_t e = 0; e < 599; ++e)
            if (e < 259 || e > 299) p.relative_bias.set(0, 0, h, e, hidden);
        EXPECT_EQ(compare(p, run_all(p), run_reference(p)), "")
            << text << " " << hidden;
      }
    }
  });
}

// Where a bias hides a key from every query, its value may be anything.
TEST(SoftmaxNumerics, WhatABiasHidesDoesNotLeak) {
  for_each_isa([] {
    for (const char* text : {"causal=1", "causal=0"}) {
      for (const double hidden : {-testing::kInf, -1e9, -1e30}) {
        SoftmaxProblem p =
            softmax_problem(str_cat("q_len=100 kv_len=300 kv_heads=2 reach=299 "
                                    "starts=bottom-right ",
                                    text));
        for (int64_t h = 0; h < 2; ++h) {
          for (int64_t e = 0; e < 599; ++e)
            if (e < 259 || e > 299) p.relative_bias.set(0, 0, h, e, hidden);
          // While nothing else was seen, keys hidden by a finite bias weigh up
          // to 2^30.
          const double value = std::isinf(hidden) ? 1e36 : 1e28;
          for (int64_t j = 0; j < 160; ++j) p.v.set(0, j, h, 0, value);
        }
        EXPECT_EQ(compare(p, run_all(p), run_reference(p)), "")
            << text << " " << hidden;
      }
    }
  });
}

TEST(SoftmaxNumerics, Float16KeysOf50StayFiniteOver8192Tokens) {
  for_each_isa([] {
    for (const char* call :
         {"q_len=100", "q_len=100 causal=1 starts=bottom-right",
          "q_len=8192 window=wide causal=1"}) {
      SoftmaxProblem p = softmax_problem(
          str_cat("kv_len=8192 head_dim=16 value_dim=16 dtype=float16 ", call));
      p.k.fill(50);
      const SoftmaxOutputs o = run_all(p);
      EXPECT_TRUE(all_finite(o.out)) << call;
      EXPECT_TRUE(all_finite(o.dq) && all_finite(o.dk) && all_finite(o.dv));
    }
  });
}

TEST(SoftmaxNumerics, BooleanMasksWorkWithHalfTypes) {
  for_each_isa([] {
    for (const char* dtype : {"float16", "bfloat16"}) {
      const SoftmaxProblem p = softmax_problem(str_cat(
          "batch=2 q_len=66 kv_len=66 mask=holes reach=4 dtype=", dtype));
      const SoftmaxOutputs o = run_all(p);
      EXPECT_EQ(o.out.dtype(), p.q.dtype());
      EXPECT_EQ(compare(p, o, run_reference(p)), "") << dtype;
    }
  });
}

TEST(SoftmaxNumerics, Tokens65536StayFiniteAndExactAtTheEnd) {
  const int64_t len = testing::kSanitized ? 16384 : 65536;
  for (const char* kind :
       {"window=wide causal=1", "window=both dilation=5 globals=first",
        "window=left dtype=bfloat16"}) {
    SoftmaxProblem p = of_length(len, str_cat("head_dim=8 value_dim=8 ", kind));
    testing::Random random(2);
    for (Tensor* x : {&p.q, &p.k, &p.v, &p.d_out}) x->fill_normal(random);
    const SoftmaxOutputs o = run_all(p);
    for (const Tensor* x : {&o.out, &o.dq, &o.dk, &o.dv})
      EXPECT_TRUE(all_finite(*x)) << kind;
    // The last query alone, against all keys.
    SoftmaxProblem last = p;
    last.q = cut(p.q, 0, len - 1, len);
    last.d_out = cut(p.d_out, 0, len - 1, len);
    last.q_start = {len - 1};
    last.kv_start = {0};
    const SoftmaxOutputs want = run_reference(last);
    ASSERT_TRUE(want.status.ok()) << want.status.message();
    EXPECT_LE(
        relative_error(values_of(o.out, 0, len - 1, len), want.out.values()),
        p.q.dtype() == DType::kBFloat16 ? 0x1p-8 : 3e-6)
        << kind;
  }
}

TEST(SoftmaxNumerics, GradientsMatchAtLengthsOneOneAnd256Three) {
  for_each_isa([] {
    for (const char* sizes : {"q_len=1 kv_len=1", "q_len=256 kv_len=3"}) {
      for (const char* kind : {"", "causal=1 reach=2", "window=left"}) {
        const SoftmaxProblem p =
            softmax_problem(str_cat(sizes, " head_dim=64 ", kind));
        EXPECT_EQ(compare(p, run_all(p), run_reference(p)), "") << p.text;
      }
    }
  });
}

TEST(SoftmaxNumerics, ThreadCountsGiveTheSameBits) {
  std::vector<int> counts = {1, 2, 3, 7};
  if (testing::kSanitized) counts = {3};
  for_each_isa([&counts] {
    for (const char* text :
         {"q_len=913 kv_len=913 causal=1 head_dim=64 reach=100",
          "q_len=257 kv_len=500 head_dim=40 group=2 dropout=20",
          "batch=3 q_len=255 kv_len=255 kv_heads=2 mask=holes causal=1",
          "q_len=700 kv_len=700 packing=many causal=1 reach=3",
          "q_len=300 kv_len=300 causal=1 dtype=bfloat16 group=4",
          "q_len=2500 kv_len=2500 causal=1 window=wide globals=first "
          "head_dim=16",
          "q_len=1 kv_len=9000 head_dim=16 reach=7",
          "q_len=900 kv_len=900 block_size=64 block_heads=1 kv_heads=2 "
          "head_dim=16 reach=64"}) {
      const SoftmaxProblem p = softmax_problem(text);
      const SoftmaxOutputs one = run_all(p);
      for (const int threads : counts) {
        auto pool = make_thread_pool(threads);
        const SoftmaxOutputs many = run(p, *pool);
        for (Tensor SoftmaxOutputs::* x :
             {&SoftmaxOutputs::out, &SoftmaxOutputs::log_sum_exp,
              &SoftmaxOutputs::dq, &SoftmaxOutputs::dk, &SoftmaxOutputs::dv,
              &SoftmaxOutputs::d_bias})
          EXPECT_EQ((many.*x).bits(), (one.*x).bits())
              << threads << " threads: " << text;
      }
    }
  });
}

// Queries taken in parts, at their positions: the same weights are dropped, the
// same keys seen.
TEST(SoftmaxNumerics, SplitsOfTheQueriesGiveTheSame) {
  for_each_isa([] {
    for (const char* text :
         {"dropout=50 causal=1", "dropout=10 reach=30 group=2",
          "dropout=30 window=both globals=scattered",
          "block_size=16 block_heads=1 kv_heads=2 causal=1"}) {
      const SoftmaxProblem p =
          softmax_problem(str_cat("q_len=150 kv_len=150 head_dim=24 ", text));
      const SoftmaxOutputs whole = run_all(p);
      Tensor dk_sum(p.k.size(), DType::kFloat64);
      dk_sum.fill(0);
      const int64_t cuts[] = {0, 1, 64, 101, 150};
      for (size_t n = 0; n + 1 < std::size(cuts); ++n) {
        SoftmaxProblem part = p;
        part.q = cut(p.q, 0, cuts[n], cuts[n + 1]);
        part.d_out = cut(p.d_out, 0, cuts[n], cuts[n + 1]);
        part.q_start = {cuts[n]};
        part.kv_start = {0};
        const SoftmaxOutputs o = run_all(part);
        EXPECT_LE(relative_error(o.out.values(),
                                 values_of(whole.out, 0, cuts[n], cuts[n + 1])),
                  1e-6)
            << text;
        testing::for_each_element(o.dk, [&](int64_t b, int64_t s, int64_t h,
                                            int64_t c) {
          dk_sum.set(b, s, h, c, dk_sum.get(b, s, h, c) + o.dk.get(b, s, h, c));
        });
      }
      EXPECT_LE(relative_error(dk_sum.values(), whole.dk.values()), 1e-5)
          << text;
    }
  });
}

// Only what is asked for is written, and it does not depend on what is.
TEST(SoftmaxNumerics, EachGradientAloneEqualsAllTogether) {
  for_each_isa([] {
    for (const char* text :
         {"batch=2 q_len=70 kv_len=70 kv_heads=2 causal=1 reach=9",
          "q_len=300 kv_len=200 group=2 window=both globals=first reach=9 "
          "dropout=20"}) {
      const SoftmaxProblem p = softmax_problem(text);
      const SoftmaxOutputs all = run_all(p);
      for (int which = 0; which < 4; ++which) {
        Tensor dq(p.q.size(), p.q.dtype()), dk(p.k.size(), p.q.dtype()),
            dv(p.v.size(), p.q.dtype()),
            d_bias(p.relative_bias.size(), p.q.dtype());
        const Status status = softmax_attention_backward(
            p.options, p.inputs(), all.out.view(), all.log_sum_exp.view().data,
            p.d_out.view(), which == 0 ? dq.view() : View4{},
            which == 1 ? dk.view() : View4{}, which == 2 ? dv.view() : View4{},
            which == 3 ? d_bias.view().data : nullptr, serial_executor());
        ASSERT_TRUE(status.ok()) << status.message();
        const Tensor* got[] = {&dq, &dk, &dv, &d_bias};
        const Tensor* want[] = {&all.dq, &all.dk, &all.dv, &all.d_bias};
        for (int other = 0; other < 4; ++other) {
          const Tensor untouched(got[other]->size(), p.q.dtype());
          EXPECT_EQ(got[other]->bits(),
                    (other == which ? *want[other] : untouched).bits())
              << which << " " << other;
        }
      }
      Tensor out(all.out.size(), p.q.dtype());
      ASSERT_TRUE(softmax_attention_forward(p.options, p.inputs(), out.view(),
                                            nullptr, serial_executor())
                      .ok());
      EXPECT_EQ(out.bits(), all.out.bits());
    }
  });
}

TEST(SoftmaxNumerics, TwiceIsIdentical) {
  for_each_isa([] {
    const SoftmaxProblem p = softmax_problem(
        "batch=2 q_len=130 kv_len=130 kv_heads=2 group=2 reach=9 dropout=40");
    const SoftmaxOutputs one = run_all(p), two = run_all(p);
    for (Tensor SoftmaxOutputs::* x :
         {&SoftmaxOutputs::out, &SoftmaxOutputs::dq, &SoftmaxOutputs::dk,
          &SoftmaxOutputs::dv, &SoftmaxOutputs::d_bias})
      EXPECT_EQ((one.*x).bits(), (two.*x).bits());
    SoftmaxProblem other = p;
    other.options.dropout_seed += 1;
    EXPECT_NE(run_all(other).out.bits(), one.out.bits());
  });
}

// Gradients and outputs of any strides are the same numbers.
TEST(SoftmaxNumerics, LayoutsGiveTheSameBits) {
  for_each_isa([] {
    const auto of = [](const char* layout) {
      return softmax_problem(
          str_cat("batch=2 q_len=90 kv_len=130 kv_heads=2 group=2 head_dim=40 "
                  "value_dim=24 causal=1 starts=bottom-right reach=9 layout=",
                  layout));
    };
    const SoftmaxOutputs contiguous = run_all(of("contiguous"));
    for (const char* layout : {"padded", "transposed", "offset", "mixed"}) {
      const SoftmaxProblem p = of(layout);
      for (int64_t outputs = 0; outputs <= testing::kNumLayouts; ++outputs) {
        const SoftmaxOutputs o = run(p, serial_executor(), outputs);
        for (Tensor SoftmaxOutputs::* x :
             {&SoftmaxOutputs::out, &SoftmaxOutputs::dq, &SoftmaxOutputs::dk,
              &SoftmaxOutputs::dv, &SoftmaxOutputs::d_bias}) {
          EXPECT_EQ((o.*x).bits(), (contiguous.*x).bits()) << layout;
          EXPECT_TRUE((o.*x).gaps_untouched()) << layout;
        }
      }
    }
  });
}

// On a machine with AMX: unless it is forced, only calls that are faster on
// tiles take them.
TEST(SoftmaxNumerics, ShortCallsTakeNoTilesUnlessForced) {
  if (supported_isas().front() != "amx") GTEST_SKIP() << "no AMX";
  const auto bits_on = [](std::string_view isa, const char* text) {
    EXPECT_TRUE(force_isa(isa).ok());
    const SoftmaxOutputs o =
        run_forward(softmax_problem(str_cat("head_dim=64 causal=1 ", text)),
                    serial_executor());
    EXPECT_TRUE(force_isa("").ok());
    return o.out.bits();
  };
  const char* const kShort = "q_len=100 kv_len=100";
  const char* const kLong = "q_len=300 kv_len=300";
  EXPECT_EQ(bits_on("", kShort), bits_on("avx512", kShort));
  EXPECT_NE(bits_on("amx", kShort), bits_on("avx512", kShort));
  EXPECT_NE(bits_on("", kLong), bits_on("avx512", kLong));
  EXPECT_EQ(bits_on("", kLong), bits_on("amx", kLong));
}

// Beyond inputs, outputs and gradients: what AlignedBuffer held at most.
size_t extra_memory(const SoftmaxProblem& p, int threads, bool backward) {
  auto pool = make_thread_pool(threads);
  const size_t before = allocation_stats().current_bytes;
  reset_peak_allocation();
  const SoftmaxOutputs o = backward ? run(p, *pool) : run_forward(p, *pool);
  EXPECT_TRUE(o.status.ok()) << o.status.message();
  EXPECT_EQ(allocation_stats().current_bytes, before);
  return allocation_stats().peak_bytes - before;
}

TEST(SoftmaxMemory, WindowsAt65536TokensTakeAFewTimesTheQueries) {
  const int64_t len = testing::kSanitized ? 16384 : 65536;
  const size_t queries = static_cast<size_t>(len) * 64 * sizeof(float);
  for (const char* text : {"window=wide causal=1", "window=both globals=first",
                           "window=left dilation=5"}) {
    for (int threads : {1, 2}) {
      const SoftmaxProblem p = of_length(len, text);
      const size_t forward = extra_memory(p, threads, false),
                   both = extra_memory(p, threads, true);
      std::printf("extra memory, %s, %d threads: forward %.3f x q, both %.3f\n",
                  text, threads,
                  static_cast<double>(forward) / static_cast<double>(queries),
                  static_cast<double>(both) / static_cast<double>(queries));
      EXPECT_LT(forward, queries) << text;
      // Where heads are few, up to 8 slices of the keys sum dq apart.
      EXPECT_LT(both, 9 * queries) << text;
    }
  }
}

TEST(SoftmaxMemory, GrowsAtMostInProportionToTheLength) {
  // From here on the backward has as many slices as it ever takes.
  const int64_t len = testing::kSanitized ? 2048 : 4096;
  for (const char* text : {"", "causal=1", "window=wide", "reach=100"}) {
    const size_t small = extra_memory(of_length(len, text), 2, true),
                 large = extra_memory(of_length(2 * len, text), 2, true);
    EXPECT_LE(large, 2 * small + 65536) << text;
  }
}

}  // namespace
}  // namespace cosformer
