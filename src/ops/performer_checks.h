// What a Performer call must satisfy whatever the device. All throw; values of
// tensors are not looked at.
#ifndef COSFORMER_OPS_PERFORMER_CHECKS_H_
#define COSFORMER_OPS_PERFORMER_CHECKS_H_

#include "ops/call_checks.h"
#include "ops/performer_call.h"

namespace cosformer::ops {

void check_performer_call(const PerformerCall& call, const PerformerSpec& spec);
void check_performer_call(const PerformerCall& call);
void check_performer_gradients(const PerformerGradients& gradients,
                               const PerformerCall& call);
void check_performer_decode(const PerformerDecodeCall& call,
                            const PerformerSpec& spec);

// A decode step as the call that it is, its state included.
class AsPerformerCall {
 public:
  explicit AsPerformerCall(const PerformerDecodeCall& call, bool with_state);
  PerformerCall get() const;

 private:
  const PerformerDecodeCall& call_;
  OptionalTensor none_, kv_state_, k_sum_, log_scale_, start_, position_;
};

}  // namespace cosformer::ops

#endif  // COSFORMER_OPS_PERFORMER_CHECKS_H_
