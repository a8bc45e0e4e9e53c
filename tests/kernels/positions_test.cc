// Rotary and sinusoidal positions against their formulas in double.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <vector>

#include "cosformer/kernels.h"
#include "tests/kernels/tensor.h"

namespace cosformer {
namespace {

using testing::Layout;
using testing::Random;
using testing::relative_error;
using testing::Tensor;

// The definition, one pair at a time.
std::vector<double> rotated(const Tensor& x,
                            const std::vector<int64_t>& positions, double base,
                            bool interleaved) {
  Tensor y(x.size(), DType::kFloat64);
  const auto [batch, seq, heads, dim] = x.size();
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t s = 0; s < seq; ++s)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t c = 0; c < dim / 2; ++c) {
          const int64_t i = interleaved ? 2 * c : c;
          const int64_t j = interleaved ? 2 * c + 1 : c + dim / 2;
          const double angle =
              static_cast<double>(positions[static_cast<size_t>(b * seq + s)]) *
              std::pow(base, -2.0 * static_cast<double>(c) /
                                 static_cast<double>(dim));
          const double a = x.get(b, s, h, i), z = x.get(b, s, h, j);
          y.set(b, s, h, i, a * std::cos(angle) - z * std::sin(angle));
          y.set(b, s, h, j, a * std::sin(angle) + z * std::cos(angle));
        }
  return y.values();
}

std::vector<int64_t> counted(int64_t batch, int64_t seq, int64_t start) {
  std::vector<int64_t> positions;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t s = 0; s < seq; ++s) positions.push_back(start + s);
  return positions;
}

double tolerance(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 1e-14;
    case DType::kBFloat16:
      return 0x1p-8;
    case DType::kFloat16:
      return 0x1p-11;
    default:
      return 1e-7;
  }
}

TEST(ApplyRotary, BothPairingsMatchTheFormula) {
  Random random(1);
  auto pool = make_thread_pool(3);
  for (DType dtype :
       {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16}) {
    for (bool interleaved : {false, true}) {
      for (int64_t dim : {2, 6, 16, 64, 128}) {
        for (int64_t seq : {0, 1, 63, 64, 65, 200}) {
          for (int64_t start : {0, 7, 1000, -5}) {
            Tensor x({2, seq, 3, dim}, dtype, Layout::kTransposed);
            Tensor out({2, seq, 3, dim}, dtype, Layout::kPadded);
            x.fill_normal(random);
            const Status status =
                apply_rotary(x.view(), out.view(), nullptr, start, 10000.0,
                             interleaved, false, *pool);
            ASSERT_TRUE(status.ok()) << status.message();
            EXPECT_LE(
                relative_error(out.values(), rotated(x, counted(2, seq, start),
                                                     10000.0, interleaved)),
                // An angle is known to its own rounding.
                tolerance(dtype) +
                    0x1p-53 * static_cast<double>(std::abs(start) + seq))
                << name(dtype) << " interleaved=" << interleaved
                << " dim=" << dim << " seq=" << seq << " start=" << start;
            EXPECT_TRUE(out.gaps_untouched());
          }
        }
      }
    }
  }
}

TEST(ApplyRotary, TakesPositionsOfEachToken) {
  Random random(2);
  const std::vector<int64_t> positions = {
      0, 5, 5, 900, 63, 64, 65, -70, 128, 12, 1, 2, 100, 99, 98, 1 << 20};
  Tensor x({2, 8, 2, 32}, DType::kFloat32), out = x;
  x.fill_normal(random);
  ASSERT_TRUE(apply_rotary(x.view(), out.view(), positions.data(), 0, 500.0,
                           false, false, serial_executor())
                  .ok());
  EXPECT_LE(relative_error(out.values(), rotated(x, positions, 500.0, false)),
            1e-7);
}

