// A run's config as JSON: the one list of keys that reading, writing, comparing
// and storing share.
#ifndef COSFORMER_SRC_TRAIN_RUN_CONFIG_H_
#define COSFORMER_SRC_TRAIN_RUN_CONFIG_H_

#include <nlohmann/json.hpp>

#include "cosformer/train.h"

namespace cosformer::train_internal {

using Json = nlohmann::ordered_json;

// {"model": {...}, "data": {...}, "train": {...}}; model.attention is an array
// of objects. Leaves out what a run's config does not set: model.vocab_size and
// model.format_version.
Json run_config_to_json(const RunConfig& config);
// The inverse; types have been checked before.
Result<RunConfig> run_config_from_json(const Json& json);

}  // namespace cosformer::train_internal

#endif  // COSFORMER_SRC_TRAIN_RUN_CONFIG_H_
