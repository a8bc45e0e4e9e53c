// What a model was trained with, and on: found beside it.
#ifndef COSFORMER_CLI_RUN_DATA_H_
#define COSFORMER_CLI_RUN_DATA_H_

#include <string>

#include "cosformer/train.h"

namespace cosformer::cli {

// The run.toml of a checkpoint, its data.cache_dir set to the run's own cache
// where that exists. kNotFound for a model that no run of ours left.
Result<RunConfig> run_of_model(const std::string& model_folder);

}  // namespace cosformer::cli

#endif  // COSFORMER_CLI_RUN_DATA_H_
