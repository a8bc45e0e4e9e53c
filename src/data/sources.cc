#include "data/sources.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "text/files.h"
#include "text/utf8.h"

namespace cosformer {
namespace {

namespace fs = std::filesystem;

// How much is read at a time.
constexpr size_t kReadBytes = size_t{1} << 20;

Status cannot_read(const std::string& path, int error) {
  return io_error("cannot read '", path, "': ", files::errno_text(error));
}

bool is_wanted(const fs::path& name,
               const std::vector<std::string>& extensions) {
  if (extensions.empty()) return true;
  const std::string suffix = name.extension().string();
  return std::any_of(
      extensions.begin(), extensions.end(), [&](const std::string& e) {
        return e == suffix || (!e.empty() && e[0] != '.' && "." + e == suffix);
      });
}

std::string listed(const std::vector<std::string>& extensions) {
  std::string out;
  for (const std::string& e : extensions) {
    if (!out.empty()) out += ", ";
    out += "'" + e + "'";
  }
  return out;
}

bool stat_source(const std::string& path, Source* source, mode_t* mode) {
  struct stat info{};
  if (::stat(path.c_str(), &info) != 0) return false;
  source->path = path;
  source->size = info.st_size;
  source->mtime_ns =
      int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec;
  *mode = info.st_mode;
  return true;
}

Status walk(const fs::path& folder, const std::vector<std::string>& extensions,
            std::vector<Source>* out) {
  std::error_code error;
  std::vector<fs::path> entries;
  for (fs::directory_iterator it(folder, error), end; !error && it != end;
       it.increment(error)) {
    entries.push_back(it->path());
  }
  if (error) return cannot_read(folder.string(), error.value());
  std::sort(entries.begin(), entries.end());
  for (const fs::path& entry : entries) {
    if (entry.filename().string().starts_with('.')) continue;
    std::error_code ignored;
    if (fs::is_directory(fs::symlink_status(entry, ignored))) {
      COSFORMER_RETURN_IF_ERROR(walk(entry, extensions, out));
      continue;
    }
    Source source;
    mode_t mode = 0;
    // A link to nothing, a pipe, a socket: not text.
    if (!stat_source(entry.string(), &source, &mode) || !S_ISREG(mode)) {
      continue;
    }
    if (is_wanted(entry.filename(), extensions)) {
      out->push_back(std::move(source));
    }
  }
  return {};
}

}  // namespace

Result<std::vector<Source>> find_sources(
    const std::string& path, const std::vector<std::string>& extensions) {
  if (path.empty()) {
    return invalid_argument(
        "data.path is empty, expected a text file or a folder of them");
  }
  Source source;
  mode_t mode = 0;
  if (!stat_source(path, &source, &mode)) {
    const int error = errno;
    if (error == ENOENT || error == ENOTDIR) {
      return not_found("data.path: there is no '", path,
                       "': expected a text file or a folder of them (a "
                       "relative path starts at the working directory)");
    }
    return cannot_read(path, error);
  }
  std::vector<Source> sources;
  if (S_ISREG(mode)) {
    if (source.size == 0) {
      return invalid_argument("data.path: the file '", path,
                              "' is empty: choose one with text");
    }
    sources.push_back(std::move(source));
    return sources;
  }
  if (!S_ISDIR(mode)) {
    return invalid_argument("data.path: '", path,
                            "' is a device or a pipe, expected a text file or "
                            "a folder of them");
  }
  COSFORMER_RETURN_IF_ERROR(walk(path, extensions, &sources));
  if (sources.empty()) {
    return not_found("data.path: the folder '", path, "' has no file",
                     extensions.empty()
                         ? ": choose one with text files"
                         : " with an extension of " + listed(extensions) +
                               ": change data.extensions (\"\" stands for "
                               "files without one)");
  }
  const bool all_empty =
      std::all_of(sources.begin(), sources.end(),
                  [](const Source& s) { return s.size == 0; });
  if (all_empty) {
    return invalid_argument("data.path: all ", sources.size(),
                            " files of the folder '", path,
                            "' are empty: choose one with text");
  }
  return sources;
}

Status check_unchanged(const std::vector<Source>& sources) {
  for (const Source& source : sources) {
    Source now;
    mode_t mode = 0;
    if (!stat_source(source.path, &now, &mode) || now.size != source.size ||
        now.mtime_ns != source.mtime_ns) {
      return data_loss("'", source.path,
                       "' changed while it was read: run again");
    }
  }
  return {};
}

SourceText::SourceText(const std::vector<Source>& sources) {
  for (const Source& source : sources) {
    if (source.skipped || source.size == 0) continue;
    parts_.push_back({source.path, size_, source.size});
    size_ += source.size;
  }
}

SourceText::~SourceText() {
  if (fd_ >= 0) ::close(fd_);
}

size_t SourceText::part_of(int64_t at) const {
  const auto after = std::upper_bound(
      parts_.begin(), parts_.end(), at,
      [](int64_t value, const Part& part) { return value < part.begin; });
  return static_cast<size_t>(after - parts_.begin()) - 1;
}

SourceText::Place SourceText::place(int64_t at) const {
  const Part& part = parts_[part_of(at)];
  return {part.path, at - part.begin};
}

Status SourceText::read(int64_t begin, int64_t count, std::string* out) {
  out->resize(static_cast<size_t>(count));
  int64_t done = 0;
  size_t index = part_of(begin);
  while (done < count) {
    const Part& part = parts_[index];
    if (fd_ < 0 || open_ != index) {
      if (fd_ >= 0) ::close(fd_);
      fd_ = ::open(part.path.c_str(), O_RDONLY | O_CLOEXEC);
      if (fd_ < 0) return cannot_read(part.path, errno);
      open_ = index;
    }
    const int64_t offset = begin + done - part.begin;
    const int64_t wanted = std::min(count - done, part.size - offset);
    const ssize_t n =
        ::pread(fd_, out->data() + done, static_cast<size_t>(wanted), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return cannot_read(part.path, errno);
    if (n == 0) {
      return data_loss("'", part.path,
                       "' became shorter while it was read: "
                       "run again");
    }
    done += n;
    if (offset + n == part.size) ++index;
  }
  return {};
}

Result<int64_t> SourceText::character_boundary(int64_t at) {
  if (at <= 0 || at >= size_) return std::clamp<int64_t>(at, 0, size_);
  const int64_t begin = std::max<int64_t>(0, at - 3);
  std::string around;
  COSFORMER_RETURN_IF_ERROR(read(begin, at - begin + 1, &around));
  for (int64_t i = at; i >= begin; --i) {
    const auto byte =
        static_cast<unsigned char>(around[static_cast<size_t>(i - begin)]);
    if ((byte & 0xC0) != 0x80) return i;
  }
  return at;  // not UTF-8 here: any place is as good
}

namespace {

// Why a file is binary, or "".
Result<std::string> scan_file(const Source& source, const ScanOptions& options,
                              CharacterCollector* characters,
                              const std::function<void(int64_t)>& progress) {
  std::vector<Source> one{source};
  one[0].skipped = false;
  SourceText text(one);
  std::string piece, rest;
  for (int64_t at = 0; at < text.size();) {
    const int64_t count =
        std::min<int64_t>(text.size() - at, int64_t{kReadBytes});
    COSFORMER_RETURN_IF_ERROR(text.read(at, count, &piece));
    const size_t nul = piece.find('\0');
    if (nul != std::string::npos) {
      return str_cat("it has a NUL byte at offset ",
                     at + static_cast<int64_t>(nul));
    }
    if (options.utf8) {
      const int64_t begin = at - static_cast<int64_t>(rest.size());
      rest += piece;
      // What the end of the piece cuts waits for the next one.
      const size_t whole =
          at + count == text.size() ? rest.size() : complete_utf8_prefix(rest);
      const Status status =
          characters->add(std::string_view(rest).substr(0, whole), begin);
      if (!status.ok()) return status.message();
      rest.erase(0, whole);
    }
    at += count;
    if (progress) progress(count);
  }
  return std::string();
}

}  // namespace

Status scan_sources(const ScanOptions& options, std::vector<Source>* sources,
                    CharacterCollector* characters,
                    const std::function<void(int64_t)>& progress) {
  CharacterCollector own;
  int64_t taken = 0;
  std::string first_reason;
  for (Source& source : *sources) {
    source.skipped = false;
    if (source.size == 0) continue;
    own.clear();
    const Result<std::string> reason =
        scan_file(source, options, &own, progress);
    if (!reason.ok()) return reason.status();
    if (reason->empty()) {
      characters->merge(own);
      taken += source.size;
      continue;
    }
    const std::string what =
        str_cat("'", source.path, "' is not a text file: ", *reason);
    if (!options.skip_binary) return invalid_argument("data.path: ", what);
    source.skipped = true;
    if (first_reason.empty()) first_reason = what;
  }
  if (taken == 0) {
    return invalid_argument("data.path: none of the ", sources->size(),
                            " files is text, e.g. ", first_reason);
  }
  return {};
}

}  // namespace cosformer
