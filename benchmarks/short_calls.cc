// What a call through the torch operator costs beside its kernel: one head of
// 64 tokens, and a decode step, of each kind; plain, and where autograd records
// it (then the kernel too keeps what a backward needs). Operator and kernel are
// timed in turn, and the medians compared: microseconds.
//
//   bench_short_calls [ROUNDS]
#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <utility>
#include <vector>

#include "cosformer/kernels.h"
#include "cosformer/ops.h"

namespace {

using namespace cosformer;  // NOLINT: a program of one file

constexpr int64_t kLength = 64, kDim = 64, kFeatures = 256;
int rounds = 400;
using Run = std::function<void()>;

void check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

ConstView4 view(const at::Tensor& x) {
  ConstView4 v;
  v.data = x.const_data_ptr();
  v.dtype = DType::kFloat32;
  for (int i = 0; i < 4; ++i) {
    v.size[i] = x.size(i);
    v.stride[i] = x.stride(i);
  }
  return v;
}
View4 target(const at::Tensor& x) {
  const ConstView4 v = view(x);
  return {x.mutable_data_ptr(), v.dtype, v.size, v.stride};
}

double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

double microseconds(const Run& f) {
  constexpr int kRepeats = 8;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kRepeats; ++i) f();
  const std::chrono::duration<double, std::micro> d =
      std::chrono::steady_clock::now() - start;
  return d.count() / kRepeats;
}

// What the operator adds to its kernel.
void report(const char* name, const std::vector<std::pair<Run, Run>>& pairs) {
  std::printf("%-18s", name);
  for (const auto& [kernel, call] : pairs) {
    std::vector<double> alone, whole;
    for (int r = 0; r < rounds; ++r) {
      alone.push_back(microseconds(kernel));
      whole.push_back(microseconds(call));
    }
    std::printf("%10.2f %+8.2f", median(alone), median(whole) - median(alone));
  }
  std::printf("\n");
}

// f without recording.
Run plain(const Run& f) {
  return [f] {
    const at::NoGradGuard off;
    f();
  };
}

struct Problem {
  explicit Problem(int64_t length)
      : q(at::randn({1, length, 1, kDim})),
        k(at::randn({1, length, 1, kDim})),
        v(at::randn({1, length, 1, kDim})),
        out(at::empty({1, length, 1, kDim})) {}
  template <typename Inputs>
  void fill(Inputs& inputs) const {
    inputs.q = view(q);
    inputs.k = view(k);
    inputs.v = view(v);
  }
  void record(bool on) const {
    for (const at::Tensor& x : {q, k, v}) x.requires_grad_(on);
  }
  at::Tensor q, k, v, out;
};

void linear() {
  const Problem p(kLength);
  LinearAttentionArgs args;
  args.is_causal = true;
  args.reweight_len = kLength;
  LinearAttentionOptions options;
  options.is_causal = true;
  options.reweight_len = kLength;
  LinearAttentionInputs inputs;
  p.fill(inputs);
  const auto call = [&] { linear_attention(p.q, p.k, p.v, args); };
  const Problem leaves(kLength);
  leaves.record(true);
  const auto kernel = [&](void* denominator) {
    check(linear_attention_forward(options, inputs, target(p.out), denominator,
                                   {}, serial_executor()));
  };
  float sums[kLength];
  report("linear",
         {{[&] { kernel(nullptr); }, plain(call)},
          {[&] { kernel(sums); },
           [&] { linear_attention(leaves.q, leaves.k, leaves.v, args); }}});
}

