#include "train/run_folder.h"

#include <sys/wait.h>
#include <unistd.h>

#include "tests/train/train_test_util.h"

namespace cosformer::train_internal {
namespace {

namespace fs = std::filesystem;
using cosformer::testing::TempFolder;
using cosformer::testing::write_text;

RunFolder open_run(const std::string& path, bool resume = false) {
  auto run = RunFolder::open(path, resume);
  EXPECT_TRUE(run.ok()) << run.status().message();
  return std::move(*run);
}

Status write_file(const std::string& folder) {
  write_text(folder + "/content", "x");
  return {};
}

TEST(RunFolder, SavesRenamesAndLinks) {
  TempFolder temp;
  RunFolder run = open_run(temp / "run");
  ASSERT_TRUE(run.save(5, true, write_file).ok());
  ASSERT_TRUE(run.save(9, false, write_file).ok());
  EXPECT_EQ(run.linked_step("last"), 9);
  EXPECT_EQ(run.linked_step("best"), 5);
  EXPECT_EQ(run.steps(), (std::vector<int64_t>{5, 9}));
  // Relative links: the run may be moved.
  EXPECT_EQ(fs::read_symlink(run.checkpoints() + "/last"), "step-9");
  EXPECT_TRUE(fs::exists(run.checkpoints() + "/best/content"));
}

TEST(RunFolder, AFailedSaveLeavesWhatWasThere) {
  TempFolder temp;
  RunFolder run = open_run(temp / "run");
  ASSERT_TRUE(run.save(5, true, write_file).ok());
  const Status failed = run.save(6, true, [](const std::string& folder) {
    write_text(folder + "/content", "half");
    return io_error("no space");
  });
  EXPECT_EQ(failed.message(), "no space");
  EXPECT_EQ(run.linked_step("last"), 5);
  EXPECT_EQ(run.linked_step("best"), 5);
  EXPECT_EQ(run.steps(), std::vector<int64_t>{5});
  EXPECT_FALSE(fs::exists(run.checkpoint(6) + ".tmp"));
}

TEST(RunFolder, SavesOverTheSameStep) {
  TempFolder temp;
  RunFolder run = open_run(temp / "run");
  ASSERT_TRUE(run.save(5, true, write_file).ok());
  ASSERT_TRUE(run.save(5, false,
                       [](const std::string& folder) {
                         write_text(folder + "/content", "newer");
                         return Status();
                       })
                  .ok());
  std::string text;
  std::ifstream(run.checkpoint(5) + "/content") >> text;
  EXPECT_EQ(text, "newer");
  EXPECT_EQ(run.linked_step("best"), 5);
}

TEST(RunFolder, KeepsTheNewestTheBestAndNothingElse) {
  TempFolder temp;
  RunFolder run = open_run(temp / "run");
  for (int64_t step = 1; step <= 6; ++step) {
    ASSERT_TRUE(run.save(step, step == 2, write_file).ok());
    ASSERT_TRUE(run.retain(2).ok());
  }
  EXPECT_EQ(run.steps(), (std::vector<int64_t>{2, 5, 6}));
  // What `last` stands for stays, whatever is asked for.
  ASSERT_TRUE(run.link("last", 5).ok());
  ASSERT_TRUE(run.retain(0).ok());
  EXPECT_EQ(run.steps(), (std::vector<int64_t>{2, 5}));
}

TEST(RunFolder, CleansWhatAKilledSaveLeft) {
  TempFolder temp;
  {
    RunFolder run = open_run(temp / "run");
    ASSERT_TRUE(run.save(5, true, write_file).ok());
    // Killed while writing, while deleting, and between rename and link.
    fs::create_directory(run.checkpoint(6) + ".tmp");
    write_text(run.checkpoint(6) + ".tmp/content", "half");
    fs::create_directory_symlink("step-6", run.checkpoints() + "/last.tmp");
    fs::create_directory(run.checkpoint(8));
  }
  RunFolder run = open_run(temp / "run", /*resume=*/true);
  EXPECT_EQ(run.linked_step("last"), 5);
  EXPECT_FALSE(fs::exists(run.checkpoint(6) + ".tmp"));
  EXPECT_FALSE(fs::is_symlink(run.checkpoints() + "/last.tmp"));
  ASSERT_TRUE(run.drop_after(5).ok());
  EXPECT_EQ(run.steps(), std::vector<int64_t>{5});
}

TEST(RunFolder, RefusesARunThatIsThere) {
  TempFolder temp;
  {
    RunFolder run = open_run(temp / "run");
    write_text(run.file("config.toml"), "");
    ASSERT_TRUE(run.save(5, true, write_file).ok());
  }
  auto again = RunFolder::open(temp / "run", /*resume=*/false);
  ASSERT_FALSE(again.ok());
  EXPECT_NE(again.status().message().find("step 5"), std::string::npos);
  EXPECT_NE(again.status().message().find("--resume"), std::string::npos);
  EXPECT_TRUE(fs::exists(temp / "run/checkpoints/last/content"));
}

TEST(RunFolder, RefusesASecondTraining) {
  TempFolder temp;
  RunFolder run = open_run(temp / "run");
  // In a process of its own, as a second training would be.
  const pid_t child = fork();
  if (child == 0) {
    auto second = RunFolder::open(temp / "run", /*resume=*/true);
    _exit(!second.ok() && second.status().message().find("another training") !=
                              std::string::npos
              ? 7
              : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 7);
}

TEST(RunFolder, LeavesNoTraceWhereNothingWasBegun) {
  TempFolder temp;
  {
    RunFolder run = open_run(temp / "deep/run");
  }
  EXPECT_FALSE(fs::exists(temp / "deep/run"));
}

TEST(RunFolder, KeepsAFolderThatWasThereBefore) {
  TempFolder temp;
  fs::create_directory(temp / "mine");
  {
    RunFolder run = open_run(temp / "mine");
  }
  EXPECT_TRUE(fs::is_directory(temp / "mine"));
  EXPECT_TRUE(fs::is_empty(temp / "mine"));
}

TEST(RunFolder, FindsTheNewestCheckpointWhereLastIsGone) {
  TempFolder temp;
  {
    RunFolder run = open_run(temp / "run");
    ASSERT_TRUE(run.save(5, true, write_file).ok());
    ASSERT_TRUE(run.save(12, false, write_file).ok());
  }
  const std::string last = temp / "run/checkpoints/last";
  fs::remove(last);
  EXPECT_EQ(open_run(temp / "run", true).linked_step("last"), 12);
  // As a copy that follows links leaves it.
  fs::remove(last);
  fs::copy(temp / "run/checkpoints/step-12", last);
  EXPECT_EQ(open_run(temp / "run", true).linked_step("last"), 12);
  EXPECT_EQ(fs::read_symlink(last), "step-12");
  EXPECT_FALSE(fs::exists(last + ".copy.tmp"));
  // Nothing says which step a lone copy is.
  fs::remove(last);
  fs::rename(temp / "run/checkpoints/step-12", last);
  fs::remove_all(temp / "run/checkpoints/step-5");
  const auto lone = RunFolder::open(temp / "run", true);
  ASSERT_FALSE(lone.ok());
  EXPECT_NE(lone.status().message().find("rename it to step-N"),
            std::string::npos);
  EXPECT_TRUE(fs::exists(last + "/content"));
}

TEST(RunFolder, AFileInThePlaceOfTheFolderIsAnError) {
  TempFolder temp;
  write_text(temp / "run", "a file");
  auto run = RunFolder::open(temp / "run", false);
  ASSERT_FALSE(run.ok());
  EXPECT_NE(run.status().message().find(temp / "run"), std::string::npos);
}

TEST(Metrics, AreCutAtAStep) {
  TempFolder temp;
  write_text(temp / "metrics.jsonl",
             "{\"type\":\"start\"}\n{\"type\":\"train\",\"step\":1}\n"
             "{\"type\":\"eval\",\"step\":1}\n"
             "{\"type\":\"train\",\"step\":2}\n{\"type\":\"train\",\"ste");
  ASSERT_TRUE(cut_metrics(temp / "metrics.jsonl", 1, 1).ok());
  EXPECT_EQ(read_metrics(temp / "metrics.jsonl")->size(), 3u);
  // An evaluation that the checkpoint does not know is made again.
  ASSERT_TRUE(cut_metrics(temp / "metrics.jsonl", 1, 0).ok());
  auto lines = read_metrics(temp / "metrics.jsonl");
  ASSERT_TRUE(lines.ok());
  ASSERT_EQ(lines->size(), 2u);
  EXPECT_EQ((*lines)[1].at("step"), 1);
  // A file that is not there is as short as can be.
  EXPECT_TRUE(cut_metrics(temp / "none.jsonl", 1, 1).ok());
  ASSERT_TRUE(cut_metrics(temp / "metrics.jsonl", -1, -1).ok());
  EXPECT_TRUE(read_metrics(temp / "metrics.jsonl")->empty());
}

}  // namespace
}  // namespace cosformer::train_internal
