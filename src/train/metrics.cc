#include "train/metrics.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace cosformer::train_internal {

Result<MetricsLog> MetricsLog::open(const std::string& path) {
  const int file =
      ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (file < 0) return io_error(path, ": cannot write: ", strerror(errno));
  return MetricsLog(path, file);
}

MetricsLog::MetricsLog(MetricsLog&& other) noexcept
    : path_(std::move(other.path_)), file_(std::exchange(other.file_, -1)) {}

MetricsLog::~MetricsLog() {
  if (file_ >= 0) ::close(file_);
}

Status MetricsLog::write(const Json& line) {
  const std::string text = line.dump() + "\n";
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t n = ::write(file_, text.data() + done, text.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return io_error(path_, ": cannot write: ", strerror(errno));
    done += static_cast<size_t>(n);
  }
  return {};
}

Status MetricsLog::sync() {
  if (::fsync(file_) != 0) {
    return io_error(path_, ": cannot sync: ", strerror(errno));
  }
  return {};
}

Result<std::vector<Json>> read_metrics(const std::string& path) {
  auto text = read_file(path);
  if (!text.ok()) return text.status();
  std::vector<Json> lines;
  for (size_t begin = 0; begin < text->size();) {
    size_t end = text->find('\n', begin);
    if (end == std::string::npos) end = text->size();
    Json line = Json::parse(text->begin() + static_cast<ptrdiff_t>(begin),
                            text->begin() + static_cast<ptrdiff_t>(end),
                            nullptr, /*allow_exceptions=*/false);
    if (line.is_object()) lines.push_back(std::move(line));
    begin = end + 1;
  }
  return lines;
}

Status cut_metrics(const std::string& path, int64_t step,
                   int64_t evaluated_step) {
  auto lines = read_metrics(path);
  if (!lines.ok()) {
    return lines.status().code() == StatusCode::kNotFound ? Status()
                                                          : lines.status();
  }
  std::string kept;
  if (step < 0) lines->clear();
  for (const Json& line : *lines) {
    const auto at = line.find("step");
    const auto type = line.find("type");
    const bool is_eval = type != line.end() && *type == "eval";
    if (at != line.end() && at->is_number_integer() &&
        at->get<int64_t>() > (is_eval ? evaluated_step : step)) {
      continue;
    }
    kept += line.dump() + "\n";
  }
  return write_file_atomically(path, kept);
}

}  // namespace cosformer::train_internal
