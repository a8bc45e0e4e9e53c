// Torch's own intra-operator threads as an Executor.
#ifndef COSFORMER_OPS_EXECUTOR_H_
#define COSFORMER_OPS_EXECUTOR_H_

#include "cosformer/base.h"

namespace cosformer::ops {

// As many threads as at::get_num_threads() at the time of a run; one inside a
// parallel region.
Executor& torch_executor();

}  // namespace cosformer::ops

#endif  // COSFORMER_OPS_EXECUTOR_H_
