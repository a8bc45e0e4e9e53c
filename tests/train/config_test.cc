#include <gtest/gtest.h>

#include <filesystem>
#include <utility>
#include <vector>

#include "cosformer/train.h"
#include "tests/train/train_test_util.h"

namespace cosformer {
namespace {

using testing::contains;

Result<RunConfig> parse(const std::string& toml,
                        const std::vector<std::string>& overrides = {}) {
  return parse_run_config(toml, "run.toml", overrides);
}

std::string error_of(const std::string& toml,
                     const std::vector<std::string>& overrides = {}) {
  auto config = parse(toml, overrides);
  EXPECT_FALSE(config.ok()) << toml;
  return config.ok() ? std::string() : config.status().message();
}

TEST(RunConfig, EmptyTextGivesTheDefaults) {
  auto config = parse("");
  ASSERT_TRUE(config.ok()) << config.status().message();
  EXPECT_EQ(to_toml(*config), to_toml(RunConfig{}));
  EXPECT_EQ(config->train.steps, TrainConfig{}.steps);
  EXPECT_EQ(config->model.vocab_size, 0);
}

TEST(RunConfig, ReadsEverySection) {
  auto config = parse(
      "[model]\nembed_dim = 64\nnum_heads = 8\nnorm = \"rmsnorm\"\n"
      "dropout = 0.25\n"
      "[model.attention]\nkind = \"linear\"\nfeature_map = \"relu\"\n"
      "[data]\npath = \"a \\\"b\\\"\"\nextensions = [\".h\", \"\"]\n"
      "[train]\nlr = 1\nseed = 7\nactivation_checkpointing = true\n"
      "min_lr = 1e-5\n");
  ASSERT_TRUE(config.ok()) << config.status().message();
  EXPECT_EQ(config->model.embed_dim, 64);
  EXPECT_EQ(config->model.norm, "rmsnorm");
  EXPECT_EQ(config->model.dropout, 0.25);
  ASSERT_EQ(config->model.attention.size(), 1u);
  EXPECT_EQ(config->model.attention[0].kind, "linear");
  EXPECT_EQ(config->model.attention[0].feature_map, "relu");
  EXPECT_EQ(config->data.path, "a \"b\"");
  EXPECT_EQ(config->data.extensions, (std::vector<std::string>{".h", ""}));
  EXPECT_EQ(config->train.lr, 1.0);  // an integer is a number
  EXPECT_EQ(config->train.seed, 7u);
  EXPECT_TRUE(config->train.activation_checkpointing);
  auto again = parse(to_toml(*config));
  ASSERT_TRUE(again.ok()) << again.status().message();
  EXPECT_EQ(to_toml(*again), to_toml(*config));
  EXPECT_EQ(again->model, config->model);
}

TEST(RunConfig, OneAttentionTableALayer) {
  auto config = parse(
      "[model]\nnum_layers = 2\n[[model.attention]]\nkind = \"softmax\"\n"
      "[[model.attention]]\nkind = \"cosformer\"\nreweight_len = 512\n",
      {"model.attention.1.reweight_len=300"});
  ASSERT_TRUE(config.ok()) << config.status().message();
  ASSERT_EQ(config->model.attention.size(), 2u);
  EXPECT_EQ(config->model.attention[0].kind, "softmax");
  EXPECT_EQ(config->model.attention[1].reweight_len, 300);
  auto again = parse(to_toml(*config));
  ASSERT_TRUE(again.ok()) << again.status().message();
  EXPECT_EQ(again->model, config->model);
}

TEST(RunConfig, TheKindsTakeTheirOptions) {
  auto config = parse(
      "[model]\nnum_layers = 3\nposition = \"none\"\n"
      "[[model.attention]]\nkind = \"performer\"\nnum_features = 48\n"
      "trainable_projection = true\n"
      "[[model.attention]]\nkind = \"longformer\"\nwindow = 16\n"
      "global_tokens = 1\ndropout = 0.1\n"
      "[[model.attention]]\nkind = \"bigbird\"\nblock_size = 16\n",
      {"model.attention.1.window=32", "model.attention.2.window_blocks=5"});
  ASSERT_TRUE(config.ok()) << config.status().message();
  EXPECT_EQ(config->model.attention[0].num_features, 48);
  EXPECT_TRUE(config->model.attention[0].trainable_projection);
  EXPECT_EQ(config->model.attention[1].window, 32);
  EXPECT_EQ(config->model.attention[1].dropout, 0.1);
  EXPECT_EQ(config->model.attention[2].window_blocks, 5);
  auto again = parse(to_toml(*config));
  ASSERT_TRUE(again.ok()) << again.status().message();
  EXPECT_EQ(again->model, config->model);
  for (const auto& [text, part] :
       std::vector<std::pair<const char*, const char*>>{
           {"kind = \"linformer\"", "'linformer' has no causal form"},
           {"kind = \"longformer\"", "attention.window: found 0"},
           {"window = 4", "kind 'cosformer' has no such option"},
           {"windows = 4", "did you mean model.attention.window?"}}) {
    const std::string error =
        error_of(std::string("[model.attention]\n") + text + "\n");
    EXPECT_TRUE(contains(error, part)) << error;
  }
}

TEST(RunConfig, ShippedConfigsAreValid) {
  int found = 0;
  for (const auto& entry : std::filesystem::directory_iterator(
           COSFORMER_SOURCE_DIR "/configs/shakespeare")) {
    if (entry.path().extension() != ".toml") continue;
    const auto config = read_run_config(entry.path().string(), {});
    EXPECT_TRUE(config.ok()) << config.status().message();
    ++found;
  }
  EXPECT_GE(found, 9);
}

TEST(RunConfig, AnUnknownKeyNamesLineAndNearest) {
  const std::string error = error_of("[train]\nsteps = 5\nwarmup_stepz = 3\n");
  EXPECT_TRUE(contains(error, "run.toml:3")) << error;
  EXPECT_TRUE(contains(error, "train.warmup_stepz")) << error;
  EXPECT_TRUE(contains(error, "did you mean train.warmup_steps?")) << error;
  EXPECT_TRUE(contains(error_of("[model.attention]\nkin = \"softmax\"\n"),
                       "run.toml:2: unknown key model.attention.kin: did you "
                       "mean model.attention.kind?"));
  EXPECT_TRUE(contains(error_of("\n[trian]\nsteps = 5\n"),
                       "run.toml:2: unknown section [trian]: did you mean "
                       "[train]?"));
  EXPECT_TRUE(contains(error_of("steps = 5\n"), "run.toml:1"));
  EXPECT_TRUE(contains(error_of("[model]\nvocab_size = 5\n"), "tokenizer"));
}

TEST(RunConfig, AWrongTypeNamesKeyFoundExpected) {
  const std::pair<const char*, const char*> cases[] = {
      {"[train]\nsteps = \"many\"\n",
       "run.toml:2: train.steps is the string \"many\", expected an integer"},
      {"[train]\nsteps = 1.5\n",
       "run.toml:2: train.steps is 1.5, expected an integer"},
      {"[train]\nlr = true\n",
       "run.toml:2: train.lr is true, expected a number"},
      {"[train]\nlr = nan\n", "expected a number"},
      {"[train]\nseed = -1\n", "expected an integer of 0 or more"},
      {"[train]\nschedule = 3\n",
       "run.toml:2: train.schedule is 3, expected a string"},
      {"[data]\nextensions = \".h\"\n", "expected an array of strings"},
      {"[data]\nextensions = [1]\n", "data.extensions holds 1"},
      {"[model]\ngated = 1\n", "model.gated is 1, expected true or false"},
      {"[model]\nattention = \"softmax\"\n", "expected a table"},
      {"[model]\nembed_dim = {}\n", "model.embed_dim is a table"},
      {"model = 3\n", "run.toml:1: model is 3, expected a table [model]"}};
  for (const auto& [toml, expected] : cases) {
    const std::string error = error_of(toml);
    EXPECT_TRUE(contains(error, expected)) << error << "\n" << toml;
  }
}

TEST(RunConfig, InvalidTomlNamesTheLine) {
  EXPECT_TRUE(contains(error_of("[train]\nsteps = \n"), "run.toml:2"));
  EXPECT_TRUE(contains(error_of("[train]\nsteps = 1\nsteps = 2\n"),
                       "run.toml:3: not valid TOML"));
}

TEST(RunConfig, OverridesAreTomlValuesOrBareStrings) {
  auto config =
      parse("[train]\nlr = 1e-3\n",
            {"train.lr=3e-4", "train.schedule=constant",
             "data.path=\"quoted name\"", "data.tokenizer=bytes",
             "data.extensions=[\".cc\"]", "model.attention.kind=softmax",
             "data.cache_dir=12", "train.activation_checkpointing=true"});
  ASSERT_TRUE(config.ok()) << config.status().message();
  EXPECT_EQ(config->train.lr, 3e-4);
  EXPECT_EQ(config->train.schedule, "constant");
  EXPECT_EQ(config->data.path, "quoted name");
  EXPECT_EQ(config->data.tokenizer, "bytes");
  EXPECT_EQ(config->data.extensions, std::vector<std::string>{".cc"});
  EXPECT_EQ(config->data.cache_dir, "12");
  EXPECT_EQ(config->model.attention[0].kind, "softmax");
  EXPECT_TRUE(config->train.activation_checkpointing);
  auto table = parse("", {"model.attention={kind = \"linear\"}"});
  ASSERT_TRUE(table.ok()) << table.status().message();
  EXPECT_EQ(table->model.attention[0].kind, "linear");
}

TEST(RunConfig, BadOverridesAreNamed) {
  const std::pair<const char*, const char*> cases[] = {
      {"train.lr", "--set train.lr: expected key=value"},
      {"=3", "expected key=value"},
      {"train.lr=fast", "train.lr is \"fast\", expected a number"},
      {"train.stepz=3", "did you mean train.steps?"},
      {"steps=3", "did you mean train.steps?"},
      {"train.steps=3\nlr = 2", "expected an integer"},
      {"model.attention=3", "expected a table"},
      {"model.attention.4.kind=linear", "unknown layer model.attention.4"},
      {"model.attention.0.kindd=linear", "did you mean"}};
  for (const auto& [setting, expected] : cases) {
    const std::string error = error_of("", {setting});
    EXPECT_TRUE(contains(error, expected)) << error;
    EXPECT_TRUE(contains(error, "--set")) << error;
  }
}

TEST(RunConfig, RangesAndContradictionsNameTheKey) {
  const std::pair<const char*, const char*> cases[] = {
      {"train.steps=0", "train.steps"},
      {"train.context=0", "train.context"},
      {"train.context=257", "model.max_len"},
      {"train.batch_size=-2", "train.batch_size"},
      {"train.accumulation=5", "train.accumulation"},
      {"train.lr=0", "train.lr"},
      {"train.min_lr=1", "train.min_lr"},
      {"train.beta2=1.0", "train.beta2"},
      {"train.adam_eps=0", "train.adam_eps"},
      {"train.weight_decay=-1", "train.weight_decay"},
      {"train.schedule=linear", "\"cosine\""},
      {"train.precision=half", "train.precision"},
      {"train.keep_checkpoints=0", "train.keep_checkpoints"},
      {"train.log_every=0", "train.log_every"},
      {"data.train_fraction=1.0", "data.train_fraction"},
      {"data.tokenizer=words", "data.tokenizer"},
      {"model.num_heads=3", "num_heads"},
      {"model.is_causal=false", "model.is_causal"},
      {"model.attention.kind=quadratic", "quadratic"}};
  for (const auto& [setting, expected] : cases) {
    const std::string error = error_of("", {setting});
    EXPECT_TRUE(contains(error, expected)) << setting << ": " << error;
  }
}

TEST(RunConfig, AMissingFileIsNamed) {
  auto config = read_run_config("no/such/config.toml", {});
  ASSERT_FALSE(config.ok());
  EXPECT_TRUE(contains(config.status().message(), "no/such/config.toml"));
}

TEST(Schedule, WarmsUpAndDecays) {
  TrainConfig config;
  config.lr = 1.0;
  config.min_lr = 0.1;
  config.warmup_steps = 10;
  config.steps = 110;
  EXPECT_DOUBLE_EQ(learning_rate(config, 1), 0.1);
  EXPECT_DOUBLE_EQ(learning_rate(config, 5), 0.5);
  EXPECT_DOUBLE_EQ(learning_rate(config, 10), 1.0);
  EXPECT_DOUBLE_EQ(learning_rate(config, 60), 0.55);  // halfway
  EXPECT_DOUBLE_EQ(learning_rate(config, 110), 0.1);
  for (int64_t step = 11; step <= 110; ++step) {
    EXPECT_LT(learning_rate(config, step), learning_rate(config, step - 1));
  }
  config.schedule = "inverse_sqrt";
  EXPECT_DOUBLE_EQ(learning_rate(config, 10), 1.0);
  EXPECT_DOUBLE_EQ(learning_rate(config, 40), 0.5);
  EXPECT_DOUBLE_EQ(learning_rate(config, 100000), 0.1);  // not below min_lr
  config.schedule = "constant";
  EXPECT_DOUBLE_EQ(learning_rate(config, 5), 0.5);
  EXPECT_DOUBLE_EQ(learning_rate(config, 90), 1.0);
  config.warmup_steps = 0;
  EXPECT_DOUBLE_EQ(learning_rate(config, 1), 1.0);
}

TEST(Schedule, AWarmUpBeyondTheStepsNeverReachesLr) {
  TrainConfig config;
  config.lr = 1.0;
  config.warmup_steps = 100;
  config.steps = 10;
  EXPECT_DOUBLE_EQ(learning_rate(config, 10), 0.1);
}

}  // namespace
}  // namespace cosformer
