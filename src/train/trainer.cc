// The training loop.
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <memory>
#include <new>
#include <utility>

#include "cosformer/models.h"
#include "cosformer/train.h"
#include "train/evaluation.h"
#include "train/metrics.h"
#include "train/optimizer.h"
#include "train/run_folder.h"
#include "train/training_state.h"

namespace cosformer {
namespace train_internal {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// bfloat16 autocast while it lives, if wanted.
class AutocastScope {
 public:
  explicit AutocastScope(bool on) : on_(on) {
    if (!on_) return;
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::increment_nesting();
  }
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;
  ~AutocastScope() {
    if (!on_) return;
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }

 private:
  bool on_;
};

struct StepResult {
  double loss = 0, grad_norm = 0, lr = 0;
};

class Trainer {
 public:
  Trainer(RunConfig config, RunFolder& run, const TrainCallbacks& callbacks,
          const std::atomic<bool>& stop)
      : config_(std::move(config)),
        run_(run),
        callbacks_(callbacks),
        stop_(stop) {}

  // Data, model, optimiser and state: new, or from `last`.
  Status prepare(bool resume);
  Status loop();
  TrainReport report() const;

 private:
  Status load_last();
  Status load_data(std::shared_ptr<const Tokenizer> tokenizer);
  void make_model();
  Status write_start();
  Result<StepResult> step();
  Status diverged(const char* what, double value) const;
  void read_denominators();
  Status log(const StepResult& result);
  void tell(const StepResult& result);
  // Sets *stopped when it was interrupted and nothing was decided.
  Status evaluate(bool* is_best, bool* stopped);
  Status save(bool is_best);
  Status after_step(bool* done);
  void message(const std::string& text) const {
    if (callbacks_.on_message) callbacks_.on_message(text);
  }
  bool is_due(int64_t every) const {
    return every > 0 && state_.step % every == 0;
  }

  RunConfig config_;
  RunFolder& run_;
  const TrainCallbacks& callbacks_;
  const std::atomic<bool>& stop_;

  std::optional<TokenDataset> data_;
  torch::Tensor token_bytes_;
  Transformer model_{nullptr};
  std::unique_ptr<AdamW> optimizer_;
  std::optional<MetricsLog> metrics_;
  TrainingState state_;
  int64_t resumed_step_ = 0;
  bool interrupted_ = false;

