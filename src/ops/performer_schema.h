// The schemas of the Performer operators and which implementation serves which
// dispatch key; schema.cc registers them.
#ifndef COSFORMER_OPS_PERFORMER_SCHEMA_H_
#define COSFORMER_OPS_PERFORMER_SCHEMA_H_

#include <torch/library.h>

namespace cosformer::ops {

void define_performer(torch::Library& m);
// Nothing for a key that the operators have no implementation of.
void implement_performer(torch::Library& m, c10::DispatchKey key);

}  // namespace cosformer::ops

#endif  // COSFORMER_OPS_PERFORMER_SCHEMA_H_
