// Under autocast queries, keys and values take the autocast dtype.
#ifndef COSFORMER_OPS_AUTOCAST_UTIL_H_
#define COSFORMER_OPS_AUTOCAST_UTIL_H_

#include <ATen/autocast_mode.h>

namespace cosformer::ops {

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

}  // namespace cosformer::ops

#endif  // COSFORMER_OPS_AUTOCAST_UTIL_H_
