// Every misuse of the softmax engine, by its message: found, expected, where.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "tests/kernels/softmax_problem.h"

namespace cosformer {
namespace {

using testing::softmax_problem;
using testing::SoftmaxProblem;
using testing::Tensor;

struct Call {
  SoftmaxAttentionOptions options;
  SoftmaxAttentionInputs inputs;
};

class CheckSoftmaxAttention : public ::testing::Test {
 protected:
  // The message, after "softmax_attention: ", for a good call that `spoil` made
  // bad.
  std::string message(const std::function<void(Call&)>& spoil,
                      const std::string& point = "") {
    problem_ = softmax_problem(
        "batch=2 q_len=6 kv_len=5 kv_heads=2 group=3 head_dim=4 value_dim=7 " +
        point);
    Call call{problem_.options, problem_.inputs()};
    EXPECT_TRUE(check_softmax_attention(call.options, call.inputs).ok());
    spoil(call);
    const Status status = check_softmax_attention(call.options, call.inputs);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    // The kernels refuse with the same words, before they touch memory.
    const View4 nowhere{nullptr, call.inputs.q.dtype, {}, {}};
    for (const Status& other :
         {softmax_attention_forward(call.options, call.inputs, nowhere, nullptr,
                                    serial_executor()),
          softmax_attention_backward(call.options, call.inputs, nowhere,
                                     nullptr, nowhere, {}, {}, {}, nullptr,
                                     serial_executor()),
          reference::softmax_attention_forward(call.options, call.inputs,
                                               nowhere, nullptr),
          reference::softmax_attention_backward(call.options, call.inputs,
                                                nowhere, {}, {}, {}, nullptr),
          reference::softmax_attention_weights(call.options, call.inputs,
                                               nullptr)}) {
      EXPECT_EQ(other.message(), status.message());
    }
    constexpr std::string_view kWhere = "softmax_attention: ";
    EXPECT_EQ(status.message().substr(0, kWhere.size()), kWhere);
    return status.message().substr(
        std::min(kWhere.size(), status.message().size()));
  }

