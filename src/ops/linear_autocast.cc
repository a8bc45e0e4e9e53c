// Under autocast queries, keys and values take the autocast dtype; states and
// sums stay in the accumulation dtype.
#include "ops/autocast_util.h"
#include "ops/decode_step.h"
#include "ops/linear_call.h"

namespace cosformer::ops {
ForwardOutputs forward_autocast(const LinearCall& c, const StateSpec& spec,
                                ForwardWanted wanted) {
  const Cast cast(c.q, c.k, c.v);
  return call_forward(c.on(cast.q(), cast.k(), cast.v(), c.kv_state, c.k_sum),
                      spec, wanted);
}

at::Tensor decode_step_autocast(const DecodeCall& c, const StateSpec& spec) {
  const Cast cast(c.q, c.k, c.v);
  return call_decode_step(
      {cast.q(), cast.k(), cast.v(), c.kv_state, c.k_sum, c.position, c.start,
       c.key_mask, c.query_mask, c.feature_map, c.reweight_len, c.normalizer,
       c.eps, c.rotary_base, c.rotary_interleaved},
      spec);
}

}  // namespace cosformer::ops
