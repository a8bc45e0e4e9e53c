// The kinds that can be measured, and what they are counted by.
#ifndef COSFORMER_SRC_BENCH_KINDS_H_
#define COSFORMER_SRC_BENCH_KINDS_H_

#include <cstdint>
#include <string_view>

#include "cosformer/bench.h"

namespace cosformer::bench_internal {

inline constexpr std::string_view kReference = "sdpa";

// Pairs of a query and a key that it sees, of one head, through a window of
// `window` tokens on each side (causal: to the left); negative: no window.
double visible_pairs(int64_t length, bool is_causal, int64_t window);

// Pairs of exact softmax: two products forward, five backward.
double softmax_operations(double pairs, int64_t head_dim, bool with_backward);
// The linear engine, a token and head: the state of so many features is read
// and added to, the denominator one more column.
double linear_operations(int64_t features, int64_t head_dim,
                         bool with_backward);

}  // namespace cosformer::bench_internal

#endif  // COSFORMER_SRC_BENCH_KINDS_H_
