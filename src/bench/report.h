// What the bench's text, its plots and its advice say alike.
#ifndef COSFORMER_SRC_BENCH_REPORT_H_
#define COSFORMER_SRC_BENCH_REPORT_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "cosformer/bench.h"

namespace cosformer::bench_internal {

// "forward", "forward + backward", "decode".
std::string_view title_of(BenchPass pass);
// "forward, causal, head_dim 64, 1 thread".
std::string title_of(const BenchSeries& series);
// "cosformer 0.1.0 on AMD EPYC (avx512, 2 cores), torch 2.13.0; float32, batch
// 1, 8 heads".
std::string machine_line(const BenchReport& report);

// "1 layer", "2,048 tokens".
std::string counted(int64_t count, std::string_view thing);

// nullptr: none.
const BenchPoint* find_point(const BenchReport& report,
                             const BenchSeries& series, std::string_view kind,
                             int64_t length);
const BenchPeak* find_peak(const BenchReport& report, int64_t threads);

}  // namespace cosformer::bench_internal

#endif  // COSFORMER_SRC_BENCH_REPORT_H_
