#include "text/files.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>

#include <string>

#include "cosformer/format.h"
#include "tests/text/child_process.h"
#include "tests/text/temp_folder.h"

namespace cosformer {
namespace {

using testing::become_nobody;
using testing::ChildResult;
using testing::get;
using testing::limit_file_size;
using testing::mount_small_disk;
using testing::put;
using testing::run_in_child;
using testing::TempFolder;

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Files, ReadsWhatWasWritten) {
  const TempFolder folder;
  std::string bytes = "line\r\n";
  bytes += '\0';
  bytes += "\xff tail";
  ASSERT_TRUE(write_file_atomically(folder / "a", bytes).ok());
  const Result<std::string> back = read_file(folder / "a");
  ASSERT_TRUE(back.ok()) << back.status().message();
  EXPECT_EQ(*back, bytes);
  ASSERT_TRUE(write_file_atomically(folder / "a", "").ok());
  EXPECT_EQ(*read_file(folder / "a"), "");
  EXPECT_EQ(folder.entries(), 1);
}

TEST(Files, ReadErrorsNamePathAndReason) {
  const TempFolder folder;
  const Result<std::string> missing = read_file(folder / "none");
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.status().code(), StatusCode::kNotFound);
  EXPECT_TRUE(has(missing.status().message(), folder / "none"));
  EXPECT_TRUE(has(missing.status().message(), "No such file or directory"));

