// Invisible means without any effect: masked, padded, later and other-sequence
// tokens change no bit, whatever they hold; visible ones reach exactly those
// that see them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/kernels/compare.h"
#include "tests/kernels/problem.h"
#include "tests/kernels/tokens.h"

namespace cosformer {
namespace {

using testing::all_finite;
using testing::all_nan;
using testing::all_zero;
using testing::bits_of;
using testing::cut;
using testing::fill_token;
using testing::kInf;
using testing::kNan;
using testing::kStrange;
using testing::make_problem;
using testing::Outputs;
using testing::parse_point;
using testing::Problem;
using testing::relative_error;
using testing::Tensor;
using testing::values_of;

const char* const kKinds[] = {
    "feature_map=relu cosine=exact",
    "feature_map=elu1",
    "feature_map=relu cosine=far group=2 value_dim=5",
    "feature_map=elu1 cosine=far rotary=half",
    "feature_map=relu cosine=exact normalized=0",
    "feature_map=relu cosine=exact dtype=float64",
    "feature_map=relu cosine=exact dtype=bfloat16",
};

// With these, 150 positions with the cosine are taken in pairs.
const char* const kWide = "head_dim=64 value_dim=64";

// Runs the body for each kind on each instruction set.
void for_all(const std::string& sizes,
             const std::function<void(const Problem&)>& body) {
  for (std::string_view isa : supported_isas()) {
    ASSERT_TRUE(force_isa(isa).ok());
    for (const char* kind : kKinds) {
      const std::string text = str_cat(sizes, " ", kind);
      SCOPED_TRACE(str_cat("isa=", isa, " ", text));
      const auto point = parse_point(text);
      ASSERT_TRUE(point.has_value());
      body(make_problem(*point));
    }
  }
  ASSERT_TRUE(force_isa("").ok());
}

Outputs run_all(const Problem& p) {
  Outputs o = run(p, serial_executor());
  EXPECT_TRUE(o.status.ok()) << o.status.message();
  return o;
}

void expect_same_bits(const Outputs& got, const Outputs& want,
                      const std::string& what) {
  EXPECT_EQ(got.out.bits(), want.out.bits()) << "out: " << what;
  EXPECT_EQ(got.denominator.bits(), want.denominator.bits())
      << "denominator: " << what;
  EXPECT_EQ(got.dq.bits(), want.dq.bits()) << "dq: " << what;
  EXPECT_EQ(got.dk.bits(), want.dk.bits()) << "dk: " << what;
  EXPECT_EQ(got.dv.bits(), want.dv.bits()) << "dv: " << what;
}

// Row b of a batch, its first n queries and keys, as a call of its own.
Problem row_alone(const Problem& batch, int64_t b, int64_t q_len,
                  int64_t kv_len) {
  Problem p = batch;
  p.q = cut(batch.q, b, 0, q_len);
  p.d_out = cut(batch.d_out, b, 0, q_len);
  p.k = cut(batch.k, b, 0, kv_len);
  p.v = cut(batch.v, b, 0, kv_len);
  p.key_mask.clear();
  p.query_mask.clear();
  if (!p.q_start.empty()) p.q_start = {batch.q_start[static_cast<size_t>(b)]};
  if (!p.kv_start.empty())
    p.kv_start = {batch.kv_start[static_cast<size_t>(b)]};
  return p;
}

TEST(LinearVisibility, PaddedBatchEqualsEachSequenceAlone) {
  for (const char* causal : {"causal=0", "causal=1"}) {
    for_all(str_cat("batch=3 q_len=130 kv_len=130 head_dim=24 value_dim=24 ",
                    causal),
            [](Problem p) {
              const int64_t lengths[] = {130, 65, 3};
              p.key_mask.assign(3 * 130, 0);
              for (int64_t b = 0; b < 3; ++b)
                std::fill_n(p.key_mask.begin() + b * 130, lengths[b], 1);
              p.query_mask = p.key_mask;
              const Outputs batch = run_all(p);
              const bool half = p.q.dtype() == DType::kBFloat16;
              for (int64_t b = 0; b < 3; ++b) {
                const int64_t n = lengths[b];
                const Outputs alone = run_all(row_alone(p, b, n, n));
                EXPECT_LE(relative_error(values_of(batch.out, b, 0, n),
                                         alone.out.values()),
                          half ? 0x1p-8 : 1e-6);
                for (Tensor Outputs::* x :
                     {&Outputs::dq, &Outputs::dk, &Outputs::dv}) {
                  EXPECT_LE(relative_error(values_of(batch.*x, b, 0, n),
                                           (alone.*x).values()),
                            half ? 0x1p-7 : 1e-5);
                  EXPECT_TRUE(all_zero(values_of(batch.*x, b, n, 130)));
                }
                EXPECT_TRUE(all_zero(values_of(batch.out, b, n, 130)));
              }
            });
  }
}

TEST(LinearVisibility, WhatThePaddingHoldsChangesNoBit) {
  for (const char* mask : {"mask=right-padding", "mask=left-padding",
                           "mask=holes", "mask=masked-rows"}) {
    for (const char* causal : {"causal=0", "causal=1"}) {
      for_all(str_cat("batch=2 q_len=70 kv_len=70 kv_heads=2 head_dim=20 "
                      "value_dim=24 seed=2 ",
                      mask, " ", causal),
              [](Problem p) {
                const auto pad_with = [&p](double value) {
                  for (int64_t b = 0; b < 2; ++b)
                    for (int64_t s = 0; s < 70; ++s) {
                      const size_t at = static_cast<size_t>(b * 70 + s);
                      if (p.key_mask[at] == 0) {
                        fill_token(p.k, b, s, value);
                        fill_token(p.v, b, s, value);
                      }
                      if (!p.query_mask.empty() && p.query_mask[at] == 0) {
                        fill_token(p.q, b, s, value);
                        fill_token(p.d_out, b, s, value);
                      }
                    }
                };
                pad_with(0);
                const Outputs zeros = run_all(p);
                EXPECT_TRUE(all_finite(zeros.out.values()));
                for (double value : kStrange) {
                  pad_with(value);
                  expect_same_bits(run_all(p), zeros,
                                   str_cat("padding holds ", value));
                }
              });
    }
  }
}

TEST(LinearVisibility, MaskedNanLeaksIntoNoStateAndNoGradient) {
  for_all(
      "batch=2 q_len=40 kv_len=90 kv_heads=2 mask=holes state=both causal=1",
      [](const Problem& p) {
        // The mask's holes hold NaN, infinity and huge numbers already.
        const Outputs o = run_all(p);
        for (const Tensor* x :
             {&o.out, &o.dq, &o.dk, &o.dv, &o.state->kv_state, &o.state->k_sum,
              &o.d_state->kv_state, &o.d_state->k_sum})
          EXPECT_TRUE(all_finite(x->values()));
      });
}

TEST(LinearVisibility, ChangingTheFutureChangesNoBitOfThePast) {
  for (int64_t when : {1, 5, 63, 64, 77, 130, 140}) {
    for_all(str_cat("causal=1 q_len=150 kv_len=150 kv_heads=2 ",
                    when % 2 != 0 ? "head_dim=24 value_dim=24" : kWide),
            [when](const Problem& p) {
              const Outputs before = run_all(p);
              for (double value : kStrange) {
                Problem changed = p;
                for (int64_t s = when; s < 150; ++s)
                  for (Tensor Problem::* x :
                       {&Problem::q, &Problem::k, &Problem::v, &Problem::d_out})
                    fill_token(changed.*x, 0, s, value);
                const Outputs after = run_all(changed);
                const std::string what = str_cat(value, " from ", when);
                EXPECT_EQ(bits_of(after.out, 0, 0, when),
                          bits_of(before.out, 0, 0, when))
                    << what;
                EXPECT_EQ(bits_of(after.denominator, 0, 0, when),
                          bits_of(before.denominator, 0, 0, when))
                    << what;
                EXPECT_EQ(bits_of(after.dq, 0, 0, when),
                          bits_of(before.dq, 0, 0, when))
                    << what;
              }
            });
  }
}

// Backward, a key hears only of queries that see it: earlier queries and their
// gradients change no bit of later keys' gradients.
TEST(LinearVisibility, QueriesThatDoNotSeeAKeyChangeNoBitOfItsGradient) {
  for (int64_t when : {1, 63, 64, 77}) {
    for_all("causal=1 q_len=150 kv_len=150 kv_heads=2 head_dim=24 value_dim=24",
            [when](const Problem& p) {
              const Outputs before = run_all(p);
              for (double value : kStrange) {
                Problem changed = p;
                for (int64_t s = 0; s < when; ++s) {
                  fill_token(changed.q, 0, s, value);
                  fill_token(changed.d_out, 0, s, value);
                }
                const Outputs after = run_all(changed);
                EXPECT_EQ(bits_of(after.dk, 0, when, 150),
                          bits_of(before.dk, 0, when, 150))
                    << value << " before " << when;
                EXPECT_EQ(bits_of(after.dv, 0, when, 150),
                          bits_of(before.dv, 0, when, 150))
                    << value << " before " << when;
              }
            });
  }
}

TEST(LinearVisibility, VisibleNanReachesExactlyTheRowsThatSeeIt) {
  for (int64_t at : {0, 1, 40, 63, 64, 99}) {
    for_all(str_cat("causal=1 q_len=100 kv_len=100 ",
                    at % 2 == 0 ? kWide : "head_dim=24 value_dim=8"),
            [at](const Problem& p) {
              const Outputs clean = run_all(p);
              for (Tensor Problem::* x : {&Problem::k, &Problem::v}) {
                Problem dirty = p;
                fill_token(dirty.*x, 0, at, kNan);
                const Outputs o = run_all(dirty);
                EXPECT_EQ(bits_of(o.out, 0, 0, at),
                          bits_of(clean.out, 0, 0, at));
                // A row whose weight for this key is zero may share no feature
                // with it; with a NaN value its product is NaN all the same.
                EXPECT_TRUE(all_nan(values_of(o.out, 0, at, 100))) << at;
                EXPECT_EQ(bits_of(o.dq, 0, 0, at), bits_of(clean.dq, 0, 0, at));
              }
              // A query's NaN stays in its row, and reaches the gradients of
              // the keys that it sees.
              Problem dirty = p;
              fill_token(dirty.q, 0, at, kNan);
              const Outputs o = run_all(dirty);
              EXPECT_EQ(bits_of(o.out, 0, 0, at), bits_of(clean.out, 0, 0, at));
              EXPECT_EQ(bits_of(o.out, 0, at + 1, 100),
                        bits_of(clean.out, 0, at + 1, 100));
              EXPECT_TRUE(all_nan(values_of(o.out, 0, at, at + 1)));
              EXPECT_TRUE(all_nan(values_of(o.dv, 0, 0, at + 1)));
              EXPECT_EQ(bits_of(o.dv, 0, at + 1, 100),
                        bits_of(clean.dv, 0, at + 1, 100));
              EXPECT_EQ(bits_of(o.dk, 0, at + 1, 100),
                        bits_of(clean.dk, 0, at + 1, 100));
              EXPECT_EQ(bits_of(o.dq, 0, at + 1, 100),
                        bits_of(clean.dq, 0, at + 1, 100));
            });
  }
}

// One element of one value: one column of the rows that see it.
TEST(LinearVisibility, OneNanInAValueReachesOneColumn) {
  for (const char* causal : {"causal=0", "causal=1"}) {
    for_all(
        str_cat("q_len=100 kv_len=100 kv_heads=2 head_dim=24 value_dim=20 ",
                causal),
        [](const Problem& p) {
          Problem dirty = p;
          dirty.v.set(0, 66, 1, 3, kNan);
          const Outputs clean = run_all(p), o = run_all(dirty);
          const int64_t heads = p.q.size()[2], first = heads / 2;
          const bool half = p.q.dtype() == DType::kBFloat16;
          for (int64_t s = 0; s < 100; ++s)
            for (int64_t h = 0; h < heads; ++h)
              for (int64_t c = 0; c < p.v.size()[3]; ++c) {
                const bool sees =
                    (!p.options.is_causal || s >= 66) && h >= first && c == 3;
                if (sees) {
                  EXPECT_TRUE(std::isnan(o.out.get(0, s, h, c)))
                      << s << " " << h;
                } else if (h < first || (p.options.is_causal && s < 66)) {
                  EXPECT_EQ(o.out.get(0, s, h, c), clean.out.get(0, s, h, c));
                } else {
                  const double was = clean.out.get(0, s, h, c);
                  EXPECT_NEAR(o.out.get(0, s, h, c), was,
                              (half ? 1e-2 : 1e-5) * (1 + std::fabs(was)));
                }
              }
        });
  }
}

TEST(LinearVisibility, NonCausalNanReachesEveryRowOfItsBatchRowAndHead) {
  for_all("batch=2 q_len=30 kv_len=80 kv_heads=2 head_dim=24 value_dim=8",
          [](const Problem& p) {
            const Outputs clean = run_all(p);
            Problem dirty = p;
            for (int64_t c = 0; c < 24; ++c) dirty.k.set(0, 70, 1, c, kNan);
            const Outputs o = run_all(dirty);
            const int64_t first = p.q.size()[2] / 2;
            for (int64_t s = 0; s < 30; ++s)
              for (int64_t h = 0; h < p.q.size()[2]; ++h)
                for (int64_t c = 0; c < p.v.size()[3]; ++c) {
                  if (h >= first) {
                    EXPECT_TRUE(std::isnan(o.out.get(0, s, h, c)));
                  } else {
                    EXPECT_EQ(o.out.get(0, s, h, c), clean.out.get(0, s, h, c));
                  }
                }
            EXPECT_EQ(bits_of(o.out, 1, 0, 30), bits_of(clean.out, 1, 0, 30));
            EXPECT_EQ(bits_of(o.dk, 1, 0, 80), bits_of(clean.dk, 1, 0, 80));
          });
}

TEST(LinearVisibility, FullyMaskedRowsAreZeroWithZeroGradients) {
  for (const char* call :
       {"causal=0", "causal=1", "causal=1 starts=negative"}) {
    for_all(str_cat("batch=2 q_len=70 kv_len=66 kv_heads=2 value_dim=9 ", call),
            [](Problem p) {
              p.key_mask.assign(2 * 66, 1);
              std::fill_n(p.key_mask.begin(), 66, 0);
              // What a row that sees nothing holds has no effect either.
              for (int64_t s : {5, 65}) {
                fill_token(p.q, 0, s, s == 5 ? kNan : kInf);
                fill_token(p.d_out, 0, s + 1, kNan);
              }
              fill_token(p.k, 0, 0, kNan);
              fill_token(p.v, 0, 65, kNan);
              const Outputs o = run_all(p);
              EXPECT_TRUE(all_zero(values_of(o.out, 0, 0, 70)));
              EXPECT_TRUE(all_zero(values_of(o.dq, 0, 0, 70)));
              EXPECT_TRUE(all_zero(values_of(o.dk, 0, 0, 66)));
              EXPECT_TRUE(all_zero(values_of(o.dv, 0, 0, 66)));
              EXPECT_TRUE(all_finite(values_of(o.out, 1, 0, 70)));
              EXPECT_FALSE(all_zero(values_of(o.out, 1, 0, 70)));
            });
  }
}

// A state whose keys were all masked shows a query as little as none does.
TEST(LinearVisibility, RowsBehindAStateWithoutKeysAreZero) {
  for (const char* causal : {"causal=0", "causal=1"}) {
    for_all(str_cat("state=in q_len=20 kv_len=20 kv_heads=2 ", causal),
            [](Problem p) {
              p.state->start = p.state->position;
              for (Tensor* x : {&p.state->kv_state, &p.state->k_sum})
                for (int64_t i = 0; i < x->numel(); ++i) x->set(0, 0, 0, i, 0);
              p.key_mask.assign(20, 0);
              fill_token(p.q, 0, 0, kNan);
              fill_token(p.q, 0, 11, kInf);
              const Outputs o = run_forward(p, serial_executor());
              ASSERT_TRUE(o.status.ok()) << o.status.message();
              EXPECT_TRUE(all_zero(o.out.values()));
              const Outputs reference = run_reference(p);
              EXPECT_TRUE(all_zero(reference.out.values()));
            });
  }
}

TEST(LinearVisibility, RowsBeforeEveryKeyAreZeroWithZeroGradients) {
  for_all("causal=1 q_len=20 kv_len=20 kv_heads=2", [](Problem p) {
    p.q_start = {0};
    p.kv_start = {12};
    p.options.reweight_len *= 4;
    fill_token(p.q, 0, 3, kNan);
    fill_token(p.d_out, 0, 11, kNan);
    const Outputs o = run_all(p);
    EXPECT_TRUE(all_zero(values_of(o.out, 0, 0, 12)));
    EXPECT_TRUE(all_zero(values_of(o.dq, 0, 0, 12)));
    EXPECT_FALSE(all_zero(values_of(o.out, 0, 12, 20)));
    EXPECT_TRUE(all_finite(o.out.values()));
    EXPECT_TRUE(all_finite(o.dk.values()));
    EXPECT_TRUE(all_zero(values_of(o.dk, 0, 8, 20)));  // seen by nobody
    EXPECT_TRUE(all_zero(values_of(o.dv, 0, 8, 20)));
  });
}

// Left padding, with nothing said about the queries.
TEST(LinearVisibility, RowsThatSeeOnlyMaskedKeysAreZeroWithZeroGradients) {
  for_all("causal=1 q_len=80 kv_len=80 kv_heads=2", [](Problem p) {
    p.key_mask.assign(80, 1);
    std::fill_n(p.key_mask.begin(), 70, 0);
    const Outputs clean = run_all(p);
    for (int64_t s : {0, 3, 40, 69}) {
      fill_token(p.q, 0, s, kNan);
      fill_token(p.d_out, 0, s, kInf);
      fill_token(p.k, 0, s, kNan);
      fill_token(p.v, 0, s, kInf);
    }
    const Outputs o = run_all(p);
    EXPECT_TRUE(all_zero(values_of(o.out, 0, 0, 70)));
    EXPECT_TRUE(all_zero(values_of(o.dq, 0, 0, 70)));
    expect_same_bits(o, clean, "rows that see masked keys only");
  });
}

// Right padding of the queries, with nothing said about the keys.
TEST(LinearVisibility, KeysThatOnlyMaskedQueriesSeeHaveZeroGradients) {
  for_all("causal=1 q_len=80 kv_len=80 kv_heads=2", [](Problem p) {
    p.query_mask.assign(80, 1);
    std::fill_n(p.query_mask.begin() + 9, 71, 0);
    const Outputs clean = run_all(p);
    for (int64_t s : {9, 10, 40, 79}) {
      fill_token(p.q, 0, s, kNan);
      fill_token(p.d_out, 0, s, kInf);
      fill_token(p.k, 0, s, kNan);
      fill_token(p.v, 0, s, kInf);
    }
    const Outputs o = run_all(p);
    EXPECT_TRUE(all_zero(values_of(o.dk, 0, 9, 80)));
    EXPECT_TRUE(all_zero(values_of(o.dv, 0, 9, 80)));
    expect_same_bits(o, clean, "keys that masked queries see only");
  });
}

TEST(LinearVisibility, MaskedQueriesAreZeroAndContributeNothing) {
  for_all("causal=1 q_len=66 kv_len=66 kv_heads=2", [](Problem p) {
    p.query_mask.assign(66, 1);
    for (size_t s : {0, 7, 64, 65}) p.query_mask[s] = 0;
    const Outputs clean = run_all(p);
    for (int64_t s : {0, 7, 64, 65}) {
      fill_token(p.q, 0, s, kNan);
      fill_token(p.d_out, 0, s, -kInf);
      EXPECT_TRUE(all_zero(values_of(clean.out, 0, s, s + 1)));
      EXPECT_TRUE(all_zero(values_of(clean.dq, 0, s, s + 1)));
      if (p.options.normalizer == Normalizer::kSum) {
        EXPECT_TRUE(all_zero(values_of(clean.denominator, 0, s, s + 1)));
      }
    }
    expect_same_bits(run_all(p), clean, "masked queries");
  });
}

TEST(LinearVisibility, PackedEqualsEachSequenceAlone) {
  for (const char* causal : {"causal=0", "causal=1"}) {
    for_all(str_cat("q_len=140 kv_len=140 head_dim=24 value_dim=24 ", causal),
            [](Problem p) {
              p.cu_seqlens_q = {0, 0, 70, 70, 71, 140};
              p.cu_seqlens_k = p.cu_seqlens_q;
              const bool half = p.q.dtype() == DType::kBFloat16;
              const Outputs packed = run_all(p);
              for (size_t r = 0; r + 1 < p.cu_seqlens_q.size(); ++r) {
                const int64_t from = p.cu_seqlens_q[r],
                              to = p.cu_seqlens_q[r + 1];
                Problem alone = p;
                alone.cu_seqlens_q = alone.cu_seqlens_k = {};
                for (Tensor Problem::* x :
                     {&Problem::q, &Problem::k, &Problem::v, &Problem::d_out}) {
                  alone.*x = cut(p.*x, 0, from, to);
                }
                const Outputs o = run_all(alone);
                EXPECT_LE(relative_error(values_of(packed.out, 0, from, to),
                                         o.out.values()),
                          half ? 0x1p-8 : 1e-6);
                if (to - from < 2) continue;  // dq of one key is zero
                for (Tensor Outputs::* x :
                     {&Outputs::dq, &Outputs::dk, &Outputs::dv}) {
                  EXPECT_LE(relative_error(values_of(packed.*x, 0, from, to),
                                           (o.*x).values()),
                            half ? 0x1p-7 : 1e-5);
                }
              }
            });
  }
}

TEST(LinearVisibility, OtherSequencesOfAPackChangeNoBit) {
  for_all(
      "causal=1 q_len=100 kv_len=100 kv_heads=2 head_dim=24", [](Problem p) {
        p.cu_seqlens_q = p.cu_seqlens_k = {0, 30, 66, 100};
        const Outputs clean = run_all(p);
        for (double value : kStrange) {
          Problem dirty = p;
          for (int64_t s : {0, 29, 66, 99})
            for (Tensor Problem::* x :
                 {&Problem::q, &Problem::k, &Problem::v, &Problem::d_out})
              fill_token(dirty.*x, 0, s, value);
          const Outputs o = run_all(dirty);
          for (Tensor Outputs::* x :
               {&Outputs::out, &Outputs::dq, &Outputs::dk, &Outputs::dv}) {
            EXPECT_EQ(bits_of(o.*x, 0, 30, 66), bits_of(clean.*x, 0, 30, 66))
                << value;
          }
        }
      });
}

// elu + 1 shares features with every key: a row's denominator counts them.
TEST(LinearVisibility, OneQuerySeesAsManyKeysAsItsPositionAllows) {
  Problem p = make_problem(*parse_point(
      "causal=1 q_len=1 kv_len=8 feature_map=elu1 head_dim=1 value_dim=1"));
  p.q.fill(0);  // phi = 1
  p.k.fill(0);
  p.v.fill(1);
  for (int64_t start = -1; start <= 8; ++start) {
    p.q_start = {start};
    const Outputs o = run_all(p);
    EXPECT_EQ(o.denominator.get(0, 0, 0, 0),
              static_cast<double>(std::min<int64_t>(8, start + 1)))
        << "q_start " << start;
  }
  p.options.is_causal = false;
  EXPECT_EQ(run_all(p).denominator.get(0, 0, 0, 0), 8);
}

TEST(LinearVisibility, CausalUnequalLengthsAreDefinedByPositions) {
  for (const auto& [q_len, kv_len] :
       {std::pair{3, 5}, std::pair{5, 3}, std::pair{1, 5}}) {
    for_all(str_cat("causal=1 q_len=", q_len, " kv_len=", kv_len),
            [](const Problem& p) {
              EXPECT_EQ(compare(p, run_all(p), run_reference(p)), "");
            });
  }
}

}  // namespace
}  // namespace cosformer
