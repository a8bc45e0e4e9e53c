// The oracle of the softmax engine itself: by hand, rule by rule, by finite
// differences, and in every dtype.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "tests/kernels/softmax_problem.h"
#include "tests/kernels/tokens.h"

namespace cosformer {
namespace {

using testing::relative_error;
using testing::softmax_problem;
using testing::SoftmaxOutputs;
using testing::SoftmaxProblem;
using testing::Tensor;

SoftmaxOutputs reference_of(const SoftmaxProblem& p) {
  SoftmaxOutputs o = run_reference(p);
  EXPECT_TRUE(o.status.ok()) << o.status.message();
  return o;
}

// Two tokens with scores ln 3 and ln 5 against key 0, 0 against key 1.
SoftmaxProblem two_tokens(const std::string& options) {
  SoftmaxProblem p = softmax_problem(
      "q_len=2 kv_len=2 head_dim=1 value_dim=1 dtype=float64 " + options);
  p.options.scale = 2;
  p.q.set(0, 0, 0, 0, std::log(3.0) / 2);
  p.q.set(0, 1, 0, 0, std::log(5.0) / 2);
  p.k.set(0, 0, 0, 0, 1);
  p.k.set(0, 1, 0, 0, 0);
  p.v.set(0, 0, 0, 0, 10);
  p.v.set(0, 1, 0, 0, 20);
  p.d_out.fill(1);
  return p;
}

TEST(SoftmaxReference, MatchesAHandComputedExample) {
  const SoftmaxOutputs o = reference_of(two_tokens(""));
  // Weights 3/4, 1/4 and 5/6, 1/6.
  const double out0 = 0.75 * 10 + 0.25 * 20, out1 = (50 + 20) / 6.0;
  EXPECT_NEAR(o.out.get(0, 0, 0, 0), out0, 1e-13);
  EXPECT_NEAR(o.out.get(0, 1, 0, 0), out1, 1e-13);
  EXPECT_NEAR(o.log_sum_exp.get(0, 0, 0, 0), std::log(4.0), 1e-15);
  EXPECT_NEAR(o.log_sum_exp.get(0, 1, 0, 0), std::log(6.0), 1e-15);
  EXPECT_NEAR(o.dv.get(0, 0, 0, 0), 0.75 + 5 / 6.0, 1e-15);
  EXPECT_NEAR(o.dv.get(0, 1, 0, 0), 0.25 + 1 / 6.0, 1e-15);
  // d score_ij = w_ij (v_j - out_i).
  const double d00 = 0.75 * (10 - out0), d10 = 5 / 6.0 * (10 - out1);
  const double d01 = 0.25 * (20 - out0), d11 = 1 / 6.0 * (20 - out1);
  EXPECT_NEAR(o.dq.get(0, 0, 0, 0), 2 * d00, 1e-13);
  EXPECT_NEAR(o.dq.get(0, 1, 0, 0), 2 * d10, 1e-13);
  EXPECT_NEAR(o.dk.get(0, 0, 0, 0), std::log(3.0) * d00 + std::log(5.0) * d10,
              1e-13);
  EXPECT_NEAR(o.dk.get(0, 1, 0, 0), std::log(3.0) * d01 + std::log(5.0) * d11,
              1e-13);
}

TEST(SoftmaxReference, CausalRowsSeeNoLaterKey) {
  const SoftmaxOutputs o = reference_of(two_tokens("causal=1"));
  EXPECT_EQ(o.out.get(0, 0, 0, 0), 10);
  EXPECT_NEAR(o.log_sum_exp.get(0, 0, 0, 0), std::log(3.0), 1e-15);
  EXPECT_EQ(o.dq.get(0, 0, 0, 0), 0);
  EXPECT_NEAR(o.out.get(0, 1, 0, 0), 70 / 6.0, 1e-13);
}

TEST(SoftmaxReference, TheDefaultScaleIsOneOverTheRootOfTheHeadDim) {
  SoftmaxProblem p =
      softmax_problem("q_len=1 kv_len=2 head_dim=16 value_dim=1 dtype=float64");
  p.q.fill(1);
  p.k.fill(0);
  testing::fill_token(p.k, 0, 0, std::log(3.0) / 4);
  p.v.set(0, 0, 0, 0, 1);
  p.v.set(0, 1, 0, 0, 0);
  EXPECT_NEAR(reference_of(p).out.get(0, 0, 0, 0), 0.75, 1e-15);
}

TEST(SoftmaxReference, TheRelativeBiasIsAddedByClampedDistance) {
  SoftmaxProblem p = softmax_problem(
      "q_len=4 kv_len=4 head_dim=1 value_dim=1 reach=1 dtype=float64");
  p.q.fill(0);
  p.v.fill(0);
  for (int64_t e = 0; e < 3; ++e)  // keys before, here, after
    p.relative_bias.set(0, 0, 0, e, std::log(static_cast<double>(e + 2)));
  p.v.set(0, 0, 0, 0, 1);
  p.d_out.fill(0);
  p.d_out.set(0, 2, 0, 0, 1);
  const SoftmaxOutputs o = reference_of(p);
  // Row 2 weighs 2, 2, 3, 4: distances -2 and -1 share an entry.
  EXPECT_NEAR(o.out.get(0, 2, 0, 0), 2 / 11.0, 1e-15);
  EXPECT_NEAR(o.out.get(0, 0, 0, 0), 3 / 15.0, 1e-15);
  EXPECT_NEAR(o.log_sum_exp.get(0, 2, 0, 0), std::log(11.0), 1e-15);
  const double w = 2 / 11.0;
  EXPECT_NEAR(o.d_bias.get(0, 0, 0, 0), w * (1 - w) + w * (0 - w), 1e-15);
  EXPECT_NEAR(o.d_bias.get(0, 0, 0, 1), 3 / 11.0 * (0 - w), 1e-15);
  EXPECT_NEAR(o.d_bias.get(0, 0, 0, 2), 4 / 11.0 * (0 - w), 1e-15);
}

// Which keys each query sees, as '1's: scores are all equal, so a row's weights
// are 1 / (keys that it sees).
std::vector<std::string> seen(const SoftmaxProblem& problem, int64_t head = 0) {
  SoftmaxProblem p = problem;
  p.q.fill(0);
  p.k.fill(0);
  const int64_t q_len = p.q.size()[1], kv_len = p.k.size()[1];
  std::vector<double> weights(
      static_cast<size_t>(p.q.size()[0] * p.q.size()[2] * q_len * kv_len), -1);
  const Status status = reference::softmax_attention_weights(
      p.options, p.inputs(), weights.data());
  EXPECT_TRUE(status.ok()) << status.message();
  std::vector<std::string> rows;
  for (int64_t i = 0; i < q_len; ++i) {
    const double* w = weights.data() + (head * q_len + i) * kv_len;
    std::string row;
    int64_t count = 0;
    for (int64_t j = 0; j < kv_len; ++j) {
      row += w[j] > 0 ? '1' : '.';
      count += w[j] > 0;
    }
    for (int64_t j = 0; j < kv_len; ++j) {
      if (w[j] > 0) {
        EXPECT_DOUBLE_EQ(w[j], 1.0 / static_cast<double>(count));
      }
    }
    rows.push_back(row);
  }
  return rows;
}
using Rows = std::vector<std::string>;

SoftmaxProblem six(const std::string& options = "") {
  return softmax_problem("q_len=6 kv_len=6 " + options);
}
SoftmaxProblem windowed(int64_t left, int64_t right, int64_t dilation,
                        const std::string& options = "") {
  SoftmaxProblem p = six(options);
  p.options.has_window = true;
  p.options.window_left = left;
  p.options.window_right = right;
  p.options.dilation = dilation;
  return p;
}

TEST(SoftmaxReference, WindowsReachAsFarAsTheySay) {
  EXPECT_EQ(seen(windowed(1, 2, 1)),
            (Rows{"111...", "1111..", ".1111.", "..1111", "...111", "....11"}));
  EXPECT_EQ(seen(windowed(0, 0, 1)),
            (Rows{"1.....", ".1....", "..1...", "...1..", "....1.", ".....1"}));
  EXPECT_EQ(seen(windowed(-1, 0, 1)),
            (Rows{"1.....", "11....", "111...", "1111..", "11111.", "111111"}));
  EXPECT_EQ(seen(windowed(1, 1, 2)),
            (Rows{"1.1...", ".1.1..", "1.1.1.", ".1.1.1", "..1.1.", "...1.1"}));
  EXPECT_EQ(seen(windowed(-1, -1, 3)),
            (Rows{"1..1..", ".1..1.", "..1..1", "1..1..", ".1..1.", "..1..1"}));
  EXPECT_EQ(seen(windowed(2, 2, 1, "causal=1")),
            (Rows{"1.....", "11....", "111...", ".111..", "..111.", "...111"}));
  SoftmaxProblem p = windowed(1, 0, 1);
  p.q_start = {2};
  p.kv_start = {4};
  EXPECT_EQ(seen(p),
            (Rows{"......", "......", "1.....", "11....", ".11...", "..11.."}));
}

TEST(SoftmaxReference, GlobalTokensSeeAndAreSeen) {
  SoftmaxProblem p = windowed(0, 0, 1);
  p.global_mask = {0, 0, 7, 0, 0, 0};
  EXPECT_EQ(seen(p),
            (Rows{"1.1...", ".11...", "111111", "..11..", "..1.1.", "..1..1"}));
  p.options.is_causal = true;
  EXPECT_EQ(seen(p),
            (Rows{"1.....", ".1....", "111...", "..11..", "..1.1.", "..1..1"}));
  // A hidden token is seen by nobody; its query stays global.
  p.options.is_causal = false;
  p.key_mask = {1, 1, 0, 1, 1, 1};
  EXPECT_EQ(seen(p),
            (Rows{"1.....", ".1....", "11.111", "...1..", "....1.", ".....1"}));
  // Global alone is a pattern too. Positions decide whose query is global.
  p = six();
  p.global_mask = {1, 0, 0, 0, 0, 0};
  p.q_start = {-2};
  EXPECT_EQ(seen(p),
            (Rows{"1.....", "1.....", "111111", "1.....", "1.....", "1....."}));
}

TEST(SoftmaxReference, BlocksGoByPosition) {
  SoftmaxProblem p = six();
  p.block_size = 2;
  p.block_mask = {0, 1, 0, 0, 0, 9};
  p.block_mask_heads = 1;
  p.q_blocks = 2;
  p.kv_blocks = 3;
  // The third block of queries is beyond the mask.
  EXPECT_EQ(seen(p),
            (Rows{"..11..", "..11..", "....11", "....11", "......", "......"}));
  p.q_start = {-1};
  p.kv_start = {1};
  EXPECT_EQ(seen(p),
            (Rows{"......", ".11...", ".11...", "...11.", "...11.", "......"}));
}

TEST(SoftmaxReference, HeadsMayHaveBlocksOfTheirOwn) {
  SoftmaxProblem p = six("kv_heads=2");
  p.block_size = 4;
  p.block_mask = {1, 0, 0, 1, 0, 1, 1, 0};
  p.block_mask_heads = 2;
  p.q_blocks = p.kv_blocks = 2;
  EXPECT_EQ(seen(p, 0),
            (Rows{"1111..", "1111..", "1111..", "1111..", "....11", "....11"}));
  EXPECT_EQ(seen(p, 1),
            (Rows{"....11", "....11", "....11", "....11", "1111..", "1111.."}));
}

TEST(SoftmaxReference, AKeyAllowedTwiceCountsOnce) {
  SoftmaxProblem p = windowed(1, 0, 1);
  p.global_mask = {1, 1, 0, 0, 0, 0};
  p.block_size = 3;
  p.block_mask = {1, 0, 0, 1};
  p.block_mask_heads = 1;
  p.q_blocks = p.kv_blocks = 2;
  EXPECT_EQ(seen(p),
            (Rows{"111111", "111111", "111...", "111111", "11.111", "11.111"}));
}

TEST(SoftmaxReference, MasksAndPackingHideKeysAndRows) {
  SoftmaxProblem p = six();
  p.key_mask = {0, 1, 1, 0, 1, 1};
  p.query_mask = {1, 0, 1, 1, 1, 1};
  EXPECT_EQ(seen(p),
            (Rows{".11.11", "......", ".11.11", ".11.11", ".11.11", ".11.11"}));
  p = six();
  p.cu_seqlens_q = {0, 1, 1, 6};
  p.cu_seqlens_k = {0, 2, 3, 6};
  EXPECT_EQ(seen(p),
            (Rows{"11....", "...111", "...111", "...111", "...111", "...111"}));
  p.global_mask = {0, 1, 0, 0, 1, 0};
  EXPECT_EQ(seen(p),
            (Rows{".1....", "....1.", "...111", "....1.", "....1.", "....1."}));
}

TEST(SoftmaxReference, RowsThatSeeNothingAreZeroWithZeroGradients) {
  SoftmaxProblem p = windowed(1, 0, 1, "dtype=float64 value_dim=2");
  p.kv_start = {3};
  testing::fill_token(p.q, 0, 1, testing::kNan);
  testing::fill_token(p.d_out, 0, 0, testing::kInf);
  const SoftmaxOutputs o = reference_of(p);
  for (int64_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(testing::all_zero(testing::values_of(o.out, 0, i, i + 1)));
    EXPECT_TRUE(testing::all_zero(testing::values_of(o.dq, 0, i, i + 1)));
    EXPECT_EQ(o.log_sum_exp.get(0, i, 0, 0), -testing::kInf);
  }
  EXPECT_TRUE(testing::all_finite(o.dk) && testing::all_finite(o.dv));
}

TEST(SoftmaxReference, DroppedWeightsAreTakenOutAfterTheNormalisation) {
  SoftmaxProblem p = softmax_problem(
      "batch=2 q_len=40 kv_len=30 head_dim=1 value_dim=30 kv_heads=2 group=2 "
      "dropout=25 starts=rows dtype=float64");
  p.q.fill(0);
  p.v.fill(0);  // v_j = e_j: the output is the row of weights
  for (int64_t b = 0; b < 2; ++b)
    for (int64_t j = 0; j < 30; ++j)
      for (int64_t h = 0; h < 2; ++h) p.v.set(b, j, h, j, 1);
  const SoftmaxOutputs o = reference_of(p);
  int64_t kept = 0;
  for (int64_t b = 0; b < 2; ++b)
    for (int64_t h = 0; h < 4; ++h)
      for (int64_t i = 0; i < 40; ++i) {
        EXPECT_NEAR(o.log_sum_exp.get(b, i, h, 0), std::log(30.0), 1e-14);
        for (int64_t j = 0; j < 30; ++j) {
          const size_t row = static_cast<size_t>(b);
          const bool stays =
              softmax_dropout_keeps(0.25, p.options.dropout_seed, b, h,
                                    p.q_start[row] + i, p.kv_start[row] + j);
          kept += stays;
          EXPECT_NEAR(o.out.get(b, i, h, j), stays ? 1 / 30.0 / 0.75 : 0,
                      1e-16);
        }
      }
  EXPECT_NEAR(static_cast<double>(kept) / (2 * 4 * 40 * 30), 0.75, 0.02);
}

double loss(const SoftmaxProblem& p) {
  const SoftmaxOutputs o = reference_of(p);
  double sum = 0;
  const std::vector<double> a = o.out.values(), b = p.d_out.values();
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

void expect_finite_differences(SoftmaxProblem& p, Tensor& x,
                               const Tensor& gradient, const char* name) {
  constexpr double kStep = 1e-5;
  std::vector<double> want;
  testing::for_each_element(gradient,
                            [&](int64_t b, int64_t s, int64_t h, int64_t c) {
                              const double value = x.get(b, s, h, c);
                              x.set(b, s, h, c, value + kStep);
                              const double above = loss(p);
                              x.set(b, s, h, c, value - kStep);
                              const double below = loss(p);
                              x.set(b, s, h, c, value);
                              want.push_back((above - below) / (2 * kStep));
                            });
  EXPECT_LE(relative_error(gradient.values(), want), 1e-7)
      << name << " of " << p.text;
}

TEST(SoftmaxReference, GradientsMatchFiniteDifferences) {
  for (const char* text : {
           "",
           "causal=1 scale=own",
           "causal=1 group=2 starts=rows reach=2",
           "mask=holes reach=9",
           "packing=many causal=1 reach=0",
           "window=left dilation=2 globals=scattered reach=3",
           "block_size=8 block_heads=1 starts=negative",
           "dropout=50 reach=1 causal=1",
       }) {
    SoftmaxProblem p = softmax_problem(
        std::string("q_len=6 kv_len=5 head_dim=4 value_dim=3 batch=2 "
                    "kv_heads=2 dtype=float64 seed=7 ") +
        text);
    // Invisible entries back from infinity.
    for (Tensor* x : {&p.q, &p.k, &p.v, &p.d_out}) {
      testing::for_each_element(
          *x, [x](int64_t b, int64_t s, int64_t h, int64_t c) {
            if (!(std::fabs(x->get(b, s, h, c)) < 100)) x->set(b, s, h, c, 1);
          });
    }
    const SoftmaxOutputs o = reference_of(p);
    expect_finite_differences(p, p.q, o.dq, "dq");
    expect_finite_differences(p, p.k, o.dk, "dk");
    expect_finite_differences(p, p.v, o.dv, "dv");
    if (p.has_bias())
      expect_finite_differences(p, p.relative_bias, o.d_bias, "d_bias");
  }
}

TEST(SoftmaxReference, RoundsEachDtypeOnce) {
  for (const char* dtype : {"float32", "bfloat16", "float16"}) {
    const SoftmaxProblem p = softmax_problem(
        std::string("q_len=9 kv_len=9 group=2 reach=3 dtype=") + dtype);
    const SoftmaxOutputs wide = reference_of(p);
    const auto rounded = [&](const Tensor& x, DType to) {
      Tensor y(x.size(), to);
      testing::for_each_element(
          x, [&](int64_t b, int64_t s, int64_t h, int64_t c) {
            y.set(b, s, h, c, x.get(b, s, h, c));
          });
      return y.bits();
    };
    Tensor out(wide.out.size(), p.q.dtype()), dq(p.q.size(), p.q.dtype());
    Tensor log_sum(wide.log_sum_exp.size(), DType::kFloat32);
    Tensor d_bias(p.relative_bias.size(), DType::kFloat32);
    ASSERT_TRUE(reference::softmax_attention_forward(
                    p.options, p.inputs(), out.view(), log_sum.view().data)
                    .ok());
    ASSERT_TRUE(reference::softmax_attention_backward(
                    p.options, p.inputs(), p.d_out.view(), dq.view(), View4{},
                    View4{}, d_bias.view().data)
                    .ok());
    EXPECT_EQ(out.bits(), rounded(wide.out, p.q.dtype())) << dtype;
    EXPECT_EQ(log_sum.bits(), rounded(wide.log_sum_exp, DType::kFloat32));
    EXPECT_EQ(dq.bits(), rounded(wide.dq, p.q.dtype()));
    EXPECT_EQ(d_bias.bits(), rounded(wide.d_bias, DType::kFloat32));
  }
}

// The rule that the tests hide junk by is written apart from the reference's.
TEST(SoftmaxReference, SeesWhatTheTestsSayIsVisible) {
  for (int64_t seed = 0; seed < 40; ++seed) {
    const auto name = [seed](const auto& names, int64_t step) {
      return names[static_cast<size_t>(seed / step) % std::size(names)];
    };
    const SoftmaxProblem p = softmax_problem(str_cat(
        "q_len=23 kv_len=31 kv_heads=2 head_dim=1 value_dim=1 causal=",
        seed % 2, " window=", testing::kWindows[seed % 10].name,
        " dilation=", seed % 10 == 0 ? 1 : 1 + seed % 3,
        " starts=", name(testing::kStartsNames, 3),
        " globals=", name(testing::kGlobalNames, 4), " mask=holes block_size=",
        seed % 3 == 0 ? 8 : 0, " block_heads=1 seed=", seed));
    for (int64_t h = 0; h < 2; ++h) {
      const Rows rows = seen(p, h);
      for (int64_t i = 0; i < 23; ++i)
        for (int64_t j = 0; j < 31; ++j) {
          const AttentionRow row = p.row(0);
          EXPECT_EQ(rows[static_cast<size_t>(i)][static_cast<size_t>(j)] == '1',
                    p.query_is_real(row, i) && p.sees(row, h, i, j))
              << p.text << " head " << h << " " << i << " " << j;
        }
    }
  }
}

}  // namespace
}  // namespace cosformer
