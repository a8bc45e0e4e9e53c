// Invisible means without any effect, for the softmax engine: masked, padded,
// later, other-sequence and pattern-excluded tokens change no bit, whatever
// they hold; visible ones reach exactly those that see them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tests/kernels/softmax_problem.h"
#include "tests/kernels/tokens.h"

namespace cosformer {
namespace {

using testing::all_finite;
using testing::all_zero;
using testing::bits_of;
using testing::cut;
using testing::fill_token;
using testing::kInf;
using testing::kNan;
using testing::kOnes;
using testing::kStrange;
using testing::relative_error;
using testing::softmax_problem;
using testing::SoftmaxOutputs;
using testing::SoftmaxProblem;
using testing::Tensor;
using testing::values_of;

const char* const kKinds[] = {
    "",
    "group=2 value_dim=5 reach=7",
    "window=both",
    "window=left dilation=3 globals=first group=2",
    "window=self globals=scattered",
    "block_size=16 block_heads=1 globals=last reach=90",
    "dropout=30",
    "window=both dilation=2 dtype=float64",
    "reach=40 dtype=bfloat16",
    "block_size=8 dtype=float16",
};

// Runs the body for each kind on each instruction set.
void for_all(const std::string& sizes,
             const std::function<void(const SoftmaxProblem&)>& body) {
  testing::for_each_isa([&] {
    for (const char* kind : kKinds) {
      const std::string text = str_cat(sizes, " ", kind);
      SCOPED_TRACE(text);
      body(softmax_problem(text));
    }
  });
}

SoftmaxOutputs run_all(const SoftmaxProblem& p) {
  SoftmaxOutputs o = run(p, serial_executor());
  EXPECT_TRUE(o.status.ok()) << o.status.message();
  return o;
}

bool is_half(const SoftmaxProblem& p) {
  return p.q.dtype() == DType::kBFloat16 || p.q.dtype() == DType::kFloat16;
}
// Largest relative difference of a result from itself, computed in other
// blocks.
double out_tolerance(const SoftmaxProblem& p) {
  return is_half(p) ? 0x1p-8 : 1e-6;
}
double gradient_tolerance(const SoftmaxProblem& p) {
  return is_half(p) ? 0x1p-6 : 1e-5;
}

void expect_same_bits(const SoftmaxOutputs& got, const SoftmaxOutputs& want,
                      const std::string& what) {
  const std::pair<const char*, Tensor SoftmaxOutputs::*> all[] = {
      {"out", &SoftmaxOutputs::out},
      {"log_sum_exp", &SoftmaxOutputs::log_sum_exp},
      {"dq", &SoftmaxOutputs::dq},
      {"dk", &SoftmaxOutputs::dk},
      {"dv", &SoftmaxOutputs::dv},
      {"d_bias", &SoftmaxOutputs::d_bias}};
  for (const auto& [name, x] : all)
    EXPECT_EQ((got.*x).bits(), (want.*x).bits()) << name << ": " << what;
}

void fill_head(Tensor& x, int64_t b, int64_t s, int64_t h, double value) {
  for (int64_t c = 0; c < x.size()[3]; ++c) x.set(b, s, h, c, value);
}

// Everything that make_problem filled with junk.
void fill_unseen(SoftmaxProblem& p, double value) {
  const SoftmaxProblem& shape = p;
  for_unseen(
      shape,
      [&](const AttentionRow& row, int64_t h, int64_t i) {
        fill_head(p.q, row.batch, row.q_offset + i, h, value);
        fill_head(p.d_out, row.batch, row.q_offset + i, h, value);
      },
      [&](const AttentionRow& row, int64_t h, int64_t j) {
        fill_head(p.k, row.batch, row.kv_offset + j, h, value);
        fill_head(p.v, row.batch, row.kv_offset + j, h, value);
      });
}

TEST(SoftmaxVisibility, WhatNothingSeesChangesNoBit) {
  for (const char* call :
       {"batch=2 mask=right-padding", "batch=2 mask=left-padding causal=1",
        "batch=2 mask=holes", "batch=2 mask=masked-rows causal=1",
        "mask=query-only starts=rows", "causal=1 starts=rows mask=holes",
        "packing=many causal=1"}) {
    for_all(str_cat("q_len=70 kv_len=70 kv_heads=2 head_dim=20 value_dim=24 "
                    "seed=2 ",
                    call),
            [](SoftmaxProblem p) {
              fill_unseen(p, 0);
              const SoftmaxOutputs zeros = run_all(p);
              EXPECT_TRUE(all_finite(zeros.out));
              EXPECT_TRUE(all_finite(zeros.dq) && all_finite(zeros.dk) &&
                          all_finite(zeros.dv));
              for (double value : kStrange) {
                fill_unseen(p, value);
                expect_same_bits(run_all(p), zeros,
                                 str_cat("invisible places hold ", value));
              }
            });
  }
}

// A token of q, k, v or d_out that holds something strange: rows that do not
// see it, and keys that no row which does sees, keep every bit; NaN reaches all
// others.
void expect_reaches_exactly(const SoftmaxProblem& p,
                            const SoftmaxOutputs& clean,
                            Tensor SoftmaxProblem::* tensor, int64_t at,
                            double value) {
  SoftmaxProblem dirty = p;
  fill_token(dirty.*tensor, 0, at, value);
  const SoftmaxOutputs o = run_all(dirty);
  const bool of_query =
      tensor == &SoftmaxProblem::q || tensor == &SoftmaxProblem::d_out;
  const bool backward_only = tensor == &SoftmaxProblem::d_out;
  const bool nan = std::isnan(value);
  const AttentionRow row = p.row(0);
  const int64_t heads = p.q.size()[2], group = heads / p.k.size()[2];
  for (int64_t h = 0; h < heads; ++h) {
    std::vector<bool> reached(static_cast<size_t>(row.kv_len));
    for (int64_t kv = 0; h % group == 0 && kv < group; ++kv)
      for (int64_t i = 0; i < row.q_len; ++i) {
        const bool hit = of_query ? i == at : p.sees(row, h + kv, i, at);
        for (int64_t j = 0; hit && j < row.kv_len; ++j)
          if (p.sees(row, h + kv, i, j)) reached[static_cast<size_t>(j)] = true;
      }
    const auto same = [&](const Tensor& x, const Tensor& y, int64_t s,
                          int64_t head) {
      for (int64_t c = 0; c < x.size()[3]; ++c)
        if (x.get(0, s, head, c) != y.get(0, s, head, c)) return false;
      return true;
    };
    const auto is_nan = [&](const Tensor& x, int64_t s, int64_t head) {
      for (int64_t c = 0; c < x.size()[3]; ++c)
        if (!std::isnan(x.get(0, s, head, c))) return false;
      return true;
    };
    const std::string what = str_cat(value, " at ", at, ", head ", h, ", row ");
    for (int64_t i = 0; i < row.q_len; ++i) {
      bool sees_any = false;
      for (int64_t j = 0; j < row.kv_len; ++j)
        sees_any = sees_any || p.sees(row, h, i, j);
      const bool hit = sees_any && (of_query ? i == at : p.sees(row, h, i, at));
      if (!hit || backward_only) {
        ASSERT_TRUE(same(o.out, clean.out, i, h)) << "out: " << what << i;
        ASSERT_TRUE(same(o.log_sum_exp, clean.log_sum_exp, i, h)) << what << i;
      } else if (nan) {
        ASSERT_TRUE(is_nan(o.out, i, h)) << "out: " << what << i;
      }
      if (!hit) {
        ASSERT_TRUE(same(o.dq, clean.dq, i, h)) << "dq: " << what << i;
      } else if (nan) {
        ASSERT_TRUE(is_nan(o.dq, i, h)) << "dq: " << what << i;
      }
    }
    if (h % group != 0) continue;
    for (int64_t j = 0; j < row.kv_len; ++j) {
      if (!reached[static_cast<size_t>(j)]) {
        ASSERT_TRUE(same(o.dk, clean.dk, j, h / group)) << "dk: " << what << j;
        ASSERT_TRUE(same(o.dv, clean.dv, j, h / group)) << "dv: " << what << j;
      } else if (nan) {
        ASSERT_TRUE(is_nan(o.dk, j, h / group)) << "dk: " << what << j;
        if (tensor == &SoftmaxProblem::v) continue;  // no part of dv
        ASSERT_TRUE(is_nan(o.dv, j, h / group)) << "dv: " << what << j;
      }
    }
  }
}

TEST(SoftmaxVisibility, StrangeTokensReachExactlyTheRowsThatSeeThem) {
  for (const char* call : {"causal=1", "causal=0"}) {
    for_all(str_cat("q_len=100 kv_len=100 kv_heads=2 head_dim=24 value_dim=8 ",
                    call),
            [](SoftmaxProblem p) {
              if (p.options.dropout_p > 0) return;  // a dropped NaN may stay
              fill_unseen(p, 0);
              const SoftmaxOutputs clean = run_all(p);
              for (int64_t at : {0, 1, 40, 63, 64, 99})
                for (Tensor SoftmaxProblem::* x :
                     {&SoftmaxProblem::q, &SoftmaxProblem::k,
                      &SoftmaxProblem::v, &SoftmaxProblem::d_out})
                  for (double value : {kNan, kOnes, kInf, 1e38}) {
                    expect_reaches_exactly(p, clean, x, at, value);
                    if (::testing::Test::HasFatalFailure()) return;
                  }
            });
    if (::testing::Test::HasFatalFailure()) return;
  }
}

// One element of one value: one column of the rows that see it.
TEST(SoftmaxVisibility, OneNanInAValueReachesOneColumn) {
  for (const char* causal : {"causal=0", "causal=1"}) {
    for_all(str_cat("q_len=100 kv_len=100 kv_heads=2 head_dim=24 value_dim=20 ",
                    causal),
            [](SoftmaxProblem p) {
              if (p.options.dropout_p > 0) return;
              fill_unseen(p, 0);
              SoftmaxProblem dirty = p;
              dirty.v.set(0, 66, 1, 3, kNan);
              const SoftmaxOutputs clean = run_forward(p, serial_executor());
              const SoftmaxOutputs o = run_forward(dirty, serial_executor());
              const AttentionRow row = p.row(0);
              const int64_t heads = p.q.size()[2];
              for (int64_t s = 0; s < 100; ++s)
                for (int64_t h = 0; h < heads; ++h)
                  for (int64_t c = 0; c < p.v.size()[3]; ++c) {
                    const bool sees = h >= heads / 2 && p.sees(row, h, s, 66);
                    const double was = clean.out.get(0, s, h, c);
                    if (sees && c == 3) {
                      EXPECT_TRUE(std::isnan(o.out.get(0, s, h, c)))
                          << s << " " << h;
                    } else if (!sees) {
                      EXPECT_EQ(o.out.get(0, s, h, c), was);
                    } else {
                      EXPECT_NEAR(
                          o.out.get(0, s, h, c), was,
                          (is_half(p) ? 1e-2 : 1e-5) * (1 + std::fabs(was)));
                    }
                  }
            });
  }
}

TEST(SoftmaxVisibility, ChangingTheFutureChangesNoBitOfThePast) {
  for (int64_t when : {1, 5, 63, 64, 77, 140}) {
    for_all("causal=1 q_len=150 kv_len=150 kv_heads=2 head_dim=24 value_dim=24",
            [when](const SoftmaxProblem& p) {
              const SoftmaxOutputs before = run_all(p);
              for (double value : kStrange) {
                SoftmaxProblem changed = p;
                for (int64_t s = when; s < 150; ++s)
                  for (Tensor SoftmaxProblem::* x :
                       {&SoftmaxProblem::q, &SoftmaxProblem::k,
                        &SoftmaxProblem::v, &SoftmaxProblem::d_out})
                    fill_token(changed.*x, 0, s, value);
                const SoftmaxOutputs after = run_all(changed);
                for (Tensor SoftmaxOutputs::* x :
                     {&SoftmaxOutputs::out, &SoftmaxOutputs::log_sum_exp,
                      &SoftmaxOutputs::dq})
                  EXPECT_EQ(bits_of(after.*x, 0, 0, when),
                            bits_of(before.*x, 0, 0, when))
                      << value << " from " << when;
              }
            });
  }
}

// Backward, a key hears only of queries that see it: earlier queries and their
// gradients change no bit of later keys' gradients.
TEST(SoftmaxVisibility, QueriesThatDoNotSeeAKeyChangeNoBitOfItsGradient) {
  for (int64_t when : {1, 63, 64, 77}) {
    for_all("causal=1 q_len=150 kv_len=150 kv_heads=2 head_dim=24 value_dim=24",
            [when](const SoftmaxProblem& p) {
              const SoftmaxOutputs before = run_all(p);
              for (double value : kStrange) {
                SoftmaxProblem changed = p;
                for (int64_t s = 0; s < when; ++s) {
                  fill_token(changed.q, 0, s, value);
                  fill_token(changed.d_out, 0, s, value);
                }
                const SoftmaxOutputs after = run_all(changed);
                for (Tensor SoftmaxOutputs::* x :
                     {&SoftmaxOutputs::dk, &SoftmaxOutputs::dv})
                  EXPECT_EQ(bits_of(after.*x, 0, when, 150),
                            bits_of(before.*x, 0, when, 150))
                      << value << " before " << when;
              }
            });
  }
}

TEST(SoftmaxVisibility, FullyMaskedRowsAreZeroWithZeroGradients) {
  for (const char* call :
       {"causal=0", "causal=1", "causal=1 starts=negative"}) {
    for_all(str_cat("batch=2 q_len=70 kv_len=66 kv_heads=2 value_dim=9 ", call),
            [](SoftmaxProblem p) {
              p.key_mask.assign(2 * 66, 1);
              std::fill_n(p.key_mask.begin(), 66, 0);
              // What a row that sees nothing holds has no effect either.
              for (int64_t s : {5, 65}) {
                fill_token(p.q, 0, s, s == 5 ? kNan : kInf);
                fill_token(p.d_out, 0, s + 1, kNan);
              }
              fill_token(p.k, 0, 0, kNan);
              fill_token(p.v, 0, 65, kNan);
              const SoftmaxOutputs o = run_all(p);
              EXPECT_TRUE(all_zero(values_of(o.out, 0, 0, 70)));
              EXPECT_TRUE(all_zero(values_of(o.dq, 0, 0, 70)));
              EXPECT_TRUE(all_zero(values_of(o.dk, 0, 0, 66)));
              EXPECT_TRUE(all_zero(values_of(o.dv, 0, 0, 66)));
              for (double x : values_of(o.log_sum_exp, 0, 0, 70))
                EXPECT_EQ(x, -kInf);
              EXPECT_TRUE(all_finite(values_of(o.out, 1, 0, 70)));
              EXPECT_FALSE(all_zero(values_of(o.out, 1, 0, 70)));
            });
  }
}

// A window wholly inside padding: its rows see nothing, the others as if the
// padding were not there.
TEST(SoftmaxVisibility, WindowsInsidePaddingGiveZeros) {
  testing::for_each_isa([] {
    for (const char* text :
         {"window=left causal=1", "window=both", "window=both dilation=3",
          "window=left dtype=float16", "window=self reach=2"}) {
      SoftmaxProblem p = softmax_problem(
          str_cat("q_len=200 kv_len=200 kv_heads=2 head_dim=16 ", text));
      p.key_mask.assign(200, 1);
      std::fill_n(p.key_mask.begin() + 40, 120, 0);
      for (int64_t s = 40; s < 160; ++s) {
        fill_token(p.k, 0, s, kNan);
        fill_token(p.v, 0, s, kInf);
      }
      const SoftmaxOutputs o = run_all(p);
      // The farthest that these windows reach is 27.
      EXPECT_TRUE(all_zero(values_of(o.out, 0, 40 + 27, 160 - 27))) << text;
      EXPECT_TRUE(all_zero(values_of(o.dq, 0, 40 + 27, 160 - 27))) << text;
      EXPECT_TRUE(all_finite(o.out)) << text;
      EXPECT_TRUE(all_finite(o.dq) && all_finite(o.dk) && all_finite(o.dv))
          << text;
      EXPECT_FALSE(all_zero(values_of(o.out, 0, 0, 40))) << text;
      EXPECT_EQ(compare(p, o, run_reference(p)), "") << text;
    }
  });
}

TEST(SoftmaxVisibility, RowsBeforeEveryKeyAreZeroWithZeroGradients) {
  testing::for_each_isa([] {
    for (const char* kind : {"", "reach=4 group=2", "dtype=bfloat16"}) {
      SoftmaxProblem p = softmax_problem(
          str_cat("causal=1 q_len=20 kv_len=20 kv_heads=2 ", kind));
      p.q_start = {0};
      p.kv_start = {12};
      fill_token(p.q, 0, 3, kNan);
      fill_token(p.d_out, 0, 11, kNan);
      const SoftmaxOutputs o = run_all(p);
      EXPECT_TRUE(all_zero(values_of(o.out, 0, 0, 12)));
      EXPECT_TRUE(all_zero(values_of(o.dq, 0, 0, 12)));
      EXPECT_FALSE(all_zero(values_of(o.out, 0, 12, 20)));
      EXPECT_TRUE(all_finite(o.out) && all_finite(o.dk));
      EXPECT_TRUE(all_zero(values_of(o.dk, 0, 8, 20)));  // seen by nobody
      EXPECT_TRUE(all_zero(values_of(o.dv, 0, 8, 20)));
    }
  });
}

TEST(SoftmaxVisibility, PaddedBatchEqualsEachSequenceAlone) {
  for (const char* causal : {"causal=0", "causal=1"}) {
    for_all(str_cat("batch=3 q_len=130 kv_len=130 head_dim=24 value_dim=24 ",
                    causal),
            [](SoftmaxProblem p) {
              if (p.options.dropout_p > 0) return;  // rows draw their own
              const int64_t lengths[] = {130, 65, 3};
              fill_unseen(p, 1);
              p.key_mask.assign(3 * 130, 0);
              for (int64_t b = 0; b < 3; ++b)
                std::fill_n(p.key_mask.begin() + b * 130, lengths[b], 1);
              p.query_mask = p.key_mask;
              // A global token inside the padding is global for nobody.
              for (size_t s = 0; s < p.global_mask.size(); ++s)
                if (p.key_mask[s] == 0) p.global_mask[s] = 0;
              const SoftmaxOutputs batch = run_all(p);
              for (int64_t b = 0; b < 3; ++b) {
                const int64_t n = lengths[b];
                const SoftmaxOutputs alone = run_all(row_alone(p, b, n, n));
                EXPECT_LE(relative_error(values_of(batch.out, b, 0, n),
                                         alone.out.values()),
                          out_tolerance(p));
                for (Tensor SoftmaxOutputs::* x :
                     {&SoftmaxOutputs::dq, &SoftmaxOutputs::dk,
                      &SoftmaxOutputs::dv}) {
                  EXPECT_TRUE(all_zero(values_of(batch.*x, b, n, 130)));
                  const std::vector<double> want = (alone.*x).values();
                  // Three keys or less may leave nothing but roundings.
                  if (n > 3) {
                    EXPECT_LE(
                        relative_error(values_of(batch.*x, b, 0, n), want),
                        gradient_tolerance(p));
                  }
                }
                EXPECT_TRUE(all_zero(values_of(batch.out, b, n, 130)));
              }
            });
  }
}

TEST(SoftmaxVisibility, PackedEqualsEachSequenceAlone) {
  for (const char* causal : {"causal=0", "causal=1"}) {
    for_all(str_cat("q_len=140 kv_len=140 head_dim=24 value_dim=24 ", causal),
            [](SoftmaxProblem p) {
              if (p.options.dropout_p > 0) return;  // rows draw their own
              fill_unseen(p, 1);
              p.cu_seqlens_q = p.cu_seqlens_k = {0, 0, 70, 70, 71, 140};
              const SoftmaxOutputs packed = run_all(p);
              for (size_t r = 0; r + 1 < p.cu_seqlens_q.size(); ++r) {
                const int64_t from = p.cu_seqlens_q[r],
                              to = p.cu_seqlens_q[r + 1];
                SoftmaxProblem alone = p;
                alone.cu_seqlens_q = alone.cu_seqlens_k = {};
                for (Tensor SoftmaxProblem::* x :
                     {&SoftmaxProblem::q, &SoftmaxProblem::k,
                      &SoftmaxProblem::v, &SoftmaxProblem::d_out})
                  alone.*x = cut(p.*x, 0, from, to);
                if (!p.global_mask.empty()) {
                  alone.global_mask.assign(p.global_mask.begin() + from,
                                           p.global_mask.begin() + to);
                }
                const SoftmaxOutputs o = run_all(alone);
                EXPECT_LE(relative_error(values_of(packed.out, 0, from, to),
                                         o.out.values()),
                          out_tolerance(p));
                if (to - from < 2) continue;  // dq of one key is zero
                for (Tensor SoftmaxOutputs::* x :
                     {&SoftmaxOutputs::dq, &SoftmaxOutputs::dk,
                      &SoftmaxOutputs::dv}) {
                  EXPECT_LE(relative_error(values_of(packed.*x, 0, from, to),
                                           (o.*x).values()),
                            gradient_tolerance(p));
                }
              }
            });
  }
}

TEST(SoftmaxVisibility, OtherSequencesOfAPackChangeNoBit) {
  for_all(
      "causal=1 q_len=100 kv_len=100 kv_heads=2 head_dim=24",
      [](SoftmaxProblem p) {
        p.cu_seqlens_q = p.cu_seqlens_k = {0, 30, 66, 100};
        fill_unseen(p, 1);
        const SoftmaxOutputs clean = run_all(p);
        for (double value : kStrange) {
          SoftmaxProblem dirty = p;
          for (int64_t s : {0, 29, 66, 99})
            for (Tensor SoftmaxProblem::* x :
                 {&SoftmaxProblem::q, &SoftmaxProblem::k, &SoftmaxProblem::v,
                  &SoftmaxProblem::d_out})
              fill_token(dirty.*x, 0, s, value);
          const SoftmaxOutputs o = run_all(dirty);
          for (Tensor SoftmaxOutputs::* x :
               {&SoftmaxOutputs::out, &SoftmaxOutputs::dq, &SoftmaxOutputs::dk,
                &SoftmaxOutputs::dv}) {
            EXPECT_EQ(bits_of(o.*x, 0, 30, 66), bits_of(clean.*x, 0, 30, 66))
                << value;
          }
        }
      });
}

// With equal scores the sum of weights counts the keys that a row sees.
TEST(SoftmaxVisibility, OneQuerySeesAsManyKeysAsItsPositionAllows) {
  testing::for_each_isa([] {
    SoftmaxProblem p = softmax_problem(
        "causal=1 q_len=1 kv_len=8 head_dim=1 value_dim=1 dtype=float64");
    p.q.fill(0);
    p.k.fill(0);
    p.v.fill(1);
    const auto seen = [&p] {
      const SoftmaxOutputs o = run_all(p);
      return std::lround(std::exp(o.log_sum_exp.get(0, 0, 0, 0)));
    };
    for (int64_t start = -1; start <= 8; ++start) {
      p.q_start = {start};
      EXPECT_EQ(seen(), std::min<int64_t>(8, start + 1)) << start;
    }
    p.options.is_causal = false;
    EXPECT_EQ(seen(), 8);
    p.options.has_window = true;
    p.options.window_left = p.options.window_right = 2;
    p.q_start = {3};
    EXPECT_EQ(seen(), 5);
    p.options.dilation = 3;
    EXPECT_EQ(seen(), 3);  // 0, 3 and 6
  });
}

TEST(SoftmaxVisibility, CausalUnequalLengthsAreDefinedByPositions) {
  for (const auto& [q_len, kv_len] :
       {std::pair{3, 5}, std::pair{5, 3}, std::pair{1, 5}}) {
    for_all(str_cat("causal=1 q_len=", q_len, " kv_len=", kv_len),
            [](const SoftmaxProblem& p) {
              EXPECT_EQ(compare(p, run_all(p), run_reference(p)), "");
            });
  }
}

}  // namespace
}  // namespace cosformer
