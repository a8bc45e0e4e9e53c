// Performer at any scale: the logarithms of its features keep what float32
// could not; what is invisible has no effect; threads and memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "tests/kernels/performer_problem.h"

namespace cosformer {
namespace {

using testing::all_finite;
using testing::compare;
using testing::empty_state;
using testing::fill_token;
using testing::for_each_isa;
using testing::kNan;
using testing::make_performer_problem;
using testing::PerformerOutputs;
using testing::PerformerProblem;
using testing::PerformerState;
using testing::relative_error;
using testing::run_forward;
using testing::run_reference;
using testing::slice;
using testing::Tensor;

// out of all tokens, one step each.
Tensor decode_all(const PerformerProblem& p, PerformerState& state) {
  Tensor all = run_forward(p, serial_executor()).out;
  all.fill(kNan);
  for (int64_t t = 0; t < p.base.q.size()[1]; ++t) {
    PerformerProblem token = slice(p, t, t + 1);
    token.state.reset();
    Tensor out({all.size()[0], 1, all.size()[2], all.size()[3]}, all.dtype());
    const Status status = performer_attention_decode_step(
        token.inputs(), state.view(), out.view(), serial_executor());
    EXPECT_TRUE(status.ok()) << status.message();
    for (int64_t b = 0; b < all.size()[0]; ++b)
      for (int64_t h = 0; h < all.size()[2]; ++h)
        for (int64_t c = 0; c < all.size()[3]; ++c)
          all.set(b, t, h, c, out.get(b, 0, h, c));
  }
  return all;
}

// Calls of `piece` tokens, the state handed on.
std::vector<double> in_pieces(const PerformerProblem& whole, int64_t piece,
                              std::optional<PerformerState>* last = nullptr) {
  std::vector<double> all;
  std::optional<PerformerState> state;
  const int64_t length = whole.base.q.size()[1];
  for (int64_t at = 0; at < length; at += piece) {
    PerformerProblem part = slice(whole, at, std::min(at + piece, length));
    part.state = state;
    part.return_state = true;
    const PerformerOutputs o = run_forward(part, serial_executor());
    EXPECT_TRUE(o.status.ok()) << o.status.message();
    state = o.state;
    const std::vector<double> values = o.out.values();
    all.insert(all.end(), values.begin(), values.end());
  }
  if (last != nullptr) *last = state;
  return all;
}

// Design 2 and issue 4, 3: q and k times 1, 3, 10 and far beyond.
TEST(PerformerNumerics, AnyScaleMatchesReferenceInEveryForm) {
  for (const double scale : {1.0, 3.0, 10.0, 100.0}) {
    const PerformerProblem p = make_performer_problem(
        "causal=1 q_len=200 kv_len=200 kv_heads=2 head_dim=32 value_dim=16", 64,
        scale);
    const PerformerOutputs want = run_reference(p);
    for_each_isa([&] {
      const double gradient = scale <= 10 ? 2e-5 : 2e-4;
      EXPECT_EQ(compare(p, run(p, serial_executor()), want, 5e-6, gradient), "")
          << scale;
      for (int64_t piece : {1, 7, 64, 199}) {
        EXPECT_LE(relative_error(in_pieces(p, piece), want.out.values()), 1e-5)
            << scale << " pieces of " << piece;
      }
      PerformerState state = empty_state(p, 0);
      EXPECT_LE(
          relative_error(decode_all(p, state).values(), want.out.values()),
          1e-5)
          << scale;
      PerformerProblem all = p;
      all.base.options.is_causal = false;
      EXPECT_EQ(compare(all, run(all, serial_executor()), run_reference(all),
                        5e-6, gradient),
                "")
          << scale << " non-causal";
    });
  }
}

// Behaviour 3, for Performer: a row is then the value of one key.
TEST(PerformerNumerics, QueriesAndKeysOfSize1e4StayFiniteAndRight) {
  for (const char* text :
       {"causal=1 head_dim=32", "head_dim=32", "causal=1 head_dim=64 group=2",
        "causal=1 head_dim=32 dtype=float64"}) {
    const PerformerProblem p = make_performer_problem(
        str_cat("q_len=150 kv_len=150 value_dim=16 ", text), 64, 1e4);
    const PerformerOutputs want = run_reference(p);
    for_each_isa([&] {
      const PerformerOutputs o = run(p, serial_executor());
      ASSERT_TRUE(o.status.ok()) << o.status.message();
      EXPECT_LE(relative_error(o.out.values(), want.out.values()), 1e-5)
          << text;
      for (const Tensor* x : {&o.out, &o.dq, &o.dk, &o.dv, &o.d_projection})
        EXPECT_TRUE(all_finite(*x)) << text;
    });
  }
}

// Keys that grow from call to call: maxima rise all the time.
PerformerProblem growing(int64_t length, double growth, const char* more = "") {
  PerformerProblem p = make_performer_problem(
      str_cat("causal=1 kv_heads=2 head_dim=16 value_dim=16 q_len=", length,
              " kv_len=", length, " ", more),
      48);
  for (int64_t s = 0; s < length; ++s) {
    const double factor =
        std::pow(growth, static_cast<double>(s) / static_cast<double>(length));
    for (int64_t h = 0; h < 2; ++h)
      for (int64_t c = 0; c < 16; ++c)
        p.base.k.set(0, s, h, c, factor * p.base.k.get(0, s, h, c));
  }
  return p;
}

// Behaviour 6.
TEST(PerformerNumerics, AThousandStepsWhileKeysGrow30FoldEqualTheParallelForm) {
  const PerformerProblem p = growing(1000, 30);
  const PerformerOutputs want = run_reference(p);
  for_each_isa([&] {
    const PerformerOutputs parallel = run_forward(p, serial_executor());
    PerformerState state = empty_state(p, 0);
    const Tensor steps = decode_all(p, state);
    EXPECT_TRUE(all_finite(steps));
    EXPECT_LE(relative_error(steps.values(), parallel.out.values()), 1e-5);
    EXPECT_LE(relative_error(steps.values(), want.out.values()), 1e-5);
  });
}

TEST(PerformerNumerics, ShrinkingKeysMatchReferenceToo) {
  const PerformerProblem p = growing(300, 1.0 / 30);
  EXPECT_EQ(compare(p, run(p, serial_executor()), run_reference(p), 5e-6, 2e-5),
            "");
}

// Behaviour 1.
TEST(PerformerNumerics, ValueOneGivesOneOnEveryPath) {
  for (const double scale : {1.0, 10.0}) {
    for (const char* form : {"causal=1 mask=holes", "mask=holes"}) {
      PerformerProblem p = make_performer_problem(
          str_cat("q_len=100 kv_len=100 head_dim=16 ", form), 32, scale);
      p.base.v.fill(1);
      const PerformerOutputs o = run_forward(p, serial_executor());
      for (int64_t s = 0; s < 100; ++s) {
        const bool visible =
            std::isfinite(o.log_denominator[static_cast<size_t>(s)]);
        EXPECT_NEAR(o.out.get(0, s, 0, 0), visible ? 1 : 0, 3e-6) << form << s;
      }
    }
  }
}

// Invisible NaN changes no bit: masked keys, other sequences, masked queries.
TEST(PerformerNumerics, WhatIsMaskedChangesNoBit) {
  for (const char* form : {"causal=1 ", ""}) {
    PerformerProblem p = make_performer_problem(
        str_cat(form,
                "batch=2 q_len=150 kv_len=150 kv_heads=2 head_dim=16 "
                "mask=holes state=both"),
        32);
    const PerformerOutputs junk = run(p, serial_executor());
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t s = 0; s < 150; ++s) {
        const auto at = static_cast<size_t>(b * 150 + s);
        if (p.base.key_mask[at] == 0) {
          fill_token(p.base.k, b, s, 0);
          fill_token(p.base.v, b, s, 0);
        }
        if (p.base.query_mask[at] == 0) {
          fill_token(p.base.q, b, s, 0);
          fill_token(p.base.d_out, b, s, 0);
        }
      }
    }
    const PerformerOutputs clean = run(p, serial_executor());
    for (Tensor PerformerOutputs::* x :
         {&PerformerOutputs::out, &PerformerOutputs::dq, &PerformerOutputs::dk,
          &PerformerOutputs::dv, &PerformerOutputs::d_projection})
      EXPECT_EQ((junk.*x).bits(), (clean.*x).bits()) << form;
    EXPECT_EQ(junk.state->kv_state.bits(), clean.state->kv_state.bits());
    EXPECT_EQ(junk.state->log_scale.bits(), clean.state->log_scale.bits());
    EXPECT_EQ(junk.d_state->kv_state.bits(), clean.d_state->kv_state.bits());
    EXPECT_TRUE(all_finite(clean.d_projection));
  }
}

