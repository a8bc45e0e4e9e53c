// One token a row over a KV cache or a ring: each step equals the last row of
// the reference, whatever lies in slots that nothing sees.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/kernels/softmax_problem.h"
#include "tests/kernels/tokens.h"

namespace cosformer {
namespace {

using testing::cut;
using testing::fill_token;
using testing::for_each_isa;
using testing::kInf;
using testing::kOnes;
using testing::relative_error;
using testing::softmax_problem;
using testing::SoftmaxOutputs;
using testing::SoftmaxProblem;
using testing::Tensor;

// A cache that takes the tokens of a problem one after another, as a caller
// would: masks are kept by slot.
struct Decoder {
  Decoder(const SoftmaxProblem& p, int64_t room, bool ring,
          testing::Layout layout = testing::Layout::kContiguous)
      : problem(p),
        batch(p.q.size()[0]),
        capacity(room),
        is_ring(ring),
        keys({batch, room, p.k.size()[2], p.k.size()[3]}, p.q.dtype(), layout),
        values({batch, room, p.v.size()[2], p.v.size()[3]}, p.q.dtype(),
               layout),
        out({batch, 1, p.q.size()[2], p.v.size()[3]}, p.q.dtype(), layout),
        start(p.q_start),
        key_mask(static_cast<size_t>(batch * room), 3),
        global_mask(static_cast<size_t>(batch * room), 9) {
    start.resize(static_cast<size_t>(batch), 0);
    position = start;
  }

  KvCacheView cache() {
    KvCacheView view{keys.view(),     values.view(), start.data(),
                     position.data(), nullptr,       0,
                     is_ring};
    if (!problem.key_mask.empty()) {
      view.key_mask = key_mask.data();
      view.key_mask_stride = capacity;
    }
    return view;
  }
  // Token t of each row, at position start + t.
  SoftmaxAttentionInputs inputs(int64_t t) {
    for (Tensor* x : {&q, &k, &v}) {
      const Tensor& all = x == &q ? problem.q : x == &k ? problem.k : problem.v;
      *x = Tensor({batch, 1, all.size()[2], all.size()[3]}, all.dtype(),
                  testing::Layout::kPadded);
      testing::for_each_element(*x,
                                [&](int64_t b, int64_t, int64_t h, int64_t c) {
                                  x->set(b, 0, h, c, all.get(b, t, h, c));
                                });
    }
    query_mask.clear();
    for (int64_t b = 0; b < batch; ++b) {
      const size_t slot = static_cast<size_t>(b * capacity + t % capacity);
      const size_t token = static_cast<size_t>(b * problem.k.size()[1] + t);
      if (!problem.key_mask.empty()) key_mask[slot] = problem.key_mask[token];
      if (!problem.global_mask.empty())
        global_mask[slot] = problem.global_mask[token];
      if (!problem.query_mask.empty())
        query_mask.push_back(problem.query_mask[token]);
    }
    SoftmaxAttentionInputs in = problem.inputs();
    in.q = q.view();
    in.k = k.view();
    in.v = v.view();
    in.q_start = in.kv_start = nullptr;
    in.key_mask = nullptr;
    in.query_mask = query_mask.empty() ? nullptr : query_mask.data();
    in.query_mask_stride = 1;
    if (in.global_mask != nullptr) in.global_mask = global_mask.data();
    in.global_mask_stride = capacity;
    return in;
  }
  Status step(int64_t t, Executor& executor) {
    out = Tensor(out.size(), out.dtype(), testing::Layout::kPadded);
    const SoftmaxAttentionInputs in = inputs(t);
    return softmax_attention_decode_step(problem.options, in, cache(),
                                         out.view(), executor);
  }

