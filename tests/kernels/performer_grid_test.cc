// Performer's kernels against its definition, over the forms and options of a
// call, forward and backward, on every instruction set.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <string>

#include "tests/kernels/grid.h"
#include "tests/kernels/performer_problem.h"

namespace cosformer {
namespace {

using testing::compare;
using testing::for_each_isa;
using testing::make_performer_problem;
using testing::PerformerOutputs;
using testing::PerformerProblem;
using testing::run_reference;

constexpr double kOut32 = 3e-6, kGradient32 = 1e-5;
constexpr double kOut64 = 1e-12, kGradient64 = 4e-12;

// What arithmetic allows a dtype.
void expect_agrees(const PerformerProblem& p, const PerformerOutputs& want,
                   Executor& executor) {
  double out = kOut32, gradient = kGradient32;
  switch (p.base.q.dtype()) {
    case DType::kFloat64:
      out = kOut64;
      gradient = kGradient64;
      break;
    case DType::kBFloat16:  // the backward starts from a rounded output
      out = 0x1p-8;
      gradient = 0x1p-5;
      break;
    case DType::kFloat16:
      out = 0x1p-11;
      gradient = 0x1p-8;
      break;
    default:
      break;
  }
  EXPECT_EQ(compare(p, run(p, executor), want, out, gradient), "")
      << p.base.text << " features=" << p.num_features;
}

void expect_agrees_everywhere(const std::string& text, int64_t features,
                              double scale = 1) {
  const PerformerProblem p = make_performer_problem(text, features, scale);
  const PerformerOutputs want = run_reference(p);
  ASSERT_TRUE(want.status.ok()) << want.status.message();
  for_each_isa([&] { expect_agrees(p, want, serial_executor()); });
}

TEST(PerformerGrid, EveryFormMatchesReference) {
  for (const char* form :
       {"causal=1 q_len=130 kv_len=130", "q_len=130 kv_len=130",
        "q_len=37 kv_len=90", "causal=1 q_len=90 kv_len=37",
        "causal=1 q_len=37 kv_len=90 starts=bottom-right",
        "causal=1 q_len=5 kv_len=3", "causal=1 q_len=3 kv_len=5",
        "causal=1 q_len=1 kv_len=5", "causal=1 q_len=70 kv_len=70 starts=rows",
        "causal=1 q_len=70 kv_len=40 starts=large",
        "causal=1 q_len=70 kv_len=40 starts=negative"}) {
    for (const char* dtype : {"float32", "float64"}) {
      expect_agrees_everywhere(
          str_cat(form,
                  " batch=2 kv_heads=2 head_dim=16 value_dim=16 dtype=", dtype),
          24);
    }
  }
}

TEST(PerformerGrid, MasksPackingStatesAndGroupsMatchReference) {
  for (const char* more : {"mask=right-padding",
                           "mask=left-padding",
                           "mask=holes",
                           "mask=masked-rows",
                           "mask=query-only",
                           "mask=nothing-visible",
                           "packing=one",
                           "packing=0-5-0-1",
                           "packing=many",
                           "state=in",
                           "state=out",
                           "state=both",
                           "state=both mask=holes",
                           "group=3",
                           "group=2 state=both",
                           "packing=many state=both",
                           "layout=padded",
                           "layout=transposed group=2",
                           "layout=offset",
                           "dtype=bfloat16 group=2 mask=holes",
                           "dtype=float16 state=both"}) {
    for (const char* form : {"", "causal=1 "}) {
      const bool packed = std::string(more).find("packing") == 0;
      expect_agrees_everywhere(
          str_cat(form, "batch=", packed ? 1 : 3,
                  " q_len=75 kv_len=75 kv_heads=2 head_dim=8 value_dim=12 ",
                  more),
          20);
    }
  }
}

TEST(PerformerGrid, EveryLengthMatchesReference) {
  for (int64_t length : {0, 1, 2, 63, 64, 65, 255, 257}) {
    for (const char* form : {"", "causal=1 "}) {
      expect_agrees_everywhere(str_cat(form, "q_len=", length, " kv_len=",
                                       length, " head_dim=8 value_dim=8"),
                               8);
    }
  }
}

TEST(PerformerGrid, EveryWidthMatchesReference) {
  for (int64_t dim : {1, 3, 40, 64, 192}) {
    for (int64_t value_dim : {1, 7, 64}) {
      for (int64_t features : {1, 5, 130}) {
        expect_agrees_everywhere(
            str_cat("causal=1 q_len=40 kv_len=40 head_dim=", dim,
                    " value_dim=", value_dim),
            features);
      }
    }
  }
}

// Small calls of everything together.
TEST(PerformerGrid, RandomPointsMatchReference) {
  std::mt19937_64 random(20261129);
  const auto one_of = [&](auto... choices) {
    const std::string all[] = {choices...};
    return all[random() % sizeof...(choices)];
  };
  const int64_t count = testing::kSanitized ? 15 : 150;
  for (int64_t i = 0; i < count; ++i) {
    const bool packed = random() % 4 == 0;
    const std::string text = str_cat(
        "batch=", packed ? 1 : 1 + random() % 3, " q_len=", random() % 100,
        " kv_len=", random() % 100, " kv_heads=", 1 + random() % 2,
        " group=", 1 + random() % 3, " head_dim=", 1 + random() % 20,
        " value_dim=", 1 + random() % 20, " causal=", random() % 2,
        " dtype=", one_of("float32", "float64", "float32"),
        " starts=", one_of("none", "equal", "bottom-right", "rows"),
        packed ? str_cat(" packing=", one_of("many", "one", "0-5-0-1"))
               : str_cat(" mask=", one_of("none", "holes", "right-padding",
                                          "left-padding", "masked-rows")),
        " state=", one_of("none", "in", "out", "both"), " seed=", i);
    const PerformerProblem p =
        make_performer_problem(text, 1 + static_cast<int64_t>(random() % 30));
    const PerformerOutputs want = run_reference(p);
    ASSERT_TRUE(want.status.ok()) << want.status.message() << text;
    const std::unique_ptr<Executor> pool = make_thread_pool(2);
    expect_agrees(p, want, *pool);
  }
}

}  // namespace
}  // namespace cosformer
