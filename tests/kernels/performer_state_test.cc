// Performer's state: however a sequence is cut, the results are those of one
// call; its gradients; and the reference's own, by finite differences.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "tests/kernels/performer_problem.h"

namespace cosformer {
namespace {

using testing::empty_state;
using testing::make_performer_problem;
using testing::norm;
using testing::PerformerOutputs;
using testing::PerformerProblem;
using testing::PerformerState;
using testing::relative_error;
using testing::run_forward;
using testing::run_reference;
using testing::slice;
using testing::Tensor;

void expect_same_state(const PerformerState& got, const PerformerState& want,
                       const std::string& where) {
  EXPECT_LE(relative_error(got.means(), want.means()), 1e-5) << where;
  EXPECT_LE(relative_error(got.log_sums(), want.log_sums()), 1e-5) << where;
  EXPECT_EQ(got.start, want.start) << where;
  EXPECT_EQ(got.position, want.position) << where;
}

std::vector<double> joined(const Tensor& a, const Tensor& b) {
  std::vector<double> all;
  for (int64_t row = 0; row < a.size()[0]; ++row)
    for (const Tensor* x : {&a, &b})
      for (int64_t s = 0; s < x->size()[1]; ++s)
        for (int64_t h = 0; h < x->size()[2]; ++h)
          for (int64_t c = 0; c < x->size()[3]; ++c)
            all.push_back(x->get(row, s, h, c));
  return all;
}

TEST(PerformerStateTest, EverySplitPointAgreesWithTheParallelForm) {
  for (const double scale : {1.0, 10.0}) {
    PerformerProblem whole = make_performer_problem(
        "causal=1 batch=2 q_len=70 kv_len=70 kv_heads=2 head_dim=8 "
        "value_dim=8",
        16, scale);
    whole.return_state = true;
    const PerformerOutputs parallel = run_forward(whole, serial_executor());
    for (int64_t cut = 0; cut <= 70; ++cut) {
      PerformerProblem first = slice(whole, 0, cut);
      PerformerProblem second = slice(whole, cut, 70);
      const PerformerOutputs a = run_forward(first, serial_executor());
      second.state = a.state;
      const PerformerOutputs b = run_forward(second, serial_executor());
      ASSERT_TRUE(b.status.ok()) << b.status.message();
      EXPECT_LE(relative_error(joined(a.out, b.out), parallel.out.values()),
                1e-5)
          << cut;
      expect_same_state(*b.state, *parallel.state, str_cat("cut at ", cut));
    }
  }
}

TEST(PerformerStateTest, DecodeAndPrefillGiveTheSameState) {
  for (const char* more : {"", "group=2", "dtype=float64", "dtype=bfloat16",
                           "dtype=float16 group=2", "value_dim=5 kv_heads=3"}) {
    PerformerProblem p = make_performer_problem(
        str_cat("causal=1 batch=2 kv_heads=2 head_dim=8 value_dim=8 q_len=30 "
                "kv_len=30 mask=holes ",
                more),
        20);
    p.return_state = true;
    const PerformerOutputs want = run_forward(p, serial_executor());
    PerformerState state = empty_state(p, 0);
    const double limit = p.base.q.dtype() == DType::kBFloat16  ? 1e-2
                         : p.base.q.dtype() == DType::kFloat16 ? 2e-3
                                                               : 1e-5;
    // A masked key leaves the position of its row: with holes the rows of the
    // batch stand at different ones, which Performer does not look at.
    std::vector<double> got, expected;
    for (int64_t t = 0; t < 30; ++t) {
      PerformerProblem token = slice(p, t, t + 1);
      token.base.key_mask = {p.base.key_mask[static_cast<size_t>(t)],
                             p.base.key_mask[static_cast<size_t>(30 + t)]};
      token.base.query_mask = {p.base.query_mask[static_cast<size_t>(t)],
                               p.base.query_mask[static_cast<size_t>(30 + t)]};
      Tensor out({2, 1, want.out.size()[2], want.out.size()[3]},
                 p.base.q.dtype());
      const Status status = performer_attention_decode_step(
          token.inputs(), state.view(), out.view(), serial_executor());
      ASSERT_TRUE(status.ok()) << status.message();
      for (int64_t b = 0; b < 2; ++b)
        for (int64_t h = 0; h < out.size()[2]; ++h)
          for (int64_t c = 0; c < out.size()[3]; ++c) {
            got.push_back(out.get(b, 0, h, c));
            expected.push_back(want.out.get(b, t, h, c));
          }
    }
    EXPECT_LE(relative_error(got, expected), limit) << more;
    EXPECT_LE(relative_error(state.means(), want.state->means()), 1e-5) << more;
    EXPECT_LE(relative_error(state.log_sums(), want.state->log_sums()), 1e-5)
        << more;
  }
}

// A non-causal call reads a state of keys alone as it would read the keys.
TEST(PerformerStateTest, AMemoryOfKeysServesCrossAttention) {
  PerformerProblem p =
      make_performer_problem("q_len=20 kv_len=50 head_dim=8 value_dim=8", 16);
  const PerformerOutputs want = run_forward(p, serial_executor());
  PerformerProblem memory = p;
  memory.base.q = Tensor({1, 0, 1, 8}, DType::kFloat32);
  memory.base.d_out = Tensor({1, 0, 1, 8}, DType::kFloat32);
  memory.return_state = true;
  PerformerProblem read = p;
  read.state = run_forward(memory, serial_executor()).state;
  read.base.k = read.base.v = Tensor({1, 0, 1, 8}, DType::kFloat32);
  const PerformerOutputs got = run_forward(read, serial_executor());
  ASSERT_TRUE(got.status.ok()) << got.status.message();
  EXPECT_LE(relative_error(got.out.values(), want.out.values()), 1e-5);
}

// Gradients through a cut equal those of the whole.
TEST(PerformerStateTest, GradientsFlowThroughTheStateBothWays) {
  for (const double scale : {1.0, 5.0}) {
    const PerformerProblem whole = make_performer_problem(
        "causal=1 batch=2 q_len=90 kv_len=90 kv_heads=2 head_dim=8 "
        "value_dim=8 dtype=float64",
        16, scale);
    const PerformerOutputs want = run(whole, serial_executor());
    PerformerProblem first = slice(whole, 0, 37);
    PerformerProblem second = slice(whole, 37, 90);
    first.return_state = true;
    second.state = run_forward(first, serial_executor()).state;
    const PerformerOutputs b = run(second, serial_executor());
    first.d_state_out = b.d_state;
    const PerformerOutputs a = run(first, serial_executor());
    ASSERT_TRUE(a.status.ok()) << a.status.message();
    EXPECT_LE(relative_error(joined(a.dq, b.dq), want.dq.values()), 1e-11);
    EXPECT_LE(relative_error(joined(a.dk, b.dk), want.dk.values()), 1e-11);
    EXPECT_LE(relative_error(joined(a.dv, b.dv), want.dv.values()), 1e-11);
    std::vector<double> sum = a.d_projection.values();
    const std::vector<double> more = b.d_projection.values();
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += more[i];
    EXPECT_LE(relative_error(sum, want.d_projection.values()), 1e-11);
  }
}

// sum(out d_out) + sum(state d_state). The maxima are constants: the sums of
// the state are taken at the scale that they had at first.
double loss(const PerformerProblem& p, const PerformerState& scale) {
  const PerformerOutputs o = run_reference(p);
  double sum = 0;
  const std::vector<double> out = o.out.values(), d = p.base.d_out.values();
  for (size_t i = 0; i < out.size(); ++i) sum += out[i] * d[i];
  const int64_t columns = o.state->kv_state.numel() / o.state->k_sum.numel();
  for (int64_t f = 0; f < o.state->k_sum.numel(); ++f) {
    const double factor = std::exp(o.state->log_scale.get(0, 0, 0, f) -
                                   scale.log_scale.get(0, 0, 0, f));
    sum += factor * o.state->k_sum.get(0, 0, 0, f) *
           p.d_state_out->k_sum.get(0, 0, 0, f);
    for (int64_t c = 0; c < columns; ++c)
      sum += factor * o.state->kv_state.get(0, 0, 0, f * columns + c) *
             p.d_state_out->kv_state.get(0, 0, 0, f * columns + c);
  }
  return sum;
}

TEST(PerformerStateTest, TheReferenceMatchesFiniteDifferences) {
  for (const char* form : {"causal=1 ", ""}) {
    PerformerProblem p = make_performer_problem(
        str_cat(form,
                "q_len=5 kv_len=6 kv_heads=2 group=2 head_dim=3 "
                "value_dim=2 dtype=float64 state=both"),
        4);
    const PerformerOutputs o = run_reference(p);
    ASSERT_TRUE(o.status.ok()) << o.status.message();
    const PerformerState scale = *o.state;
    const auto expect_gradient = [&](Tensor& x, const Tensor& gradient,
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
              const double up = loss(p, scale);
              x.set(b, s, h, c, value - kStep);
              const double down = loss(p, scale);
              x.set(b, s, h, c, value);
              want.push_back((up - down) / (2 * kStep));
            }
      EXPECT_GT(norm(want), 1e-3) << name;
      EXPECT_LE(relative_error(gradient.values(), want), 1e-7)
          << name << " " << form;
    };
    expect_gradient(p.base.q, o.dq, "dq");
    expect_gradient(p.base.k, o.dk, "dk");
    expect_gradient(p.base.v, o.dv, "dv");
    expect_gradient(p.projection, o.d_projection, "d_projection");
    expect_gradient(p.state->kv_state, o.d_state->kv_state, "d_kv_state");
    expect_gradient(p.state->k_sum, o.d_state->k_sum, "d_k_sum");
  }
}

TEST(PerformerProjection, IsOrthogonalInBlocksWithRedrawnNorms) {
  constexpr int64_t kDim = 16, kFeatures = 40;
  std::vector<double> w(kFeatures * kDim), again(kFeatures * kDim),
      other(kFeatures * kDim), longer(2 * kFeatures * kDim);
  performer_projection(kFeatures, kDim, true, 7, w.data());
  performer_projection(kFeatures, kDim, true, 7, again.data());
  performer_projection(kFeatures, kDim, true, 8, other.data());
  performer_projection(2 * kFeatures, kDim, true, 7, longer.data());
  EXPECT_EQ(w, again);
  EXPECT_NE(w, other);
  // More features go on where fewer end.
  EXPECT_TRUE(std::equal(w.begin(), w.end(), longer.begin()));
  const auto dot = [&](int64_t a, int64_t b) {
    double sum = 0;
    for (int64_t c = 0; c < kDim; ++c)
      sum += w[static_cast<size_t>(a * kDim + c)] *
             w[static_cast<size_t>(b * kDim + c)];
    return sum;
  };
  for (int64_t a = 0; a < kFeatures; ++a)
    for (int64_t b = a + 1; b < kFeatures; ++b)
      if (a / kDim == b / kDim) {
        EXPECT_NEAR(dot(a, b), 0, 1e-12) << a << b;
      }
  EXPECT_GT(std::fabs(dot(0, 17)), 1e-3);  // another block
  EXPECT_GT(std::fabs(dot(0, 0) - dot(1, 1)), 1e-3);
}

// chi with dim degrees of freedom: mean square dim, its variance 2 dim.
TEST(PerformerProjection, HasTheMomentsOfGaussianRows) {
  constexpr int64_t kDim = 8, kFeatures = 20000;
  for (const bool orthogonal : {true, false}) {
    std::vector<double> w(kFeatures * kDim);
    performer_projection(kFeatures, kDim, orthogonal, 3, w.data());
    double mean = 0, square = 0, squares = 0;
    for (int64_t f = 0; f < kFeatures; ++f) {
      double length = 0;
      for (int64_t c = 0; c < kDim; ++c) {
        const double x = w[static_cast<size_t>(f * kDim + c)];
        mean += x;
        length += x * x;
      }
      square += length;
      squares += length * length;
    }
    EXPECT_NEAR(mean / (kFeatures * kDim), 0, 0.01);
    EXPECT_NEAR(square / kFeatures, kDim, 0.15);
    const double variance =
        squares / kFeatures - (square / kFeatures) * (square / kFeatures);
    EXPECT_NEAR(variance, 2 * kDim, 1);
  }
}

}  // namespace
}  // namespace cosformer
