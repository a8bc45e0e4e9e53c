// Tables of 2^x for exp-inl.h, whatever the instruction set.
#ifndef COSFORMER_SRC_KERNELS_SIMD_EXP_TABLE_H_
#define COSFORMER_SRC_KERNELS_SIMD_EXP_TABLE_H_

#include <bit>
#include <cstdint>
#include <numbers>

namespace cosformer::simd {

inline constexpr int kExp2Degree = 13;

// ln(2)^k / k!: 2^x = sum_k c[k] x^k.
struct Exp2Series {
  double c[kExp2Degree + 1];
};
constexpr Exp2Series exp2_series() {
  Exp2Series series{};
  long double term = 1;
  for (int k = 0; k <= kExp2Degree; ++k) {
    series.c[k] = static_cast<double>(term);
    term *= std::numbers::ln2_v<long double> / (k + 1);
  }
  return series;
}
inline constexpr Exp2Series kExp2Series = exp2_series();

// 2^x for 0 <= x < 1 by the series, which is more than enough for a float.
constexpr double exp2_at(double x) {
  double power = 1, sum = 0;
  for (int k = 0; k <= kExp2Degree; ++k, power *= x)
    sum += kExp2Series.c[k] * power;
  return sum;
}

// 2^(i / 32).
struct alignas(64) Exp2Table32 {
  float value[32];
};
constexpr Exp2Table32 exp2_table_32() {
  Exp2Table32 table{};
  for (int i = 0; i < 32; ++i)
    table.value[i] = static_cast<float>(exp2_at(i / 32.0));
  return table;
}
inline constexpr Exp2Table32 kExp2Table32 = exp2_table_32();

// 2^(i / 8), with i / 8 taken off the bits of the exponent.
struct alignas(64) Exp2Table8 {
  float value[8];
};
constexpr Exp2Table8 exp2_table_8() {
  Exp2Table8 table{};
  for (int i = 0; i < 8; ++i) {
    const uint32_t bits =
        std::bit_cast<uint32_t>(static_cast<float>(exp2_at(i / 8.0)));
    table.value[i] =
        std::bit_cast<float>(bits - (static_cast<uint32_t>(i) << 20));
  }
  return table;
}
inline constexpr Exp2Table8 kExp2Table8 = exp2_table_8();

}  // namespace cosformer::simd

#endif  // COSFORMER_SRC_KERNELS_SIMD_EXP_TABLE_H_
