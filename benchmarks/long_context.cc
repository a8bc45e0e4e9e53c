// Every kind at 32,768 and 65,536 tokens, one head of 64, forward and backward
// through the operators: time, its growth, and the memory beyond inputs,
// outputs and gradients. Prints a table.
//
//   bench_long_context [KIND...]     --quick: 1/8 of the lengths
#include <malloc.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "bench/memory.h"
#include "cosformer/kernels.h"
#include "cosformer/ops.h"

namespace {

using torch::Tensor;

struct Case {
  std::string name;
  std::function<Tensor(const Tensor& q, const Tensor& k, const Tensor& v)> run;
};

std::vector<Case> cases() {
  using namespace cosformer;  // NOLINT: the functions under measurement
  const auto linear = [](const char* map, std::optional<int64_t> m,
                         const char* normalizer) {
    return [=](const Tensor& q, const Tensor& k, const Tensor& v) {
      LinearAttentionArgs args;
      args.feature_map = map;
      args.reweight_len = m;
      args.is_causal = true;
      args.normalizer = normalizer;
      return std::get<0>(linear_attention(q, k, v, args));
    };
  };
  const auto softmax = [](SoftmaxAttentionArgs args) {
    return [args](const Tensor& q, const Tensor& k, const Tensor& v) {
      return softmax_attention(q, k, v, args);
    };
  };
  SoftmaxAttentionArgs causal;
  causal.is_causal = true;
  SoftmaxAttentionArgs window = causal;
  window.window = {255, 0};
  SoftmaxAttentionArgs dilated = window;
  dilated.dilation = 4;
  const int64_t kMost = 1 << 16;
  return {
      {"cosformer causal", linear("relu", kMost, "sum")},
      {"cosformer causal, normalizer none", linear("relu", kMost, "none")},
      {"linear causal", linear("elu1", std::nullopt, "sum")},
      {"relu causal", linear("relu", std::nullopt, "sum")},
      {"performer causal, 256 features",
       [](const Tensor& q, const Tensor& k, const Tensor& v) {
         PerformerAttentionArgs args;
         args.is_causal = true;
         return std::get<0>(performer_attention(
             q, k, v, performer_projection(256, q.size(3)), args));
       }},
      {"linformer, 256 projected keys",
       [](const Tensor& q, const Tensor& k, const Tensor& v) {
         torch::manual_seed(1);
         const Tensor e = torch::randn({q.size(1), 256}) / 256.0;
         return linformer_attention(q, k, v, e, e);
       }},
      {"softmax causal, window 256", softmax(window)},
      {"softmax causal, window 256, dilation 4", softmax(dilated)},
      {"longformer, window 256, 1 global",
       [](const Tensor& q, const Tensor& k, const Tensor& v) {
         SoftmaxAttentionArgs args;
         args.window = {256, 256};
         args.global_mask = torch::zeros({1, q.size(1)}, torch::kBool);
         args.global_mask->narrow(1, 0, 1).fill_(true);
         return longformer_attention(q, k, v, q, k, v, args);
       }},
      {"bigbird causal, blocks of 64",
       [](const Tensor& q, const Tensor& k, const Tensor& v) {
         BigBirdAttentionArgs args;
         args.softmax.is_causal = true;
         return bigbird_attention(q, k, v, args);
       }},
      {"softmax causal, full", softmax(causal)},
  };
}

struct Measured {
  double seconds;
  int64_t extra;  // bytes
};

Measured measure(const Case& c, int64_t length) {
  torch::manual_seed(0);
  const auto input = [&] {
    return torch::randn({1, length, 1, 64}).requires_grad_();
  };
  const Tensor q = input(), k = input(), v = input();
  const Tensor d_out = torch::randn({1, length, 1, 64});
  std::chrono::duration<double> taken{};
  Tensor out;
  const int64_t peak = cosformer::bench_internal::peak_bytes([&] {
    const auto start = std::chrono::steady_clock::now();
    out = c.run(q, k, v);
    out.backward(d_out);
    taken = std::chrono::steady_clock::now() - start;
  });
  const int64_t results = 4 * static_cast<int64_t>(out.nbytes());
  return {taken.count(), peak - results};
}

}  // namespace

int main(int argc, char** argv) {
  // Freed memory stays with the program. By default glibc takes tensors of 16
  // MB from the system at every call and smaller ones from what was freed
  // before: a step of malloc between the two lengths (ratios up to 2.5), not of
  // attention.
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
  std::set<std::string> wanted(argv + 1, argv + argc);
  const int64_t length = wanted.erase("--quick") > 0 ? 8192 : 65536;
  std::printf(
      "%s, %d threads; forward and backward, 1 head of 64; extra memory in "
      "sizes of q\n\n| kind | seconds at %ld | at %ld | ratio | extra memory "
      "at %ld | at %ld |\n|---|---|---|---|---|---|\n",
      std::string(cosformer::active_isa()).c_str(), at::get_num_threads(),
      length / 2, length, length / 2, length);
  for (const Case& c : cases()) {
    const std::string kind = c.name.substr(0, c.name.find_first_of(" ,"));
    if (!wanted.empty() && wanted.count(kind) == 0) continue;
    const bool slow = c.name == "softmax causal, full";
    if (!slow) measure(c, length / 2);  // the first call is slower
    Measured half{1e9, 0}, whole{1e9, 0};
    for (int round = 0; round < (slow ? 1 : 9); ++round) {
      const Measured a = measure(c, length / 2);
      const Measured b = measure(c, length);
      half = {std::min(half.seconds, a.seconds), a.extra};
      whole = {std::min(whole.seconds, b.seconds), b.extra};
    }
    const auto sizes = [](int64_t bytes, int64_t tokens) {
      return static_cast<double>(bytes) / static_cast<double>(tokens * 64 * 4);
    };
    std::printf("| %s | %.3f | %.3f | %.2f | %.2f | %.2f |\n", c.name.c_str(),
                half.seconds, whole.seconds, whole.seconds / half.seconds,
                sizes(half.extra, length / 2), sizes(whole.extra, length));
    std::fflush(stdout);
  }
}
