// Linear attention as a share of the machine's peak: state% = (8 d (d + 1)
// operations a token and head forward, 20 d (d + 1) backward; half without the
// cosine) / time / the peak of multiply-adds of the same instruction set,
// measured before and after every run, so that a busy neighbour or a falling
// clock rate lowers both. One thread, its own processor time. state% is the
// median over the runs, best% their largest (a neighbour's use of caches and
// memory lowers the kernels, but not the peak).
//
//   bench_linear                                  everything
//   bench_linear --benchmark_filter='causal/avx512/d:64'
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

constexpr int64_t kHeads = 16;

struct Case {
  Isa isa;
  DType dtype = DType::kFloat32;
  int64_t dim = 64, length = 1024, heads = kHeads;
  bool causal = true, cosine = true;
  FeatureMap map = FeatureMap::kRelu;
  int64_t value_dim = 0;  // 0: dim
  Pass pass = Pass::kForward;
};

void attention(benchmark::State& state, const Case& c) {
  if (Status forced = force_isa(isa_name(c.isa)); !forced.ok()) {
    state.SkipWithError(forced.message().c_str());
    return;
  }
  const bool is_double = c.dtype == DType::kFloat64;
  const int64_t value_dim = c.value_dim != 0 ? c.value_dim : c.dim;
  Tensor q(c.dtype, c.length, c.heads, c.dim, 1);
  Tensor k(c.dtype, c.length, c.heads, c.dim, 2);
  Tensor v(c.dtype, c.length, c.heads, value_dim, 3);
  Tensor out(c.dtype, c.length, c.heads, value_dim, 0);
  Tensor denominator(is_double ? DType::kFloat64 : DType::kFloat32, c.length,
                     c.heads, 1, 0);
  Tensor d_out(c.dtype, c.length, c.heads, value_dim, 4);
  Tensor dq(c.dtype, c.length, c.heads, c.dim, 0);
  Tensor dk(c.dtype, c.length, c.heads, c.dim, 0);
  Tensor dv(c.dtype, c.length, c.heads, value_dim, 0);
  LinearAttentionOptions options;
  options.is_causal = c.causal;
  options.feature_map = c.map;
  options.reweight_len = c.cosine ? c.length : 0;
  LinearAttentionInputs inputs;
  inputs.q = q.view;
  inputs.k = k.view;
  inputs.v = v.view;
  Executor& executor = serial_executor();
  const auto forward = [&] {
    return linear_attention_forward(options, inputs, out.view,
                                    denominator.view.data, {}, executor);
  };
  const auto run = [&] {
    if (c.pass == Pass::kForward) return forward();
    return linear_attention_backward(options, inputs, out.view,
                                     denominator.view.data, d_out.view, {},
                                     dq.view, dk.view, dv.view, {}, executor);
  };
  if (Status status = forward(); !status.ok()) {
    state.SkipWithError(status.message().c_str());
    return;
  }
  const double d = static_cast<double>(c.dim);
  const double operations = (c.pass == Pass::kForward ? 8 : 20) * d *
                            static_cast<double>(value_dim + 1) *
                            static_cast<double>(c.length * c.heads) *
                            (c.cosine ? 1 : 0.5);
  measure_share(state, c.isa, is_double, operations, /*at_least=*/2e8, "state%",
                run);
}

