// Under autocast queries, keys and values take the autocast dtype; projections
// and states stay in float32.
#include "ops/autocast_util.h"
#include "ops/performer_call.h"

namespace cosformer::ops {

PerformerOutputs performer_autocast(const PerformerCall& c,
                                    const PerformerSpec& spec,
                                    ForwardWanted wanted) {
  const Cast cast(c.q, c.k, c.v);
  return call_performer(
      c.on(cast.q(), cast.k(), cast.v(), c.projection, c.kv_state, c.k_sum),
      spec, wanted);
}

at::Tensor performer_decode_autocast(const PerformerDecodeCall& c,
                                     const PerformerSpec& spec) {
  const Cast cast(c.q, c.k, c.v);
  return call_performer_decode_step(
      {cast.q(), cast.k(), cast.v(), c.projection, c.kv_state, c.k_sum,
       c.log_scale, c.position, c.start, c.key_mask},
      spec);
}

}  // namespace cosformer::ops
