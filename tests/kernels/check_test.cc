// Every misuse of the linear engine, by its message: found, expected, where.
#include "kernels/check.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "tests/kernels/problem.h"

namespace cosformer {
namespace {

using testing::make_problem;
using testing::parse_point;
using testing::Problem;

struct Call {
  LinearAttentionOptions options;
  LinearAttentionInputs inputs;
};

class CheckLinearAttention : public ::testing::Test {
 protected:
  // The message for a good call that `spoil` made bad.
  std::string message(const std::function<void(Call&)>& spoil,
                      const std::string& point = "") {
    problem_ = make_problem(*parse_point(
        "batch=2 q_len=6 kv_len=5 kv_heads=2 group=3 head_dim=4 value_dim=7 " +
        point));
    Call call{problem_.options, problem_.inputs()};
    EXPECT_TRUE(check_linear_attention(call.options, call.inputs).ok());
    spoil(call);
    const Status status = check_linear_attention(call.options, call.inputs);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    // The kernels refuse with the same words, before they touch memory.
    const View4 nowhere{nullptr, call.inputs.q.dtype, {}, {}};
    EXPECT_EQ(linear_attention_forward(call.options, call.inputs, nowhere,
                                       nullptr, {}, serial_executor())
                  .message(),
              status.message());
    EXPECT_EQ(linear_attention_backward(call.options, call.inputs, nowhere,
                                        nullptr, nowhere, {}, {}, {}, {}, {},
                                        serial_executor())
                  .message(),
              status.message());
    return status.message();
  }

