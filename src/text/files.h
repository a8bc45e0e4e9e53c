// Whole files, read with a limit and written so that nothing is ever
// half-written. Lives at the bottom of what touches the disk; the public
// functions of cosformer/format.h are these.
#ifndef COSFORMER_SRC_TEXT_FILES_H_
#define COSFORMER_SRC_TEXT_FILES_H_

#include <cstddef>
#include <string>
#include <string_view>

#include "cosformer/base.h"

namespace cosformer::files {

// kNotFound for a missing file, kIoError when the system refuses,
// kInvalidArgument for a folder, another special file or one above max_bytes.
Result<std::string> read(const std::string& path, size_t max_bytes);
// Temporary neighbour, write, fsync, rename, fsync of the folder.
Status write_atomically(const std::string& path, std::string_view content);
// fsync of a folder.
Status sync_folder(const std::string& path);
// Creates a folder and its parents; one that exists is fine.
Status make_folders(const std::string& path);
// "No such file or directory" for ENOENT, and so on (thread-safe).
std::string errno_text(int error);
// The folder that holds path ("." for a bare name).
std::string parent_of(const std::string& path);

// A file that appears under its name whole, or not at all: bytes go to a
// temporary neighbour with a name of its own (so two writers never share one),
// which commit() makes durable and renames. Without commit() the destructor
// removes it, and what a killed writer left goes with the next create(). An
// error leaves an existing file of that name as it was.
class AtomicFile {
 public:
  static Result<AtomicFile> create(const std::string& path);
  AtomicFile(AtomicFile&& other) noexcept;
  AtomicFile& operator=(AtomicFile&& other) noexcept;
  ~AtomicFile();

  // expected_bytes: the size of the whole file, for error messages; 0 =
  // unknown.
  void expect(size_t bytes) { expected_ = bytes; }
  Status append(const void* data, size_t bytes);
  // Overwrites bytes already appended.
  Status overwrite(size_t offset, const void* data, size_t bytes);
  // Nothing can be appended afterwards.
  Status commit();
  const std::string& temporary() const { return temporary_; }

 private:
  AtomicFile() = default;
  void discard();
  Status failure(const char* what, int error);

  std::string path_, temporary_;
  int fd_ = -1;
  size_t written_ = 0, expected_ = 0;
};

}  // namespace cosformer::files

#endif  // COSFORMER_SRC_TEXT_FILES_H_
