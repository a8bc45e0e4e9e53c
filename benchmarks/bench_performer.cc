// Performer as a share of its floor, the products that it cannot do without, at
// the peak of multiply-adds of the same instruction set, measured in the same
// run (kernel_bench.h). Operations a token and head, m features, head_dim d,
// value_dim d:
//
//   forward   8 m d + 4 m: q and k times the projection, a state read and
//             updated, of values and of ones
//   backward  18 m d + 10 m: both projections and the way back, one state read
//             and updated (dq), one read twice and updated (dk, dv)
//
//   bench_performer --benchmark_filter='forward/causal/avx512'
#include <benchmark/benchmark.h>

#include <string>
#include <vector>

#include "benchmarks/kernel_bench.h"
#include "cosformer/kernels.h"

namespace {

using namespace cosformer;              // NOLINT: a program of one file
using namespace cosformer::benchmarks;  // NOLINT

struct Case {
  Isa isa;
  DType dtype = DType::kFloat32;
  int64_t features = 256, dim = 64, length = 1024, heads = 16;
  bool causal = true;
  Pass pass = Pass::kForward;
  double scale = 1;  // of q and k
};

Tensor scaled(const Case& c, int seed) {
  Tensor x(c.dtype, c.length, c.heads, c.dim, seed);
  if (c.dtype != DType::kFloat32) return x;
  for (int64_t i = 0; i < c.length * c.heads * c.dim; ++i)
    x.buffer.as<float>()[i] *= static_cast<float>(c.scale);
  return x;
}

void attention(benchmark::State& state, const Case& c) {
  if (Status forced = force_isa(isa_name(c.isa)); !forced.ok()) {
    state.SkipWithError(forced.message().c_str());
    return;
  }
  const bool is_double = c.dtype == DType::kFloat64;
  Tensor q = scaled(c, 1), k = scaled(c, 2);
  Tensor v(c.dtype, c.length, c.heads, c.dim, 3);
  Tensor out(c.dtype, c.length, c.heads, c.dim, 0);
  Tensor d_out(c.dtype, c.length, c.heads, c.dim, 4);
  Tensor dq(c.dtype, c.length, c.heads, c.dim, 0);
  Tensor dk(c.dtype, c.length, c.heads, c.dim, 0);
  Tensor dv(c.dtype, c.length, c.heads, c.dim, 0);
  std::vector<double> log_denominator(static_cast<size_t>(c.length * c.heads));
  const size_t weights = static_cast<size_t>(c.features * c.dim);
  std::vector<double> drawn(weights);
  performer_projection(c.features, c.dim, true, 7, drawn.data());
  const std::vector<float> narrow(drawn.begin(), drawn.end());
  PerformerAttentionOptions options;
  options.is_causal = c.causal;
  PerformerAttentionInputs inputs;
  inputs.call.q = q.view;
  inputs.call.k = k.view;
  inputs.call.v = v.view;
  inputs.projection = is_double ? static_cast<const void*>(drawn.data())
                                : static_cast<const void*>(narrow.data());
  inputs.num_features = c.features;
  Executor& executor = serial_executor();
  const auto forward = [&] {
    return performer_attention_forward(options, inputs, out.view,
                                       log_denominator.data(), {}, executor);
  };
  const auto run = [&] {
    if (c.pass == Pass::kForward) return forward();
    return performer_attention_backward(
        options, inputs, out.view, log_denominator.data(), d_out.view, {},
        dq.view, dk.view, dv.view, nullptr, {}, executor);
  };
  if (Status status = forward(); !status.ok()) {
    state.SkipWithError(status.message().c_str());
    return;
  }
  const double m = static_cast<double>(c.features);
  const double d = static_cast<double>(c.dim);
  const double operations =
      (c.pass == Pass::kForward ? 8 * m * d + 4 * m : 18 * m * d + 10 * m) *
      static_cast<double>(c.length * c.heads);
  measure_share(state, c.isa, is_double, operations, /*at_least=*/2e8, "floor%",
                run);
}

void add(const Case& c) {
  const std::string name =
      str_cat(c.pass == Pass::kForward ? "forward" : "backward", "/",
              c.causal ? "causal" : "full", "/", isa_name(c.isa), "/",
              cosformer::name(c.dtype), "/m:", c.features, "/d:", c.dim,
              "/L:", c.length, "/H:", c.heads, "/scale:", c.scale);
  register_case(name, c, &attention);
}

}  // namespace

int main(int argc, char** argv) {
  for (std::string_view name : supported_isas()) {
    const Isa isa = isa_of(name);
    for (Pass pass : {Pass::kForward, Pass::kBackward}) {
      for (int64_t length : {64, 1024, 4096})
        add({.isa = isa, .length = length, .pass = pass});
      add({.isa = isa, .length = 4096, .heads = 1, .pass = pass});
      add({.isa = isa, .causal = false, .pass = pass});
      add({.isa = isa, .features = 128, .dim = 32, .pass = pass});
      add({.isa = isa, .features = 512, .dim = 128, .pass = pass});
      add({.isa = isa, .pass = pass, .scale = 10});
      add({.isa = isa, .dtype = DType::kFloat64, .pass = pass});
      add({.isa = isa, .dtype = DType::kBFloat16, .pass = pass});
    }
  }
  return run_benchmarks(argc, argv);
}
