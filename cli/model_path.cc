#include "cli/model_path.h"

#include <filesystem>

namespace cosformer::cli {

namespace fs = std::filesystem;

Result<std::string> find_model(const std::string& path) {
  std::error_code error;
  if (!fs::exists(path, error)) {
    return not_found(path, ": ",
                     error ? error.message() : "no such file or folder",
                     ": expected a run's folder, a checkpoint or a model "
                     "folder");
  }
  for (const char* inside :
       {"", "/checkpoints/best", "/best", "/checkpoints/last", "/last"}) {
    const std::string folder = path + inside;
    if (!fs::exists(folder + "/config.json", error)) continue;
    const fs::path real = fs::canonical(folder, error);
    return error ? folder : real.string();
  }
  if (fs::exists(path + "/config.toml", error)) {
    return not_found(path,
                     ": this run has no checkpoint yet: wait for its first, "
                     "or go on with `cosformer train --resume`");
  }
  return not_found(path,
                   ": no config.json in it: expected a run's folder, a "
                   "checkpoint or a model folder");
}

}  // namespace cosformer::cli
