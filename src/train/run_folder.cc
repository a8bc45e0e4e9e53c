#include "train/run_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "cosformer/format.h"

namespace cosformer::train_internal {
namespace {

namespace fs = std::filesystem;

constexpr const char* kLock = ".lock";
constexpr const char* kTemporary = ".tmp";

// N of "step-N", or -1.
int64_t step_of(const std::string& name) {
  const std::string prefix = "step-";
  if (name.rfind(prefix, 0) != 0) return -1;
  const std::string digits = name.substr(prefix.size());
  if (digits.empty() || digits.size() > 18 ||
      digits.find_first_not_of("0123456789") != std::string::npos) {
    return -1;
  }
  return std::stoll(digits);
}

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() &&
         text.compare(text.size() - end.size(), end.size(), end) == 0;
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end;
       it.increment(error)) {
    names.push_back(it->path().filename().string());
  }
  return names;
}

Status remove_all(const std::string& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) return io_error(path, ": cannot delete: ", error.message());
  return {};
}

// Everything under a folder, and the folder, on the disk.
Status sync_tree(const std::string& folder) {
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end;
       it.increment(error)) {
    if (!it->is_regular_file()) continue;
    const int file = ::open(it->path().c_str(), O_RDONLY | O_CLOEXEC);
    const bool ok = file >= 0 && ::fsync(file) == 0;
    const int reason = errno;
    if (file >= 0) ::close(file);
    if (!ok) {
      return io_error(it->path().string(), ": cannot sync: ", strerror(reason));
    }
  }
  if (error) return io_error(folder, ": cannot read: ", error.message());
  return sync_folder(folder);
}

// Puts a folder in another's place at once, where the file system can: then
// there is no moment without one. The old one goes when that is on the disk.
Status swap_in(const std::string& from, const std::string& to) {
  const std::string parent = fs::path(to).parent_path().string();
  if (::rename(from.c_str(), to.c_str()) == 0) return sync_folder(parent);
  std::string old = from;
  bool done = false;
  if (errno == EEXIST || errno == ENOTEMPTY) {
    done = ::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(),
                       RENAME_EXCHANGE) == 0;
    if (!done && (errno == EINVAL || errno == ENOSYS)) {
      old = to + ".old" + kTemporary;
      COSFORMER_RETURN_IF_ERROR(remove_all(old));
      done = ::rename(to.c_str(), old.c_str()) == 0 &&
             ::rename(from.c_str(), to.c_str()) == 0;
    }
  }
  if (!done) {
    return io_error(from, ": cannot rename to ", to, ": ", strerror(errno));
  }
  COSFORMER_RETURN_IF_ERROR(sync_folder(parent));
  return remove_all(old);
}

Result<int> take_lock(const std::string& folder) {
  const std::string path = folder + "/" + kLock;
  for (;;) {
    const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (file < 0) {
      return io_error(path, ": cannot write: ", strerror(errno),
                      ": choose an --out folder that you may write to");
    }
    if (::flock(file, LOCK_EX | LOCK_NB) != 0) {
      const int reason = errno;
      ::close(file);
      if (reason == EWOULDBLOCK) {
        return invalid_argument(
            folder,
            ": another training writes to this folder now: wait for it, stop "
            "it, or choose another --out");
      }
      return io_error(path, ": cannot lock: ", strerror(reason));
    }
    // The last owner may have deleted the file between open and lock.
    struct stat by_file{}, by_name{};
    if (::fstat(file, &by_file) == 0 && ::stat(path.c_str(), &by_name) == 0 &&
        by_file.st_ino == by_name.st_ino) {
      return file;
    }
    ::close(file);
  }
}

}  // namespace

Result<RunFolder> RunFolder::open(const std::string& path, bool resume) {
  std::error_code error;
  if (fs::exists(path, error) && !fs::is_directory(path, error)) {
    return invalid_argument(path, ": a file has this name, expected a folder ",
                            "for the run: choose another --out");
  }
  const bool created = fs::create_directories(path, error);
  if (error) {
    return io_error(path, ": cannot create this folder: ", error.message(),
                    ": choose another --out");
  }
  auto lock = take_lock(path);
  if (!lock.ok()) return lock.status();
  RunFolder run(path, *lock, created);
  const bool holds_run = fs::exists(run.file("config.toml")) ||
                         fs::exists(run.file("metrics.jsonl")) ||
                         !run.steps().empty();
  if (holds_run && !resume) {
    const int64_t last = run.linked_step("last");
    return invalid_argument(
        path, ": holds a run already",
        last >= 0 ? str_cat(" (saved at step ", last, ")") : std::string(),
        ": go on with it by --resume, or choose another --out");
  }
  COSFORMER_RETURN_IF_ERROR(run.clean());
  COSFORMER_RETURN_IF_ERROR(run.restore_last());
  return run;
}

RunFolder::RunFolder(RunFolder&& other) noexcept
    : path_(std::move(other.path_)),
      lock_(std::exchange(other.lock_, -1)),
      created_(other.created_) {}

