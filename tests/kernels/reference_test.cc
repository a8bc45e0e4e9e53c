// The oracle itself: by hand, by finite differences, and in every dtype.
#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <string>
#include <vector>

#include "tests/kernels/problem.h"

namespace cosformer {
namespace {

using testing::make_problem;
using testing::Outputs;
using testing::parse_point;
using testing::Problem;
using testing::relative_error;
using testing::State;
using testing::Tensor;

TEST(Reference, MatchesAHandComputedExample) {
  // Two tokens, M = 2, so the weight at distance 1 is cos(pi/4) = h.
  Problem p = make_problem(*parse_point(
      "q_len=2 kv_len=2 head_dim=2 value_dim=1 dtype=float64 causal=1"));
  p.options.reweight_len = 2;
  const double h = std::sqrt(0.5);
  const double q[2][2] = {{1, -5}, {2, 3}}, k[2][2] = {{4, 7}, {-1, 2}};
  for (int64_t s = 0; s < 2; ++s) {
    for (int64_t c = 0; c < 2; ++c) {
      p.q.set(0, s, 0, c, q[s][c]);
      p.k.set(0, s, 0, c, k[s][c]);
    }
    p.v.set(0, s, 0, 0, s == 0 ? 10.0 : 20.0);
    p.d_out.set(0, s, 0, 0, 1.0);
  }
  const Outputs o = run_reference(p);
  ASSERT_TRUE(o.status.ok()) << o.status.message();
  // Row 0 sees key 0: weight 1 x 4. Row 1: (8 + 21) h and 3 x 2.
  const double w10 = 29 * h, w11 = 6;
  EXPECT_DOUBLE_EQ(o.denominator.get(0, 0, 0, 0), 4.0);
  EXPECT_DOUBLE_EQ(o.denominator.get(0, 1, 0, 0), w10 + w11);
  EXPECT_DOUBLE_EQ(o.out.get(0, 0, 0, 0), 10.0);
  const double out = (10 * w10 + 20 * w11) / (w10 + w11);
  EXPECT_DOUBLE_EQ(o.out.get(0, 1, 0, 0), out);
  EXPECT_DOUBLE_EQ(o.dv.get(0, 0, 0, 0), 1 + w10 / (w10 + w11));
  EXPECT_DOUBLE_EQ(o.dv.get(0, 1, 0, 0), w11 / (w10 + w11));
  // d out_1 / d w_1j = (v_j - out_1) / sum.
  const double d10 = (10 - out) / (w10 + w11), d11 = (20 - out) / (w10 + w11);
  EXPECT_NEAR(o.dq.get(0, 0, 0, 0), 0, 1e-15);
  EXPECT_EQ(o.dq.get(0, 0, 0, 1), 0);  // relu is shut there
  EXPECT_NEAR(o.dq.get(0, 1, 0, 0), d10 * h * 4, 1e-14);
  EXPECT_NEAR(o.dq.get(0, 1, 0, 1), d10 * h * 7 + d11 * 2, 1e-14);
  EXPECT_NEAR(o.dk.get(0, 0, 0, 0), d10 * h * 2, 1e-14);
  EXPECT_NEAR(o.dk.get(0, 0, 0, 1), d10 * h * 3, 1e-14);
  EXPECT_EQ(o.dk.get(0, 1, 0, 0), 0);
  EXPECT_NEAR(o.dk.get(0, 1, 0, 1), d11 * 3, 1e-14);
}

TEST(Reference, RotaryTurnsTheNumeratorOnly) {
  // One pair, base irrelevant for it: the angle is the distance.
  for (const char* pairing : {"half", "interleaved"}) {
    Problem p = make_problem(
        *parse_point(std::string("q_len=1 kv_len=1 head_dim=2 value_dim=1 "
                                 "dtype=float64 rotary=") +
                     pairing));
    const std::vector<int64_t> at = {3};
    p.q_start = at;
    for (Tensor* x : {&p.q, &p.k}) x->fill(1);
    p.v.fill(1);
    const Outputs o = run_reference(p);
    EXPECT_DOUBLE_EQ(o.denominator.get(0, 0, 0, 0), 2.0);
    EXPECT_DOUBLE_EQ(o.out.get(0, 0, 0, 0), std::cos(3.0));
  }
}

TEST(Reference, ClampsSmallDenominatorsWithoutAGradientThroughThem) {
  Problem p = make_problem(
      *parse_point("q_len=1 kv_len=1 head_dim=1 value_dim=1 dtype=float64"));
  p.options.eps = 0.5;
  p.q.fill(0.25);
  p.k.fill(1);
  p.v.fill(3);
  p.d_out.fill(1);
  const Outputs o = run_reference(p);
  EXPECT_DOUBLE_EQ(o.denominator.get(0, 0, 0, 0), 0.25);
  EXPECT_DOUBLE_EQ(o.out.get(0, 0, 0, 0), 0.25 * 3 / 0.5);
  EXPECT_DOUBLE_EQ(o.dq.get(0, 0, 0, 0), 3 / 0.5);
  EXPECT_DOUBLE_EQ(o.dk.get(0, 0, 0, 0), 0.25 * 3 / 0.5);
  EXPECT_DOUBLE_EQ(o.dv.get(0, 0, 0, 0), 0.25 / 0.5);
}

// sum(out d_out) + sum(state d_state), whose gradients the backward gives.
double loss(const Problem& p) {
  const Outputs o = run_reference(p);
  EXPECT_TRUE(o.status.ok()) << o.status.message();
  double sum = 0;
  const auto add = [&sum](const Tensor& x, const Tensor& d) {
    const std::vector<double> a = x.values(), b = d.values();
    for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  };
  add(o.out, p.d_out);
  if (p.d_state_out) {
    add(o.state->kv_state, p.d_state_out->kv_state);
    add(o.state->k_sum, p.d_state_out->k_sum);
  }
  return sum;
}

void expect_finite_differences(Problem& p, Tensor& x, const Tensor& gradient,
                               const char* name) {
  constexpr double kStep = 1e-5;
  std::vector<double> want;
  const auto [batch, seq, heads, dim] = x.size();
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t s = 0; s < seq; ++s)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t c = 0; c < dim; ++c) {
          const double value = x.get(b, s, h, c);
          x.set(b, s, h, c, value + kStep);
          const double above = loss(p);
          x.set(b, s, h, c, value - kStep);
          const double below = loss(p);
          x.set(b, s, h, c, value);
          want.push_back((above - below) / (2 * kStep));
        }
  EXPECT_LE(relative_error(gradient.values(), want), 1e-7)
      << name << " of " << p.text;
}

