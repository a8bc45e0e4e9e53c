// What a MODEL argument may be: a run's folder, its checkpoints, or a model
// folder itself.
#ifndef COSFORMER_CLI_MODEL_PATH_H_
#define COSFORMER_CLI_MODEL_PATH_H_

#include <string>

#include "cosformer/base.h"

namespace cosformer::cli {

// The model folder: of a run its `best`, or `last` where nothing was evaluated.
Result<std::string> find_model(const std::string& path);

}  // namespace cosformer::cli

#endif  // COSFORMER_CLI_MODEL_PATH_H_
