// Which weights dropout keeps: how many, how they differ, and that the kernels'
// block of 64 keys says the same as one at a time.
#include "kernels/softmax_dropout.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>

#include "cosformer/kernels.h"

namespace cosformer {
namespace {

int64_t count_kept(double p, uint64_t seed, int64_t row, int64_t head,
                   int64_t from) {
  int64_t kept = 0;
  for (int64_t i = from; i < from + 200; ++i)
    for (int64_t j = from; j < from + 200; ++j)
      kept += softmax_dropout_keeps(p, seed, row, head, i, j);
  return kept;
}

TEST(SoftmaxDropout, KeepsTheFractionThatItIsAskedFor) {
  for (double p : {0.0, 0.01, 0.1, 0.5, 0.9, 0.999}) {
    for (const int64_t from : {int64_t{0}, int64_t{-150}, int64_t{1} << 50}) {
      const double n = 200 * 200;
      // Five standard deviations.
      EXPECT_NEAR(static_cast<double>(count_kept(p, 7, 0, 3, from)),
                  (1 - p) * n, 5 * std::sqrt(n * p * (1 - p)))
          << p << " from " << from;
    }
  }
}

TEST(SoftmaxDropout, EachSeedRowHeadAndPositionDrawsItsOwn) {
  const auto keeps = [](uint64_t seed, int64_t row, int64_t head, int64_t i,
                        int64_t j) {
    uint64_t bits = 0;
    for (int64_t n = 0; n < 64; ++n)
      bits |= uint64_t{softmax_dropout_keeps(0.5, seed, row, head, i, j + n)}
              << n;
    return bits;
  };
  const uint64_t one = keeps(1, 2, 3, 4, 5);
  EXPECT_EQ(one, keeps(1, 2, 3, 4, 5));
  for (const uint64_t other :
       {keeps(2, 2, 3, 4, 5), keeps(1 + (uint64_t{1} << 32), 2, 3, 4, 5),
        keeps(1, 3, 3, 4, 5), keeps(1, 3, 2, 4, 5), keeps(1, 2, 4, 4, 5),
        keeps(1, 2, 3, 5, 5), keeps(1, 2, 3, 5, 4), keeps(1, 2, 3, -4, 5),
        keeps(1, 2, 3, 4, -5), keeps(1, 2, 3, 4, 5 + (int64_t{1} << 40)),
        keeps(1, 2, 3, 4 + (int64_t{1} << 32), 5)}) {
    // About half of 64 bits agree by chance.
    EXPECT_NEAR(std::popcount(one ^ other), 32, 20);
  }
  // The same keys from one place further: shifted, not drawn anew.
  EXPECT_EQ(one >> 1, keeps(1, 2, 3, 4, 6) & ~(uint64_t{1} << 63));
}

TEST(SoftmaxDropout, WhatStaysAtALowRateStaysAtAnyLower) {
  for (int64_t j = 0; j < 2000; ++j) {
    if (softmax_dropout_keeps(0.6, 1, 0, 0, 11, j)) {
      EXPECT_TRUE(softmax_dropout_keeps(0.3, 1, 0, 0, 11, j));
    }
    EXPECT_TRUE(softmax_dropout_keeps(0, 1, 0, 0, 11, j));
  }
}

TEST(SoftmaxDropout, ABlockOf64KeysSaysTheSame) {
  for (const int64_t position :
       {int64_t{0}, int64_t{77}, int64_t{-3}, int64_t{1} << 45}) {
    for (const int64_t block :
         {int64_t{0}, int64_t{3}, int64_t{-1}, -(int64_t{1} << 40)}) {
      const uint64_t bits = dropout_keeps_block(
          dropout_key(5, 6, 7), dropout_threshold(0.3), position, block);
      for (int64_t r = 0; r < 64; ++r) {
        EXPECT_EQ(((bits >> r) & 1) != 0,
                  softmax_dropout_keeps(0.3, 5, 6, 7, position,
                                        block * kDropoutKeys + r));
        EXPECT_EQ(dropout_block(block * kDropoutKeys + r), block);
      }
    }
  }
}

TEST(SoftmaxDropout, TheThresholdIsTheRateIn32Bits) {
  EXPECT_EQ(dropout_threshold(0), 0u);
  EXPECT_EQ(dropout_threshold(0.5), 0x80000000u);
  EXPECT_EQ(dropout_threshold(0.1), 429496730u);
  EXPECT_EQ(dropout_threshold(0x1p-32), 1u);
  EXPECT_EQ(dropout_threshold(1 - 0x1p-40), ~uint32_t{0});
}

// Trained models resume with the masks that they were trained with.
TEST(SoftmaxDropout, NeverChanges) {
  EXPECT_EQ(dropout_key(1, 2, 3), 7367606758917324626u);
  EXPECT_EQ(
      dropout_keeps_block(dropout_key(1, 2, 3), dropout_threshold(0.5), 100, 2),
      12489521936132963367u);
}

}  // namespace
}  // namespace cosformer