TEST(Reference, GradientsMatchFiniteDifferences) {
  for (const char* text : {
           "cosine=exact",
           "cosine=exact causal=1 state=both",
           "feature_map=elu1 causal=1",
           "feature_map=elu1 cosine=far rotary=half causal=1 state=both",
           "feature_map=identity cosine=far rotary=interleaved state=both",
           "causal=1 group=2 starts=rows cosine=far",
           "normalized=0 cosine=far state=both rotary=half",
           "mask=holes causal=1 feature_map=elu1 state=both",
           "packing=many causal=1 feature_map=elu1 cosine=far state=both",
           "packing=0-5-0-1 feature_map=elu1 state=out",
       }) {
    Problem p = make_problem(*parse_point(
        std::string("q_len=6 kv_len=5 head_dim=4 value_dim=3 batch=2 "
                    "kv_heads=2 dtype=float64 seed=7 ") +
        text));
    // Away from relu's corner; invisible entries back from infinity.
    for (Tensor* x : {&p.q, &p.k, &p.v, &p.d_out}) {
      for (int64_t b = 0; b < x->size()[0]; ++b)
        for (int64_t s = 0; s < x->size()[1]; ++s)
          for (int64_t h = 0; h < x->size()[2]; ++h)
            for (int64_t c = 0; c < x->size()[3]; ++c) {
              const double value = x->get(b, s, h, c);
              if (!(std::fabs(value) < 100)) x->set(b, s, h, c, 1.0);
              if (std::fabs(value) < 0.01) x->set(b, s, h, c, 0.01);
            }
    }
    const Outputs o = run_reference(p);
    ASSERT_TRUE(o.status.ok()) << o.status.message();
    expect_finite_differences(p, p.q, o.dq, "dq");
    expect_finite_differences(p, p.k, o.dk, "dk");
    expect_finite_differences(p, p.v, o.dv, "dv");
    if (p.state) {
      expect_finite_differences(p, p.state->kv_state, o.d_state->kv_state,
                                "d_state.kv_state");
      expect_finite_differences(p, p.state->k_sum, o.d_state->k_sum,
                                "d_state.k_sum");
    }
  }
}

TEST(Reference, RoundsEachDtypeOnce) {
  for (const char* dtype : {"float32", "bfloat16", "float16"}) {
    const Problem p = make_problem(*parse_point(
        std::string("q_len=9 kv_len=9 group=2 cosine=exact state=both dtype=") +
        dtype));
    const Outputs wide = run_reference(p);
    Tensor out(wide.out.size(), p.q.dtype()), rounded = out;
    Tensor dk(p.k.size(), p.q.dtype()), dk_rounded = dk;
    State state = testing::make_state(p.options, p.inputs()), d_state = state;
    ASSERT_TRUE(reference::linear_attention_forward(
                    p.options, p.inputs(), out.view(), nullptr, state.view())
                    .ok());
    const State& d_state_out = *p.d_state_out;
    ASSERT_TRUE(reference::linear_attention_backward(
                    p.options, p.inputs(), p.d_out.view(), d_state_out.view(),
                    View4{}, dk.view(), View4{}, d_state.view())
                    .ok());
    for (int64_t s = 0; s < 9; ++s)
      for (int64_t c = 0; c < 8; ++c) {
        for (int64_t h = 0; h < 2; ++h)
          rounded.set(0, s, h, c, wide.out.get(0, s, h, c));
        dk_rounded.set(0, s, 0, c, wide.dk.get(0, s, 0, c));
      }
    EXPECT_EQ(out.bits(), rounded.bits()) << dtype;
    EXPECT_EQ(dk.bits(), dk_rounded.bits()) << dtype;
    EXPECT_LE(
        relative_error(state.kv_state.values(), wide.state->kv_state.values()),
        1e-7);
    EXPECT_LE(relative_error(d_state.kv_state.values(),
                             wide.d_state->kv_state.values()),
              1e-7);
  }
}

// The cosine's period is taken off in integers: moving everything by any
// distance changes nothing.
TEST(Reference, FarPositionsGiveWhatNearOnesGive) {
  const auto at = [](int64_t start) {
    Problem p = make_problem(*parse_point(
        "q_len=20 kv_len=20 cosine=exact causal=1 dtype=float64 state=none"));
    p.q_start = p.kv_start = {start};
    return run_reference(p).out.bits();
  };
  EXPECT_EQ(at(0), at(1));
  EXPECT_EQ(at(0), at(int64_t{1} << 50));
}

}  // namespace
}  // namespace cosformer