TEST(PerformerNumerics, OtherSequencesOfAPackChangeNoBit) {
  PerformerProblem p = make_performer_problem(
      "causal=1 q_len=150 kv_len=150 head_dim=16 packing=one", 32);
  p.base.cu_seqlens_q = p.base.cu_seqlens_k = {0, 70, 150};
  p.base.q_start = p.base.kv_start = {};
  const PerformerOutputs before = run(p, serial_executor());
  for (int64_t s = 70; s < 150; ++s) {
    for (Tensor* x : {&p.base.q, &p.base.k, &p.base.v, &p.base.d_out})
      fill_token(*x, 0, s, s % 2 == 0 ? kNan : 1e30);
  }
  const PerformerOutputs after = run(p, serial_executor());
  for (int64_t s = 0; s < 70; ++s) {
    for (Tensor PerformerOutputs::* x :
         {&PerformerOutputs::out, &PerformerOutputs::dq, &PerformerOutputs::dk,
          &PerformerOutputs::dv}) {
      for (int64_t c = 0; c < (before.*x).size()[3]; ++c)
        EXPECT_EQ((before.*x).get(0, s, 0, c), (after.*x).get(0, s, 0, c));
    }
  }
}

// The future may move the maxima of a block, and no more.
TEST(PerformerNumerics, TheFutureDoesNotChangeThePast) {
  for (const double factor : {0.0, 3.0, 1000.0, kNan}) {
    PerformerProblem p =
        make_performer_problem("causal=1 q_len=150 kv_len=150 head_dim=16", 32);
    const PerformerOutputs before = run_forward(p, serial_executor());
    for (int64_t s = 97; s < 150; ++s)
      for (Tensor* x : {&p.base.q, &p.base.k, &p.base.v})
        for (int64_t c = 0; c < x->size()[3]; ++c)
          x->set(0, s, 0, c, factor * x->get(0, s, 0, c));
    const PerformerOutputs after = run_forward(p, serial_executor());
    std::vector<double> a, b;
    for (int64_t s = 0; s < 97; ++s)
      for (int64_t c = 0; c < 8; ++c) {
        a.push_back(after.out.get(0, s, 0, c));
        b.push_back(before.out.get(0, s, 0, c));
      }
    EXPECT_LE(relative_error(a, b), 1e-5) << factor;
  }
}

