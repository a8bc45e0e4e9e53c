#include "format/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "text/files.h"

namespace cosformer {

Result<MappedFile> MappedFile::open(const std::string& path) {
  const auto failure = [&path](int error) -> Status {
    const std::string message =
        str_cat("cannot read '", path, "': ", files::errno_text(error));
    return Status(
        error == ENOENT ? StatusCode::kNotFound : StatusCode::kIoError,
        message);
  };
  // O_NONBLOCK: opening a pipe that nobody writes to must not hang.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return failure(errno);
  struct stat info{};
  if (::fstat(fd, &info) != 0) {
    const int error = errno;
    ::close(fd);
    return failure(error);
  }
  if (!S_ISREG(info.st_mode)) {
    ::close(fd);
    return invalid_argument(
        "cannot read '", path, "': it is a ",
        S_ISDIR(info.st_mode) ? "folder" : "device or a pipe",
        ", expected a file");
  }
  MappedFile file;
  const size_t size = static_cast<size_t>(info.st_size);
  if (size > 0) {
    void* data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (data == MAP_FAILED) {
      const int error = errno;
      ::close(fd);
      return failure(error);
    }
    file.data_ = static_cast<const char*>(data);
    file.size_ = size;
  }
  ::close(fd);
  return file;
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<char*>(data_), size_);
}

}  // namespace cosformer
