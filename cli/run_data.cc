#include "cli/run_data.h"

#include <filesystem>

namespace cosformer::cli {

Result<RunConfig> run_of_model(const std::string& model_folder) {
  auto config = read_run_config(model_folder + "/run.toml", {});
  if (!config.ok()) return config;
  // RUN/checkpoints/step-N
  const auto run =
      std::filesystem::path(model_folder).parent_path().parent_path();
  std::error_code error;
  if (config->data.cache_dir.empty() &&
      std::filesystem::is_directory(run / "cache", error)) {
    config->data.cache_dir = (run / "cache").string();
  }
  return config;
}

}  // namespace cosformer::cli
