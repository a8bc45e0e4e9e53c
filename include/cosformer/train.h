// Training a language model: configuration, loop, evaluation, checkpoints.
#ifndef COSFORMER_TRAIN_H_
#define COSFORMER_TRAIN_H_

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "cosformer/base.h"
#include "cosformer/data.h"
#include "cosformer/format.h"

namespace cosformer {

// [train] of a run's config.
struct TrainConfig {
  int64_t context = 256;     // tokens a sequence
  int64_t batch_size = 12;   // sequences a step, over all accumulation parts
  int64_t accumulation = 1;  // parts that a batch is computed in
  int64_t steps = 2000;
  double lr = 1e-3;
  double min_lr = 1e-4;
  int64_t warmup_steps = 100;
  std::string schedule = "cosine";  // "cosine", "inverse_sqrt", "constant"
  double beta1 = 0.9, beta2 = 0.99, adam_eps = 1e-8;
  double weight_decay = 0.1;          // on matrices only
  double grad_clip = 1.0;             // 0 = none
  std::string precision = "float32";  // "float32", "bfloat16" (autocast)
  bool activation_checkpointing = false;
  uint64_t seed = 1;
  int64_t eval_every = 250;        // steps; 0 = only at the end
  int64_t checkpoint_every = 250;  // steps; 0 = only at the end
  int64_t keep_checkpoints = 2;    // besides the best one
  int64_t early_stop = 0;          // evaluations without improvement; 0 = never
  int64_t log_every = 10;          // steps between lines of metrics.jsonl
  int64_t threads = 0;             // 0 = torch's default
};

// A whole run: TOML [model] (with [model.attention], a table or an array of
// tables), [data], [train].
struct RunConfig {
  ModelConfig model;  // vocab_size comes from the tokenizer
  DataConfig data;
  TrainConfig train;
  // Keys that the user set besides the file ("data.path"); in no file. A
  // resumed run takes another text or seed only where it is among them.
  std::vector<std::string> overridden;
};
// Errors name file, line, the unknown key and the nearest known one; a wrong
// type names key, found, expected. overrides: "train.lr=3e-4", values as in
// TOML. Relative paths in the file are relative to the working directory.
Result<RunConfig> read_run_config(const std::string& toml_path,
                                  const std::vector<std::string>& overrides);
Result<RunConfig> parse_run_config(std::string_view toml,
                                   const std::string& name,
                                   const std::vector<std::string>& overrides);
// Every key but model.vocab_size, in the order of the structs; reading it back
// gives the same config.
std::string to_toml(const RunConfig& config);
// Ranges and contradictions over the sections: context beyond max_len, a batch
// that the accumulation does not divide, steps below 1. Names the key, found,
// expected. (model.vocab_size 0 is fine: the tokenizer brings it.)
Status validate(const RunConfig& config);

// The learning rate of step 1, 2, ..., steps: a linear warm-up that reaches lr
// at warmup_steps, then the schedule down to min_lr.
double learning_rate(const TrainConfig& config, int64_t step);

// What the loop reports; the program draws it.
struct TrainProgress {
  int64_t step = 0, steps = 0;
  double loss = 0;  // nats a token, this step
  double tokens_per_second = 0;
  double seconds_left = 0;
  double lr = 0;
  double grad_norm = 0;
  double min_denominator = 0;  // smallest over layers (NaN: no linear kind)
  double clamped_share = 0;    // share of rows with a denominator below eps
};
struct EvalResult {
  int64_t tokens = 0;  // predictions made
  double loss = 0;     // nats a token
  double bits_per_byte = 0;
  double perplexity = 0;
};
struct TrainStart {
  int64_t parameters = 0, vocab_size = 0;
  int64_t train_tokens = 0, validation_tokens = 0;
  int64_t step = 0;  // 0, or the checkpoint's step when resumed
  int threads = 0;
  Baselines baselines;
};
struct TrainCallbacks {
  std::function<void(const TrainProgress&)> on_step;
  std::function<void(int64_t step, const EvalResult&, bool is_best)> on_eval;
  std::function<void(const std::string& message)> on_message;
  // While the text is read and tokenised: bytes done, bytes in all.
  std::function<void(int64_t done, int64_t total)> on_data;
  // Once, before the first step.
  std::function<void(const TrainStart&)> on_start;
};
struct TrainReport {
  int64_t step = 0;
  EvalResult last, best;
  int64_t best_step = 0;
  bool interrupted = false, stopped_early = false;
  Baselines baselines;
  double seconds = 0;                // over all parts of a resumed run
  double min_denominator = 0;        // smallest seen; NaN: no linear kind
  double clamped_share = 0;          // of the last log step
  std::string last_path, best_path;  // checkpoints; best_path may be empty
};

// Trains into out_dir: config.toml, metrics.jsonl, checkpoints/step-N/ (each a
// model folder plus training state), links `last` and `best`. With resume, goes
// on from `last` (metrics.jsonl cut to its step) and gives bit for bit the
// losses of a run never stopped, on the same machine and thread count. *stop
// set to true saves a checkpoint after the current step and returns with
// interrupted.
Result<TrainReport> train(const RunConfig& config, const std::string& out_dir,
                          bool resume, const TrainCallbacks& callbacks,
                          const std::atomic<bool>& stop);

// Loss of a model folder on the whole validation part (or, with whole_text, on
// everything): windows of `context` without gaps or overlap, each token
// predicted once (the first has nothing before it). In float32. context 0 = the
// model's max_len, batch_size 0 = one that suits the sizes; the model's own
// tokenizer is used. An empty data.cache_dir = a temporary folder.
Result<EvalResult> evaluate(const std::string& model_dir,
                            const DataConfig& data, int64_t context,
                            int64_t batch_size, bool whole_text);

// Draws loss.png from a run's metrics.jsonl through gnuplot.
Status plot_run(const std::string& run_dir, const std::string& png_path);

// What plot_attention shows.
struct AttentionPlotOptions {
  int64_t max_tokens = 64;      // of the text; the rest is left out
  std::vector<int64_t> layers;  // empty = all
  std::vector<int64_t> heads;   // empty = all
};
// Heat maps of the weights w_ij / norm_i of a model folder on a text, a row of
// pictures a layer and a column a head, queries downwards. Returns how many
// tokens it shows.
Result<int64_t> plot_attention(const std::string& model_folder,
                               const std::string& text,
                               const AttentionPlotOptions& options,
                               const std::string& png_path);

// What plot_profile shows, distances in tokens.
struct ProfileOptions {
  int64_t max_distance = 1024;
  std::vector<int64_t> reweight_lens{256, 512, 1024};  // M of the cosine
  int64_t window = 16, dilation = 4;
  int64_t relative_buckets = 32, relative_distance = 128;  // T5
  bool bidirectional = false;
  at::Tensor relative_bias;  // [relative_buckets, heads] as learned, or none:
                             // then the bucket numbers are shown
  int64_t rotary_dim = 64;
  std::vector<double> rotary_bases{1e4, 5e5};
};
// What a model folder's config (and its T5 bias) says of these, the defaults
// for the rest.
Result<ProfileOptions> profile_of_model(const std::string& model_folder);
// The weight against distance, a picture of four: cosine, window, T5 bias,
// rotary.
Status plot_profile(const ProfileOptions& options, const std::string& png_path);

}  // namespace cosformer

#endif  // COSFORMER_TRAIN_H_
