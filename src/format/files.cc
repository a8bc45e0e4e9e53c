#include "text/files.h"

#include "cosformer/format.h"

namespace cosformer {

Result<std::string> read_file(const std::string& path, size_t max_bytes) {
  return files::read(path, max_bytes);
}

Status write_file_atomically(const std::string& path,
                             std::string_view content) {
  return files::write_atomically(path, content);
}

Status sync_folder(const std::string& path) { return files::sync_folder(path); }

}  // namespace cosformer
