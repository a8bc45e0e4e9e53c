// T5's relative positions (Raffel et al. 2020, section 2.1): a learned bias a
// bucket of distances.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <cmath>

#include "ops/call_checks.h"
#include "ops/errors.h"
#include "ops/softmax_kinds.h"

namespace cosformer::ops {

at::Tensor t5_bias(const at::Tensor& weight, bool bidirectional,
                   int64_t max_distance) {
  constexpr const char* where = "t5_relative_bias: ";
  if (weight.dim() != 2 || !at::isFloatingType(weight.scalar_type())) {
    fail(where, "weight is ", weight.scalar_type(), " ", shape(weight),
         ", expected floating [buckets, heads]");
  }
  const int64_t buckets = weight.sym_size(0).guard_int(__FILE__, __LINE__) /
                          (bidirectional ? 2 : 1);
  if (buckets < 2 || (bidirectional && weight.sym_size(0) % 2 != 0)) {
    fail(where, "weight has ", weight.sym_size(0), " buckets, expected ",
         bidirectional ? "an even number from 4 (half of them for later keys)"
                       : "at least 2");
  }
  const int64_t exact = buckets / 2;
  if (max_distance <= exact) {
    fail(where, "max_distance is ", max_distance, ", expected more than ",
         exact, ", the distances that have a bucket each");
  }
  // float32 as in the public implementations: which bucket a distance falls
  // into where the logarithm is nearly an integer is theirs.
  const at::TensorOptions integers =
      at::TensorOptions().dtype(at::kLong).device(weight.device());
  const at::Tensor distance =
      at::arange(-max_distance, max_distance + 1, integers);  // key - query
  const at::Tensor far =
      bidirectional ? distance.abs() : distance.clamp_max(0).neg();
  const double width =
      std::log(static_cast<double>(max_distance) / static_cast<double>(exact));
  const at::Tensor large =
      ((far.to(at::kFloat) / static_cast<double>(exact)).log() / width *
       static_cast<double>(buckets - exact))
          .clamp_min(0)
          .to(at::kLong) +
      exact;
  at::Tensor bucket = at::where(far < exact, far, large.clamp_max(buckets - 1));
  if (bidirectional) bucket = bucket + (distance > 0).to(at::kLong) * buckets;
  return weight.index_select(0, bucket).t();
}

}  // namespace cosformer::ops