// A visible NaN reaches the rows that see it, and no other.
TEST(PerformerNumerics, AVisibleNanReachesExactlyTheRowsThatSeeIt) {
  for (const bool in_value : {false, true}) {
    PerformerProblem p = make_performer_problem(
        "causal=1 q_len=150 kv_len=150 head_dim=16 value_dim=8", 32);
    (in_value ? p.base.v : p.base.k).set(0, 83, 0, 3, kNan);
    for_each_isa([&] {
      const PerformerOutputs o = run(p, serial_executor());
      PerformerState state = empty_state(p, 0);
      const Tensor steps = decode_all(p, state);
      for (int64_t s = 0; s < 150; ++s) {
        EXPECT_EQ(std::isnan(o.out.get(0, s, 0, 3)), s >= 83) << s;
        EXPECT_EQ(std::isnan(steps.get(0, s, 0, 3)), s >= 83) << s;
        EXPECT_EQ(std::isnan(o.dq.get(0, s, 0, 0)), s >= 83) << s;
      }
    });
  }
  PerformerProblem p = make_performer_problem(
      "causal=1 q_len=150 kv_len=150 head_dim=16 value_dim=8", 32);
  p.base.q.set(0, 83, 0, 3, kNan);
  const PerformerOutputs o = run(p, serial_executor());
  for (int64_t s = 0; s < 150; ++s) {
    EXPECT_EQ(std::isnan(o.out.get(0, s, 0, 3)), s == 83) << s;
    EXPECT_EQ(std::isnan(o.dq.get(0, s, 0, 0)), s == 83) << s;
    EXPECT_EQ(std::isnan(o.dk.get(0, s, 0, 0)), s <= 83) << s;
    EXPECT_EQ(std::isnan(o.dv.get(0, s, 0, 0)), s <= 83) << s;
  }
}

TEST(PerformerNumerics, ResultsDoNotDependOnTheThreads) {
  for (const char* form : {"causal=1 ", ""}) {
    const PerformerProblem p = make_performer_problem(
        str_cat(form,
                "batch=3 q_len=300 kv_len=300 kv_heads=2 group=2 "
                "head_dim=16 state=both"),
        32);
    const PerformerOutputs one = run(p, serial_executor());
    const std::unique_ptr<Executor> pool = make_thread_pool(3);
    const PerformerOutputs three = run(p, *pool);
    for (Tensor PerformerOutputs::* x :
         {&PerformerOutputs::out, &PerformerOutputs::dq, &PerformerOutputs::dk,
          &PerformerOutputs::dv, &PerformerOutputs::d_projection})
      EXPECT_EQ((one.*x).bits(), (three.*x).bits()) << form;
    EXPECT_EQ(one.state->kv_state.bits(), three.state->kv_state.bits());
  }
}

