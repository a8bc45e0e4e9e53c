// A run's folder on disk: the lock, the checkpoints and their links.
#ifndef COSFORMER_SRC_TRAIN_RUN_FOLDER_H_
#define COSFORMER_SRC_TRAIN_RUN_FOLDER_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cosformer/base.h"

namespace cosformer::train_internal {

// Held by one training at a time, through a lock that the system drops when the
// process ends, however it ends.
class RunFolder {
 public:
  // Creates the folder, takes the lock and cleans what an interrupted save left
  // behind; where `last` is gone, the newest checkpoint takes its place. A
  // folder that holds a run is refused unless resume is set.
  static Result<RunFolder> open(const std::string& path, bool resume);
  RunFolder(RunFolder&& other) noexcept;
  RunFolder& operator=(RunFolder&&) = delete;
  // Gives the lock back; a folder that open() made and in which nothing was
  // begun is removed.
  ~RunFolder();

  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }
  std::string checkpoints() const { return path_ + "/checkpoints"; }
  std::string checkpoint(int64_t step) const;

  // The step that a link ("last", "best") stands for, or -1.
  int64_t linked_step(const std::string& link) const;
  // Steps of all complete checkpoints, ascending.
  std::vector<int64_t> steps() const;

  // Runs write(folder) on step-N.tmp/, makes it durable, renames it to step-N
  // and swaps `last`, and `best` if wanted, to it. What was there before stays
  // until then; a failed write leaves nothing behind.
  Status save(int64_t step, bool is_best,
              const std::function<Status(const std::string& folder)>& write);
  Status link(const std::string& name, int64_t step);
  // Deletes all but the newest `keep` checkpoints; never what a link stands
  // for.
  Status retain(int64_t keep);
  // Deletes checkpoints later than `step`: saved, but not linked, by a process
  // that was killed in between.
  Status drop_after(int64_t step);

 private:
  RunFolder(std::string path, int lock, bool created)
      : path_(std::move(path)), lock_(lock), created_(created) {}
  Status clean() const;
  Status restore_last();
  Status remove(int64_t step) const;
  std::string path_;
  int lock_;
  bool created_;
};

}  // namespace cosformer::train_internal

#endif  // COSFORMER_SRC_TRAIN_RUN_FOLDER_H_
