#include "base/half.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>

namespace cosformer {
namespace {

// The nearest of the two neighbours of x on the grid of a half type, by
// definition: precision counts the bits of the significand, subnormals are
// multiples of `smallest`.
double nearest(double x, int precision, double smallest, double largest) {
  if (x == 0 || !std::isfinite(x)) return x;
  const double step =
      std::fmax(std::ldexp(1.0, std::ilogb(x) - precision + 1), smallest);
  const double rounded = std::nearbyint(x / step) * step;  // ties to even
  return std::fabs(rounded) > largest ? std::copysign(INFINITY, x)
                                      : std::copysign(rounded, x);
}
double nearest_float16(double x) { return nearest(x, 11, 0x1p-24, 65504.0); }
double nearest_bfloat16(double x) {
  return nearest(x, 8, 0x1p-133, 0x1.FEp127);
}

TEST(Half, EveryFloat16SurvivesFloatAndBack) {
  for (uint32_t h = 0; h < 65536; ++h) {
    const float x = float16_to_float(static_cast<uint16_t>(h));
    const uint16_t back = float_to_float16(x);
    if (std::isnan(x)) {
      EXPECT_TRUE(std::isnan(float16_to_float(back))) << h;
    } else {
      EXPECT_EQ(back, h);
    }
  }
}

TEST(Half, EveryBFloat16SurvivesFloatAndBack) {
  for (uint32_t h = 0; h < 65536; ++h) {
    const float x = bfloat16_to_float(static_cast<uint16_t>(h));
    const uint16_t back = float_to_bfloat16(x);
    if (std::isnan(x)) {
      EXPECT_TRUE(std::isnan(bfloat16_to_float(back))) << h;
    } else {
      EXPECT_EQ(back, h);
    }
  }
}

// Every float16, the ties half way to the next, and a hair beside each tie.
TEST(Half, RoundsToTheNearestFloat16TiesToEven) {
  for (uint16_t h = 0; h < 0x7C00; ++h) {
    const double low = float16_to_float(h);
    const double high =
        h == 0x7BFF ? 65536.0 : float16_to_float(static_cast<uint16_t>(h + 1));
    const double tie = (low + high) / 2;
    for (double x :
         {low, tie, std::nextafter(tie, 0.0), std::nextafter(tie, 1e9), -tie}) {
      EXPECT_EQ(float16_to_float(double_to_float16(x)), nearest_float16(x))
          << x;
      const float single = static_cast<float>(x);
      EXPECT_EQ(float16_to_float(float_to_float16(single)),
                nearest_float16(single))
          << x;
    }
  }
}

TEST(Half, RoundsToTheNearestBFloat16TiesToEven) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 200000; ++i) {
    const uint16_t h = static_cast<uint16_t>(random() % 0x7F80);
    const double low = bfloat16_to_float(h);
    const double high =
        h == 0x7F7F ? 0x1p128 : bfloat16_to_float(static_cast<uint16_t>(h + 1));
    const double tie = (low + high) / 2;
    const double inside =
        low + (high - low) * static_cast<double>(random() % 1000) / 1000;
    for (double x : {low, tie, inside, -inside, std::nextafter(tie, 0.0),
                     std::nextafter(tie, 1e300)}) {
      EXPECT_EQ(bfloat16_to_float(double_to_bfloat16(x)), nearest_bfloat16(x))
          << x;
    }
  }
}

TEST(Half, KeepsInfinityNanAndTheSignOfZero) {
  for (const double x : {HUGE_VAL, -HUGE_VAL, 1e300, -1e300}) {
    EXPECT_EQ(float16_to_float(double_to_float16(x)),
              std::copysign(INFINITY, x));
    EXPECT_EQ(bfloat16_to_float(double_to_bfloat16(x)),
              std::copysign(INFINITY, x));
  }
  EXPECT_TRUE(std::isnan(float16_to_float(double_to_float16(NAN))));
  EXPECT_TRUE(std::isnan(bfloat16_to_float(double_to_bfloat16(NAN))));
  EXPECT_TRUE(std::signbit(float16_to_float(double_to_float16(-0.0))));
  EXPECT_TRUE(std::signbit(bfloat16_to_float(double_to_bfloat16(-1e-60))));
}

}  // namespace
}  // namespace cosformer