// One token of every head; against a loop that reads and writes the state.
void decode(benchmark::State& state, Isa isa, int64_t dim, int64_t rows) {
  if (Status forced = force_isa(isa_name(isa)); !forced.ok()) {
    state.SkipWithError(forced.message().c_str());
    return;
  }
  const auto tensor = [&](int seed) {
    Tensor t(DType::kFloat32, rows, kHeads, dim, seed);
    t.view.size = {rows, 1, kHeads, dim};
    t.view.stride = contiguous_strides(t.view.size);
    return t;
  };
  Tensor q = tensor(1), k = tensor(2), v = tensor(3), out = tensor(0);
  Tensor kv_state(DType::kFloat32, rows, kHeads, 2 * dim * dim, 0);
  Tensor k_sum(DType::kFloat32, rows, kHeads, 2 * dim, 0);
  std::vector<int64_t> start(static_cast<size_t>(rows)), position = start;
  LinearAttentionOptions options;
  options.reweight_len = 1 << 20;
  options.is_causal = true;
  LinearAttentionInputs inputs;
  inputs.q = q.view;
  inputs.k = k.view;
  inputs.v = v.view;
  const LinearStateView view{kv_state.view.data, k_sum.view.data, start.data(),
                             position.data()};
  const int64_t count = rows * kHeads * 2 * dim * dim;
  float* values = kv_state.buffer.as<float>();
  constexpr int kSteps = 16;
  std::vector<double> share;
  for (auto _ : state) {
    const double step = thread_seconds();
    for (int i = 0; i < kSteps; ++i) {
      if (!linear_attention_decode_step(options, inputs, view, out.view,
                                        serial_executor())
               .ok())
        state.SkipWithError("kernel failed");
    }
    const double seconds = since(step) / kSteps;
    const double loop = thread_seconds();
    for (int i = 0; i < kSteps; ++i) {
      update_memory(isa, values, count);
      benchmark::ClobberMemory();
    }
    share.push_back(100 * since(loop) / kSteps / seconds);
    state.SetIterationTime(seconds);
    std::fill(position.begin(), position.end(), 0);
  }
  state.counters["memory%"] = median(share);
  state.counters["us/head"] =
      benchmark::Counter(static_cast<double>(rows * kHeads) * 1e-6,
                         benchmark::Counter::kIsIterationInvariantRate |
                             benchmark::Counter::kInvert);
}

void add(const Case& c) {
  const std::string name =
      str_cat(c.pass == Pass::kForward ? "forward" : "backward", "/",
              c.causal ? "causal" : "full",
              c.cosine                     ? ""
              : c.map == FeatureMap::kElu1 ? "_elu1"
                                           : "_relu",
              "/", isa_name(c.isa), "/", cosformer::name(c.dtype), "/d:", c.dim,
              c.value_dim != 0 ? str_cat("x", c.value_dim) : "",
              "/L:", c.length, "/H:", c.heads);
  register_case(name, c, &attention);
}

}  // namespace

int main(int argc, char** argv) {
  for (std::string_view name : supported_isas()) {
    const Isa isa = isa_of(name);
    for (Pass pass : {Pass::kForward, Pass::kBackward}) {
      for (int64_t dim : {64, 32, 128})
        for (int64_t length : {1024, 4096, 16384})
          add({.isa = isa, .dim = dim, .length = length, .pass = pass});
      for (int64_t length : {64, 256})
        add({.isa = isa, .length = length, .pass = pass});
      for (int64_t dim : {40, 63, 192, 256, 512})
        add({.isa = isa, .dim = dim, .heads = 4, .pass = pass});
      for (int64_t value_dim : {32, 96, 128})
        add({.isa = isa, .value_dim = value_dim, .pass = pass});
      for (int64_t dim : {64, 32, 128})
        for (int64_t length : {1024, 4096, 16384})
          add({.isa = isa,
               .dim = dim,
               .length = length,
               .causal = false,
               .pass = pass});
      for (FeatureMap map : {FeatureMap::kRelu, FeatureMap::kElu1})
        for (int64_t length : {1024, 4096, 16384})
          add({.isa = isa,
               .length = length,
               .cosine = false,
               .map = map,
               .pass = pass});
      add({.isa = isa, .dtype = DType::kFloat64, .pass = pass});
      add({.isa = isa, .dtype = DType::kBFloat16, .pass = pass});
    }
    // Rows: at head_dim 64 states of 0.5, 4 and 64 MB, in the second-level
    // cache, the third and memory.
    for (int64_t rows : {1, 8, 128}) {
      for (int64_t dim : {32, 64, 128}) {
        benchmark::RegisterBenchmark(
            str_cat("decode/", name, "/d:", dim, "/rows:", rows).c_str(),
            [isa, dim, rows](benchmark::State& state) {
              decode(state, isa, dim, rows);
            })
            ->UseManualTime()
            ->Unit(benchmark::kMicrosecond);
      }
    }
  }
  return run_benchmarks(argc, argv);
}
