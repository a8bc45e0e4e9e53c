// A regular file mapped read-only.
#ifndef COSFORMER_SRC_FORMAT_MAPPED_FILE_H_
#define COSFORMER_SRC_FORMAT_MAPPED_FILE_H_

#include <cstddef>
#include <string>
#include <string_view>

#include "cosformer/base.h"

namespace cosformer {

// Another process that shortens the file while it is mapped breaks the mapping
// (SIGBUS, as for every mapped file); files of this library are replaced by
// rename, never rewritten in place.
class MappedFile {
 public:
  // kNotFound, kIoError or, for a folder or a device, kInvalidArgument.
  static Result<MappedFile> open(const std::string& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  std::string_view bytes() const { return {data_, size_}; }

 private:
  MappedFile() = default;
  const char* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace cosformer

#endif  // COSFORMER_SRC_FORMAT_MAPPED_FILE_H_
