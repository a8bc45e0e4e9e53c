// bfloat16 and float16 to and from wider types, rounding to nearest, ties to
// even. Values too large for float16 become infinity; NaN stays NaN.
#ifndef COSFORMER_SRC_BASE_HALF_H_
#define COSFORMER_SRC_BASE_HALF_H_

#include <bit>
#include <cmath>
#include <cstdint>

namespace cosformer {

inline float bfloat16_to_float(uint16_t h) {
  return std::bit_cast<float>(static_cast<uint32_t>(h) << 16);
}

inline uint16_t float_to_bfloat16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if (std::isnan(x))  // a quiet one: rounding could carry it to infinity
    return static_cast<uint16_t>((bits >> 16) | 0x0040);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

inline float float16_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  const uint32_t exponent = (h >> 10) & 0x1F, fraction = h & 0x3FF;
  if (exponent == 31)  // infinity or NaN
    return std::bit_cast<float>(sign | 0x7F800000 | (fraction << 13));
  if (exponent == 0) {  // zero or subnormal: fraction x 2^-24, exact
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) |
                              (fraction << 13));
}

inline uint16_t float_to_float16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000)
    return static_cast<uint16_t>(sign | 0x7E00 | ((magnitude >> 13) & 0x3FF));
  if (magnitude >= 0x477FF000)  // 65520 and above round to infinity
    return static_cast<uint16_t>(sign | 0x7C00);
  if (magnitude < 0x38800000) {  // below 2^-14: a multiple of 2^-24
    // Adding 0.5 puts the last kept bit at 2^-24: the FPU does the rounding.
    const float sum = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(
        sign | (std::bit_cast<uint32_t>(sum) - std::bit_cast<uint32_t>(0.5f)));
  }
  const uint32_t rounded = magnitude + 0xFFF + ((magnitude >> 13) & 1);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13));
}

// The float32 neighbour of x with an odd last bit unless x is exact: rounding
// it once more to a type at least two bits narrower is rounding x once.
inline float round_to_odd(double x) {
  const float nearest = static_cast<float>(x);
  if (static_cast<double>(nearest) == x || std::isnan(x) ||
      std::isinf(nearest)) {
    return nearest;
  }
  uint32_t bits = std::bit_cast<uint32_t>(nearest);
  if (std::fabs(static_cast<double>(nearest)) > std::fabs(x)) --bits;
  return std::bit_cast<float>(bits | 1);
}
inline uint16_t double_to_bfloat16(double x) {
  return float_to_bfloat16(round_to_odd(x));
}
inline uint16_t double_to_float16(double x) {
  return float_to_float16(round_to_odd(x));
}

}  // namespace cosformer

#endif  // COSFORMER_SRC_BASE_HALF_H_