  // Query t against the tokens that the cache still holds.
  SoftmaxProblem last_row(int64_t t) const {
    const int64_t first = is_ring ? std::max<int64_t>(0, t - capacity + 1) : 0;
    const int64_t len = problem.k.size()[1];
    SoftmaxProblem p = problem;
    p.options.is_causal = true;
    p.q = tokens(problem.q, t, t + 1);
    p.k = tokens(problem.k, first, t + 1);
    p.v = tokens(problem.v, first, t + 1);
    p.d_out = Tensor(p.out_size(), p.q.dtype());
    p.d_out.fill(0);
    p.q_start.clear();
    p.kv_start.clear();
    p.key_mask.clear();
    p.query_mask.clear();
    p.global_mask.clear();
    for (int64_t b = 0; b < batch; ++b) {
      p.q_start.push_back(start[static_cast<size_t>(b)] + t);
      p.kv_start.push_back(start[static_cast<size_t>(b)] + first);
      const auto add = [&](const std::vector<uint8_t>& from,
                           std::vector<uint8_t>& to, int64_t begin) {
        if (from.empty()) return;
        to.insert(to.end(), from.begin() + b * len + begin,
                  from.begin() + b * len + t + 1);
      };
      add(problem.key_mask, p.key_mask, first);
      add(problem.global_mask, p.global_mask, first);
      add(problem.query_mask, p.query_mask, t);
    }
    return p;
  }
  Tensor tokens(const Tensor& x, int64_t from, int64_t to) const {
    Tensor y({batch, to - from, x.size()[2], x.size()[3]}, x.dtype());
    testing::for_each_element(y,
                              [&](int64_t b, int64_t s, int64_t h, int64_t c) {
                                y.set(b, s, h, c, x.get(b, from + s, h, c));
                              });
    return y;
  }