RunFolder::~RunFolder() {
  if (lock_ < 0) return;
  ::unlink(file(kLock).c_str());
  if (created_) {
    for (const auto& folder : {checkpoints(), file("cache"), path_}) {
      ::rmdir(folder.c_str());  // only where empty
    }
  }
  ::close(lock_);
}

std::string RunFolder::checkpoint(int64_t step) const {
  return str_cat(checkpoints(), "/step-", step);
}

int64_t RunFolder::linked_step(const std::string& link) const {
  std::error_code error;
  const auto target = fs::read_symlink(checkpoints() + "/" + link, error);
  if (error) return -1;
  const int64_t step = step_of(target.filename().string());
  return step >= 0 && fs::is_directory(checkpoint(step), error) ? step : -1;
}

std::vector<int64_t> RunFolder::steps() const {
  std::vector<int64_t> steps;
  for (const std::string& name : names_in(checkpoints())) {
    if (const int64_t step = step_of(name); step >= 0) steps.push_back(step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

Status RunFolder::clean() const {
  for (const std::string& name : names_in(checkpoints())) {
    if (ends_with(name, kTemporary)) {
      COSFORMER_RETURN_IF_ERROR(remove_all(checkpoints() + "/" + name));
    }
  }
  return {};
}

Status RunFolder::save(
    int64_t step, bool is_best,
    const std::function<Status(const std::string& folder)>& write) {
  const std::string target = checkpoint(step);
  const std::string temporary = target + kTemporary;
  std::error_code error;
  fs::create_directories(checkpoints(), error);
  if (!error) {
    fs::remove_all(temporary, error);
    if (!error) fs::create_directory(temporary, error);
  }
  if (error) {
    return io_error(temporary, ": cannot create: ", error.message());
  }
  Status status = write(temporary);
  if (status.ok()) status = sync_tree(temporary);
  if (status.ok()) status = swap_in(temporary, target);
  if (!status.ok()) {
    fs::remove_all(temporary, error);
    return status;
  }
  COSFORMER_RETURN_IF_ERROR(link("last", step));
  return is_best ? link("best", step) : Status();
}

Status RunFolder::link(const std::string& name, int64_t step) {
  const std::string path = checkpoints() + "/" + name;
  const std::string temporary = path + kTemporary;
  const std::string target = str_cat("step-", step);
  // A copy that followed the link left a folder here.
  const std::string copy = path + ".copy" + kTemporary;
  std::error_code error;
  const bool is_copy = fs::is_directory(fs::symlink_status(path, error));
  ::unlink(temporary.c_str());
  if (::symlink(target.c_str(), temporary.c_str()) != 0 ||
      (is_copy && ::rename(path.c_str(), copy.c_str()) != 0) ||
      ::rename(temporary.c_str(), path.c_str()) != 0) {
    return io_error(path, ": cannot link to ", target, ": ", strerror(errno));
  }
  COSFORMER_RETURN_IF_ERROR(sync_folder(checkpoints()));
  return is_copy ? remove_all(copy) : Status();
}

// A run that was copied without its links, or killed before the first one, has
// checkpoints all the same: a folder called step-N is always complete.
Status RunFolder::restore_last() {
  if (linked_step("last") >= 0) return {};
  const std::vector<int64_t> found = steps();
  if (!found.empty()) return link("last", found.back());
  const std::string last = checkpoints() + "/last";
  if (!fs::is_directory(last)) return {};
  return invalid_argument(
      last,
      ": found a folder and no step-N beside it, expected a link to one: "
      "rename it to step-N, N the step in its training_state.json");
}

Status RunFolder::remove(int64_t step) const {
  // Under another name first: a folder called step-N is always complete.
  const std::string path = checkpoint(step);
  const std::string doomed = path + kTemporary;
  COSFORMER_RETURN_IF_ERROR(remove_all(doomed));
  if (::rename(path.c_str(), doomed.c_str()) != 0) {
    return io_error(path, ": cannot delete: ", strerror(errno));
  }
  return remove_all(doomed);
}

Status RunFolder::retain(int64_t keep) {
  const int64_t last = linked_step("last"), best = linked_step("best");
  std::vector<int64_t> others;
  for (const int64_t step : steps()) {
    if (step != best) others.push_back(step);
  }
  const auto spare = static_cast<int64_t>(others.size()) - keep;
  for (int64_t i = 0; i < spare; ++i) {
    const int64_t step = others[static_cast<size_t>(i)];
    if (step != last) COSFORMER_RETURN_IF_ERROR(remove(step));
  }
  return {};
}

Status RunFolder::drop_after(int64_t step) {
  for (const int64_t later : steps()) {
    if (later <= step || later == linked_step("best")) continue;
    COSFORMER_RETURN_IF_ERROR(remove(later));
  }
  return {};
}

}  // namespace cosformer::train_internal
