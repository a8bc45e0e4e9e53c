// Sizes, lengths and types at the edges; threads, memory and time.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/kernels/compare.h"
#include "tests/kernels/grid.h"
#include "tests/kernels/problem.h"
#include "tests/kernels/tokens.h"

namespace cosformer {
namespace {

using testing::all_finite;
using testing::compare;
using testing::for_each_isa;
using testing::make_problem;
using testing::make_state;
using testing::Outputs;
using testing::parse_point;
using testing::Problem;
using testing::relative_error;
using testing::State;
using testing::Tensor;

Problem problem_of(const std::string& text) {
  const auto point = parse_point(text);
  EXPECT_TRUE(point.has_value()) << text;
  return make_problem(*point);
}

TEST(LinearNumerics, ValueOneGivesOneWhereverTheDenominatorReachesEps) {
  for_each_isa([] {
    for (const char* text :
         {"cosine=exact causal=1", "cosine=exact", "feature_map=elu1 causal=1",
          "feature_map=identity cosine=far group=2", "causal=1 mask=holes",
          "causal=1 cosine=far dtype=float64", "dtype=bfloat16 cosine=exact",
          "head_dim=3 causal=1",
          "feature_map=elu1 packing=many cosine=exact"}) {
      Problem p = problem_of(
          str_cat("q_len=200 kv_len=200 kv_heads=2 head_dim=32 ", text));
      p.v.fill(1);
      const Outputs o = run_forward(p, serial_executor());
      ASSERT_TRUE(o.status.ok()) << o.status.message();
      int64_t reached = 0;
      for (int64_t s = 0; s < p.q.size()[1]; ++s)
        for (int64_t h = 0; h < p.q.size()[2]; ++h) {
          if (!(o.denominator.get(0, s, h, 0) >= p.options.eps)) continue;
          ++reached;
          EXPECT_NEAR(o.out.get(0, s, h, 0), 1.0, 3e-6)
              << text << " s=" << s << " h=" << h;
        }
      EXPECT_GT(reached, p.q.size()[1] / 2) << text;
    }
  });
}

// The same one token at a time.
TEST(LinearNumerics, ValueOneGivesOneWhenDecoding) {
  for_each_isa([] {
    Problem p = problem_of(
        "causal=1 q_len=1 kv_len=1 kv_heads=2 head_dim=32 feature_map=elu1");
    p.options.reweight_len = 300;
    p.v.fill(1);
    State state = make_state(p.options, p.inputs());
    state.kv_state.fill(0);
    state.k_sum.fill(0);
    state.start = state.position = {0};
    Tensor out({1, 1, 2, 8}, DType::kFloat32);
    testing::Random random(1);
    for (int64_t t = 0; t < 300; ++t) {
      p.q.fill_normal(random);
      p.k.fill_normal(random);
      ASSERT_TRUE(linear_attention_decode_step(p.options, p.inputs(),
                                               state.view(), out.view(),
                                               serial_executor())
                      .ok());
      EXPECT_NEAR(out.get(0, 0, 1, 7), 1.0, 1e-5) << t;
    }
  });
}

TEST(LinearNumerics, QueriesAndKeysOfSize1e4MatchReference) {
  for_each_isa([] {
    for (const char* text :
         {"cosine=exact causal=1", "feature_map=elu1", "cosine=far",
          "feature_map=elu1 causal=1 rotary=half state=both cosine=far"}) {
      Problem p =
          problem_of(str_cat("q_len=150 kv_len=150 head_dim=64 ", text));
      for (Tensor* x : {&p.q, &p.k})
        for (int64_t s = 0; s < 150; ++s)
          for (int64_t c = 0; c < 64; ++c)
            x->set(0, s, 0, c, 1e4 * x->get(0, s, 0, c));
      const Outputs o = run(p, serial_executor());
      EXPECT_TRUE(all_finite(o.out)) << text;
      EXPECT_TRUE(all_finite(o.dq) && all_finite(o.dk) && all_finite(o.dv));
      EXPECT_EQ(compare(p, o, run_reference(p)), "") << text;
    }
  });
}

// The rows of a call share the tables of angles: one whose middle is position 0
// and one that begins there must not take the other's.
TEST(LinearNumerics, RowsAroundPositionZeroMatchReference) {
  for_each_isa([] {
    Problem p = problem_of(
        "batch=3 q_len=64 kv_len=64 cosine=far head_dim=16 starts=rows");
    p.options.is_causal = true;
    p.q_start = {264, -32, 100};
    p.kv_start = {200, -32, -32};
    p.options.reweight_len = 200;
    const Outputs o = run(p, serial_executor());
    ASSERT_TRUE(o.status.ok()) << o.status.message();
    EXPECT_EQ(compare(p, o, run_reference(p)), "");
  });
}

TEST(LinearNumerics, Float16KeysOf50StayFiniteOver8192Tokens) {
  for_each_isa([] {
    for (const char* causal : {"causal=1", "causal=0"}) {
      Problem p = problem_of(str_cat(
          "q_len=8192 kv_len=8192 head_dim=16 value_dim=16 dtype=float16 "
          "cosine=exact ",
          causal));
      p.k.fill(50);
      const Outputs o = run(p, serial_executor());
      ASSERT_TRUE(o.status.ok()) << o.status.message();
      EXPECT_TRUE(all_finite(o.out));
      EXPECT_TRUE(all_finite(o.dq) && all_finite(o.dk) && all_finite(o.dv));
      EXPECT_FALSE(std::isnan(o.denominator.get(0, 8191, 0, 0)));
    }
  });
}

TEST(LinearNumerics, BooleanMasksWorkWithHalfTypes) {
  for_each_isa([] {
    for (const char* dtype : {"float16", "bfloat16"}) {
      const Problem p = problem_of(str_cat(
          "batch=2 q_len=66 kv_len=66 mask=holes cosine=exact dtype=", dtype));
      const Outputs o = run(p, serial_executor());
      EXPECT_EQ(o.out.dtype(), p.q.dtype());
      EXPECT_EQ(compare(p, o, run_reference(p)), "") << dtype;
    }
  });
}

TEST(LinearNumerics, Tokens65536StayFiniteAndExactAtTheEnd) {
  constexpr int64_t kLen = 65536;
  for (const char* kind : {"cosine=exact", "feature_map=elu1"}) {
    const Problem p = problem_of(str_cat(
        "causal=1 q_len=", kLen, " kv_len=", kLen, " head_dim=8 ", kind));
    const Outputs o = run(p, serial_executor());
    ASSERT_TRUE(o.status.ok()) << o.status.message();
    for (const Tensor* x : {&o.out, &o.dq, &o.dk, &o.dv})
      EXPECT_TRUE(all_finite(*x)) << kind;
    // The last query alone, against all keys.
    Problem last = p;
    last.q = Tensor({1, 1, 1, 8}, DType::kFloat32);
    for (int64_t c = 0; c < 8; ++c)
      last.q.set(0, 0, 0, c, p.q.get(0, kLen - 1, 0, c));
    last.d_out = Tensor({1, 1, 1, 8}, DType::kFloat32);
    last.d_out.fill(0);
    last.q_start = {kLen - 1};
    const Outputs want = run_reference(last);
    ASSERT_TRUE(want.status.ok()) << want.status.message();
    std::vector<double> row;
    for (int64_t c = 0; c < 8; ++c) row.push_back(o.out.get(0, kLen - 1, 0, c));
    EXPECT_LE(relative_error(row, want.out.values()), 3e-5) << kind;
  }
}

TEST(LinearNumerics, GradientsMatchAtLengthsOneOneAnd256Three) {
  for_each_isa([] {
    for (const char* sizes : {"q_len=1 kv_len=1", "q_len=256 kv_len=3"}) {
      for (const char* kind :
           {"cosine=far", "cosine=exact causal=1", "feature_map=elu1"}) {
        const Problem p = problem_of(str_cat(sizes, " head_dim=64 ", kind));
        EXPECT_EQ(compare(p, run(p, serial_executor()), run_reference(p)), "")
            << p.text;
      }
    }
  });
}

TEST(LinearNumerics, ThreadCountsGiveTheSameBits) {
  for_each_isa([] {
    for (const char* text :
         {"q_len=913 kv_len=913 cosine=exact causal=1 head_dim=64",
          "q_len=257 kv_len=500 feature_map=elu1 head_dim=40 group=2",
          "batch=3 q_len=255 kv_len=255 kv_heads=2 mask=holes cosine=far "
          "causal=1 state=both",
          "q_len=700 kv_len=700 packing=many causal=1 feature_map=elu1 "
          "state=both",
          "q_len=300 kv_len=300 causal=1 dtype=bfloat16 rotary=half",
          "q_len=2500 kv_len=2500 causal=1 cosine=exact head_dim=16 state=both",
          "q_len=9000 kv_len=9000 causal=1 cosine=exact head_dim=16 state=both",
          "q_len=9000 kv_len=5000 cosine=exact head_dim=16 state=both",
          "q_len=2500 kv_len=2500 cosine=exact head_dim=16"}) {
      const Problem p = problem_of(text);
      const Outputs one = run(p, serial_executor());
      ASSERT_TRUE(one.status.ok()) << one.status.message();
      for (int threads : {1, 2, 3, 7}) {
        auto pool = make_thread_pool(threads);
        const Outputs many = run(p, *pool);
        for (Tensor Outputs::* x : {&Outputs::out, &Outputs::denominator,
                                    &Outputs::dq, &Outputs::dk, &Outputs::dv})
          EXPECT_EQ((many.*x).bits(), (one.*x).bits())
              << threads << " threads: " << text;
        if (!one.state) continue;
        EXPECT_EQ(many.state->kv_state.bits(), one.state->kv_state.bits());
        EXPECT_EQ(many.state->k_sum.bits(), one.state->k_sum.bits());
        EXPECT_EQ(many.d_state->kv_state.bits(), one.d_state->kv_state.bits());
        EXPECT_EQ(many.d_state->k_sum.bits(), one.d_state->k_sum.bits());
      }
    }
  });
}

// Only what is asked for is written, and it does not depend on what is.
TEST(LinearNumerics, EachGradientAloneEqualsAllTogether) {
  for_each_isa([] {
    const Problem p = problem_of(
        "batch=2 q_len=70 kv_len=70 kv_heads=2 causal=1 cosine=far state=both");
    const Outputs all = run(p, serial_executor());
    ASSERT_TRUE(all.status.ok()) << all.status.message();
    const testing::State& d_state_out = *p.d_state_out;
    for (int which = 0; which < 4; ++which) {
      Tensor dq(p.q.size(), p.q.dtype()), dk(p.k.size(), p.q.dtype()),
          dv(p.v.size(), p.q.dtype());
      State d_state = make_state(p.options, p.inputs());
      const Status status = linear_attention_backward(
          p.options, p.inputs(), all.out.view(), all.denominator.view().data,
          p.d_out.view(), d_state_out.view(), which == 0 ? dq.view() : View4{},
          which == 1 ? dk.view() : View4{}, which == 2 ? dv.view() : View4{},
          which == 3 ? d_state.view() : LinearStateView{}, serial_executor());
      ASSERT_TRUE(status.ok()) << status.message();
      if (which == 0) {
        EXPECT_EQ(dq.bits(), all.dq.bits());
      }
      if (which == 1) {
        EXPECT_EQ(dk.bits(), all.dk.bits());
      }
      if (which == 2) {
        EXPECT_EQ(dv.bits(), all.dv.bits());
      }
      if (which == 3) {
        EXPECT_EQ(d_state.kv_state.bits(), all.d_state->kv_state.bits());
        EXPECT_EQ(d_state.k_sum.bits(), all.d_state->k_sum.bits());
      }
    }
    Tensor out(all.out.size(), p.q.dtype());
    ASSERT_TRUE(linear_attention_forward(p.options, p.inputs(), out.view(),
                                         nullptr, LinearStateView{},
                                         serial_executor())
                    .ok());
    EXPECT_EQ(out.bits(), all.out.bits());
  });
}

// The pass of dk and dv leaves what it knows of the queries to that of dq,
// which finds the same alone.
TEST(LinearNumerics, QueriesLearnTheSameWithAndWithoutTheKeysPass) {
  for_each_isa([] {
    for (const char* text :
         {"q_len=70 kv_len=70 causal=1 cosine=exact head_dim=64 value_dim=40",
          "q_len=150 kv_len=150 causal=1 cosine=far head_dim=40 group=3 "
          "mask=holes",
          "q_len=90 kv_len=120 head_dim=63 value_dim=20 kv_heads=2 batch=2 "
          "mask=left-padding",
          "q_len=70 kv_len=70 causal=1 head_dim=20 feature_map=elu1 state=in",
          "q_len=70 kv_len=70 causal=1 head_dim=17 feature_map=identity "
          "dtype=bfloat16 normalized=0",
          "q_len=40 kv_len=40 causal=1 cosine=exact head_dim=36 state=out",
          "batch=3 q_len=50 kv_len=50 causal=1 cosine=far packing=many",
          "q_len=4200 kv_len=4200 causal=1 cosine=far head_dim=24 value_dim=8",
          "q_len=4200 kv_len=100 head_dim=24 value_dim=8 mask=holes"}) {
      const Problem p = problem_of(text);
      const Outputs all = run(p, serial_executor());
      ASSERT_TRUE(all.status.ok()) << text << all.status.message();
      Tensor dq(p.q.size(), p.q.dtype());
      const Status status = linear_attention_backward(
          p.options, p.inputs(), all.out.view(), all.denominator.view().data,
          p.d_out.view(),
          p.d_state_out ? std::as_const(*p.d_state_out).view()
                        : ConstLinearStateView{},
          dq.view(), View4{}, View4{}, LinearStateView{}, serial_executor());
      ASSERT_TRUE(status.ok()) << text << status.message();
      EXPECT_EQ(dq.bits(), all.dq.bits()) << text;
    }
  });
}

TEST(LinearNumerics, NormalizerNoneLeavesTheDenominatorUntouched) {
  for_each_isa([] {
    const Problem p = problem_of("q_len=70 kv_len=70 normalized=0 causal=1");
    const Outputs o = run(p, serial_executor());
    const Tensor untouched(o.denominator.size(), DType::kFloat32);
    EXPECT_EQ(o.denominator.bits(), untouched.bits());
  });
}

TEST(LinearNumerics, DenominatorsAndSizesBelowEpsAreClamped) {
  for_each_isa([] {
    for (const char* dtype : {"float32", "float64"}) {
      // Products around eps, on both sides of it, and far below.
      for (double scale : {1e-2, 3e-4, 1e-4, 1e-10, 1e-18}) {
        Problem p = problem_of(str_cat(
            "q_len=70 kv_len=70 causal=1 cosine=exact head_dim=4 dtype=",
            dtype));
        for (Tensor* x : {&p.q, &p.k})
          for (int64_t s = 0; s < 70; ++s)
            for (int64_t c = 0; c < 4; ++c)
              x->set(0, s, 0, c, scale * x->get(0, s, 0, c));
        const Outputs o = run(p, serial_executor());
        EXPECT_EQ(compare(p, o, run_reference(p)), "") << dtype << " " << scale;
      }
    }
  });
}

// Beyond inputs, outputs and gradients: what AlignedBuffer held at most.
size_t extra_memory(const std::string& text, int threads) {
  const Problem p = problem_of(text);
  auto pool = make_thread_pool(threads);
  const size_t before = allocation_stats().current_bytes;
  reset_peak_allocation();
  const Outputs o = run(p, *pool);
  EXPECT_TRUE(o.status.ok()) << o.status.message();
  EXPECT_EQ(allocation_stats().current_bytes, before);
  return allocation_stats().peak_bytes - before;
}

TEST(LinearMemory, CausalForwardBackwardAt65536TokensTakesLessThanTheQueries) {
  for (int threads : {1, 2}) {
    const size_t bytes = extra_memory(
        "q_len=65536 kv_len=65536 causal=1 cosine=exact head_dim=64 "
        "value_dim=64",
        threads);
    std::printf("extra memory, %d threads: %.3f x q\n", threads,
                static_cast<double>(bytes) / (65536.0 * 64 * 4));
    EXPECT_LT(bytes, size_t{65536} * 64 * 4) << threads << " threads";
  }
}

TEST(LinearMemory, GrowsAtMostInProportionToTheLength) {
  for (const char* causal : {"causal=1", "causal=0"}) {
    const auto at = [causal](int64_t len) {
      return extra_memory(
          str_cat("q_len=", len, " kv_len=", len,
                  " cosine=exact head_dim=16 value_dim=16 ", causal),
          2);
    };
    const size_t small = at(8192), large = at(32768);
    EXPECT_LE(large, 4 * small + 65536) << causal;
  }
}

TEST(Isa, EachSupportedOneCanBeForcedAndOthersAreRefused) {
  ASSERT_FALSE(supported_isas().empty());
  EXPECT_EQ(supported_isas().back(), "generic");
  for (std::string_view isa : supported_isas()) {
    ASSERT_TRUE(force_isa(isa).ok());
    EXPECT_EQ(active_isa(), isa);
  }
  const Status unknown = force_isa("sse9");
  EXPECT_EQ(unknown.code(), StatusCode::kNotSupported);
  EXPECT_NE(unknown.message().find("sse9"), std::string::npos);
  EXPECT_NE(unknown.message().find("generic"), std::string::npos)
      << unknown.message();
  for (std::string_view isa : {"avx512", "avx2"}) {
    const auto supported = supported_isas();
    if (std::count(supported.begin(), supported.end(), isa) != 0) continue;
    EXPECT_EQ(force_isa(isa).code(), StatusCode::kNotSupported) << isa;
  }
  ASSERT_TRUE(force_isa("").ok());
  EXPECT_EQ(active_isa(), supported_isas().front());
}

}  // namespace
}  // namespace cosformer