  // Of the present log line.
  double min_denominator_ = std::numeric_limits<double>::quiet_NaN();
  double clamped_share_ = 0;
  // Time a step takes, smoothed; evaluations and saving apart.
  double step_seconds_ = 0;
  double eval_seconds_ = 0;
};

Status no_data() {
  return invalid_argument(
      "data.path is empty: name a file or folder of text in the config, or by "
      "--data PATH");
}

// What a run stores must hold wherever it is read from.
RunConfig with_absolute_paths(RunConfig config) {
  for (std::string* path : {&config.data.path, &config.data.cache_dir}) {
    if (path->empty()) continue;
    std::error_code error;
    const auto absolute = std::filesystem::absolute(*path, error);
    if (!error) *path = absolute.lexically_normal().string();
  }
  return config;
}

Status Trainer::load_data(std::shared_ptr<const Tokenizer> tokenizer) {
  if (config_.data.path.empty()) return no_data();
  DataConfig config = config_.data;
  if (config.cache_dir.empty()) config.cache_dir = run_.file("cache");
  auto data =
      TokenDataset::prepare(config, std::move(tokenizer), callbacks_.on_data);
  if (!data.ok()) return data.status();
  data_.emplace(std::move(*data));
  for (const auto& text : data_->messages()) message(text);
  const int64_t context = config_.train.context;
  if (data_->train_size() < context + 1) {
    return invalid_argument(
        config_.data.path, ": the training part has ", data_->train_size(),
        " tokens, expected at least ", context + 1,
        " (train.context + 1): give more text or lower train.context");
  }
  if (data_->validation_size() < 2) {
    return invalid_argument(
        config_.data.path, ": the validation part has ",
        data_->validation_size(),
        " token(s), expected at least 2: give more text or lower "
        "data.train_fraction");
  }
  token_bytes_ = bytes_of_tokens(*data_->tokenizer());
  return {};
}

void Trainer::make_model() {
  ModelConfig config = config_.model;
  config.vocab_size = data_->tokenizer()->vocab_size();
  torch::manual_seed(config_.train.seed);
  model_ = Transformer(config);
}

Status Trainer::load_last() {
  const int64_t step = run_.linked_step("last");
  const std::string folder = run_.checkpoint(step);
  auto begun = read_run_config(folder + "/run.toml", {});
  if (!begun.ok()) return begun.status();
  if (config_.data.path.empty()) config_.data.path = begun->data.path;
  std::vector<std::string> changes;
  COSFORMER_RETURN_IF_ERROR(check_resumable(*begun, config_, &changes));
  for (const auto& change : changes) message("resume: " + change);
  auto loaded = load_model(folder);
  if (!loaded.ok()) return loaded.status();
  if (loaded->tokenizer == nullptr) {
    return data_loss(folder, ": has no tokenizer");
  }
  model_ = loaded->model;
  COSFORMER_RETURN_IF_ERROR(load_data(loaded->tokenizer));
  optimizer_ =
      std::make_unique<AdamW>(model_->named_parameters(), config_.train);
  COSFORMER_RETURN_IF_ERROR(
      optimizer_->load(folder + "/optimizer.safetensors"));
  auto state = load_training_state(folder, /*restore_generator=*/true);
  if (!state.ok()) return state.status();
  state_ = *state;
  // As the config now has it: a run that stopped early may be told to go on.
  state_.stopped_early = state_.stopped_early && config_.train.early_stop > 0 &&
                         state_.without_improvement >= config_.train.early_stop;
  resumed_step_ = state_.step;
  // A kill between the two links leaves `best` behind `last`.
  const int64_t best = state_.best_step;
  if (best > 0 && run_.linked_step("best") != best &&
      std::filesystem::is_directory(run_.checkpoint(best))) {
    COSFORMER_RETURN_IF_ERROR(run_.link("best", best));
  }
  COSFORMER_RETURN_IF_ERROR(run_.drop_after(state_.step));
  return cut_metrics(run_.file("metrics.jsonl"), state_.step,
                     state_.evaluated_step);
}

Status Trainer::write_start() {
  COSFORMER_RETURN_IF_ERROR(
      write_file_atomically(run_.file("config.toml"), to_toml(config_)));
  auto metrics = MetricsLog::open(run_.file("metrics.jsonl"));
  if (!metrics.ok()) return metrics.status();
  metrics_.emplace(std::move(*metrics));
  int64_t parameters = 0;
  for (const auto& parameter : model_->parameters()) {
    parameters += parameter.numel();
  }
  if (resumed_step_ == 0) {
    COSFORMER_RETURN_IF_ERROR(
        metrics_->write({{"type", "start"},
                         {"version", std::string(version())},
                         {"kind", config_.model.attention[0].kind},
                         {"parameters", parameters},
                         {"vocab_size", model_->config().vocab_size},
                         {"train_tokens", data_->train_size()},
                         {"validation_tokens", data_->validation_size()},
                         {"threads", at::get_num_threads()},
                         {"unigram_loss", state_.baselines.unigram_loss},
                         {"bigram_loss", state_.baselines.bigram_loss}}));
  }
  if (callbacks_.on_start) {
    callbacks_.on_start({parameters, model_->config().vocab_size,
                         data_->train_size(), data_->validation_size(),
                         resumed_step_, at::get_num_threads(),
                         state_.baselines});
  }
  return {};
}

Status Trainer::prepare(bool resume) {
  if (config_.train.threads > 0) {
    at::set_num_threads(static_cast<int>(config_.train.threads));
  }
  if (resume && run_.linked_step("last") >= 0) {
    COSFORMER_RETURN_IF_ERROR(load_last());
    message(str_cat("going on from step ", state_.step));
  } else {
    if (resume) message("no checkpoint yet: starting from the first step");
    COSFORMER_RETURN_IF_ERROR(load_data(nullptr));
    make_model();
    optimizer_ =
        std::make_unique<AdamW>(model_->named_parameters(), config_.train);
    state_.baselines = count_baselines(*data_);
    COSFORMER_RETURN_IF_ERROR(cut_metrics(run_.file("metrics.jsonl"), -1, -1));
  }
  model_->set_activation_checkpointing(config_.train.activation_checkpointing);
  model_->train();
  return write_start();
}

Status Trainer::diverged(const char* what, double value) const {
  const int64_t last = run_.linked_step("last");
  return invalid_argument(
      "train: the ", what, " at step ", state_.step + 1, " is ", value,
      ", expected a finite number: ",
      last >= 0 ? str_cat("the last good checkpoint is ", run_.checkpoint(last),
                          "; go on from it with --resume and a lower train.lr")
                : std::string("start again with a lower train.lr"),
      " (now ", config_.train.lr,
      "), a longer train.warmup_steps or train.grad_clip");
}

void Trainer::read_denominators() {
  const DenominatorStats stats = model_->denominator_stats();
  const auto smallest = stats.min_denominator.item<double>();
  min_denominator_ = std::fmin(min_denominator_, smallest);
  clamped_share_ += stats.clamped_share.item<double>() /
                    static_cast<double>(config_.train.accumulation);
}

Result<StepResult> Trainer::step() {
  const TrainConfig& train = config_.train;
  StepResult result;
  result.lr = learning_rate(train, state_.step + 1);
  const bool will_log = (state_.step + 1) % train.log_every == 0;
  min_denominator_ = std::numeric_limits<double>::quiet_NaN();
  clamped_share_ = 0;
  model_->set_track_denominators(will_log);
  const auto [inputs, targets] = data_->train_batch(
      train.seed, state_.step, train.batch_size, train.context);
  optimizer_->zero_grad();
  const int64_t rows = train.batch_size / train.accumulation;
  for (int64_t part = 0; part < train.accumulation; ++part) {
    torch::Tensor loss;
    {
      const AutocastScope autocast(train.precision == "bfloat16");
      const torch::Tensor logits =
          model_->forward(inputs.narrow(0, part * rows, rows));
      loss = at::cross_entropy_loss(
          logits.flatten(0, 1).to(torch::kFloat32),
          targets.narrow(0, part * rows, rows).flatten());
    }
    if (train.accumulation > 1) {
      loss = loss / static_cast<double>(train.accumulation);
    }
    loss.backward();
    result.loss += loss.item<double>();
    if (will_log) read_denominators();
  }
  if (!std::isfinite(result.loss)) return diverged("loss", result.loss);
  result.grad_norm = optimizer_->clip_grad_norm(train.grad_clip);
  if (!std::isfinite(result.grad_norm)) {
    return diverged("gradient norm", result.grad_norm);
  }
  optimizer_->step(result.lr, state_.step + 1);
  ++state_.step;
  return result;
}

Status Trainer::log(const StepResult& result) {
  state_.min_denominator = std::fmin(state_.min_denominator, min_denominator_);
  state_.clamped_share = clamped_share_;
  const auto tokens =
      static_cast<double>(config_.train.batch_size * config_.train.context);
  Json line = {{"type", "train"},
               {"step", state_.step},
               {"loss", result.loss},
               {"lr", result.lr},
               {"grad_norm", result.grad_norm},
               {"tokens_per_second", std::round(tokens / step_seconds_)},
               {"seconds", state_.seconds}};
  if (!std::isnan(min_denominator_)) {
    line["min_denominator"] = min_denominator_;
    line["clamped_share"] = clamped_share_;
  }
  return metrics_->write(line);
}

void Trainer::tell(const StepResult& result) {
  if (!callbacks_.on_step) return;
  const TrainConfig& train = config_.train;
  const int64_t left = train.steps - state_.step;
  const int64_t evaluations =
      train.eval_every > 0 ? left / train.eval_every + 1 : 1;
  TrainProgress progress;
  progress.step = state_.step;
  progress.steps = train.steps;
  progress.loss = result.loss;
  progress.lr = result.lr;
  progress.grad_norm = result.grad_norm;
  progress.tokens_per_second =
      static_cast<double>(train.batch_size * train.context) / step_seconds_;
  progress.seconds_left = static_cast<double>(left) * step_seconds_ +
                          static_cast<double>(evaluations) * eval_seconds_;
  progress.min_denominator = min_denominator_;
  progress.clamped_share = clamped_share_;
  callbacks_.on_step(progress);
}

Status Trainer::evaluate(bool* is_best, bool* stopped) {
  const auto begin = Clock::now();
  model_->set_track_denominators(false);
  TokenSource source{data_->validation_size(), token_bytes_,
                     [this](int64_t at, int64_t n) {
                       return data_->validation_tokens(at, n);
                     }};
  const int64_t context = config_.train.context;
  const auto result = evaluate_tokens(
      model_, source, context,
      evaluation_batch(context, model_->config().vocab_size), &stop_);
  *stopped = !result.has_value();
  if (*stopped) return {};
  eval_seconds_ = seconds_since(begin);
  if (!std::isfinite(result->loss)) {
    return diverged("validation loss", result->loss);
  }
  state_.evaluated_step = state_.step;
  state_.last = *result;
  *is_best = state_.best_step == 0 || result->loss < state_.best.loss;
  if (*is_best) {
    state_.best = *result;
    state_.best_step = state_.step;
    state_.without_improvement = 0;
  } else {
    ++state_.without_improvement;
  }
  COSFORMER_RETURN_IF_ERROR(
      metrics_->write({{"type", "eval"},
                       {"step", state_.step},
                       {"loss", result->loss},
                       {"bits_per_byte", result->bits_per_byte},
                       {"perplexity", result->perplexity},
                       {"tokens", result->tokens},
                       {"best", *is_best},
                       {"seconds", state_.seconds}}));
  if (callbacks_.on_eval) callbacks_.on_eval(state_.step, *result, *is_best);
  return {};
}

Status Trainer::save(bool is_best) {
  COSFORMER_RETURN_IF_ERROR(metrics_->sync());
  COSFORMER_RETURN_IF_ERROR(
      run_.save(state_.step, is_best, [this](const std::string& folder) {
        return save_training(folder, config_, state_, model_,
                             *data_->tokenizer(), *optimizer_);
      }));
  return run_.retain(config_.train.keep_checkpoints);
}

// Evaluates and saves where due. A stop asked for meanwhile saves at once; an
// evaluation that it cut short is made up for when the run goes on.
Status Trainer::after_step(bool* done) {
  const TrainConfig& train = config_.train;
  const bool finished = state_.step >= train.steps;
  const bool eval_due = state_.evaluated_step != state_.step &&
                        (finished || is_due(train.eval_every));
  bool is_best = false, stopped = stop_.load();
  if (eval_due && !stopped) {
    COSFORMER_RETURN_IF_ERROR(evaluate(&is_best, &stopped));
    if (!stopped && train.early_stop > 0 && !finished &&
        state_.without_improvement >= train.early_stop) {
      state_.stopped_early = true;
      message(str_cat("no improvement in ", train.early_stop,
                      " evaluations: stopping early at step ", state_.step));
    }
  }
  // Nothing is left to stop once the last evaluation is made.
  interrupted_ = stopped && !(finished && state_.evaluated_step == state_.step);
  *done = finished || state_.stopped_early || stopped;
  const bool saved = run_.linked_step("last") == state_.step;
  const bool evaluated_now = eval_due && state_.evaluated_step == state_.step;
  if (is_best || *done || is_due(train.checkpoint_every)) {
    if (!saved || evaluated_now) return save(is_best);
  }
  return {};
}

Status Trainer::loop() {
  bool done = state_.stopped_early;
  if (done) message("the run has stopped early before: nothing to do");
  // The step that the checkpoint was saved at may still want its evaluation.
  if (!done && state_.step > 0) COSFORMER_RETURN_IF_ERROR(after_step(&done));
  int64_t timed = 0;
  while (!done) {
    const auto begin = Clock::now();
    auto result = step();
    if (!result.ok()) return result.status();
    const double spent = seconds_since(begin);
    state_.seconds += spent;
    // The first step pays for caches: it does not count.
    step_seconds_ = ++timed <= 2 ? spent : 0.9 * step_seconds_ + 0.1 * spent;
    if (is_due(config_.train.log_every)) {
      COSFORMER_RETURN_IF_ERROR(log(*result));
    }
    tell(*result);
    const auto pause = Clock::now();
    const Status status = after_step(&done);
    state_.seconds += seconds_since(pause);
    COSFORMER_RETURN_IF_ERROR(status);
  }
  return {};
}

TrainReport Trainer::report() const {
  TrainReport report;
  report.step = state_.step;
  report.last = state_.last;
  report.best = state_.best;
  report.best_step = state_.best_step;
  report.interrupted = interrupted_;
  report.stopped_early = state_.stopped_early;
  report.baselines = state_.baselines;
  report.seconds = state_.seconds;
  report.min_denominator = state_.min_denominator;
  report.clamped_share = state_.clamped_share;
  report.last_path = run_.checkpoint(run_.linked_step("last"));
  if (const int64_t best = run_.linked_step("best"); best >= 0) {
    report.best_path = run_.checkpoint(best);
  }
  return report;
}

Result<TrainReport> run_training(const RunConfig& config,
                                 const std::string& out_dir, bool resume,
                                 const TrainCallbacks& callbacks,
                                 const std::atomic<bool>& stop) {
  COSFORMER_RETURN_IF_ERROR(validate(config));
  if (config.data.path.empty() && !resume) return no_data();
  auto run = RunFolder::open(out_dir, resume);
  if (!run.ok()) return run.status();
  Trainer trainer(with_absolute_paths(config), *run, callbacks, stop);
  COSFORMER_RETURN_IF_ERROR(trainer.prepare(resume));
  COSFORMER_RETURN_IF_ERROR(trainer.loop());
  return trainer.report();
}

}  // namespace
}  // namespace train_internal

Result<TrainReport> train(const RunConfig& config, const std::string& out_dir,
                          bool resume, const TrainCallbacks& callbacks,
                          const std::atomic<bool>& stop) {
  const Status no_memory(StatusCode::kOutOfMemory,
                         "train: out of memory: lower train.batch_size (or "
                         "raise train.accumulation), or set "
                         "train.activation_checkpointing");
  try {
    return train_internal::run_training(config, out_dir, resume, callbacks,
                                        stop);
  } catch (const c10::Error& error) {
    const std::string what = error.what_without_backtrace();
    // Torch's allocator has no type of its own for this.
    if (what.find("can't allocate memory") != std::string::npos) {
      return no_memory;
    }
    return invalid_argument("train: ", what);
  } catch (const std::bad_alloc&) {
    return no_memory;
  } catch (const std::filesystem::filesystem_error& error) {
    return io_error("train: ", error.what());
  }
}

}  // namespace cosformer
