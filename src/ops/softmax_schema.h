// The schemas of the softmax attention operators and which implementation
// serves which dispatch key; schema.cc registers them.
#ifndef COSFORMER_OPS_SOFTMAX_SCHEMA_H_
#define COSFORMER_OPS_SOFTMAX_SCHEMA_H_

#include <torch/library.h>

namespace cosformer::ops {

void define_softmax(torch::Library& m);
// Nothing for a key that the operators have no implementation of.
void implement_softmax(torch::Library& m, c10::DispatchKey key);

}  // namespace cosformer::ops

#endif  // COSFORMER_OPS_SOFTMAX_SCHEMA_H_
