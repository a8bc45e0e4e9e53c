// Tokens of tensors, as the tests fill, cut and compare them; and a body run on
// every instruction set.
#ifndef COSFORMER_TESTS_KERNELS_TOKENS_H_
#define COSFORMER_TESTS_KERNELS_TOKENS_H_

#include <bit>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "tests/kernels/tensor.h"

namespace cosformer::testing {

inline constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
// A NaN whose payload is all ones: what careless bit arithmetic makes a number.
inline constexpr double kOnes = std::bit_cast<double>(~uint64_t{0});
inline constexpr double kInf = std::numeric_limits<double>::infinity();
// What invisible places are filled with.
inline constexpr double kStrange[] = {kNan, kInf, -kInf, 1e38, -1e38};

void for_each_isa(const std::function<void()>& body);

void fill_token(Tensor& x, int64_t b, int64_t s, double value);
// Tokens [from, to) of batch row b: their bits, their values, a copy of them.
std::vector<uint64_t> bits_of(const Tensor& x, int64_t b, int64_t from,
                              int64_t to);
std::vector<double> values_of(const Tensor& x, int64_t b, int64_t from,
                              int64_t to);
Tensor cut(const Tensor& x, int64_t b, int64_t from, int64_t to);

bool all_nan(const std::vector<double>& x);
bool all_finite(const std::vector<double>& x);
bool all_finite(const Tensor& x);
bool all_zero(const std::vector<double>& x);

}  // namespace cosformer::testing

#endif  // COSFORMER_TESTS_KERNELS_TOKENS_H_
