// metrics.jsonl: one JSON object a line, each flushed when written.
#ifndef COSFORMER_SRC_TRAIN_METRICS_H_
#define COSFORMER_SRC_TRAIN_METRICS_H_

#include <string>
#include <vector>

#include "train/run_config.h"

namespace cosformer::train_internal {

class MetricsLog {
 public:
  // Opens for appending.
  static Result<MetricsLog> open(const std::string& path);
  MetricsLog(MetricsLog&& other) noexcept;
  MetricsLog& operator=(MetricsLog&&) = delete;
  ~MetricsLog();

  // A line that cannot be written whole (a full disk) is an error.
  Status write(const Json& line);
  // On the disk, not only in the system's cache.
  Status sync();

 private:
  MetricsLog(std::string path, int file)
      : path_(std::move(path)), file_(file) {}
  std::string path_;
  int file_;
};

// All lines; one that is broken (the last of a killed process) is left out.
Result<std::vector<Json>> read_metrics(const std::string& path);
// Keeps the lines of steps up to `step`, of evaluations up to `evaluated_step`,
// and those without a step; below 0 nothing.
Status cut_metrics(const std::string& path, int64_t step,
                   int64_t evaluated_step);

}  // namespace cosformer::train_internal

#endif  // COSFORMER_SRC_TRAIN_METRICS_H_
