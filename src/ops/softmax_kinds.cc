#include "ops/softmax_kinds.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <vector>

#include "ops/call_checks.h"
#include "ops/errors.h"

namespace cosformer::ops {
namespace {

std::vector<int64_t> on_host(const at::Tensor& offsets) {
  const at::Tensor host = offsets.to(at::kCPU, at::kLong).contiguous();
  const int64_t* data = host.const_data_ptr<int64_t>();
  return {data, data + host.numel()};
}

void check_ends(const std::vector<int64_t>& offsets, int64_t total,
                const char* name) {
  for (size_t i = 0; i + 1 < offsets.size(); ++i) {
    if (offsets[i + 1] < offsets[i]) {
      fail("softmax_attention: ", name, " falls from ", offsets[i], " to ",
           offsets[i + 1], ": offsets must not decrease");
    }
  }
  if (offsets.front() != 0 || offsets.back() != total) {
    fail("softmax_attention: ", name, " runs from ", offsets.front(), " to ",
         offsets.back(), ", expected 0 to the number of tokens, ", total);
  }
}

}  // namespace

at::Tensor for_each_sequence(
    const SoftmaxCall& call,
    const std::function<at::Tensor(const SoftmaxCall&, int64_t, int64_t,
                                   int64_t, int64_t)>& one) {
  const AttentionCall common = attention_call("softmax_attention: ", call);
  check_queries_keys_values(common);
  check_layout(common, "");
  const std::vector<int64_t> of_q = on_host(*call.cu_seqlens_q);
  const std::vector<int64_t> of_k =
      call.cu_seqlens_k ? on_host(*call.cu_seqlens_k) : of_q;
  check_ends(of_q, call.q.size(1), "cu_seqlens_q");
  check_ends(of_k, call.k.size(1),
             call.cu_seqlens_k ? "cu_seqlens_k" : "cu_seqlens_q (for keys)");
  const auto start_of = [](const OptionalTensor& start, int64_t s) {
    return start && start->dim() == 1 ? OptionalTensor(start->select(0, s))
                                      : start;
  };
  const OptionalTensor none;
  std::vector<at::Tensor> outs;
  for (size_t i = 0; i + 1 < of_q.size(); ++i) {
    const int64_t s = static_cast<int64_t>(i);
    const at::Tensor q = call.q.slice(1, of_q[i], of_q[i + 1]);
    const at::Tensor k = call.k.slice(1, of_k[i], of_k[i + 1]);
    const at::Tensor v = call.v.slice(1, of_k[i], of_k[i + 1]);
    const OptionalTensor q_start = start_of(call.q_start, s);
    const OptionalTensor kv_start = start_of(call.kv_start, s);
    OptionalTensor global, seed;
    if (call.global_mask)
      global = call.global_mask->slice(1, of_k[i], of_k[i + 1]);
    if (call.dropout_seed) seed = *call.dropout_seed + 1000003 * s;
    outs.push_back(one({q,
                        k,
                        v,
                        q_start,
                        kv_start,
                        none,
                        none,
                        none,
                        none,
                        global,
                        call.block_mask,
                        call.relative_bias,
                        seed,
                        call.is_causal,
                        call.scale,
                        call.window_left,
                        call.window_right,
                        call.dilation,
                        call.block_size,
                        call.dropout_p},
                       of_q[i], of_q[i + 1], of_k[i], of_k[i + 1]));
  }
  if (outs.empty())
    return call.q.new_zeros({1, 0, call.q.size(2), call.v.size(3)});
  return at::cat(outs, 1);
}

}  // namespace cosformer::ops
