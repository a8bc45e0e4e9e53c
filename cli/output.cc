#include "cli/output.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>

#include "cosformer/kernels.h"

namespace cosformer::cli {
namespace {

int output_errno = 0;

// False with errno on failure.
bool write_all(int file, std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = ::write(file, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return false;
    text.remove_prefix(static_cast<size_t>(n));
  }
  return true;
}

}  // namespace

bool write_out(std::string_view text) {
  if (output_errno != 0) return false;
  if (!write_all(STDOUT_FILENO, text)) output_errno = errno;
  return output_errno == 0;
}

int check_output() {
  if (output_errno == 0) return kDone;
  return fail(io_error("stdout: cannot write: ", strerror(output_errno),
                       output_errno == ENOSPC
                           ? ": free some space, or write elsewhere"
                           : ": the reader must stay until the end"));
}

void note(std::string_view message) {
  // Where stderr is closed too there is nobody left to tell.
  (void)write_all(STDERR_FILENO, str_cat(message, "\n"));
}

int fail(const Status& error, int status) {
  std::string line = str_cat("cosformer: ", error.message());
  while (!line.empty() && (line.back() == '\n' || line.back() == ' ')) {
    line.pop_back();
  }
  std::replace(line.begin(), line.end(), '\n', ' ');
  note(line);
  return status;
}

std::string duration(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) return "?";
  const auto total = static_cast<int64_t>(seconds + 0.5);
  const auto two = [](int64_t n) { return str_cat(n < 10 ? "0" : "", n); };
  if (total < 60) return str_cat(total, "s");
  if (total < 3600) return str_cat(total / 60, "m", two(total % 60), "s");
  return str_cat(total / 3600, "h", two(total / 60 % 60), "m");
}

std::string machine(int threads) {
  return str_cat(active_isa(), ", ", threads,
                 threads == 1 ? " thread" : " threads");
}

}  // namespace cosformer::cli
