// Under autocast queries, keys and values take the autocast dtype; the relative
// bias stays as it is. A cache has a dtype of its own, which the token takes.
#include "ops/autocast_util.h"
#include "ops/softmax_call.h"

namespace cosformer::ops {

SoftmaxOutputs softmax_autocast(const SoftmaxCall& c, bool return_log_sum_exp) {
  const Cast cast(c.q, c.k, c.v);
  return call_softmax(c.on(cast.q(), cast.k(), cast.v(), c.relative_bias),
                      return_log_sum_exp);
}

at::Tensor softmax_decode_autocast(const SoftmaxDecodeCall& c) {
  const c10::impl::ExcludeDispatchKeyGuard off(c10::autocast_dispatch_keyset);
  const at::ScalarType dtype = c.keys.scalar_type();
  const at::Tensor q = c.q.to(dtype), k = c.k.to(dtype), v = c.v.to(dtype);
  return call_softmax_decode(
      {q, k, v, c.keys, c.values, c.position, c.start, c.cache_mask,
       c.query_mask, c.global_mask, c.block_mask, c.relative_bias, c.is_ring,
       c.scale, c.window_left, c.window_right, c.dilation, c.block_size});
}

}  // namespace cosformer::ops
