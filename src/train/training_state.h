// What a checkpoint holds besides the model: where the run stands, so that it
// goes on as if never stopped.
#ifndef COSFORMER_SRC_TRAIN_TRAINING_STATE_H_
#define COSFORMER_SRC_TRAIN_TRAINING_STATE_H_

#include <torch/torch.h>

#include <limits>
#include <string>

#include "cosformer/models.h"
#include "train/optimizer.h"
#include "train/run_config.h"

namespace cosformer::train_internal {

struct TrainingState {
  int64_t step = 0;  // steps done; the sampler draws batch `step` next
  int64_t evaluated_step = 0;  // of the last evaluation
  int64_t best_step = 0;       // 0 = none yet
  EvalResult best, last;
  int64_t without_improvement = 0;  // evaluations since the best
  bool stopped_early = false;
  double seconds = 0;
  Baselines baselines;
  double min_denominator = std::numeric_limits<double>::quiet_NaN();
  double clamped_share = 0;
};

// The files of a checkpoint: the model folder, optimizer.safetensors,
// training_state.json (with the state of torch's generator) and run.toml.
Status save_training(const std::string& folder, const RunConfig& config,
                     const TrainingState& state, const Transformer& model,
                     const Tokenizer& tokenizer, const AdamW& optimizer);

// training_state.json; also sets torch's generator when restore_generator.
Result<TrainingState> load_training_state(const std::string& folder,
                                          bool restore_generator);

// Whether `config` may go on with a run that was begun with `begun`: an error
// names the first key of the model or the tokenizer that differs, or of the
// text or the seed where it is not among config.overridden; changed keys of
// other kinds (allowed) are listed in `changes`.
Status check_resumable(const RunConfig& begun, const RunConfig& config,
                       std::vector<std::string>* changes);

}  // namespace cosformer::train_internal

#endif  // COSFORMER_SRC_TRAIN_TRAINING_STATE_H_
