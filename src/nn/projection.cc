// The linear map of every layer. torch::nn::Linear would draw random numbers
// in its constructor even where the values are about to be loaded.
#include <cmath>

#include "cosformer/nn.h"

namespace cosformer {

ProjectionImpl::ProjectionImpl(int64_t in, int64_t out, bool with_bias) {
  weight = register_parameter("weight", torch::empty({out, in}));
  if (with_bias) bias = register_parameter("bias", torch::empty({out}));
}

void ProjectionImpl::reset_parameters() {
  torch::NoGradGuard no_grad;
  const double bound =
      weight.size(1) > 0 ? 1.0 / std::sqrt(static_cast<double>(weight.size(1)))
                         : 0.0;
  weight.uniform_(-bound, bound);
  if (bias.defined()) bias.uniform_(-bound, bound);
}

}  // namespace cosformer
