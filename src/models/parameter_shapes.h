// Names and shapes of a model's parameters, from its config alone: a file is
// checked against them before anything of the config's size is allocated.
#ifndef COSFORMER_SRC_MODELS_PARAMETER_SHAPES_H_
#define COSFORMER_SRC_MODELS_PARAMETER_SHAPES_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cosformer/format.h"

namespace cosformer {

// Calls visit for each parameter; stops at the first error and returns it. The
// config must be valid.
Status for_each_parameter(
    const ModelConfig& config,
    const std::function<Status(const std::string& name,
                               const std::vector<int64_t>& shape)>& visit);

}  // namespace cosformer

#endif  // COSFORMER_SRC_MODELS_PARAMETER_SHAPES_H_
