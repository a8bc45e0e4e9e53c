#include "text/files.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <system_error>

namespace cosformer::files {
namespace {

// Writing past RLIMIT_FSIZE raises SIGXFSZ, which ends the process by default;
// blocked for this thread, the write fails with EFBIG and becomes an error.
class BlockFileSizeSignal {
 public:
  BlockFileSizeSignal() {
    sigemptyset(&set_);
    sigaddset(&set_, SIGXFSZ);
    blocked_ = pthread_sigmask(SIG_BLOCK, &set_, &before_) == 0;
  }
  ~BlockFileSizeSignal() {
    if (!blocked_) return;
    if (!sigismember(&before_, SIGXFSZ)) {
      const timespec no_wait{};
      while (sigtimedwait(&set_, nullptr, &no_wait) == -1 && errno == EINTR) {
      }
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

 private:
  sigset_t set_, before_;
  bool blocked_ = false;
};

struct Descriptor {
  int fd = -1;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

// Largest single write: above it Linux cuts a write short anyway.
constexpr size_t kMaxWrite = size_t{1} << 30;

// 0, or errno; *done counts what was written.
int write_all(int fd, const char* data, size_t bytes, off_t offset, bool at,
              size_t* done) {
  const BlockFileSizeSignal block;
  *done = 0;
  while (*done < bytes) {
    const size_t part = std::min(bytes - *done, kMaxWrite);
    const ssize_t n = at ? ::pwrite(fd, data + *done, part,
                                    offset + static_cast<off_t>(*done))
                         : ::write(fd, data + *done, part);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n < 0 ? errno : EIO;
    *done += static_cast<size_t>(n);
  }
  return 0;
}

Status open_error(const char* verb, const std::string& path, int error) {
  if (error == ENOENT) {
    return not_found("cannot ", verb, " '", path, "': ", errno_text(error));
  }
  return io_error("cannot ", verb, " '", path, "': ", errno_text(error));
}

}  // namespace

std::string errno_text(int error) {
  return std::generic_category().message(error);
}

std::string parent_of(const std::string& path) {
  const size_t slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

Result<std::string> read(const std::string& path, size_t max_bytes) {
  Descriptor file;
  // O_NONBLOCK: opening a pipe that nobody writes to must not hang.
  file.fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file.fd < 0) return open_error("read", path, errno);
  struct stat info{};
  if (::fstat(file.fd, &info) != 0) return open_error("read", path, errno);
  if (S_ISDIR(info.st_mode)) {
    return invalid_argument("cannot read '", path,
                            "': it is a folder, expected a file");
  }
  if (!S_ISREG(info.st_mode)) {
    return invalid_argument("cannot read '", path,
                            "': it is a device or a pipe, expected a file");
  }
  const size_t size = static_cast<size_t>(info.st_size);
  if (size > max_bytes) {
    return invalid_argument("cannot read '", path, "': it has ", size,
                            " bytes, expected at most ", max_bytes);
  }
  std::string content(size, '\0');
  size_t done = 0;
  while (done < size) {
    const ssize_t n = ::read(file.fd, content.data() + done, size - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return open_error("read", path, errno);
    if (n == 0) break;  // it became shorter since fstat
    done += static_cast<size_t>(n);
  }
  content.resize(done);
  return content;
}

Status sync_folder(const std::string& path) {
  Descriptor folder;
  folder.fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECTORY);
  if (folder.fd < 0) return open_error("open the folder", path, errno);
  // Some file systems have no fsync for folders: then there is nothing to do.
  if (::fsync(folder.fd) != 0 && errno != EINVAL && errno != EROFS) {
    return io_error("cannot sync the folder '", path, "': ", errno_text(errno));
  }
  return {};
}

Status make_folders(const std::string& path) {
  if (path.empty()) return invalid_argument("a folder's name is empty");
  for (size_t end = 1; end <= path.size(); ++end) {
    if (end < path.size() && path[end] != '/') continue;
    const std::string part = path.substr(0, end);
    if (::mkdir(part.c_str(), 0777) == 0) continue;
    const int error = errno;
    struct stat info{};
    if (::stat(part.c_str(), &info) == 0) {
      if (S_ISDIR(info.st_mode)) continue;
      return io_error("cannot create the folder '", path, "': '", part,
                      "' is a file");
    }
    return io_error("cannot create the folder '", part,
                    "': ", errno_text(error));
  }
  return {};
}

namespace {

// "model.123-4.tmp" is a temporary of "model".
bool is_temporary_of(std::string_view name, std::string_view base) {
  constexpr std::string_view kEnd = ".tmp";
  if (name.size() <= base.size() + 1 + kEnd.size() || !name.starts_with(base) ||
      name[base.size()] != '.' || !name.ends_with(kEnd)) {
    return false;
  }
  name.remove_prefix(base.size() + 1);
  name.remove_suffix(kEnd.size());
  return name.find_first_not_of("0123456789-") == std::string_view::npos;
}

// A writer that was killed leaves its temporary behind, perhaps gigabytes. A
// living one holds a lock on it, which the system drops with the process.
void remove_abandoned(const std::string& path) {
  const std::string folder = parent_of(path);
  const size_t slash = path.find_last_of('/');
  const std::string base =
      slash == std::string::npos ? path : path.substr(slash + 1);
  std::error_code error;
  for (std::filesystem::directory_iterator it(folder, error), end;
       !error && it != end; it.increment(error)) {
    if (!is_temporary_of(it->path().filename().string(), base)) continue;
    const std::string name = it->path().string();
    Descriptor file;
    file.fd = ::open(name.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file.fd >= 0 && ::flock(file.fd, LOCK_EX | LOCK_NB) == 0) {
      ::unlink(name.c_str());
    }
  }
}

}  // namespace

Result<AtomicFile> AtomicFile::create(const std::string& path) {
  static std::atomic<uint64_t> counter{0};
  AtomicFile file;
  file.path_ = path;
  struct stat info{};
  if (path.empty() || path.back() == '/' ||
      (::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode))) {
    return invalid_argument("cannot write '", path,
                            "': it is a folder, expected a file name");
  }
  // A device (/dev/full, /dev/null) must not be renamed over.
  if (::stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode)) {
    return invalid_argument("cannot write '", path,
                            "': it is a device or a pipe, expected a file");
  }
  remove_abandoned(path);
  for (int attempt = 0; attempt < 100; ++attempt) {
    file.temporary_ =
        str_cat(path, ".", ::getpid(), "-", counter.fetch_add(1), ".tmp");
    file.fd_ = ::open(file.temporary_.c_str(),
                      O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (file.fd_ < 0) {
      if (errno == EEXIST) continue;  // left by a process of the same id
      break;
    }
    // Where a file system has no locks nothing is taken for abandoned.
    const bool locked = ::flock(file.fd_, LOCK_EX | LOCK_NB) == 0;
    // Another writer may have seen it before it was locked, and removed it.
    if (locked && ::fstat(file.fd_, &info) == 0 && info.st_nlink > 0) {
      return file;
    }
    if (!locked && errno != EWOULDBLOCK) return file;
    ::close(file.fd_);
    file.fd_ = -1;
    errno = EBUSY;
  }
  const int error = errno;
  file.temporary_.clear();
  return io_error("cannot write '", path, "' in folder '", parent_of(path),
                  "': ", errno_text(error));
}

AtomicFile::AtomicFile(AtomicFile&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_(std::move(other.temporary_)),
      fd_(other.fd_),
      written_(other.written_),
      expected_(other.expected_) {
  other.fd_ = -1;
  other.temporary_.clear();
}

AtomicFile& AtomicFile::operator=(AtomicFile&& other) noexcept {
  if (this == &other) return *this;
  discard();
  path_ = std::move(other.path_);
  temporary_ = std::move(other.temporary_);
  fd_ = other.fd_;
  written_ = other.written_;
  expected_ = other.expected_;
  other.fd_ = -1;
  other.temporary_.clear();
  return *this;
}

AtomicFile::~AtomicFile() { discard(); }

void AtomicFile::discard() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
  temporary_.clear();
}

Status AtomicFile::failure(const char* what, int error) {
  discard();
  struct stat info{};
  const bool old = ::lstat(path_.c_str(), &info) == 0;
  const std::string of =
      expected_ > 0 ? str_cat(" of ", expected_) : std::string();
  return io_error(
      "cannot ", what, " '", path_, "': ", errno_text(error), " after ",
      written_, of, " bytes; ",
      old ? "the file that was there is unchanged" : "nothing was left behind");
}

Status AtomicFile::append(const void* data, size_t bytes) {
  if (fd_ < 0) return io_error("cannot write '", path_, "': it is closed");
  size_t done = 0;
  const int error =
      write_all(fd_, static_cast<const char*>(data), bytes, 0, false, &done);
  written_ += done;
  return error == 0 ? Status() : failure("write", error);
}

Status AtomicFile::overwrite(size_t offset, const void* data, size_t bytes) {
  if (fd_ < 0) return io_error("cannot write '", path_, "': it is closed");
  size_t done = 0;
  const int error = write_all(fd_, static_cast<const char*>(data), bytes,
                              static_cast<off_t>(offset), true, &done);
  return error == 0 ? Status() : failure("write", error);
}

Status AtomicFile::commit() {
  if (fd_ < 0) return io_error("cannot write '", path_, "': it is closed");
  if (::fsync(fd_) != 0) return failure("sync", errno);
  // Some file systems report a full disk only here.
  const int fd = fd_;
  fd_ = -1;
  if (::close(fd) != 0) return failure("close", errno);
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) {
    return failure("rename the finished file to", errno);
  }
  temporary_.clear();
  return sync_folder(parent_of(path_));
}

Status write_atomically(const std::string& path, std::string_view content) {
  Result<AtomicFile> file = AtomicFile::create(path);
  if (!file.ok()) return file.status();
  file->expect(content.size());
  COSFORMER_RETURN_IF_ERROR(file->append(content.data(), content.size()));
  return file->commit();
}

}  // namespace cosformer::files
