#include <map>
#include <set>

#include "cosformer/models.h"
#include "tests/train/train_test_util.h"
#include "train/training_state.h"

namespace cosformer {
namespace {

namespace fs = std::filesystem;
using testing::contains;
using testing::losses;
using testing::run_train;
using testing::sample_text;
using testing::TempFolder;
using testing::tiny_config;
using testing::write_text;

class Training : public ::testing::Test {
 protected:
  Training() : config(tiny_config(temp / "text.txt")) {
    write_text(temp / "text.txt", sample_text(3000));
  }
  // Trains, and stops after `step` as Ctrl-C would.
  Result<TrainReport> run_until(const std::string& out, int64_t step,
                                bool resume = false) {
    std::atomic<bool> stop{false};
    TrainCallbacks callbacks;
    callbacks.on_step = [&](const TrainProgress& progress) {
      if (progress.step == step) stop = true;
    };
    return train(config, out, resume, callbacks, stop);
  }
  std::string message_of(const Result<TrainReport>& report) {
    EXPECT_FALSE(report.ok());
    return report.status().message();
  }

  TempFolder temp;
  RunConfig config;
};

std::map<std::string, torch::Tensor> parameters_of(const std::string& folder) {
  auto loaded = load_model(folder);
  EXPECT_TRUE(loaded.ok()) << loaded.status().message();
  std::map<std::string, torch::Tensor> out;
  for (const auto& item : loaded->model->named_parameters()) {
    out[item.key()] = item.value().detach().clone();
  }
  for (const auto& item : loaded->model->named_buffers()) {
    out[item.key()] = item.value().clone();
  }
  return out;
}

TEST_F(Training, LearnsAndLeavesAWholeRun) {
  config.train.steps = 60;
  config.train.lr = 1e-2;
  config.train.eval_every = 20;
  config.train.checkpoint_every = 15;
  auto report = run_train(config, temp / "run");
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_EQ(report->step, 60);
  EXPECT_FALSE(report->interrupted);
  EXPECT_LT(report->best.loss, report->baselines.unigram_loss);
  EXPECT_GT(report->baselines.unigram_loss, report->baselines.bigram_loss);
  EXPECT_GE(report->min_denominator, 0.0);
  EXPECT_LT(report->min_denominator, 1e6);
  const std::string run = temp / "run";
  for (const char* file :
       {"config.toml", "metrics.jsonl", "checkpoints/last/config.json",
        "checkpoints/last/model.safetensors",
        "checkpoints/last/optimizer.safetensors",
        "checkpoints/last/training_state.json", "checkpoints/last/run.toml",
        "checkpoints/best/model.safetensors"}) {
    EXPECT_TRUE(fs::exists(run + "/" + file)) << file;
  }
  EXPECT_FALSE(fs::exists(run + "/.lock"));
  EXPECT_EQ(fs::read_symlink(run + "/checkpoints/last"), "step-60");
  // Two besides the best.
  std::set<std::string> kept;
  for (const auto& entry : fs::directory_iterator(run + "/checkpoints")) {
    if (!entry.is_symlink()) kept.insert(entry.path().filename());
  }
  const std::string best =
      fs::read_symlink(run + "/checkpoints/best").filename();
  EXPECT_TRUE(kept.count("step-60"));
  EXPECT_TRUE(kept.count(best));
  EXPECT_LE(kept.size(), 3u);
  auto stored = read_run_config(run + "/config.toml", {});
  ASSERT_TRUE(stored.ok()) << stored.status().message();
  EXPECT_EQ(to_toml(*stored), to_toml(config));

  auto lines = train_internal::read_metrics(run + "/metrics.jsonl");
  ASSERT_TRUE(lines.ok());
  int64_t trained = 0, evaluated = 0;
  for (const auto& line : *lines) {
    const std::string type = line.at("type");
    if (type == "train") {
      ++trained;
      for (const char* key :
           {"step", "loss", "lr", "grad_norm", "tokens_per_second", "seconds",
            "min_denominator", "clamped_share"}) {
        EXPECT_TRUE(line.contains(key)) << key;
      }
    }
    evaluated += type == "eval";
  }
  EXPECT_EQ(trained, 60);
  EXPECT_EQ(evaluated, 3);
  EXPECT_EQ(lines->front().at("type"), "start");
  EXPECT_EQ(lines->front().at("bigram_loss").get<double>(),
            report->baselines.bigram_loss);
}

TEST_F(Training, ScoresTheSameAfterLoading) {
  auto report = run_train(config, temp / "run");
  ASSERT_TRUE(report.ok()) << report.status().message();
  auto again = evaluate(temp / "run/checkpoints/last", config.data,
                        config.train.context, 0, /*whole_text=*/false);
  ASSERT_TRUE(again.ok()) << again.status().message();
  EXPECT_EQ(again->loss, report->last.loss);
  EXPECT_EQ(again->tokens, report->last.tokens);
  auto whole = evaluate(temp / "run/checkpoints/last", config.data,
                        config.train.context, 0, /*whole_text=*/true);
  ASSERT_TRUE(whole.ok()) << whole.status().message();
  EXPECT_EQ(whole->tokens,
            static_cast<int64_t>(fs::file_size(temp / "text.txt")) - 1);
}

TEST_F(Training, TheSameSeedGivesTheSameLosses) {
  config.model.dropout = 0.2;
  ASSERT_TRUE(run_train(config, temp / "a").ok());
  ASSERT_TRUE(run_train(config, temp / "b").ok());
  EXPECT_EQ(losses(temp / "a"), losses(temp / "b"));
  config.train.seed = 2;
  ASSERT_TRUE(run_train(config, temp / "c").ok());
  EXPECT_NE(losses(temp / "a"), losses(temp / "c"));
}

TEST_F(Training, AccumulationIsOneBigBatch) {
  config.train.grad_clip = 0.5;
  auto whole = run_train(config, temp / "whole");
  ASSERT_TRUE(whole.ok()) << whole.status().message();
  config.train.accumulation = 4;
  auto parts = run_train(config, temp / "parts");
  ASSERT_TRUE(parts.ok()) << parts.status().message();
  EXPECT_NEAR(parts->last.loss, whole->last.loss, 2e-5);
  const auto a = parameters_of(temp / "whole/checkpoints/last");
  for (const auto& [name, value] :
       parameters_of(temp / "parts/checkpoints/last")) {
    EXPECT_TRUE(torch::allclose(value, a.at(name), 1e-3, 2e-4)) << name;
  }
}

TEST_F(Training, ActivationCheckpointingChangesNoLoss) {
  config.model.dropout = 0.1;
  ASSERT_TRUE(run_train(config, temp / "a").ok());
  config.train.activation_checkpointing = true;
  ASSERT_TRUE(run_train(config, temp / "b").ok());
  EXPECT_EQ(losses(temp / "a"), losses(temp / "b"));
}

// precision, whether activations are recomputed
class Resuming
    : public Training,
      public ::testing::WithParamInterface<std::tuple<const char*, bool>> {};

TEST_P(Resuming, GoesOnBitForBitFromAnyStep) {
  config.model.dropout = 0.2;
  config.train.precision = std::get<0>(GetParam());
  config.train.activation_checkpointing = std::get<1>(GetParam());
  auto straight = run_train(config, temp / "straight");
  ASSERT_TRUE(straight.ok()) << straight.status().message();
  const auto expected = parameters_of(temp / "straight/checkpoints/last");
  // 4: as a checkpoint is due; 6: as an evaluation is; 11: before the end.
  for (const int64_t step : {1, 4, 6, 11}) {
    const std::string out = temp / str_cat("stopped-", step);
    auto stopped = run_until(out, step);
    ASSERT_TRUE(stopped.ok()) << stopped.status().message();
    EXPECT_TRUE(stopped->interrupted);
    EXPECT_EQ(stopped->step, step);
    auto resumed = run_train(config, out, /*resume=*/true);
    ASSERT_TRUE(resumed.ok()) << resumed.status().message();
    EXPECT_FALSE(resumed->interrupted);
    EXPECT_EQ(losses(out), losses(temp / "straight")) << "stopped at " << step;
    EXPECT_EQ(resumed->best.loss, straight->best.loss);
    EXPECT_EQ(resumed->best_step, straight->best_step);
    for (const auto& [name, value] : parameters_of(out + "/checkpoints/last")) {
      EXPECT_TRUE(torch::equal(value, expected.at(name))) << name;
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Precisions, Resuming,
                         ::testing::Values(std::tuple("float32", false),
                                           std::tuple("float32", true),
                                           std::tuple("bfloat16", false)));

// A kind with its options, and whether activations are recomputed.
struct KindRun {
  const char* name;
  bool recomputes;
  void (*set)(ModelConfig&);
};
class ResumingKinds : public Training,
                      public ::testing::WithParamInterface<KindRun> {};

TEST_P(ResumingKinds, GoesOnBitForBit) {
  GetParam().set(config.model);
  config.train.activation_checkpointing = GetParam().recomputes;
  auto straight = run_train(config, temp / "straight");
  ASSERT_TRUE(straight.ok()) << straight.status().message();
  auto stopped = run_until(temp / "stopped", 7);
  ASSERT_TRUE(stopped.ok()) << stopped.status().message();
  auto resumed = run_train(config, temp / "stopped", /*resume=*/true);
  ASSERT_TRUE(resumed.ok()) << resumed.status().message();
  EXPECT_EQ(losses(temp / "stopped"), losses(temp / "straight"));
  const auto expected = parameters_of(temp / "straight/checkpoints/last");
  for (const auto& [name, value] :
       parameters_of(temp / "stopped/checkpoints/last")) {
    EXPECT_TRUE(torch::equal(value, expected.at(name))) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, ResumingKinds,
    ::testing::Values(KindRun{"softmax_t5", true,
                              [](ModelConfig& m) {
                                m.position = "t5";
                                m.attention[0].kind = "softmax";
                                m.attention[0].dropout = 0.2;  // of the weights
                              }},
                      KindRun{"softmax_window", false,
                              [](ModelConfig& m) {
                                m.attention[0].kind = "softmax";
                                m.attention[0].window = 4;
                                m.attention[0].dropout = 0.2;
                              }},
                      KindRun{"performer", false,
                              [](ModelConfig& m) {
                                m.attention[0].kind = "performer";
                              }},
                      KindRun{"performer_trainable", true,
                              [](ModelConfig& m) {
                                m.attention[0].kind = "performer";
                                m.attention[0].trainable_projection = true;
                              }},
                      KindRun{"longformer", false,
                              [](ModelConfig& m) {
                                m.attention[0].kind = "longformer";
                                m.attention[0].window = 3;
                                m.attention[0].global_tokens = 2;
                                m.attention[0].dropout = 0.1;
                              }},
                      KindRun{"bigbird", true,
                              [](ModelConfig& m) {
                                m.attention[0].kind = "bigbird";
                                m.attention[0].block_size = 4;
                                m.attention[0].dropout = 0.1;
                              }}),
    [](const auto& info) { return info.param.name; });

TEST_F(Training, AKilledRunIsCutToItsLastCheckpoint) {
  ASSERT_TRUE(run_train(config, temp / "straight").ok());
  ASSERT_TRUE(run_until(temp / "run", 9).ok());
  const std::string checkpoints = temp / "run/checkpoints/";
  // As if killed after more lines, and between the rename and the links.
  std::ofstream(temp / "run/metrics.jsonl", std::ios::app)
      << "{\"type\":\"train\",\"step\":10,\"loss\":1}\n{\"type\":\"tra";
  fs::copy(checkpoints + "step-9", checkpoints + "step-11",
           fs::copy_options::recursive);
  auto resumed = run_train(config, temp / "run", /*resume=*/true);
  ASSERT_TRUE(resumed.ok()) << resumed.status().message();
  EXPECT_EQ(losses(temp / "run"), losses(temp / "straight"));
}

TEST_F(Training, ResumeWithoutACheckpointStartsAnew) {
  ASSERT_TRUE(run_train(config, temp / "straight").ok());
  ASSERT_TRUE(run_until(temp / "run", 2).ok());
  fs::remove_all(temp / "run/checkpoints");  // as if killed before the first
  auto resumed = run_train(config, temp / "run", /*resume=*/true);
  ASSERT_TRUE(resumed.ok()) << resumed.status().message();
  EXPECT_EQ(losses(temp / "run"), losses(temp / "straight"));
  int64_t starts = 0;
  const auto lines = train_internal::read_metrics(temp / "run/metrics.jsonl");
  for (const auto& line : *lines) starts += line.at("type") == "start";
  EXPECT_EQ(starts, 1);
}

TEST_F(Training, ACopyWithoutLinksGoesOn) {
  ASSERT_TRUE(run_train(config, temp / "straight").ok());
  ASSERT_TRUE(run_until(temp / "run", 9).ok());
  // std::filesystem copies what a link points to, as cp -rL does.
  fs::copy(temp / "run", temp / "copy", fs::copy_options::recursive);
  ASSERT_FALSE(fs::is_symlink(temp / "copy/checkpoints/last"));
  auto resumed = run_train(config, temp / "copy", /*resume=*/true);
  ASSERT_TRUE(resumed.ok()) << resumed.status().message();
  EXPECT_EQ(losses(temp / "copy"), losses(temp / "straight"));
  EXPECT_EQ(fs::read_symlink(temp / "copy/checkpoints/last"), "step-12");
  EXPECT_TRUE(fs::is_symlink(temp / "copy/checkpoints/best"));
}

TEST_F(Training, ResumeTakesAnotherTextOrSeedOnlyWhenAsked) {
  ASSERT_TRUE(run_until(temp / "run", 4).ok());
  write_text(temp / "other.txt", sample_text(3000));
  const std::vector<std::pair<std::string, void (*)(RunConfig&)>> changes = {
      {"data.path",
       [](RunConfig& c) {
         c.data.path = fs::path(c.data.path).replace_filename("other.txt");
       }},
      {"data.extensions", [](RunConfig& c) { c.data.extensions = {".md"}; }},
      {"train.seed", [](RunConfig& c) { c.train.seed = 77; }}};
  for (const auto& [key, change] : changes) {
    RunConfig other = config;
    change(other);
    const std::string error = message_of(run_train(other, temp / "run", true));
    EXPECT_TRUE(contains(error, key + " is ")) << error;
    EXPECT_TRUE(contains(error, "the run was begun with")) << error;
  }
  RunConfig other = config;
  changes[0].second(other);
  changes[2].second(other);
  other.overridden = {"train.seed", "data.path"};
  const auto report = run_train(other, temp / "run", true);
  EXPECT_TRUE(report.ok()) << report.status().message();
}

TEST_F(Training, ResumeOfAFinishedRunDoesNothing) {
  auto first = run_train(config, temp / "run");
  ASSERT_TRUE(first.ok());
  const auto before = losses(temp / "run");
  auto again = run_train(config, temp / "run", /*resume=*/true);
  ASSERT_TRUE(again.ok()) << again.status().message();
  EXPECT_EQ(again->step, 12);
  EXPECT_EQ(again->last.loss, first->last.loss);
  EXPECT_EQ(losses(temp / "run"), before);
  // More steps go on.
  config.train.steps = 14;
  again = run_train(config, temp / "run", /*resume=*/true);
  ASSERT_TRUE(again.ok()) << again.status().message();
  EXPECT_EQ(again->step, 14);
}

TEST_F(Training, ResumeRefusesAnotherModelOrTokenizer) {
  ASSERT_TRUE(run_until(temp / "run", 4).ok());
  RunConfig other = config;
  other.model.embed_dim = 32;
  std::string error = message_of(run_train(other, temp / "run", true));
  EXPECT_TRUE(contains(error, "model.embed_dim is 32")) << error;
  EXPECT_TRUE(contains(error, "16")) << error;
  other = config;
  other.model.attention[0].kind = "softmax";
  error = message_of(run_train(other, temp / "run", true));
  EXPECT_TRUE(contains(error, "model.attention")) << error;
  other = config;
  other.data.tokenizer = "bytes";
  error = message_of(run_train(other, temp / "run", true));
  EXPECT_TRUE(contains(error, "data.tokenizer is \"bytes\"")) << error;
  // Another learning rate is allowed, and said.
  other = config;
  other.train.lr = 5e-4;
  std::string said;
  TrainCallbacks callbacks;
  callbacks.on_message = [&](const std::string& text) { said += text + "\n"; };
  auto report = run_train(other, temp / "run", true, callbacks);
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_TRUE(contains(said, "train.lr")) << said;
}

TEST_F(Training, RefusesAFolderThatHoldsARun) {
  ASSERT_TRUE(run_train(config, temp / "run").ok());
  const auto before = losses(temp / "run");
  const std::string error = message_of(run_train(config, temp / "run"));
  EXPECT_TRUE(contains(error, "--resume")) << error;
  EXPECT_EQ(losses(temp / "run"), before);
}

TEST_F(Training, ALossThatIsNotFiniteStopsAndKeepsTheLastGoodCheckpoint) {
  config.train.lr = config.train.min_lr = 1e-3;
  config.train.checkpoint_every = 1;
  ASSERT_TRUE(run_until(temp / "run", 3).ok());
  config.train.lr = 1e30;
  const std::string error =
      message_of(run_train(config, temp / "run", /*resume=*/true));
  EXPECT_TRUE(contains(error, "expected a finite number")) << error;
  EXPECT_TRUE(contains(error, "step-")) << error;
  EXPECT_TRUE(contains(error, "train.lr")) << error;
  for (const auto& [name, value] :
       parameters_of(temp / "run/checkpoints/last")) {
    EXPECT_TRUE(torch::isfinite(value).all().item<bool>()) << name;
  }
  // Every line of the metrics is still JSON with a number.
  for (const auto& line : losses(temp / "run")) {
    EXPECT_FALSE(contains(line, "null")) << line;
  }
}

TEST_F(Training, StopsEarlyWithoutImprovement) {
  config.train.steps = 100;
  config.train.eval_every = 1;
  config.train.early_stop = 3;
  // Steps too small to change a float: the first evaluation stays the best.
  config.train.lr = config.train.min_lr = 1e-30;
  config.train.weight_decay = 0;
  auto report = run_train(config, temp / "run");
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_TRUE(report->stopped_early);
  EXPECT_EQ(report->best_step, 1);
  EXPECT_EQ(report->step, 4);
  // Resuming does not begin again.
  auto again = run_train(config, temp / "run", /*resume=*/true);
  ASSERT_TRUE(again.ok()) << again.status().message();
  EXPECT_EQ(again->step, 4);
  // Unless the config no longer says so.
  config.train.early_stop = 0;
  config.train.steps = 6;
  again = run_train(config, temp / "run", /*resume=*/true);
  ASSERT_TRUE(again.ok()) << again.status().message();
  EXPECT_EQ(again->step, 6);
  EXPECT_FALSE(again->stopped_early);
}

TEST_F(Training, OutOfMemoryAndSkippedFilesAreSaid) {
  fs::create_directory(temp / "folder");
  write_text(temp / "folder/a.txt", sample_text(3000));
  write_text(temp / "folder/b.bin", std::string("\0\1", 2));
  config.data.path = temp / "folder";
  config.train.batch_size = int64_t{1} << 40;
  std::string said;
  TrainCallbacks callbacks;
  callbacks.on_message = [&](const std::string& text) { said += text + "\n"; };
  const auto report = run_train(config, temp / "run", false, callbacks);
  ASSERT_FALSE(report.ok());
  EXPECT_EQ(report.status().code(), StatusCode::kOutOfMemory)
      << report.status().message();
  EXPECT_TRUE(contains(said, "skipped 1 of 2 files")) << said;
}

TEST_F(Training, TooLittleTextIsAnError) {
  write_text(temp / "text.txt", "short text");
  const std::string error = message_of(run_train(config, temp / "run"));
  EXPECT_TRUE(contains(error, "expected at least 17")) << error;
  config.data.path.clear();
  EXPECT_TRUE(contains(message_of(run_train(config, temp / "run")),
                       "data.path is empty"));
}

TEST_F(Training, SoftmaxHasNoDenominatorToReport) {
  config.model.attention[0].kind = "softmax";
  auto report = run_train(config, temp / "run");
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_TRUE(std::isnan(report->min_denominator));
}

TEST_F(Training, PlotsItsLosses) {
  ASSERT_TRUE(run_train(config, temp / "run").ok());
  const Status status = plot_run(temp / "run", temp / "loss.png");
  ASSERT_TRUE(status.ok()) << status.message();
  std::string magic(4, ' ');
  std::ifstream(temp / "loss.png", std::ios::binary).read(magic.data(), 4);
  EXPECT_EQ(magic, "\x89PNG");
  EXPECT_GT(fs::file_size(temp / "loss.png"), 5000u);
  // No name is run as a command, no loss is too large.
  fs::create_directory(temp / "hostile");
  write_text(temp / "hostile/metrics.jsonl",
             "{\"type\":\"start\",\"kind\":\"`touch ran`'\\\"\"}\n"
             "{\"type\":\"train\",\"step\":1,\"loss\":3}\n"
             "{\"type\":\"train\",\"step\":2,\"loss\":1e17}\n");
  const fs::path before = fs::current_path();
  fs::current_path(temp.path());
  const Status hostile = plot_run("hostile", "`touch ran`'s.png");
  fs::current_path(before);
  EXPECT_TRUE(hostile.ok()) << hostile.message();
  EXPECT_TRUE(fs::exists(temp / "`touch ran`'s.png"));
  EXPECT_FALSE(fs::exists(temp / "ran"));
  // Without gnuplot there is a plain message.
  const std::string path = std::getenv("PATH");
  setenv("PATH", temp.path().c_str(), 1);
  const Status missing = plot_run(temp / "run", temp / "other.png");
  setenv("PATH", path.c_str(), 1);
  EXPECT_TRUE(contains(missing.message(), "gnuplot: not found"))
      << missing.message();
  EXPECT_FALSE(fs::exists(temp / "other.png"));
}

}  // namespace
}  // namespace cosformer