 private:
  Problem problem_;
};

TEST_F(CheckLinearAttention, NamesDTypes) {
  EXPECT_EQ(message([](Call& c) { c.inputs.k.dtype = DType::kFloat64; }),
            "linear_attention: key is float64, query is float32: expected one "
            "dtype");
  EXPECT_EQ(message([](Call& c) { c.inputs.v.dtype = DType::kBFloat16; }),
            "linear_attention: value is bfloat16, query is float32: expected "
            "one dtype");
  EXPECT_EQ(message([](Call& c) { c.inputs.q.dtype = DType::kInt64; }),
            "linear_attention: query is int64, expected float32, float64, "
            "bfloat16 or float16");
}

TEST_F(CheckLinearAttention, NamesShapes) {
  EXPECT_EQ(message([](Call& c) { c.inputs.q.size[2] = 5; }),
            "linear_attention: key has 2 heads, query has 5: query heads must "
            "be a multiple of key heads");
  EXPECT_EQ(message([](Call& c) { c.inputs.k.size[0] = 1; }),
            "linear_attention: key has batch size 1, query has 2: expected the "
            "same");
  EXPECT_EQ(message([](Call& c) { c.inputs.v.size[0] = 1; }),
            "linear_attention: value has batch size 1, query has 2: expected "
            "the same");
  EXPECT_EQ(message([](Call& c) { c.inputs.k.size[3] = 3; }),
            "linear_attention: key has head_dim 3, query has 4: expected the "
            "same");
  EXPECT_EQ(message([](Call& c) { c.inputs.v.size[1] = 4; }),
            "linear_attention: value has length 4, key has 5: expected the "
            "same");
  EXPECT_EQ(
      message([](Call& c) { c.inputs.v.size[2] = 1; }),
      "linear_attention: value has 1 heads, key has 2: expected the same");
  EXPECT_EQ(
      message([](Call& c) { c.inputs.q.size[1] = -6; }),
      "linear_attention: query has size [2, -6, 6, 4] [batch, seq, heads, "
      "dim]: sizes must not be negative");
  EXPECT_EQ(
      message([](Call& c) { c.inputs.q.size[3] = c.inputs.k.size[3] = 0; }),
      "linear_attention: head_dim is 0, value_dim is 7: expected at least "
      "1");
  EXPECT_EQ(
      message([](Call& c) { c.inputs.v.size[3] = 0; }),
      "linear_attention: head_dim is 4, value_dim is 0: expected at least "
      "1");
  EXPECT_EQ(
      message([](Call& c) { c.inputs.k.size[2] = c.inputs.v.size[2] = 0; }),
      "linear_attention: query has 6 heads, key has 0: expected at least "
      "1");
  EXPECT_EQ(message([](Call& c) { c.inputs.q.size[2] = 0; }),
            "linear_attention: query has 0 heads, key has 2: expected at least "
            "1");
}

TEST_F(CheckLinearAttention, NamesMemoryThatCannotBe) {
  EXPECT_EQ(message([](Call& c) { c.inputs.q.data = nullptr; }),
            "linear_attention: query of size [2, 6, 6, 4] has no data "
            "(nullptr)");
  EXPECT_EQ(
      message([](Call& c) { c.inputs.k.stride[3] = 2; }),
      "linear_attention: key has stride 2 in its last dimension, expected "
      "1");
  EXPECT_EQ(message([](Call& c) { c.inputs.v.stride[1] = -14; }),
            "linear_attention: value has stride -14 in dimension seq: strides "
            "must not be negative");
  EXPECT_EQ(message([](Call& c) {
              c.inputs.v.stride[0] = std::numeric_limits<int64_t>::max();
            }),
            "linear_attention: value has stride 9223372036854775807 in "
            "dimension batch of size 2: beyond what memory can hold");
  EXPECT_EQ(message([](Call& c) {
              c.inputs.q.size = {int64_t{1} << 31, int64_t{1} << 31, 6, 4};
            }),
            "linear_attention: query has size [2147483648, 2147483648, 6, 4]: "
            "more elements than memory can hold");
  // Tensors that could be, but not their state.
  EXPECT_EQ(message([](Call& c) {
              c.inputs.q.size[3] = c.inputs.k.size[3] = int64_t{1} << 30;
              c.inputs.v.size[3] = int64_t{1} << 30;
            }),
            "linear_attention: a state of size [2, 2, 1073741824, 1073741824] "
            "[rows, kv_heads, features, value_dim] has more elements than "
            "memory can hold");
}

TEST_F(CheckLinearAttention, NamesOptions) {
  EXPECT_EQ(message([](Call& c) { c.options.eps = 0; }),
            "linear_attention: eps is 0, expected a finite number above 0");
  EXPECT_EQ(message([](Call& c) { c.options.eps = -1e-6; }),
            "linear_attention: eps is -1e-06, expected a finite number above "
            "0");
  EXPECT_EQ(message([](Call& c) { c.options.eps = NAN; }),
            "linear_attention: eps is nan, expected a finite number above 0");
  EXPECT_EQ(
      message([](Call& c) { c.options.eps = 1e-60; }),
      "linear_attention: eps is 1e-60, expected at least 1.17549e-38, the "
      "smallest normal number of the accumulator for float32");
  EXPECT_EQ(
      message([](Call& c) { c.options.reweight_len = -3; }),
      "linear_attention: reweight_len is -3, expected 1 to 2^53, or 0 for "
      "no cosine re-weighting");
  EXPECT_EQ(message([](Call& c) { c.options.rotary_base = -10; }),
            "linear_attention: rotary_base is -10, expected a finite number "
            "above 0, or 0 for no rotary positions");
  EXPECT_EQ(message([](Call& c) { c.options.rotary_base = 10; }, "head_dim=3"),
            "linear_attention: head_dim is 3: rotary positions turn pairs, "
            "expected an even head_dim");
}

TEST_F(CheckLinearAttention, NamesPacking) {
  const std::string packed = "packing=many q_len=6 kv_len=6";
  const auto with_offsets = [&](std::vector<int64_t> q,
                                std::vector<int64_t> k) {
    return message(
        [&](Call& c) {
          c.inputs.cu_seqlens_q = q.data();
          c.inputs.cu_seqlens_k = k.data();
          c.inputs.num_sequences = static_cast<int64_t>(q.size()) - 1;
        },
        packed);
  };
  EXPECT_EQ(with_offsets({1, 6}, {0, 6}),
            "linear_attention: cu_seqlens_q starts with 1, expected 0");
  EXPECT_EQ(
      with_offsets({0, 4, 3, 6}, {0, 2, 4, 6}),
      "linear_attention: cu_seqlens_q[2] is 3, below cu_seqlens_q[1] = 4: "
      "offsets must not decrease");
  EXPECT_EQ(
      with_offsets({0, 6}, {0, 5}),
      "linear_attention: cu_seqlens_k ends with 5, expected the number of "
      "tokens, 6");
  EXPECT_EQ(
      with_offsets({0, 7}, {0, 6}),
      "linear_attention: cu_seqlens_q ends with 7, expected the number of "
      "tokens, 6");
  EXPECT_EQ(message([](Call& c) { c.inputs.cu_seqlens_k = nullptr; }, packed),
            "linear_attention: cu_seqlens_q is given without cu_seqlens_k: "
            "packed sequences need both");
  const std::vector<uint8_t> mask(6, 1);
  EXPECT_EQ(
      message([&](Call& c) { c.inputs.key_mask = mask.data(); }, packed),
      "linear_attention: key_mask and cu_seqlens are given together: packed "
      "sequences have no padding to mask");
  EXPECT_EQ(
      message([&](Call& c) { c.inputs.query_mask = mask.data(); }, packed),
      "linear_attention: query_mask and cu_seqlens are given together: packed "
      "sequences have no padding to mask");
  const std::vector<int64_t> q_offsets = {0, 6}, k_offsets = {0, 5};
  EXPECT_EQ(message([&](Call& c) {
              c.inputs.cu_seqlens_q = q_offsets.data();
              c.inputs.cu_seqlens_k = k_offsets.data();
              c.inputs.num_sequences = 1;
            }),
            "linear_attention: batch size is 2 with cu_seqlens, expected 1");
  EXPECT_EQ(message([](Call& c) { c.inputs.num_sequences = -1; }, packed),
            "linear_attention: num_sequences is -1, expected 0 or more");
}

TEST_F(CheckLinearAttention, NamesMaskStrides) {
  const std::vector<uint8_t> mask(12, 1);
  EXPECT_EQ(message([&](Call& c) {
              c.inputs.key_mask = mask.data();
              c.inputs.key_mask_stride = -5;
            }),
            "linear_attention: key_mask has batch stride -5, expected 0 or "
            "more");
}

TEST_F(CheckLinearAttention, NamesStatesAndStartsThatContradictThem) {
  // State rows stand at 9 or before; the call goes on from there.
  const std::string with_state = "state=in causal=1 q_len=5";
  static std::vector<int64_t> changed;
  const auto copy = [](const int64_t* x, int64_t add) {
    changed = {x[0], x[1] + add};
    return changed.data();
  };
  const std::string start = message(
      [&](Call& c) { c.inputs.state.start = copy(c.inputs.state.position, 3); },
      with_state);
  EXPECT_NE(start.find("linear_attention: state.start of row 1 is "),
            std::string::npos);
  EXPECT_NE(start.find(", after state.position "), std::string::npos) << start;
  const std::string kv_start = message(
      [&](Call& c) { c.inputs.kv_start = copy(c.inputs.state.position, 1); },
      with_state);
  EXPECT_NE(kv_start.find("linear_attention: kv_start of row 1 is "),
            std::string::npos);
  EXPECT_NE(kv_start.find("keys must go on where the state ends"),
            std::string::npos)
      << kv_start;
  const std::string q_start = message(
      [&](Call& c) { c.inputs.q_start = copy(c.inputs.state.position, -1); },
      with_state);
  EXPECT_NE(q_start.find("linear_attention: q_start of row 1 is "),
            std::string::npos);
  EXPECT_NE(q_start.find("may not stand before keys of the state"),
            std::string::npos)
      << q_start;
  EXPECT_EQ(
      message([](Call& c) { c.inputs.state.k_sum = nullptr; }, with_state),
      "linear_attention: state has kv_state but no k_sum");
  EXPECT_EQ(
      message([](Call& c) { c.inputs.state.position = nullptr; }, with_state),
      "linear_attention: state has kv_state but no position");
}

TEST_F(CheckLinearAttention, NamesDistancesBeyondReweightLen) {
  const std::vector<int64_t> q_start = {0, 3}, kv_start = {0, 1};
  const auto with = [&](bool causal, int64_t reweight_len, int64_t q_len) {
    return [&q_start, &kv_start, causal, reweight_len, q_len](Call& c) {
      c.options.is_causal = causal;
      c.options.reweight_len = reweight_len;
      c.inputs.q.size[1] = q_len;
      c.inputs.q_start = q_start.data();
      c.inputs.kv_start = kv_start.data();
    };
  };
  // Row 0: queries 0..5, keys 0..4; row 1: queries 3..8, keys 1..5.
  EXPECT_EQ(
      message(with(true, 4, 6)),
      "linear_attention: in row 0 the query at position 5 sees the key at "
      "position 0, 5 apart, but reweight_len is 4: beyond it the cosine "
      "is negative; use a reweight_len of at least 5");
  EXPECT_EQ(
      message(with(true, 6, 6)),
      "linear_attention: in row 1 the query at position 8 sees the key at "
      "position 1, 7 apart, but reweight_len is 6: beyond it the cosine "
      "is negative; use a reweight_len of at least 7");
  // Non-causal looks ahead as well.
  EXPECT_EQ(
      message(with(false, 3, 1)),
      "linear_attention: in row 0 the query at position 0 sees the key at "
      "position 4, 4 apart, but reweight_len is 3: beyond it the cosine "
      "is negative; use a reweight_len of at least 4");
}

TEST_F(CheckLinearAttention, NamesPositionsOutOfRange) {
  const std::vector<int64_t> huge = {0, std::numeric_limits<int64_t>::max()};
  const std::vector<int64_t> low = {std::numeric_limits<int64_t>::min(), 0};
  EXPECT_EQ(message([&](Call& c) { c.inputs.q_start = huge.data(); }),
            "linear_attention: q_start of row 1 is 9223372036854775807: "
            "positions must lie within -2^53 and 2^53");
  EXPECT_EQ(message([&](Call& c) { c.inputs.kv_start = low.data(); }),
            "linear_attention: kv_start of row 0 is -9223372036854775808: "
            "positions must lie within -2^53 and 2^53");
}

Status check_reach(bool causal, int64_t q_start, int64_t q_len,
                   int64_t kv_start, int64_t kv_len, int64_t reweight_len) {
  Problem p = make_problem(*parse_point(
      str_cat("q_len=", q_len, " kv_len=", kv_len, " causal=", causal)));
  p.options.reweight_len = reweight_len;
  p.q_start = {q_start};
  p.kv_start = {kv_start};
  return check_linear_attention(p.options, p.inputs());
}

// The check looks at the ends only: it must say what looking at every pair
// says.
TEST(CheckReach, AgreesWithLookingAtEveryPair) {
  for (bool causal : {false, true})
    for (int64_t q_start = 0; q_start < 7; ++q_start)
      for (int64_t kv_start = 0; kv_start < 7; ++kv_start)
        for (int64_t q_len = 0; q_len < 5; ++q_len)
          for (int64_t kv_len = 0; kv_len < 5; ++kv_len) {
            int64_t reach = 0;
            for (int64_t i = q_start; i < q_start + q_len; ++i)
              for (int64_t j = kv_start; j < kv_start + kv_len; ++j)
                if (!causal || j <= i) reach = std::max(reach, std::abs(i - j));
            for (int64_t m = 1; m < 12; ++m) {
              EXPECT_EQ(
                  check_reach(causal, q_start, q_len, kv_start, kv_len, m).ok(),
                  m >= reach)
                  << causal << " " << q_start << "+" << q_len << " " << kv_start
                  << "+" << kv_len << " M=" << m;
            }
          }
}

TEST(CheckReach, CountsTheKeysOfAStateAndPaddingButNoEmptyState) {
  Problem p =
      make_problem(*parse_point("q_len=1 kv_len=1 causal=1 cosine=far "
                                "state=in mask=none"));
  p.q_start = p.kv_start = {};
  const int64_t start = p.state->start[0];
  p.state->position[0] = start + 6;
  p.options.reweight_len = 6;  // query at start + 6, first key at start
  EXPECT_TRUE(check_linear_attention(p.options, p.inputs()).ok());
  p.options.reweight_len = 5;
  EXPECT_FALSE(check_linear_attention(p.options, p.inputs()).ok());
  p.state->start[0] = start + 1;
  EXPECT_TRUE(check_linear_attention(p.options, p.inputs()).ok());
  // No keys in the state: where it began does not matter.
  p.state->start[0] = p.state->position[0];
  p.options.reweight_len = 1;
  EXPECT_TRUE(check_linear_attention(p.options, p.inputs()).ok());
  // Masked keys count: results must not depend on what is padded.
  Problem padded = make_problem(*parse_point("q_len=8 kv_len=8 cosine=exact"));
  padded.key_mask.assign(8, 0);
  padded.options.reweight_len = 6;
  EXPECT_FALSE(check_linear_attention(padded.options, padded.inputs()).ok());
}

TEST(CheckReach, AnEmptySequenceHasNoLastPosition) {
  Problem p = make_problem(*parse_point("q_len=0 kv_len=0"));
  p.q_start = p.kv_start = {-(int64_t{1} << 53)};
  EXPECT_TRUE(check_linear_attention(p.options, p.inputs()).ok());
}

TEST(CheckViews, NameTheTensorAndWhatIsWrong) {
  const Problem p = make_problem(*parse_point("q_len=3 kv_len=3"));
  const auto forward = [&](const View4& out) {
    return linear_attention_forward(p.options, p.inputs(), out, nullptr, {},
                                    serial_executor())
        .message();
  };
  testing::Tensor right({1, 3, 1, 8}, DType::kFloat32);
  testing::Tensor wide({1, 3, 1, 9}, DType::kFloat32);
  testing::Tensor other({1, 3, 1, 8}, DType::kFloat64);
  EXPECT_EQ(forward(right.view()), "");
  testing::Tensor half_a_state({1, 1, 8, 8}, DType::kFloat32);
  EXPECT_EQ(
      linear_attention_forward(p.options, p.inputs(), right.view(), nullptr,
                               {half_a_state.view().data}, serial_executor())
          .message(),
      "linear_attention: state_out has kv_state but no k_sum");
  EXPECT_EQ(forward(wide.view()),
            "linear_attention: out has size [1, 3, 1, 9], expected [1, 3, 1, "
            "8]");
  EXPECT_EQ(forward(other.view()),
            "linear_attention: out is float64, expected float32");
  View4 shared = right.view();
  shared.stride[1] = 4;
  EXPECT_EQ(forward(shared),
            "linear_attention: out of size [1, 3, 1, 8] and strides [24, 4, 8, "
            "1] has elements that share memory");
  View4 null = right.view();
  null.data = nullptr;
  EXPECT_EQ(forward(null),
            "linear_attention: out of size [1, 3, 1, 8] has no data (nullptr)");
  const auto backward = [&](const ConstView4& d_out, const View4& dq,
                            const View4& dk, const View4& dv) {
    const testing::Tensor denominator({1, 3, 1, 1}, DType::kFloat32);
    return linear_attention_backward(p.options, p.inputs(), right.view(),
                                     denominator.view().data, d_out, {}, dq, dk,
                                     dv, {}, serial_executor())
        .message();
  };
  EXPECT_EQ(backward(wide.view(), right.view(), {}, {}),
            "linear_attention: d_out has size [1, 3, 1, 9], expected [1, 3, 1, "
            "8]");
  EXPECT_EQ(backward(right.view(), wide.view(), {}, {}),
            "linear_attention: dq has size [1, 3, 1, 9], expected [1, 3, 1, "
            "8]");
  EXPECT_EQ(backward(right.view(), {}, other.view(), {}),
            "linear_attention: dk is float64, expected float32");
  EXPECT_EQ(backward(right.view(), {}, {}, shared),
            "linear_attention: dv of size [1, 3, 1, 8] and strides [24, 4, 8, "
            "1] has elements that share memory");
}

}  // namespace
}  // namespace cosformer