// One unit of work has its features cut instead, into unequal parts; backward
// where there is no state.
TEST(PerformerNumerics, FewHeadsAreCutByFeatures) {
  for (const double scale : {1.0, 10.0}) {
    for (const char* form :
         {"state=both causal=1 q_len=140 kv_len=140 mask=holes",
          "state=both q_len=130 kv_len=140",
          "state=both causal=1 q_len=1100 kv_len=1100 group=1",
          "causal=1 q_len=140 kv_len=140 mask=holes", "q_len=130 kv_len=140",
          "causal=1 q_len=700 kv_len=700 group=1"}) {
      const PerformerProblem p = make_performer_problem(
          str_cat("kv_heads=1 group=2 head_dim=12 value_dim=5 ", form), 270,
          scale);
      const PerformerOutputs one = run(p, serial_executor());
      const std::unique_ptr<Executor> pool = make_thread_pool(3);
      const PerformerOutputs three = run(p, *pool);
      for (Tensor PerformerOutputs::* x :
           {&PerformerOutputs::out, &PerformerOutputs::dq,
            &PerformerOutputs::dk, &PerformerOutputs::dv,
            &PerformerOutputs::d_projection})
        EXPECT_EQ((one.*x).bits(), (three.*x).bits()) << form;
      EXPECT_EQ(one.log_denominator, three.log_denominator) << form;
      if (one.state) {
        EXPECT_EQ(one.state->kv_state.bits(), three.state->kv_state.bits());
      }
      if (p.base.q.size()[1] > 500) continue;  // the reference is slow
      const PerformerOutputs want = run_reference(p);
      for_each_isa([&] {
        EXPECT_EQ(compare(p, run(p, serial_executor()), want, 5e-6, 2e-5), "")
            << form << " " << scale;
      });
    }
  }
}

// What the kernels do with tiny results of their own is none of the caller's.
TEST(PerformerNumerics, TheCallersTinyNumbersStay) {
  run(make_performer_problem("q_len=9 kv_len=9", 16), serial_executor());
  volatile float least = std::numeric_limits<float>::min();
  EXPECT_GT(least / 2, 0.0f);
}

// Rows beside ordinary ones that need double: the choice is a block's, and no
// row's result depends on it by more than rounding.
TEST(PerformerNumerics, LargeAndOrdinaryRowsShareABlock) {
  PerformerProblem p = make_performer_problem(
      "causal=1 q_len=150 kv_len=150 head_dim=16 value_dim=8", 32);
  const auto enlarge = [](Tensor& x, int64_t s) {
    for (int64_t c = 0; c < 16; ++c) x.set(0, s, 0, c, 20 * x.get(0, s, 0, c));
  };
  for (int64_t s : {7, 70, 133}) enlarge(p.base.q, s);
  for (int64_t s : {20, 100}) enlarge(p.base.k, s);
  const PerformerOutputs want = run_reference(p);
  for_each_isa([&] {
    EXPECT_EQ(compare(p, run(p, serial_executor()), want, 5e-6, 2e-5), "");
  });
}

// Bytes beyond inputs, outputs and gradients, at most.
size_t extra_memory(int64_t length, bool causal) {
  const PerformerProblem p = make_performer_problem(
      str_cat("causal=", causal, " q_len=", length, " kv_len=", length,
              " head_dim=64 value_dim=64"),
      256);
  reset_peak_allocation();
  const size_t before = allocation_stats().current_bytes;
  EXPECT_TRUE(run(p, serial_executor()).status.ok());
  return allocation_stats().peak_bytes - before;
}

TEST(PerformerNumerics, ExtraMemoryIsSmallAndLinearInTheLength) {
  for (const bool causal : {false, true}) {
    const size_t at_4k = extra_memory(4096, causal);
    const size_t at_8k = extra_memory(8192, causal);
    // The maxima before each block: 256 floats for 64 tokens.
    EXPECT_LE(at_8k - at_4k, size_t{4096} * 256 * 4 / 64 + 4096) << causal;
    EXPECT_LE(at_4k, size_t{4} << 20) << causal;
  }
}

TEST(PerformerNumerics, ErrorsNameWhatIsWrong) {
  const PerformerProblem p =
      make_performer_problem("q_len=4 kv_len=4 state=in", 8);
  PerformerAttentionInputs in = p.inputs();
  in.num_features = 0;
  EXPECT_EQ(check_performer_attention({}, in).message(),
            "performer_attention: the projection has 0 features, expected at "
            "least 1");
  in = p.inputs();
  in.state.log_scale = nullptr;
  EXPECT_EQ(check_performer_attention({}, in).message(),
            "performer_attention: state has kv_state but no log_scale");
  in = p.inputs();
  in.call.k.size[3] = 5;
  EXPECT_EQ(check_performer_attention({}, in).message(),
            "performer_attention: key has head_dim 5, query has 8: expected "
            "the same");
}

}  // namespace
}  // namespace cosformer
