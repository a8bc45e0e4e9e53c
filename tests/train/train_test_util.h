// A tiny run for the tests: text, config, a folder that goes.
#ifndef COSFORMER_TESTS_TRAIN_TRAIN_TEST_UTIL_H_
#define COSFORMER_TESTS_TRAIN_TRAIN_TEST_UTIL_H_

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "cosformer/train.h"
#include "train/metrics.h"

namespace cosformer::testing {

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

class TempFolder {
 public:
  TempFolder() {
    std::string path =
        (std::filesystem::temp_directory_path() / "cosformer-train-test-XXXXXX")
            .string();
    EXPECT_NE(mkdtemp(path.data()), nullptr);
    path_ = path;
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  ~TempFolder() { std::filesystem::remove_all(path_); }
  std::string operator/(const std::string& name) const {
    return path_ + "/" + name;
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline void write_text(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

// About `bytes` of words that repeat with some surprise.
inline std::string sample_text(size_t bytes) {
  const char* words[] = {"the ", "cat ",  "sat ", "on ",
                         "a ",   "mat. ", "dog ", "ran\n"};
  std::string text;
  uint32_t state = 1;
  while (text.size() < bytes) {
    state = state * 1664525u + 1013904223u;
    text += words[(state >> 24) % 8];
  }
  return text;
}

// Two layers of 16, 12 steps, one thread.
inline RunConfig tiny_config(const std::string& data_path) {
  RunConfig config;
  config.model.embed_dim = 16;
  config.model.num_layers = 2;
  config.model.num_heads = 2;
  config.model.max_len = 16;
  config.data.path = data_path;
  config.train.context = 16;
  config.train.batch_size = 4;
  config.train.steps = 12;
  config.train.warmup_steps = 2;
  config.train.log_every = 1;
  config.train.eval_every = 6;
  config.train.checkpoint_every = 4;
  config.train.threads = 1;
  return config;
}

inline Result<TrainReport> run_train(const RunConfig& config,
                                     const std::string& out,
                                     bool resume = false,
                                     const TrainCallbacks& callbacks = {}) {
  const std::atomic<bool> stop{false};
  return train(config, out, resume, callbacks, stop);
}

// "train 3 2.52" for each loss in metrics.jsonl, digits that tell doubles
// apart.
inline std::vector<std::string> losses(const std::string& run) {
  std::vector<std::string> out;
  auto lines = train_internal::read_metrics(run + "/metrics.jsonl");
  EXPECT_TRUE(lines.ok()) << lines.status().message();
  if (!lines.ok()) return out;
  for (const auto& line : *lines) {
    if (!line.contains("loss")) continue;
    out.push_back(str_cat(line.at("type").get<std::string>(), " ",
                          line.at("step").dump(), " ", line.at("loss").dump()));
  }
  return out;
}

}  // namespace cosformer::testing

#endif  // COSFORMER_TESTS_TRAIN_TRAIN_TEST_UTIL_H_
