// The files that a data set is made of, and their text as one.
#ifndef COSFORMER_SRC_DATA_SOURCES_H_
#define COSFORMER_SRC_DATA_SOURCES_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cosformer/base.h"
#include "text/characters.h"

namespace cosformer {

struct Source {
  std::string path;
  int64_t size = 0;      // bytes
  int64_t mtime_ns = 0;  // last modification
  bool skipped = false;  // a binary file in a folder
  bool operator==(const Source&) const = default;
};

// A file as it is, or a folder's files below it by name, hidden ones left out,
// those with one of the extensions (none given: all). Symbolic links to folders
// are not followed. Errors name the path and what to do.
Result<std::vector<Source>> find_sources(
    const std::string& path, const std::vector<std::string>& extensions);

// Sizes and times anew; an error names a file that changed.
Status check_unchanged(const std::vector<Source>& sources);

// The text of the sources that are not skipped, one after the other.
class SourceText {
 public:
  explicit SourceText(const std::vector<Source>& sources);
  SourceText(const SourceText&) = delete;
  SourceText& operator=(const SourceText&) = delete;
  ~SourceText();

  int64_t size() const { return size_; }
  // Bytes [begin, begin + count), count > 0 and in range.
  Status read(int64_t begin, int64_t count, std::string* out);
  // Which file byte `at` lies in, and where in it.
  struct Place {
    std::string path;
    int64_t offset = 0;
  };
  Place place(int64_t at) const;
  // The largest n <= at that does not cut a character.
  Result<int64_t> character_boundary(int64_t at);

 private:
  struct Part {
    std::string path;
    int64_t begin = 0, size = 0;
  };
  size_t part_of(int64_t at) const;

  std::vector<Part> parts_;  // none empty
  int64_t size_ = 0;
  int fd_ = -1;  // of parts_[open_]
  size_t open_ = 0;
};

// What makes a file binary: a NUL byte; with utf8 also bytes that are
// not UTF-8.
struct ScanOptions {
  bool utf8 = false;
  bool skip_binary = false;  // mark such files; else they are an error
};
// Reads every file once, marks or refuses binary ones, and collects the
// characters of the others. progress: bytes read.
Status scan_sources(const ScanOptions& options, std::vector<Source>* sources,
                    CharacterCollector* characters,
                    const std::function<void(int64_t)>& progress);

}  // namespace cosformer

#endif  // COSFORMER_SRC_DATA_SOURCES_H_