// A token's result is that of its position alone: decoding gives the bits of
// the whole sequence.
TEST(ApplyRotary, OneTokenAtATimeGivesTheSameBits) {
  Random random(3);
  Tensor x({1, 300, 2, 16}, DType::kFloat32), whole = x, single = x;
  x.fill_normal(random);
  auto pool = make_thread_pool(2);
  ASSERT_TRUE(apply_rotary(x.view(), whole.view(), nullptr, 41, 10000.0, false,
                           false, *pool)
                  .ok());
  for (int64_t s = 0; s < 300; ++s) {
    ConstView4 from = x.view();
    View4 to = single.view();
    from.size[1] = to.size[1] = 1;
    from.data = static_cast<const float*>(from.data) + s * from.stride[1];
    to.data = static_cast<float*>(to.data) + s * to.stride[1];
    ASSERT_TRUE(apply_rotary(from, to, nullptr, 41 + s, 10000.0, false, false,
                             serial_executor())
                    .ok());
  }
  EXPECT_EQ(single.bits(), whole.bits());
}

TEST(ApplyRotary, InverseTurnsBackInPlace) {
  Random random(4);
  for (bool interleaved : {false, true}) {
    Tensor x({2, 70, 2, 24}, DType::kFloat64);
    x.fill_normal(random);
    Tensor y = x;
    for (bool inverse : {false, true}) {
      ASSERT_TRUE(apply_rotary(y.view(), y.view(), nullptr, 123, 10000.0,
                               interleaved, inverse, serial_executor())
                      .ok());
    }
    EXPECT_LE(relative_error(y.values(), x.values()), 1e-14);
  }
}

TEST(ApplyRotary, FarPositionsStayExact) {
  Random random(5);
  const int64_t start = 10'000'000;
  Tensor x({1, 100, 1, 64}, DType::kFloat32), out = x;
  x.fill_normal(random);
  ASSERT_TRUE(apply_rotary(x.view(), out.view(), nullptr, start, 10000.0, false,
                           false, serial_executor())
                  .ok());
  EXPECT_LE(relative_error(out.values(),
                           rotated(x, counted(1, 100, start), 10000.0, false)),
            1e-7);
}

TEST(ApplyRotary, SaysWhatIsWrong) {
  Tensor odd({1, 2, 1, 3}, DType::kFloat32),
      even({1, 2, 1, 4}, DType::kFloat32);
  Tensor other({1, 2, 1, 4}, DType::kFloat64);
  const auto call = [](Tensor& x, Tensor& out, int64_t start, double base) {
    return apply_rotary(x.view(), out.view(), nullptr, start, base, false,
                        false, serial_executor())
        .message();
  };
  EXPECT_EQ(
      call(odd, odd, 0, 10000.0),
      "apply_rotary: x has dim 3: pairs are turned, expected an even dim");
  EXPECT_EQ(call(even, even, 0, 0.0),
            "apply_rotary: base is 0, expected a finite number above 0");
  EXPECT_EQ(call(even, odd, 0, 10000.0),
            "apply_rotary: out has size [1, 2, 1, 3], expected [1, 2, 1, 4]");
  EXPECT_EQ(call(even, other, 0, 10000.0),
            "apply_rotary: out is float64, expected float32");
  EXPECT_EQ(
      call(even, even, INT64_MAX - 1, 10000.0),
      "apply_rotary: start is 9223372036854775806 for 2 tokens: positions "
      "must lie within -2^53 and 2^53");
  ConstView4 integers = even.view();
  integers.dtype = DType::kInt32;
  View4 integers_out = even.view();
  integers_out.dtype = DType::kInt32;
  EXPECT_EQ(apply_rotary(integers, integers_out, nullptr, 0, 10.0, false, false,
                         serial_executor())
                .message(),
            "apply_rotary: x is int32, expected float32, float64, bfloat16 or "
            "float16");
}

TEST(SinusoidalPositions, MatchTheFormulaToTheLastBit) {
  for (int64_t dim : {1, 2, 7, 24, 128}) {
    const int64_t len = 300;
    std::vector<float> table(static_cast<size_t>(len * dim), NAN);
    sinusoidal_positions(len, dim, table.data());
    for (int64_t p = 0; p < len; ++p) {
      for (int64_t c = 0; c < dim; ++c) {
        const double angle = static_cast<double>(p) *
                             std::pow(10000.0, -static_cast<double>(c / 2 * 2) /
                                                   static_cast<double>(dim));
        EXPECT_EQ(
            table[static_cast<size_t>(p * dim + c)],
            static_cast<float>(c % 2 == 0 ? std::sin(angle) : std::cos(angle)))
            << "p=" << p << " c=" << c << " dim=" << dim;
      }
    }
  }
}

}  // namespace
}  // namespace cosformer