  SoftmaxProblem problem;
  int64_t batch, capacity;
  bool is_ring;
  Tensor keys, values, out, q, k, v;
  std::vector<int64_t> start, position;
  std::vector<uint8_t> key_mask, global_mask, query_mask;
};

double tolerance(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 3e-13;
    case DType::kBFloat16:
      return 3e-6 + 0x1p-8;
    case DType::kFloat16:
      return 3e-6 + 0x1p-11;
    default:
      return 3e-6;
  }
}

// Masked queries and whatever make_problem hid would be seen by a longer row:
// junk stays only where the mask says so.
SoftmaxProblem decodable(const std::string& text) {
  SoftmaxProblem p = softmax_problem(text + " causal=1");
  const SoftmaxProblem clean = [&] {
    SoftmaxProblem c = p;
    testing::Random random(5);
    for (Tensor* x : {&c.q, &c.k, &c.v}) x->fill_normal(random);
    return c;
  }();
  for (int64_t r = 0; r < p.rows(); ++r) {
    const AttentionRow row = p.row(r);
    for (int64_t j = 0; j < row.kv_len; ++j) {
      for (int64_t c = 0; c < p.q.size()[3]; ++c) {
        for (int64_t h = 0; h < p.k.size()[2] && p.key_is_real(row, j); ++h)
          p.k.set(r, j, h, c, clean.k.get(r, j, h, c));
        for (int64_t h = 0; h < p.q.size()[2] && p.query_is_real(row, j); ++h)
          p.q.set(r, j, h, c, clean.q.get(r, j, h, c));
      }
      for (int64_t c = 0; c < p.v.size()[3] && p.key_is_real(row, j); ++c)
        for (int64_t h = 0; h < p.k.size()[2]; ++h)
          p.v.set(r, j, h, c, clean.v.get(r, j, h, c));
    }
  }
  return p;
}

const char* const kKinds[] = {
    "",
    "kv_heads=2 group=3 reach=7",
    "batch=3 starts=equal kv_heads=2",
    "batch=2 mask=holes reach=200 starts=negative",
    "window=left",
    "window=wide batch=2 starts=negative",
    "window=left dilation=3 reach=2",
    "window=both dilation=5 mask=holes kv_heads=2",
    "window=left-open globals=first",
    "window=self globals=scattered kv_heads=2 batch=2",
    "globals=scattered mask=holes",
    "window=left dilation=2 globals=first block_size=8",
    "block_size=8 block_heads=1 kv_heads=2 group=2",
    "block_size=16 block_heads=1 kv_heads=3 window=left reach=9",
    "block_size=64 starts=negative globals=last",
    "dropout=30 kv_heads=2 group=2",
    "dropout=50 window=left dilation=2 batch=2 starts=negative",
    "scale=own dtype=float64 reach=30",
    "dtype=bfloat16 group=2 window=wide",
    "dtype=float16 kv_heads=2 reach=4 mask=holes",
    "head_dim=1 value_dim=3",
    "head_dim=63 value_dim=65 group=2",
    "head_dim=40 value_dim=192 dtype=float64",
    "head_dim=128 value_dim=64 dtype=bfloat16",
};

void expect_steps_match(const std::string& kind, int64_t len, int64_t capacity,
                        bool ring, testing::Layout layout) {
  const std::string text = str_cat("q_len=", len, " kv_len=", len, " ", kind);
  SCOPED_TRACE(str_cat(text, " capacity ", capacity));
  const SoftmaxProblem p = decodable(text);
  Decoder decoder(p, capacity, ring, layout);
  for (int64_t t = 0; t < len; ++t) {
    const Status status = decoder.step(t, serial_executor());
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(decoder.position[0], decoder.start[0] + t + 1);
    EXPECT_TRUE(decoder.out.gaps_untouched());
    // Each step costs the reference a call: the first ones and some more.
    if (t > 5 && t % 13 != 0 && t != len - 1) continue;
    const SoftmaxOutputs want = run_reference(decoder.last_row(t));
    ASSERT_TRUE(want.status.ok()) << want.status.message();
    ASSERT_LE(relative_error(decoder.out.values(), want.out.values()),
              tolerance(p.q.dtype()))
        << "step " << t;
  }
  EXPECT_TRUE(decoder.keys.gaps_untouched());
  EXPECT_TRUE(decoder.values.gaps_untouched());
}

TEST(SoftmaxDecode, StepsOverAGrowingCacheEqualTheLastRow) {
  for_each_isa([] {
    for (const char* kind : kKinds)
      expect_steps_match(kind, 150, 200, false, testing::Layout::kContiguous);
    expect_steps_match("kv_heads=2 group=2", 70, 70, false,
                       testing::Layout::kTransposed);
    expect_steps_match("kv_heads=2 reach=3", 70, 75, false,
                       testing::Layout::kPadded);
  });
}

// The last tokens only, far past the ring's length.
TEST(SoftmaxDecode, StepsOverARingEqualTheLastRowOverWhatItHolds) {
  for_each_isa([] {
    for (const char* kind : kKinds)
      for (int64_t capacity : {1, 17, 64, 100})
        expect_steps_match(kind, 300, capacity, true,
                           testing::Layout::kContiguous);
  });
}

// A ring as long as the window sees what a full cache would.
TEST(SoftmaxDecode, ARingOfItsWindowForgetsNothingThatCounts) {
  for_each_isa([] {
    for (int64_t dilation : {1, 3}) {
      SoftmaxProblem p = decodable(
          "q_len=400 kv_len=400 kv_heads=2 group=2 window=left reach=5");
      p.options.dilation = dilation;  // 3 keys to the left
      Decoder full(p, 400, false), ring(p, 3 * dilation + 1, true);
      for (int64_t t = 0; t < 400; ++t) {
        ASSERT_TRUE(full.step(t, serial_executor()).ok());
        ASSERT_TRUE(ring.step(t, serial_executor()).ok());
        EXPECT_EQ(ring.out.bits(), full.out.bits()) << t;
      }
    }
  });
}

// Long caches are cut into spans.
TEST(SoftmaxDecode, LongCachesEqualTheReferenceOnAnyNumberOfThreads) {
  for_each_isa([] {
    for (const char* kind :
         {"kv_heads=4 group=2 reach=100", "head_dim=64 value_dim=64",
          "window=left dilation=500 kv_heads=4 head_dim=64",
          "globals=scattered window=left kv_heads=4 head_dim=64",
          "dtype=bfloat16 kv_heads=4 head_dim=64 value_dim=64",
          "block_size=64 block_heads=1 kv_heads=4 head_dim=64 dtype=float64",
          "dropout=20 kv_heads=4 head_dim=64"}) {
      constexpr int64_t kLen = 2500;
      SoftmaxProblem p = softmax_problem(
          str_cat("q_len=4 kv_len=4 batch=2 starts=rows ", kind));
      testing::Random random(6);
      for (Tensor* x : {&p.q, &p.k, &p.v}) {
        *x = Tensor({2, kLen, x->size()[2], x->size()[3]}, x->dtype());
        x->fill_normal(random);
      }
      if (!p.global_mask.empty()) {
        p.global_mask.assign(2 * kLen, 0);
        for (int64_t s = 0; s < 2 * kLen; s += 97)
          p.global_mask[static_cast<size_t>(s)] = 1;
      }
      if (!p.block_mask.empty()) {
        p.q_blocks = p.kv_blocks = 80;
        p.block_mask.assign(static_cast<size_t>(p.block_mask_heads * 80 * 80),
                            0);
        for (size_t s = 0; s < p.block_mask.size(); s += 3) p.block_mask[s] = 1;
      }
      Decoder decoder(p, kLen, false);
      // As if all but the last were there.
      testing::for_each_element(
          decoder.keys, [&](int64_t b, int64_t s, int64_t h, int64_t c) {
            if (s + 1 < kLen) decoder.keys.set(b, s, h, c, p.k.get(b, s, h, c));
          });
      testing::for_each_element(
          decoder.values, [&](int64_t b, int64_t s, int64_t h, int64_t c) {
            if (s + 1 < kLen)
              decoder.values.set(b, s, h, c, p.v.get(b, s, h, c));
          });
      if (!p.global_mask.empty()) decoder.global_mask = p.global_mask;
      std::vector<uint64_t> bits;
      for (int threads : {1, 2, 3, 7}) {
        for (size_t b = 0; b < 2; ++b)
          decoder.position[b] = decoder.start[b] + kLen - 1;
        auto pool = make_thread_pool(threads);
        ASSERT_TRUE(decoder.step(kLen - 1, *pool).ok());
        if (threads == 1) {
          bits = decoder.out.bits();
          const SoftmaxOutputs want = run_reference(decoder.last_row(kLen - 1));
          EXPECT_LE(relative_error(decoder.out.values(), want.out.values()),
                    tolerance(p.q.dtype()))
              << kind;
        }
        EXPECT_EQ(decoder.out.bits(), bits) << threads << " threads " << kind;
      }
    }
  });
}

// Slots that are not filled, hidden by the mask or outside the pattern.
TEST(SoftmaxDecode, WhatUnseenSlotsHoldChangesNoBit) {
  for_each_isa([] {
    for (const char* kind :
         {"", "window=left", "window=left dilation=3 kv_heads=2",
          "block_size=8 block_heads=1 kv_heads=2 group=2", "globals=first",
          "dtype=float16 window=left reach=3"}) {
      for (bool ring : {false, true}) {
        SoftmaxProblem p =
            decodable(str_cat("q_len=90 kv_len=90 mask=holes ", kind));
        p.query_mask.clear();
        testing::Random random(8);
        p.q.fill_normal(random);
        Decoder decoder(p, ring ? 70 : 100, ring);
        for (int64_t t = 0; t < 89; ++t)
          ASSERT_TRUE(decoder.step(t, serial_executor()).ok());
        Decoder strange = decoder;
        ASSERT_TRUE(decoder.step(89, serial_executor()).ok());
        const SoftmaxProblem last = decoder.last_row(89);
        const AttentionRow row = last.row(0);
        const int64_t held = last.k.size()[1], heads = last.q.size()[2];
        const int64_t group = heads / last.k.size()[2];
        for (double value : testing::kStrange) {
          for (int64_t slot = 0; slot < strange.capacity; ++slot) {
            // The token that it holds, as an index of the last row's keys.
            int64_t j = -1;
            for (int64_t n = 0; n < held; ++n)
              if ((90 - held + n) % strange.capacity == slot) j = n;
            if (j == held - 1) continue;  // the step writes it
            for (int64_t kv = 0; kv < last.k.size()[2]; ++kv) {
              bool seen = false;
              for (int64_t g = 0; j >= 0 && g < group; ++g)
                seen = seen || last.sees(row, kv * group + g, 0, j);
              if (seen) continue;
              for (int64_t c = 0; c < 8; ++c) {
                strange.keys.set(0, slot, kv, c, value);
                strange.values.set(0, slot, kv, c, value);
              }
            }
          }
          strange.position = {strange.start[0] + 89};
          ASSERT_TRUE(strange.step(89, serial_executor()).ok());
          EXPECT_EQ(strange.out.bits(), decoder.out.bits())
              << kind << " unseen slots hold " << value;
        }
      }
    }
  });
}

// A visible NaN reaches the heads that read it and no other.
TEST(SoftmaxDecode, AVisibleNanReachesExactlyItsHeads) {
  for_each_isa([] {
    for (const auto& [of_value, dtype] :
         {std::pair{false, "float32"}, std::pair{true, "float32"},
          std::pair{false, "float64"}, std::pair{true, "bfloat16"}}) {
      SoftmaxProblem p = decodable(str_cat(
          "q_len=90 kv_len=90 kv_heads=3 group=2 value_dim=5 dtype=", dtype));
      const auto last = [](const SoftmaxProblem& problem) {
        Decoder decoder(problem, 90, false);
        for (int64_t t = 0; t < 90; ++t)
          EXPECT_TRUE(decoder.step(t, serial_executor()).ok());
        return decoder.out;
      };
      const Tensor clean = last(p);
      (of_value ? p.v : p.k).set(0, 12, 1, 3, kOnes);
      const Tensor got = last(p);
      for (int64_t h = 0; h < 6; ++h)
        for (int64_t c = 0; c < 5; ++c) {
          if (h / 2 == 1 && (!of_value || c == 3)) {
            EXPECT_TRUE(std::isnan(got.get(0, 0, h, c)));
          } else {
            EXPECT_EQ(got.get(0, 0, h, c), clean.get(0, 0, h, c));
          }
        }
    }
  });
}

TEST(SoftmaxDecode, ValueOneGivesOne) {
  for_each_isa([] {
    for (const char* kind : {"", "window=left", "reach=9 kv_heads=2 group=2",
                             "dtype=bfloat16", "dtype=float64"}) {
      SoftmaxProblem p =
          decodable(str_cat("q_len=300 kv_len=300 head_dim=32 ", kind));
      p.v.fill(1);
      Decoder decoder(p, 300, false);
      for (int64_t t = 0; t < 300; ++t) {
        ASSERT_TRUE(decoder.step(t, serial_executor()).ok());
        EXPECT_NEAR(decoder.out.get(0, 0, 0, 7), 1.0, 1e-6) << t;
      }
    }
  });
}

TEST(SoftmaxDecode, SizesOf1e4StayFinite) {
  for_each_isa([] {
    SoftmaxProblem p = decodable("q_len=200 kv_len=200 head_dim=64");
    for (Tensor* x : {&p.q, &p.k})
      testing::for_each_element(
          *x, [x](int64_t b, int64_t s, int64_t h, int64_t c) {
            x->set(b, s, h, c, 1e4 * x->get(b, s, h, c));
          });
    Decoder decoder(p, 200, false);
    for (int64_t t = 0; t < 200; ++t) {
      ASSERT_TRUE(decoder.step(t, serial_executor()).ok());
      EXPECT_TRUE(testing::all_finite(decoder.out)) << t;
    }
  });
}

TEST(SoftmaxDecode, ABiasOfMinusInfinityIsAWeightOfZero) {
  for_each_isa([] {
    SoftmaxProblem p = decodable("q_len=200 kv_len=200 reach=199");
    for (int64_t e = 0; e < 399; ++e)
      if (e < 170 || e > 199) p.relative_bias.set(0, 0, 0, e, -kInf);
    Decoder decoder(p, 200, false);
    for (int64_t t = 0; t < 200; ++t)
      ASSERT_TRUE(decoder.step(t, serial_executor()).ok());
    EXPECT_LE(relative_error(decoder.out.values(),
                             run_reference(decoder.last_row(199)).out.values()),
              3e-6);
  });
}

// Rows that hold different numbers of tokens, each as if it were alone.
TEST(SoftmaxDecode, RowsStandWhereTheyStand) {
  for_each_isa([] {
    const SoftmaxProblem p =
        decodable("batch=3 q_len=60 kv_len=60 kv_heads=2 reach=7");
    Decoder all(p, 80, false);
    const int64_t held[] = {0, 59, 31};
    for (int64_t b = 0; b < 3; ++b) {
      all.position[static_cast<size_t>(b)] = held[b];
      for (int64_t s = 0; s < held[b]; ++s)
        for (int64_t h = 0; h < 2; ++h)
          for (int64_t c = 0; c < 8; ++c) {
            all.keys.set(b, s, h, c, p.k.get(b, s, h, c));
            all.values.set(b, s, h, c, p.v.get(b, s, h, c));
          }
    }
    ASSERT_TRUE(all.step(59, serial_executor()).ok());
    for (int64_t b = 0; b < 3; ++b) {
      EXPECT_EQ(all.position[static_cast<size_t>(b)], held[b] + 1);
      Decoder alone(row_alone(p, b, 60, 60), 80, false);
      alone.position = {held[b]};
      alone.keys = cut(all.keys, b, 0, 80);
      alone.values = cut(all.values, b, 0, 80);
      ASSERT_TRUE(alone.step(59, serial_executor()).ok());
      EXPECT_EQ(testing::bits_of(all.out, b, 0, 1), alone.out.bits()) << b;
    }
  });
}

TEST(SoftmaxDecode, RingsTakeNoMoreMemoryHoweverFarTheyGo) {
  const SoftmaxProblem p = decodable("q_len=8 kv_len=8 window=left");
  Decoder decoder(p, 4, true);
  size_t peak = 0;
  for (int64_t t = 0; t < 5000; ++t) {
    const size_t before = allocation_stats().current_bytes;
    reset_peak_allocation();
    ASSERT_TRUE(decoder.step(t % 8, serial_executor()).ok());
    const size_t bytes = allocation_stats().peak_bytes - before;
    EXPECT_EQ(allocation_stats().current_bytes, before);
    if (t == 10) peak = bytes;
    if (t > 10) {
      EXPECT_EQ(bytes, peak);
    }
  }
}

TEST(SoftmaxDecode, NamesMisuse) {
  constexpr std::string_view kWhere = "softmax_attention_decode_step: ";
  const SoftmaxProblem p = decodable("batch=2 q_len=9 kv_len=9 kv_heads=2");
  struct Call {
    SoftmaxAttentionOptions options;
    SoftmaxAttentionInputs inputs;
    KvCacheView cache;
    View4 out;
  };
  const auto message = [&](const std::function<void(Call&)>& spoil,
                           bool ring = false) {
    Decoder decoder(p, 4, ring);
    decoder.position = {3, 2};
    Call call{p.options, decoder.inputs(0), decoder.cache(),
              decoder.out.view()};
    spoil(call);
    const std::vector<uint64_t> before = decoder.keys.bits();
    const std::vector<int64_t> position = decoder.position;
    const Status status = softmax_attention_decode_step(
        call.options, call.inputs, call.cache, call.out, serial_executor());
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(decoder.keys.bits(), before);  // nothing half-written
    EXPECT_EQ(decoder.position, position);
    const bool own = status.message().substr(0, kWhere.size()) == kWhere;
    return own ? status.message().substr(kWhere.size()) : status.message();
  };
  std::vector<int64_t> places = {4, 2};
  EXPECT_EQ(message([&](Call& c) { c.cache.position = places.data(); }),
            "the cache has capacity 4, row 0 holds 4 tokens: expected room for "
            "one more (or a ring)");
  places = {3, -1};
  EXPECT_EQ(message([&](Call& c) { c.cache.position = places.data(); }),
            "cache position of row 1 is -1, before its start 0");
  places = {3, int64_t{1} << 53};
  EXPECT_EQ(message([&](Call& c) { c.cache.position = places.data(); }, true),
            "cache position of row 1 is 9007199254740993: positions must lie "
            "within -2^53 and 2^53");
  EXPECT_EQ(message([](Call& c) { c.cache.position = nullptr; }),
            "the cache has no position");
  EXPECT_EQ(message(
                [](Call& c) {
                  c.cache.keys.size[1] = 0;
                  c.cache.values.size[1] = 0;
                },
                true),
            "the cache has capacity 0, row 0 holds 3 tokens: expected room for "
            "one more (or a ring)");
  EXPECT_EQ(message([](Call& c) { c.cache.values.size[1] = 3; }),
            "cache values has size [2, 3, 2, 8], expected [2, 4, 2, 8]");
  EXPECT_EQ(message([](Call& c) { c.cache.keys.size[2] = 1; }),
            "cache keys has size [2, 4, 1, 8], expected [2, 4, 2, 8]");
  EXPECT_EQ(message([](Call& c) { c.cache.keys.dtype = DType::kFloat16; }),
            "cache keys is float16, expected float32");
  EXPECT_EQ(message([](Call& c) { c.out.size[3] = 7; }),
            "out has size [2, 1, 2, 7], expected [2, 1, 2, 8]");
  EXPECT_EQ(message([](Call& c) { c.inputs.q.size[1] = 2; }),
            "query has length 2, key has 1, expected 1: one token a row");
  EXPECT_EQ(message([&](Call& c) { c.inputs.q_start = places.data(); }),
            "starts, packing and key_mask must be empty: the cache gives the "
            "positions and has a mask of its own");
  const std::vector<uint8_t> mask(8, 1);
  EXPECT_EQ(message([&](Call& c) {
              c.cache.key_mask = mask.data();
              c.cache.key_mask_stride = -4;
            }),
            "cache key_mask has batch stride -4, expected 0 or more");
  EXPECT_EQ(message([](Call& c) { c.options.dropout_p = 2; }),
            "softmax_attention: dropout_p is 2, expected at least 0 and below "
            "1");
}

}  // namespace
}  // namespace cosformer
