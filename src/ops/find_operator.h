// Calling our operators through the dispatcher.
#ifndef COSFORMER_OPS_FIND_OPERATOR_H_
#define COSFORMER_OPS_FIND_OPERATOR_H_

#include <ATen/core/dispatch/Dispatcher.h>

namespace cosformer::ops {

// The operator "cosformer::name". Defined beside the registrations, so that a
// program that calls any operator links them all.
c10::OperatorHandle find_operator(const char* name);

}  // namespace cosformer::ops

#endif  // COSFORMER_OPS_FIND_OPERATOR_H_
