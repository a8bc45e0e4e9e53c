// Measurements made by hand: curves that are known exactly.
#ifndef COSFORMER_TESTS_BENCH_MADE_REPORT_H_
#define COSFORMER_TESTS_BENCH_MADE_REPORT_H_

#include <functional>
#include <map>
#include <string>

#include "cosformer/bench.h"

namespace cosformer {

// Seconds of a call at a length.
using Cost = std::function<double(double length)>;

// One thread, 8 heads of 64, a peak of 1e11 and memory of 1e10 bytes a second;
// each kind by its own cost, the backward three times the forward; decoding by
// `decode`.
inline BenchReport made_report(const std::map<std::string, Cost>& forward,
                               const std::map<std::string, Cost>& decode) {
  BenchReport report;
  report.machine = {"Imaginary CPU", "avx2", "2.13.0", "0.1.0", 4};
  report.options.threads = {1};
  report.options.lengths = {64, 256, 1024, 4096};
  report.options.causal = {true};
  report.peaks = {{1, 1e11, 1e10}};
  report.is_complete = true;
  for (const auto& [kind, cost] : forward) {
    report.options.kinds.push_back(kind);
  }
  for (const int64_t length : report.options.lengths) {
    for (const auto& [kind, cost] : forward) {
      for (const BenchPass pass :
           {BenchPass::kForward, BenchPass::kBackward, BenchPass::kDecode}) {
        BenchPoint p;
        p.kind = kind;
        p.pass = pass;
        p.length = length;
        p.head_dim = 64;
        p.rounds = 7;
        const auto n = static_cast<double>(length);
        if (pass == BenchPass::kDecode) {
          if (decode.count(kind) == 0) {
            p.left_out = "no decoding";
            report.points.push_back(p);
            continue;
          }
          p.seconds = decode.at(kind)(n);
        } else {
          p.seconds = cost(n) * (pass == BenchPass::kBackward ? 3 : 1);
        }
        p.fastest_seconds = p.seconds;
        p.share = 0.5;
        p.extra_bytes = length * 100;
        report.points.push_back(p);
      }
    }
  }
  return report;
}

// Of seconds a token squared, or a token.
inline Cost quadratic(double seconds) {
  return [seconds](double n) { return seconds * n * n; };
}
inline Cost linear(double seconds) {
  return [seconds](double n) { return seconds * n; };
}
inline Cost constant(double seconds) {
  return [seconds](double) { return seconds; };
}

}  // namespace cosformer

#endif  // COSFORMER_TESTS_BENCH_MADE_REPORT_H_
