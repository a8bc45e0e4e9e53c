// The one-token step of softmax attention on CPU tensors.
#include <ATen/ops/empty.h>

#include "ops/errors.h"
#include "ops/executor.h"
#include "ops/softmax_checks.h"
#include "ops/softmax_inputs.h"

namespace cosformer::ops {
namespace {

void check_in_place(const at::Tensor& cache, const char* name) {
  if (cache.size(3) <= 1 || cache.stride(3) == 1) return;
  fail("softmax_attention_decode_step_: ", name, " has stride ",
       cache.stride(3),
       " in its last dimension and cannot be updated in place: expected 1");
}

}  // namespace

at::Tensor softmax_decode_cpu(const SoftmaxDecodeCall& call) {
  check_softmax_decode(call);
  check_in_place(call.keys, "keys");
  check_in_place(call.values, "values");
  const OptionalTensor none;
  const SoftmaxCall softmax{call.q,
                            call.k,
                            call.v,
                            none,
                            none,
                            none,
                            call.query_mask,
                            none,
                            none,
                            call.global_mask,
                            call.block_mask,
                            call.relative_bias,
                            none,
                            /*is_causal=*/false,
                            call.scale,
                            call.window_left,
                            call.window_right,
                            call.dilation,
                            call.block_size,
                            /*dropout_p=*/0.0};
  const SoftmaxInputs inputs(softmax);
  const int64_t rows = call.q.size(0);
  Integers start, position;
  at::Tensor mask_holder;
  KvCacheView cache;
  cache.keys = mutable_view(call.keys);
  cache.values = mutable_view(call.values);
  if (call.start) cache.start = integers(*call.start, rows, start);
  integers(call.position, rows, position);
  cache.position = position.data();
  if (call.cache_mask) {
    const MaskView mask = mask_view(*call.cache_mask, mask_holder);
    cache.key_mask = mask.data;
    cache.key_mask_stride = mask.stride;
  }
  cache.is_ring = call.is_ring;
  at::Tensor out =
      at::empty({rows, 1, call.q.size(2), call.v.size(3)}, call.q.options());
  throw_if_error(softmax_attention_decode_step(
      kernel_options(softmax), inputs.inputs(), cache, mutable_view(out),
      torch_executor()));
  int64_t* to = call.position.mutable_data_ptr<int64_t>();
  for (int64_t r = 0; r < rows; ++r)
    to[r * call.position.stride(0)] = position[static_cast<size_t>(r)];
  return out;
}

}  // namespace cosformer::ops
