// Exact softmax attention as a share of the machine's peak: peak% = (2 (d + v)
// operations a visible pair and head forward, 6 d + 4 v backward, of head_dim d
// and value_dim v, that is 4 d and 10 d) / time / the peak
// of multiply-adds of the same instruction set, measured before and after every
// run, so that a busy neighbour or a falling clock rate lowers both. One
// thread, its own processor time. peak% is the median over the runs, best%
// their largest (a neighbour's use of caches and memory lowers the kernels, but
// not the peak).
//
//   bench_softmax                                  everything
//   bench_softmax --benchmark_filter='causal/avx512/float32/d:64'
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "benchmarks/kernel_bench.h"
#include "cosformer/kernels.h"

namespace {

using namespace cosformer;              // NOLINT: a program of one file
using namespace cosformer::benchmarks;  // NOLINT

struct Case {
  std::string kind;  // causal, full, window (of `window` keys)
  Isa isa;
  DType dtype = DType::kFloat32;
  int64_t dim = 64, length = 1024, heads = 16;
  int64_t value_dim = 0;  // 0: dim
  int64_t window = 0, dilation = 1;
  double dropout = 0;
  Pass pass = Pass::kForward;
};

// Pairs of a query and a key that it sees, of one head.
double visible_pairs(const Case& c) {
  double pairs = 0;
  for (int64_t i = 0; i < c.length; ++i) {
    const int64_t seen = c.kind == "full" ? c.length
                         : c.kind == "causal"
                             ? i + 1
                             : std::min(i / c.dilation + 1, c.window);
    pairs += static_cast<double>(seen);
  }
  return pairs;
}

void attention(benchmark::State& state, const Case& c) {
  if (Status forced = force_isa(isa_name(c.isa)); !forced.ok()) {
    state.SkipWithError(forced.message().c_str());
    return;
  }
  const bool is_double = c.dtype == DType::kFloat64;
  const int64_t value_dim = c.value_dim > 0 ? c.value_dim : c.dim;
  Tensor q(c.dtype, c.length, c.heads, c.dim, 1);
  Tensor k(c.dtype, c.length, c.heads, c.dim, 2);
  Tensor v(c.dtype, c.length, c.heads, value_dim, 3);
  Tensor out(c.dtype, c.length, c.heads, value_dim, 0);
  Tensor log_sum_exp(is_double ? DType::kFloat64 : DType::kFloat32, c.length,
                     c.heads, 1, 0);
  Tensor d_out(c.dtype, c.length, c.heads, value_dim, 4);
  Tensor dq(c.dtype, c.length, c.heads, c.dim, 0);
  Tensor dk(c.dtype, c.length, c.heads, c.dim, 0);
  Tensor dv(c.dtype, c.length, c.heads, value_dim, 0);
  SoftmaxAttentionOptions options;
  options.is_causal = c.kind != "full";
  options.dropout_p = c.dropout;
  if (c.kind == "window") {
    options.has_window = true;
    options.window_left = c.window - 1;
    options.window_right = 0;
    options.dilation = c.dilation;
  }
  SoftmaxAttentionInputs inputs;
  inputs.q = q.view;
  inputs.k = k.view;
  inputs.v = v.view;
  const auto forward = [&] {
    return softmax_attention_forward(options, inputs, out.view,
                                     log_sum_exp.view.data, serial_executor());
  };
  const auto run = [&] {
    if (c.pass == Pass::kForward) return forward();
    return softmax_attention_backward(
        options, inputs, out.view, log_sum_exp.view.data, d_out.view, dq.view,
        dk.view, dv.view, nullptr, serial_executor());
  };
  if (Status status = forward(); !status.ok()) {
    state.SkipWithError(status.message().c_str());
    return;
  }
  const int64_t of_pair = c.pass == Pass::kForward ? 2 * (c.dim + value_dim)
                                                   : 6 * c.dim + 4 * value_dim;
  const double operations =
      static_cast<double>(of_pair * c.heads) * visible_pairs(c);
  measure_share(state, c.isa, is_double, operations, /*at_least=*/5e8, "peak%",
                run);
}

void add(const Case& c) {
  std::string kind = c.kind;
  if (c.window > 0) kind += str_cat("_", c.window);
  if (c.dilation > 1) kind += str_cat("_by_", c.dilation);
  if (c.dropout > 0) kind += "_dropout";
  const std::string name =
      str_cat(c.pass == Pass::kForward ? "forward/" : "backward/", kind, "/",
              isa_name(c.isa), "/", cosformer::name(c.dtype), "/d:", c.dim,
              c.value_dim > 0 ? str_cat("/v:", c.value_dim) : "",
              "/L:", c.length, "/H:", c.heads);
  register_case(name, c, &attention);
}

}  // namespace

int main(int argc, char** argv) {
  for (std::string_view name : supported_isas()) {
    const Isa isa = isa_of(name);
    for (Pass pass : {Pass::kForward, Pass::kBackward}) {
      for (const char* kind : {"causal", "full"}) {
        Case c{.kind = kind, .isa = isa, .pass = pass};
        for (int64_t dim : {64, 128, 32}) {
          c.dim = dim;
          for (int64_t length : {256, 1024, 4096}) {
            c.length = length;
            add(c);
          }
        }
        c.dim = 64;
        c.length = 64;
        add(c);
        c.length = 1024;
        for (DType dtype : {DType::kBFloat16, DType::kFloat64}) {
          c.dtype = dtype;
          add(c);
        }
      }
      // No cliff between the sizes that are met most.
      for (int64_t dim : {40, 63, 192, 256, 512})
        add({.kind = "causal", .isa = isa, .dim = dim, .pass = pass});
      for (int64_t value_dim : {32, 128}) {
        add({.kind = "causal",
             .isa = isa,
             .value_dim = value_dim,
             .pass = pass});
      }
      add({.kind = "window",
           .isa = isa,
           .length = 16384,
           .window = 512,
           .pass = pass});
      for (int64_t dilation : {1, 4}) {
        add({.kind = "window",
             .isa = isa,
             .length = 65536,
             .heads = 4,
             .window = 256,
             .dilation = dilation,
             .pass = pass});
      }
      add({.kind = "causal", .isa = isa, .dropout = 0.1, .pass = pass});
    }
  }
  return run_benchmarks(argc, argv);
}
