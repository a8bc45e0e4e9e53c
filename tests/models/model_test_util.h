// Small models for the tests.
#ifndef COSFORMER_TESTS_MODELS_MODEL_TEST_UTIL_H_
#define COSFORMER_TESTS_MODELS_MODEL_TEST_UTIL_H_

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <string>
#include <vector>

#include "cosformer/models.h"

namespace cosformer::testing {

// 2 layers of 2 heads, 16 wide, 11 tokens, 32 positions.
inline ModelConfig small_config(const std::string& kind) {
  ModelConfig config;
  config.vocab_size = 11;
  config.embed_dim = 16;
  config.num_layers = 2;
  config.num_heads = 2;
  config.ffn_dim = 24;
  config.max_len = 32;
  config.attention[0].kind = kind;
  config.init_std = 0.3;  // so that logits differ well
  return config;
}

struct ConfigCase {
  std::string name;
  ModelConfig config;
};
inline void PrintTo(const ConfigCase& value, std::ostream* out) {
  *out << value.name;
}

// Every option of a causal model's config at least once.
std::vector<ConfigCase> config_cases();
// The same models as encoders, and those of the kind that has no causal form.
std::vector<ConfigCase> encoder_cases();

inline torch::Tensor random_ids(int64_t batch, int64_t count,
                                const ModelConfig& config) {
  return torch::randint(config.vocab_size, {batch, count},
                        torch::dtype(torch::kInt64));
}

double relative_error(const torch::Tensor& a, const torch::Tensor& b);

template <typename Function>
std::string error_of(const Function& run) {
  try {
    run();
  } catch (const c10::Error& e) {
    return e.what_without_backtrace();
  }
  return "";
}

inline void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos)
      << "found: \"" << text << "\"\nexpected in it: \"" << part << "\"";
}

// A folder of this test's own, removed at the end.
class ScratchFolder {
 public:
  ScratchFolder();
  ~ScratchFolder();
  std::string operator/(const std::string& name) const {
    return (path_ / name).string();
  }

 private:
  std::filesystem::path path_;
};

}  // namespace cosformer::testing

#endif  // COSFORMER_TESTS_MODELS_MODEL_TEST_UTIL_H_