 private:
  SoftmaxProblem problem_;
};

TEST_F(CheckSoftmaxAttention, NamesDTypes) {
  EXPECT_EQ(message([](Call& c) { c.inputs.k.dtype = DType::kFloat64; }),
            "key is float64, query is float32: expected one dtype");
  EXPECT_EQ(message([](Call& c) { c.inputs.v.dtype = DType::kBFloat16; }),
            "value is bfloat16, query is float32: expected one dtype");
  EXPECT_EQ(message([](Call& c) { c.inputs.q.dtype = DType::kInt64; }),
            "query is int64, expected float32, float64, bfloat16 or float16");
}

TEST_F(CheckSoftmaxAttention, NamesShapes) {
  EXPECT_EQ(message([](Call& c) { c.inputs.q.size[2] = 5; }),
            "key has 2 heads, query has 5: query heads must be a multiple of "
            "key heads");
  EXPECT_EQ(message([](Call& c) { c.inputs.k.size[0] = 1; }),
            "key has batch size 1, query has 2: expected the same");
  EXPECT_EQ(message([](Call& c) { c.inputs.v.size[0] = 1; }),
            "value has batch size 1, query has 2: expected the same");
  EXPECT_EQ(message([](Call& c) { c.inputs.k.size[3] = 3; }),
            "key has head_dim 3, query has 4: expected the same");
  EXPECT_EQ(message([](Call& c) { c.inputs.v.size[1] = 4; }),
            "value has length 4, key has 5: expected the same");
  EXPECT_EQ(message([](Call& c) { c.inputs.v.size[2] = 1; }),
            "value has 1 heads, key has 2: expected the same");
  EXPECT_EQ(message([](Call& c) { c.inputs.q.size[1] = -6; }),
            "query has size [2, -6, 6, 4] [batch, seq, heads, dim]: sizes must "
            "not be negative");
  EXPECT_EQ(message([](Call& c) { c.inputs.v.size[3] = 0; }),
            "head_dim is 4, value_dim is 0: expected at least 1");
  EXPECT_EQ(
      message([](Call& c) { c.inputs.k.size[2] = c.inputs.v.size[2] = 0; }),
      "query has 6 heads, key has 0: expected at least 1");
}

TEST_F(CheckSoftmaxAttention, NamesMemoryThatCannotBe) {
  EXPECT_EQ(message([](Call& c) { c.inputs.q.data = nullptr; }),
            "query of size [2, 6, 6, 4] has no data (nullptr)");
  EXPECT_EQ(message([](Call& c) { c.inputs.k.stride[3] = 2; }),
            "key has stride 2 in its last dimension, expected 1");
  EXPECT_EQ(message([](Call& c) { c.inputs.v.stride[1] = -14; }),
            "value has stride -14 in dimension seq: strides must not be "
            "negative");
}

TEST_F(CheckSoftmaxAttention, NamesOptions) {
  EXPECT_EQ(message([](Call& c) { c.options.scale = NAN; }),
            "scale is nan, expected a finite number, or 0 for 1 / "
            "sqrt(head_dim)");
  EXPECT_EQ(message([](Call& c) { c.options.dropout_p = 1; }),
            "dropout_p is 1, expected at least 0 and below 1");
  EXPECT_EQ(message([](Call& c) { c.options.dropout_p = -0.5; }),
            "dropout_p is -0.5, expected at least 0 and below 1");
  EXPECT_EQ(message([](Call& c) { c.options.dropout_p = NAN; }),
            "dropout_p is nan, expected at least 0 and below 1");
}

TEST_F(CheckSoftmaxAttention, NamesWindows) {
  EXPECT_EQ(message([](Call& c) { c.options.dilation = 2; }),
            "dilation is 2 without a window, expected 1: it spaces the keys of "
            "a window");
  EXPECT_EQ(message([](Call& c) { c.options.dilation = 0; }, "window=both"),
            "dilation is 0, expected 1 to 2^53");
  EXPECT_EQ(message([](Call& c) { c.options.window_left = -2; }, "window=both"),
            "window reaches -2 keys to the left, expected 0 or more, or -1 for "
            "all");
  EXPECT_EQ(
      message([](Call& c) { c.options.window_right = -7; }, "window=both"),
      "window reaches -7 keys to the right, expected 0 or more, or -1 for "
      "all");
  EXPECT_EQ(message(
                [](Call& c) {
                  c.options.window_left = std::numeric_limits<int64_t>::max();
                },
                "window=both"),
            "window reaches 9223372036854775807 keys to the left at dilation "
            "1, expected a reach within 2^53 positions, or -1 for all");
  EXPECT_EQ(message(
                [](Call& c) {
                  c.options.window_right = int64_t{1} << 50;
                  c.options.dilation = 9;
                },
                "window=both"),
            "window reaches 1125899906842624 keys to the right at dilation 9, "
            "expected a reach within 2^53 positions, or -1 for all");
}

TEST_F(CheckSoftmaxAttention, NamesBlockMasks) {
  const std::string blocks = "block_size=8 block_heads=1";
  EXPECT_EQ(message([](Call& c) { c.inputs.block_size = 0; }, blocks),
            "block_size is 0 with a block_mask, expected 1 to 2^53");
  EXPECT_EQ(message([](Call& c) { c.inputs.block_size = 3; }),
            "block_mask has size [0, 0, 0] [heads, q_blocks, kv_blocks], query "
            "has 6 heads: expected a mask for each head, or 1 for all of them");
  EXPECT_EQ(message([](Call& c) { c.inputs.block_mask_heads = 2; }, blocks),
            "block_mask has size [2, 1, 1] [heads, q_blocks, kv_blocks], query "
            "has 6 heads: expected a mask for each head, or 1 for all of them");
  EXPECT_EQ(message([](Call& c) { c.inputs.q_blocks = -1; }, blocks),
            "block_mask has size [6, -1, 1] [heads, q_blocks, kv_blocks]: "
            "sizes must not be negative");
  EXPECT_EQ(message(
                [](Call& c) {
                  c.inputs.q_blocks = c.inputs.kv_blocks = int64_t{1} << 31;
                },
                blocks),
            "block_mask has size [6, 2147483648, 2147483648] [heads, q_blocks, "
            "kv_blocks]: more elements than memory can hold");
  EXPECT_EQ(message([](Call& c) { c.inputs.kv_blocks = 0; }, blocks),
            "block_mask has size [6, 1, 0] [heads, q_blocks, kv_blocks]: "
            "expected at least 1 block of each");
  EXPECT_EQ(message([](Call& c) { c.inputs.block_mask = nullptr; }, blocks),
            "block_size is 8, but block_mask has no data (nullptr)");
}

TEST_F(CheckSoftmaxAttention, NamesRelativeBiases) {
  EXPECT_EQ(message([](Call& c) { c.inputs.relative_reach = 4; }),
            "relative_reach is 4, but relative_bias has no data (nullptr)");
  EXPECT_EQ(message([](Call& c) { c.inputs.relative_reach = -1; }, "reach=3"),
            "relative_reach is -1, expected 0 or more, and a table [heads, 2 "
            "reach + 1] that memory can hold");
  EXPECT_EQ(message(
                [](Call& c) {
                  c.inputs.relative_reach = std::numeric_limits<int64_t>::max();
                },
                "reach=3"),
            "relative_reach is 9223372036854775807, expected 0 or more, and a "
            "table [heads, 2 reach + 1] that memory can hold");
}

TEST_F(CheckSoftmaxAttention, NamesMaskStrides) {
  const std::vector<uint8_t> mask(12, 1);
  EXPECT_EQ(message([&](Call& c) {
              c.inputs.key_mask = mask.data();
              c.inputs.key_mask_stride = -5;
            }),
            "key_mask has batch stride -5, expected 0 or more");
  EXPECT_EQ(message([&](Call& c) {
              c.inputs.query_mask = mask.data();
              c.inputs.query_mask_stride = -1;
            }),
            "query_mask has batch stride -1, expected 0 or more");
  EXPECT_EQ(message([&](Call& c) {
              c.inputs.global_mask = mask.data();
              c.inputs.global_mask_stride = -2;
            }),
            "global_mask has batch stride -2, expected 0 or more");
}

TEST_F(CheckSoftmaxAttention, NamesPacking) {
  const std::string packed = "packing=many batch=1 q_len=6 kv_len=6";
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
            "cu_seqlens_q starts with 1, expected 0");
  EXPECT_EQ(with_offsets({0, 4, 3, 6}, {0, 2, 4, 6}),
            "cu_seqlens_q[2] is 3, below cu_seqlens_q[1] = 4: offsets must not "
            "decrease");
  EXPECT_EQ(with_offsets({0, 6}, {0, 7}),
            "cu_seqlens_k ends with 7, expected the number of tokens, 6");
  EXPECT_EQ(message([](Call& c) { c.inputs.cu_seqlens_q = nullptr; }, packed),
            "cu_seqlens_k is given without cu_seqlens_q: packed sequences need "
            "both");
  const std::vector<uint8_t> mask(6, 1);
  EXPECT_EQ(message([&](Call& c) { c.inputs.key_mask = mask.data(); }, packed),
            "key_mask and cu_seqlens are given together: packed sequences have "
            "no padding to mask");
  EXPECT_EQ(message([](Call& c) { c.inputs.num_sequences = -1; }, packed),
            "num_sequences is -1, expected 0 or more");
}

TEST_F(CheckSoftmaxAttention, NamesPositions) {
  constexpr int64_t kFar = int64_t{1} << 53;
  std::vector<int64_t> starts = {0, kFar + 1};
  EXPECT_EQ(message([&](Call& c) { c.inputs.q_start = starts.data(); }),
            "q_start of row 1 is 9007199254740993: positions must lie within "
            "-2^53 and 2^53");
  starts = {kFar - 2, 0};
  EXPECT_EQ(message([&](Call& c) { c.inputs.kv_start = starts.data(); }),
            "last key of row 0 is 9007199254740994: positions must lie within "
            "-2^53 and 2^53");
}

// What a call writes, and reads beside its inputs.
TEST(CheckSoftmaxOutputs, NamesWhatIsWrong) {
  const SoftmaxProblem p =
      softmax_problem("batch=2 q_len=6 kv_len=5 head_dim=4 value_dim=7");
  const auto forward = [&](const View4& out) {
    const Status status = softmax_attention_forward(p.options, p.inputs(), out,
                                                    nullptr, serial_executor());
    EXPECT_EQ(reference::softmax_attention_forward(p.options, p.inputs(), out,
                                                   nullptr)
                  .message(),
              status.message());
    return status.message();
  };
  Tensor out(p.out_size(), DType::kFloat32), lse({2, 6, 1, 1}, DType::kFloat32);
  View4 view = out.view();
  view.dtype = DType::kFloat64;
  EXPECT_EQ(forward(view),
            "softmax_attention: out is float64, expected float32");
  view = out.view();
  view.size[3] = 4;
  EXPECT_EQ(forward(view),
            "softmax_attention: out has size [2, 6, 1, 4], expected [2, 6, 1, "
            "7]");
  view = out.view();
  view.stride[0] = 7;
  EXPECT_EQ(forward(view),
            "softmax_attention: out of size [2, 6, 1, 7] and strides [7, 7, 7, "
            "1] has elements that share memory");
  ASSERT_EQ(forward(out.view()), "");
  ASSERT_TRUE(softmax_attention_forward(p.options, p.inputs(), out.view(),
                                        lse.view().data, serial_executor())
                  .ok());

  Tensor dq(p.q.size(), DType::kFloat32), dv(p.v.size(), DType::kFloat32);
  const auto backward = [&](const ConstView4& saved, const void* log_sum_exp,
                            const ConstView4& d_out, const View4& d_query,
                            const View4& d_value, void* d_bias) {
    return softmax_attention_backward(p.options, p.inputs(), saved, log_sum_exp,
                                      d_out, d_query, {}, d_value, d_bias,
                                      serial_executor())
        .message();
  };
  const void* sums = lse.view().data;
  const ConstView4 saved = out.view(), d_out = p.d_out.view();
  EXPECT_EQ(backward(saved, sums, d_out, dq.view(), dv.view(), nullptr), "");
  EXPECT_EQ(backward(saved, sums, p.q.view(), dq.view(), {}, nullptr),
            "softmax_attention: d_out has size [2, 6, 1, 4], expected [2, 6, "
            "1, 7]");
  EXPECT_EQ(backward(saved, sums, d_out, dv.view(), {}, nullptr),
            "softmax_attention: dq has size [2, 5, 1, 7], expected [2, 6, 1, "
            "4]");
  EXPECT_EQ(backward(saved, sums, d_out, {}, dq.view(), nullptr),
            "softmax_attention: dv has size [2, 6, 1, 4], expected [2, 5, 1, "
            "7]");
  EXPECT_EQ(backward(p.q.view(), sums, d_out, dq.view(), {}, nullptr),
            "softmax_attention: out has size [2, 6, 1, 4], expected [2, 6, 1, "
            "7]");
  EXPECT_EQ(backward(saved, nullptr, d_out, dq.view(), {}, nullptr),
            "softmax_attention: the backward needs the forward's log_sum_exp, "
            "got none");
  float d_bias = 0;
  EXPECT_EQ(backward(saved, sums, d_out, dq.view(), {}, &d_bias),
            "softmax_attention: d_relative_bias is wanted, but there is no "
            "relative_bias");
}

}  // namespace
}  // namespace cosformer
