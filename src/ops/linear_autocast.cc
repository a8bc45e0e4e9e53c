// Under autocast queries, keys and values take the autocast dtype; states and
// sums stay in the accumulation dtype.
#include <ATen/autocast_mode.h>

#include "ops/decode_step.h"
#include "ops/linear_call.h"

namespace cosformer::ops {
namespace {

// q, k and v in the autocast dtype, and autocast off, of every device, while it
// lives.
class Cast {
 public:
  Cast(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v)
      : device_(q.device().type()),
        off_(c10::autocast_dispatch_keyset),
        q_(cast(q)),
        k_(cast(k)),
        v_(cast(v)) {}

  const at::Tensor& q() const { return q_; }
  const at::Tensor& k() const { return k_; }
  const at::Tensor& v() const { return v_; }

 private:
  at::Tensor cast(const at::Tensor& tensor) const {
    return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device_),
                                     tensor, device_);
  }

  c10::DeviceType device_;
  c10::impl::ExcludeDispatchKeyGuard off_;
  at::Tensor q_, k_, v_;
};

}  // namespace

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
