// Work is proportional to what is visible: the pairs of queries and keys that
// the plan of a call has its kernels multiply, counted.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/simd/softmax_plan.h"
#include "tests/kernels/softmax_problem.h"

namespace cosformer {
namespace {

using testing::softmax_problem;
using testing::SoftmaxProblem;
using testing::Tensor;

// Pairs of a block's outer tokens and the inner ones that it visits, tile by
// tile where the tile has any visible pair.
int64_t visited(const SoftmaxProblem& p, simd::Side side) {
  const SoftmaxAttentionInputs inputs = p.inputs();
  const simd::SoftmaxCall call(p.options, inputs);
  const simd::SoftmaxPlan plan(call, side, 128);
  simd::InnerList inner;
  simd::TileMask mask;
  int64_t pairs = 0;
  for (int64_t i = 0; i < plan.num_items(); ++i) {
    const simd::SoftmaxItem item = plan.item(i);
    inner.fill(plan, item);
    const int64_t outer = item.block->outer.count;
    for (const simd::IndexList& list : inner.parts()) {
      for (int64_t first = 0; first < list.count; first += simd::kTileKeys) {
        const int64_t count = std::min(simd::kTileKeys, list.count - first);
        mask.start(plan, item, list, first, count);
        // Rows in groups, as the kernels take them.
        for (int64_t t = 0; t < outer; t += 16) {
          const int64_t rows = std::min<int64_t>(16, outer - t);
          if (mask.classify(t, t + rows) != simd::TileClass::kNone)
            pairs += rows * count;
        }
      }
    }
  }
  return pairs;
}

SoftmaxProblem of_length(int64_t len, const std::string& text) {
  SoftmaxProblem p = softmax_problem("q_len=2 kv_len=2 head_dim=1 " + text);
  for (Tensor SoftmaxProblem::* x :
       {&SoftmaxProblem::q, &SoftmaxProblem::k, &SoftmaxProblem::v})
    p.*x = Tensor({1, len, 1, 1}, DType::kFloat32);
  if (!p.global_mask.empty()) {
    p.global_mask.assign(static_cast<size_t>(len), 0);
    p.global_mask[0] = 1;
  }
  return p;
}

constexpr simd::Side kSides[] = {simd::Side::kQueries, simd::Side::kKeys};

TEST(SoftmaxWork, WindowsVisitAFewTimesTheirKeys) {
  constexpr int64_t kLen = 65536;
  for (const simd::Side side : kSides) {
    for (const char* text :
         {"window=both", "window=both causal=1", "window=both dilation=7",
          "window=both globals=first", "window=wide",
          "window=wide dilation=3"}) {
      const SoftmaxProblem p = of_length(kLen, text);
      const int64_t reach = p.options.window_left * 2 + 1;
      // A block's 128 tokens and a tile's 128 more, twice.
      int64_t most = kLen * (reach + 2 * 256);
      if (!p.global_mask.empty()) most += 2 * kLen * 16;
      EXPECT_LE(visited(p, side), most) << text;
      EXPECT_LE(visited(p, side), kLen * kLen / 50) << text;
    }
  }
}

TEST(SoftmaxWork, DoublingTheLengthDoublesTheWorkOfAWindow) {
  for (const simd::Side side : kSides) {
    for (const char* text :
         {"window=wide causal=1", "window=both dilation=5", "window=self"}) {
      const int64_t one = visited(of_length(16384, text), side),
                    two = visited(of_length(32768, text), side);
      EXPECT_LE(two, one * 21 / 10) << text;
      EXPECT_GT(one, 0) << text;
    }
  }
}

TEST(SoftmaxWork, CausalCallsSkipTheLaterHalf) {
  constexpr int64_t kLen = 8192;
  for (const simd::Side side : kSides) {
    const int64_t full = visited(of_length(kLen, ""), side);
    const int64_t causal = visited(of_length(kLen, "causal=1"), side);
    EXPECT_EQ(full, kLen * kLen);
    EXPECT_LE(causal, full / 2 + kLen * 256);
  }
}

TEST(SoftmaxWork, PackedCallsVisitNoOtherSequence) {
  SoftmaxProblem p = of_length(8000, "");
  for (int64_t s = 0; s <= 8000; s += 100) p.cu_seqlens_q.push_back(s);
  p.cu_seqlens_k = p.cu_seqlens_q;
  for (const simd::Side side : kSides) EXPECT_EQ(visited(p, side), 8000 * 100);
}

// What a tile's elements see of the rows, by intervals, is what the rows see of
// them.
TEST(SoftmaxWork, ColumnsOfAMaskAreItsRowsTurned) {
  constexpr int64_t kLen = 400, kRows = 100;
  for (const char* text : {"", "causal=1", "window=both", "window=left-open",
                           "causal=1 window=left", "window=ahead"}) {
    const SoftmaxProblem p = of_length(kLen, text);
    const SoftmaxAttentionInputs inputs = p.inputs();
    const simd::SoftmaxCall call(p.options, inputs);
    for (const simd::Side side : kSides) {
      const simd::SoftmaxPlan plan(call, side, 128);
      simd::InnerList inner;
      simd::TileMask mask;
      for (int64_t i = 0; i < plan.num_items(); ++i) {
        const simd::SoftmaxItem item = plan.item(i);
        inner.fill(plan, item);
        const simd::IndexList& list = inner.parts()[1];
        const int64_t all = list.count;
        for (int64_t first = 0; first < all; first += kRows) {
          const int64_t count = std::min(kRows, all - first);
          mask.start(plan, item, list, first, count);
          const int64_t to = item.block->outer.count, from = to / 3;
          simd::TileBits columns[kRows];
          ASSERT_TRUE(mask.columns(from, to, columns)) << text;
          for (int64_t t = from; t < to; ++t) {
            const simd::TileBits row = mask.row(t);
            const int64_t at = t - from;
            for (int64_t c = 0; c < count; ++c) {
              EXPECT_EQ(columns[c].word[at / 64] >> (at % 64) & 1,
                        row.word[c / 64] >> (c % 64) & 1)
                  << text << " row " << t << " column " << c;
            }
          }
        }
      }
    }
  }
}

// No row of a tile that none sees has a bit, and each row of a full one has
// all.
TEST(SoftmaxWork, ClassesOfATileAreWhatItsRowsSee) {
  for (const char* text :
       {"window=both globals=first", "window=both globals=scattered mask=holes",
        "causal=1 window=left globals=scattered dilation=3",
        "causal=1 globals=last", "block_size=64", "causal=1 block_size=64",
        "block_size=24 mask=holes", "block_size=3 window=left globals=first"}) {
    const SoftmaxProblem p = softmax_problem(
        str_cat("q_len=500 kv_len=500 head_dim=1 value_dim=1 ", text));
    const SoftmaxAttentionInputs inputs = p.inputs();
    const simd::SoftmaxCall call(p.options, inputs);
    for (const simd::Side side : kSides) {
      const simd::SoftmaxPlan plan(call, side, 128);
      simd::InnerList inner;
      simd::TileMask mask;
      int64_t classes[3] = {};
      for (int64_t i = 0; i < plan.num_items(); ++i) {
        const simd::SoftmaxItem item = plan.item(i);
        inner.fill(plan, item);
        for (const simd::IndexList& list : inner.parts()) {
          for (int64_t first = 0; first < list.count; first += 64) {
            const int64_t count = std::min<int64_t>(64, list.count - first);
            mask.start(plan, item, list, first, count);
            for (int64_t t = 0; t < item.block->outer.count; t += 10) {
              const int64_t to = std::min(t + 10, item.block->outer.count);
              const simd::TileClass found = mask.classify(t, to);
              ++classes[static_cast<int>(found)];
              for (int64_t r = t; r < to; ++r) {
                const simd::TileBits bits = mask.row(r);
                if (found == simd::TileClass::kNone) {
                  EXPECT_FALSE(bits.any()) << text << " row " << r;
                }
                if (found == simd::TileClass::kFull) {
                  EXPECT_EQ(bits, simd::bit_range(0, count)) << text;
                }
              }
            }
          }
        }
      }
      // Without holes there are full ones, whatever the pattern.
      if (p.key_mask.empty() && p.options.dilation == 1 && p.block_size != 3) {
        EXPECT_GT(classes[static_cast<int>(simd::TileClass::kFull)], 0) << text;
      }
    }
  }
}

// One global token costs a window a tile of its own, not those of the window.
TEST(SoftmaxWork, AGlobalTokenLeavesAWindowsTilesWhole) {
  SoftmaxProblem p = of_length(4000, "window=both globals=first");
  p.options.window_left = p.options.window_right = 200;
  const SoftmaxAttentionInputs inputs = p.inputs();
  const simd::SoftmaxCall call(p.options, inputs);
  for (const simd::Side side : kSides) {
    const simd::SoftmaxPlan plan(call, side, 128);
    simd::InnerList inner;
    for (int64_t i = 0; i < plan.num_items(); ++i) {
      inner.fill(plan, plan.item(i));
      EXPECT_LE(inner.parts()[0].count, 1);
      EXPECT_EQ(inner.parts()[1].list, nullptr);
    }
  }
}

TEST(SoftmaxWork, BlockMasksVisitTheirBlocks) {
  constexpr int64_t kLen = 8192, kBlocks = kLen / 64;
  SoftmaxProblem p = of_length(kLen, "");
  p.block_size = 64;
  p.block_mask_heads = 1;
  p.q_blocks = p.kv_blocks = kBlocks;
  p.block_mask.assign(kBlocks * kBlocks, 0);
  for (int64_t a = 0; a < kBlocks; ++a)
    for (int64_t b : {int64_t{0}, a, (a * 37 + 11) % kBlocks})
      p.block_mask[static_cast<size_t>(a * kBlocks + b)] = 1;
  // A pattern block is a block: tiles of others' keys are none of its own.
  for (const simd::Side side : kSides)
    EXPECT_LE(visited(p, side), 3 * kLen * 64);
}

}  // namespace
}  // namespace cosformer