  const Result<std::string> is_folder = read_file(folder.path());
  ASSERT_FALSE(is_folder.ok());
  EXPECT_EQ(is_folder.status().code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(has(is_folder.status().message(), "is a folder"));

  put(folder / "big", std::string(100, 'x'));
  const Result<std::string> big = read_file(folder / "big", 99);
  ASSERT_FALSE(big.ok());
  EXPECT_TRUE(has(big.status().message(), "100"));
  EXPECT_TRUE(has(big.status().message(), "99"));
  EXPECT_TRUE(read_file(folder / "big", 100).ok());

  // A pipe without a writer must not hang.
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_FALSE(read_file(folder / "pipe").ok());
}

TEST(Files, PermissionErrors) {
  const TempFolder folder;
  put(folder / "secret", "old");
  ::chmod((folder / "secret").c_str(), 0600);
  ::chmod(folder.path().c_str(), 0555);
  const ChildResult read = run_in_child([&] {
    if (!become_nobody()) return std::string("cannot change the user");
    const Result<std::string> r = read_file(folder / "secret");
    return r.ok() ? "read it" : r.status().message();
  });
  if (::geteuid() == 0) {  // otherwise the file is the reader's own
    EXPECT_TRUE(has(read.text, "Permission denied")) << read.text;
    EXPECT_TRUE(has(read.text, folder / "secret")) << read.text;
  }
  const ChildResult write = run_in_child([&] {
    if (!become_nobody()) return std::string("cannot change the user");
    const Status s = write_file_atomically(folder / "secret", "new");
    return s.ok() ? "wrote it" : s.message();
  });
  EXPECT_TRUE(has(write.text, "Permission denied")) << write.text;
  EXPECT_TRUE(has(write.text, folder / "secret")) << write.text;
  ::chmod(folder.path().c_str(), 0755);
  EXPECT_EQ(get(folder / "secret"), "old");
  EXPECT_EQ(folder.entries(), 1);
}

TEST(Files, WriteIntoAMissingFolderOrOverAFolder) {
  const TempFolder folder;
  const Status missing = write_file_atomically(folder / "none/file", "x");
  EXPECT_FALSE(missing.ok());
  EXPECT_TRUE(has(missing.message(), folder / "none")) << missing.message();
  EXPECT_TRUE(has(missing.message(), "No such file")) << missing.message();
  EXPECT_FALSE(write_file_atomically(folder.path(), "x").ok());
  EXPECT_FALSE(write_file_atomically("", "x").ok());
  EXPECT_FALSE(write_file_atomically("/dev/full", "x").ok());
  EXPECT_EQ(folder.entries(), 0);
}

// A limit on file sizes raises SIGXFSZ; it must become an error, and the old
// file and the process must survive.
TEST(Files, FileSizeLimitLeavesTheOldFile) {
  const TempFolder folder;
  put(folder / "a", "old");
  const ChildResult child = run_in_child([&] {
    if (!limit_file_size(1000)) return std::string("cannot set the limit");
    const Status s =
        write_file_atomically(folder / "a", std::string(5000, 'n'));
    // The signal that was held back must not come later either.
    const Status again = write_file_atomically(folder / "b", "short");
    return (s.ok() ? "wrote it" : s.message()) + (again.ok() ? " B" : " -");
  });
  EXPECT_EQ(child.signal, 0);
  EXPECT_TRUE(has(child.text, "File too large after 1000 of 5000 bytes"))
      << child.text;
  EXPECT_TRUE(has(child.text, "unchanged B")) << child.text;
  EXPECT_EQ(get(folder / "a"), "old");
  EXPECT_EQ(get(folder / "b"), "short");
  EXPECT_EQ(folder.entries(), 2);
}

// The same through the tensors' path, and on a disk that is really full where
// the system lets a test mount one.
TEST(Files, FullDiskLeavesTheOldFile) {
  const TempFolder folder;
  const std::string path = folder / "model.safetensors";
  const std::vector<float> values(100'000, 1.0f);
  const std::map<std::string, TensorEntry> large{
      {"w", {DType::kFloat32, {100'000}, values.data(), 400'000}}};
  const std::map<std::string, TensorEntry> small{
      {"w", {DType::kFloat32, {3}, values.data(), 12}}};
  const ChildResult child = run_in_child([&] {
    const bool disk = mount_small_disk(folder.path());
    if (!disk && !limit_file_size(64 * 1024)) return std::string("no limit");
    const Status first = write_safetensors(path, small, {});
    if (!first.ok()) return first.message();
    const std::string before = get(path);
    const Status s = write_safetensors(path, large, {});
    if (s.ok()) return std::string("wrote it");
    if (get(path) != before) return std::string("the old file changed");
    if (folder.entries() != 1) return std::string("a temporary was left");
    return (disk ? "disk: " : "limit: ") + s.message();
  });
  EXPECT_EQ(child.exit_status, 0);
  const bool disk = child.text.starts_with("disk: ");
  EXPECT_TRUE(has(child.text, disk ? "No space left on device after"
                                   : "File too large after"))
      << child.text;
  EXPECT_TRUE(has(child.text, path)) << child.text;
  EXPECT_TRUE(has(child.text, "of 400")) << child.text;
}

// What a killed writer leaves is gone with the next write; what a living one
// writes is not touched.
TEST(Files, KilledWritersLeaveNothingForLong) {
  const TempFolder folder;
  put(folder / "a", "old");
  put(folder / "a.notes.tmp", "a user's own");
  const auto killed = run_in_child([&]() -> std::string {
    auto file = files::AtomicFile::create(folder / "a");
    if (!file.ok() || !file->append("half", 4).ok()) return "failed";
    ::kill(::getpid(), SIGKILL);
    return "survived";
  });
  EXPECT_EQ(killed.signal, SIGKILL);
  EXPECT_EQ(folder.entries(), 3);
  EXPECT_EQ(get(folder / "a"), "old");
  auto living = files::AtomicFile::create(folder / "a");
  ASSERT_TRUE(living.ok());
  ASSERT_TRUE(living->append("living", 6).ok());
  EXPECT_EQ(folder.entries(), 3);
  // From another process: locks of one process do not tell its writers apart
  // everywhere.
  const auto other = run_in_child([&]() -> std::string {
    return write_file_atomically(folder / "a", "other").message();
  });
  EXPECT_EQ(other.text, "");
  EXPECT_EQ(get(folder / "a"), "other");
  ASSERT_TRUE(living->commit().ok());
  EXPECT_EQ(get(folder / "a"), "living");
  EXPECT_EQ(get(folder / "a.notes.tmp"), "a user's own");
  EXPECT_EQ(folder.entries(), 2);
}

TEST(Files, SyncFolder) {
  const TempFolder folder;
  EXPECT_TRUE(sync_folder(folder.path()).ok());
  const Status missing = sync_folder(folder / "none");
  EXPECT_EQ(missing.code(), StatusCode::kNotFound);
  put(folder / "file", "x");
  EXPECT_FALSE(sync_folder(folder / "file").ok());
}

}  // namespace
}  // namespace cosformer