void softmax() {
  const Problem p(kLength);
  SoftmaxAttentionArgs args;
  args.is_causal = true;
  SoftmaxAttentionOptions options;
  options.is_causal = true;
  SoftmaxAttentionInputs inputs;
  p.fill(inputs);
  const Problem leaves(kLength);
  leaves.record(true);
  const auto kernel = [&](void* log_sum_exp) {
    check(softmax_attention_forward(options, inputs, target(p.out), log_sum_exp,
                                    serial_executor()));
  };
  float sums[kLength];
  report("softmax",
         {{[&] { kernel(nullptr); },
           plain([&] { softmax_attention(p.q, p.k, p.v, args); })},
          {[&] { kernel(sums); },
           [&] { softmax_attention(leaves.q, leaves.k, leaves.v, args); }}});
}

void performer() {
  const Problem p(kLength);
  const at::Tensor w = performer_projection(kFeatures, kDim, true, 7);
  PerformerAttentionArgs args;
  args.is_causal = true;
  PerformerAttentionInputs inputs;
  p.fill(inputs.call);
  inputs.projection = w.const_data_ptr();
  inputs.num_features = kFeatures;
  const Problem leaves(kLength);
  leaves.record(true);
  const auto kernel = [&](double* log_denominator) {
    check(performer_attention_forward({true}, inputs, target(p.out),
                                      log_denominator, {}, serial_executor()));
  };
  double sums[kLength];
  report(
      "performer",
      {{[&] { kernel(nullptr); },
        plain([&] { performer_attention(p.q, p.k, p.v, w, args); })},
       {[&] { kernel(sums); },
        [&] { performer_attention(leaves.q, leaves.k, leaves.v, w, args); }}});
}

// A state to step, and the kernel's view of it.
struct Stepped {
  explicit Stepped(LinearState from) : state(std::move(from)) {}
  LinearStateView view() {
    return {state.kv_state.mutable_data_ptr(), state.k_sum.mutable_data_ptr(),
            state.start.mutable_data_ptr<int64_t>(),
            state.position.mutable_data_ptr<int64_t>()};
  }
  LinearState state;
};

void linear_decode() {
  const at::NoGradGuard off;
  const Problem p(1);
  LinearAttentionArgs args;
  args.is_causal = true;
  args.reweight_len = int64_t{1} << 40;
  args.return_state = true;
  Stepped by_kernel(*std::get<1>(linear_attention(p.q, p.k, p.v, args)));
  Stepped by_operator(by_kernel.state.clone());
  args.return_state = false;
  LinearAttentionOptions options;
  options.is_causal = true;
  options.reweight_len = *args.reweight_len;
  LinearAttentionInputs inputs;
  p.fill(inputs);
  report(
      "linear decode",
      {{[&] {
          check(linear_attention_decode_step(options, inputs, by_kernel.view(),
                                             target(p.out), serial_executor()));
        },
        [&] {
          linear_attention_decode_step_(p.q, p.k, p.v, by_operator.state, args);
        }}});
}

void performer_decode() {
  const at::NoGradGuard off;
  const Problem p(1);
  const at::Tensor w = performer_projection(kFeatures, kDim, true, 7);
  PerformerAttentionArgs args;
  args.is_causal = true;
  args.return_state = true;
  Stepped by_kernel(*std::get<1>(performer_attention(p.q, p.k, p.v, w, args)));
  Stepped by_operator(by_kernel.state.clone());
  PerformerAttentionInputs inputs;
  p.fill(inputs.call);
  inputs.projection = w.const_data_ptr();
  inputs.num_features = kFeatures;
  report(
      "performer decode",
      {{[&] {
          check(performer_attention_decode_step(
              inputs,
              {by_kernel.view(), by_kernel.state.log_scale.mutable_data_ptr()},
              target(p.out), serial_executor()));
        },
        [&] {
          performer_attention_decode_step_(p.q, p.k, p.v, w, by_operator.state);
        }}});
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) rounds = std::max(1, std::atoi(argv[1]));
  std::printf("%-18s%10s %8s%10s %8s\n", "microseconds", "kernel", "operator",
              "kernel", "recorded");
  linear();
  softmax();
  performer();
  linear_decode();
  performer_decode();
  return 0;
}
