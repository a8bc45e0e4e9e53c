#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "cosformer/data.h"
#include "tests/text/child_process.h"
#include "tests/text/corpus.h"
#include "tests/text/temp_folder.h"

namespace cosformer {
namespace {

using testing::become_nobody;
using testing::get;
using testing::limit_file_size;
using testing::make_corpus;
using testing::put;
using testing::run_in_child;
using testing::TempFolder;

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

DataConfig config_of(const TempFolder& folder, const std::string& path,
                     const std::string& tokenizer = "characters") {
  DataConfig config;
  config.path = path;
  config.tokenizer = tokenizer;
  config.vocab_size = 400;
  config.cache_dir = folder / "cache";
  return config;
}

std::vector<int32_t> ids_of(const at::Tensor& tokens) {
  std::vector<int32_t> ids;
  const int64_t* from = tokens.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < tokens.numel(); ++i) {
    ids.push_back(static_cast<int32_t>(from[i]));
  }
  return ids;
}
std::vector<int32_t> train_ids(const TokenDataset& data) {
  return ids_of(data.train_tokens(0, data.train_size()));
}
std::vector<int32_t> validation_ids(const TokenDataset& data) {
  return ids_of(data.validation_tokens(0, data.validation_size()));
}
std::string train_text(const TokenDataset& data) {
  return *data.tokenizer()->decode(train_ids(data));
}
std::string validation_text(const TokenDataset& data) {
  return *data.tokenizer()->decode(validation_ids(data));
}

TokenDataset prepared(const DataConfig& config,
                      std::shared_ptr<const Tokenizer> tokenizer = nullptr) {
  auto data = TokenDataset::prepare(config, std::move(tokenizer));
  EXPECT_TRUE(data.ok()) << data.status().message();
  return std::move(*data);
}

std::string error_of(const DataConfig& config,
                     std::shared_ptr<const Tokenizer> tokenizer = nullptr) {
  const auto data = TokenDataset::prepare(config, std::move(tokenizer));
  EXPECT_FALSE(data.ok());
  return data.ok() ? "" : data.status().message();
}

TEST(Dataset, TrainsOnTheFirstNinetyPercentOfCharacters) {
  const TempFolder folder;
  for (const int n : {1, 9, 10, 11, 1234, 99'999}) {
    std::string text;
    for (int i = 0; i < n; ++i) text += static_cast<char>('a' + i * 7 % 26);
    put(folder / "text", text);
    const TokenDataset data = prepared(config_of(folder, folder / "text"));
    ASSERT_EQ(data.train_size(), static_cast<int64_t>(0.9 * n)) << n;
    ASSERT_EQ(data.validation_size(), n - data.train_size());
    EXPECT_EQ(train_text(data) + validation_text(data), text);
    EXPECT_EQ(data.validation_bytes(), data.validation_size());
  }
}

TEST(Dataset, SplitsBetweenCharacters) {
  const TempFolder folder;
  std::string text;
  for (int i = 0; i < 50; ++i) text += "\xF0\x9F\x98\x80\xC3\xA9";
  put(folder / "text", text);
  for (const char* kind : {"characters", "bytes"}) {
    for (int percent = 0; percent <= 100; percent += 4) {
      DataConfig config = config_of(folder, folder / "text", kind);
      config.train_fraction = percent / 100.0;
      const TokenDataset data = prepared(config);
      const int64_t limit = static_cast<int64_t>(config.train_fraction *
                                                 static_cast<double>(300));
      ASSERT_LE(data.train_bytes(), limit);
      ASSERT_GT(data.train_bytes(), limit - 4);
      ASSERT_EQ(data.train_bytes() + data.validation_bytes(), 300);
      ASSERT_EQ(train_text(data), text.substr(0, data.train_bytes()));
      ASSERT_EQ(validation_text(data), text.substr(data.train_bytes()));
    }
  }
}

// Larger than the pieces that it is read in, with characters across their ends:
// the tokens are those of the whole text.
TEST(Dataset, PiecesDoNotShow) {
  const TempFolder folder;
  std::string text = "x" + make_corpus(2'500'000, 1);
  for (size_t i = 1000; i < text.size(); i += 100'003) {
    text.insert(text.find(' ', i), "\xE2\x82\xAC\xC3\xA9");
  }
  put(folder / "text", text);
  for (const char* kind : {"bytes", "characters", "sentencepiece"}) {
    const TokenDataset data =
        prepared(config_of(folder, folder / "text", kind));
    EXPECT_EQ(data.tokenizer()->kind(), kind);
    const std::string train = text.substr(0, data.train_bytes());
    const std::string validation = text.substr(data.train_bytes());
    EXPECT_TRUE(train_ids(data) == *data.tokenizer()->encode(train)) << kind;
    EXPECT_TRUE(validation_ids(data) == *data.tokenizer()->encode(validation))
        << kind;
    EXPECT_TRUE(train_text(data) == train) << kind;
    EXPECT_TRUE(validation_text(data) == validation) << kind;
  }
}

TEST(Dataset, LargeVocabulariesTakeFourBytes) {
  const TempFolder folder;
  std::vector<std::string> characters;
  std::string text;
  for (uint32_t code = 0x20000; code < 0x20000 + 70'000; ++code) {
    const char c[4] = {static_cast<char>(0xF0 | code >> 18),
                       static_cast<char>(0x80 | (code >> 12 & 63)),
                       static_cast<char>(0x80 | (code >> 6 & 63)),
                       static_cast<char>(0x80 | (code & 63))};
    text.append(c, 4);
  }
  put(folder / "text", text);
  const TokenDataset data = prepared(config_of(folder, folder / "text"));
  EXPECT_EQ(data.tokenizer()->vocab_size(), 70'000);
  EXPECT_EQ(
      data.validation_tokens(data.validation_size() - 1, 1).item<int64_t>(),
      69'999);
  EXPECT_TRUE(train_text(data) + validation_text(data) == text);
}

TEST(Dataset, FoldersInNameOrder) {
  const TempFolder folder;
  const std::string root = folder / "texts";
  std::filesystem::create_directories(root + "/b");
  std::filesystem::create_directories(root + "/.git");
  put(root + "/c.txt", "third ");
  put(root + "/a.txt", "first ");
  put(root + "/b/z.h", "second ");
  put(root + "/b/vector", "suffixless ");
  put(root + "/b/empty.txt", "");
  put(root + "/.hidden.txt", "never");
  put(root + "/.git/never.txt", "never");
  std::filesystem::create_directory_symlink(root, root + "/b/loop");
  std::filesystem::create_symlink("nowhere", root + "/b/dangling.txt");
  DataConfig config = config_of(folder, root);
  const auto text_with = [&](std::vector<std::string> extensions) {
    config.extensions = std::move(extensions);
    const TokenDataset data = prepared(config);
    return train_text(data) + validation_text(data);
  };
  EXPECT_EQ(text_with({}), "first suffixless second third ");
  EXPECT_EQ(text_with({".txt"}), "first third ");
  EXPECT_EQ(text_with({"txt"}), "first third ");
  EXPECT_EQ(text_with({""}), "suffixless ");
  EXPECT_EQ(text_with({"", ".h"}), "suffixless second ");
  config.extensions = {".cc", ""};
  config.path = root + "/.git";
  const std::string none = error_of(config);
  EXPECT_TRUE(has(none, root + "/.git")) << none;
  EXPECT_TRUE(has(none, "'.cc'")) << none;
}

TEST(Dataset, BinaryFiles) {
  const TempFolder folder;
  const std::string root = folder / "texts";
  std::filesystem::create_directories(root);
  put(root + "/a.txt", "some text\n");
  put(root + "/b.bin", std::string("\x7f"
                                   "ELF\0\0",
                                   6));
  put(root + "/c.txt", "latin \xE9 one \xFF");
  put(root + "/d.txt", "more text, \xC3\xA9\n");

  const TokenDataset data = prepared(config_of(folder, root));
  EXPECT_EQ(train_text(data) + validation_text(data),
            "some text\nmore text, \xC3\xA9\n");
  // What skipped files hold is no part of the vocabulary.
  EXPECT_FALSE(data.tokenizer()->encode("L").ok());
  ASSERT_EQ(data.messages().size(), 1u);
  EXPECT_TRUE(has(data.messages()[0], "skipped 2 of 4 files"));
  EXPECT_TRUE(has(data.messages()[0], "b.bin"));
  const TokenDataset again = prepared(config_of(folder, root));
  EXPECT_TRUE(again.reused_cache());
  EXPECT_EQ(again.messages(), data.messages());

  const std::string nul = error_of(config_of(folder, root + "/b.bin"));
  EXPECT_TRUE(has(nul, root + "/b.bin")) << nul;
  EXPECT_TRUE(has(nul, "not a text file: it has a NUL byte at offset 4"))
      << nul;
  const std::string latin = error_of(config_of(folder, root + "/c.txt"));
  EXPECT_TRUE(has(latin, "0xE9 at offset 6 is not UTF-8")) << latin;
  EXPECT_TRUE(has(latin, "c.txt")) << latin;
  std::filesystem::remove(root + "/a.txt");
  std::filesystem::remove(root + "/d.txt");
  const std::string all = error_of(config_of(folder, root));
  EXPECT_TRUE(has(all, "none of the 2 files is text")) << all;

  // To bytes everything is data, in a folder too.
  const TokenDataset whole = prepared(config_of(folder, root, "bytes"));
  EXPECT_TRUE(whole.messages().empty());
  EXPECT_EQ(whole.train_bytes() + whole.validation_bytes(),
            static_cast<int64_t>(std::filesystem::file_size(root + "/b.bin") +
                                 std::filesystem::file_size(root + "/c.txt")));
  const TokenDataset bytes =
      prepared(config_of(folder, root + "/b.bin", "bytes"));
  EXPECT_EQ(bytes.train_size() + bytes.validation_size(), 6);
}

TEST(Dataset, ExtensionsOfOneFileAreSaidToBeUnused) {
  const TempFolder folder;
  put(folder / "text", "some text\n");
  DataConfig config = config_of(folder, folder / "text");
  config.extensions = {".md"};
  const TokenDataset data = prepared(config);
  ASSERT_EQ(data.messages().size(), 1u);
  EXPECT_TRUE(has(data.messages()[0], "data.extensions is not used"));
}

TEST(Dataset, ErrorsSayWhatToDo) {
  const TempFolder folder;
  const std::string missing = error_of(config_of(folder, folder / "none.txt"));
  EXPECT_TRUE(has(missing, folder / "none.txt")) << missing;
  EXPECT_TRUE(has(missing, "expected a text file or a folder")) << missing;
  put(folder / "empty.txt", "");
  const std::string empty = error_of(config_of(folder, folder / "empty.txt"));
  EXPECT_TRUE(has(empty, "empty.txt' is empty")) << empty;
  EXPECT_TRUE(has(error_of(config_of(folder, "")), "data.path is empty"));
  std::filesystem::create_directories(folder / "nothing");
  const std::string nothing = error_of(config_of(folder, folder / "nothing"));
  EXPECT_TRUE(has(nothing, "has no file")) << nothing;
  put(folder / "nothing/e", "");
  EXPECT_TRUE(
      has(error_of(config_of(folder, folder / "nothing")), "are empty"));
  EXPECT_TRUE(has(error_of(config_of(folder, "/dev/null")), "device"));

  put(folder / "text", "hello world");
  DataConfig config = config_of(folder, folder / "text", "character");
  EXPECT_TRUE(has(error_of(config), "did you mean 'characters'?"));
  config = config_of(folder, folder / "text");
  config.train_fraction = 1.5;
  EXPECT_TRUE(has(error_of(config), "data.train_fraction: found 1.5"));
  config = config_of(folder, folder / "text");
  config.cache_dir = "";
  EXPECT_TRUE(has(error_of(config), "data.cache_dir is empty"));
  config.cache_dir = folder / "text/cache";
  EXPECT_TRUE(has(error_of(config), "is a file"));
  config = config_of(folder, folder / "text", "sentencepiece");
  config.vocab_size = 100'000;
  EXPECT_TRUE(has(error_of(config), "vocab_size: found 100000"));
}

TEST(Dataset, AnUnknownCharacterIsNamedWithItsFile) {
  const TempFolder folder;
  std::filesystem::create_directories(folder / "texts");
  put(folder / "texts/a", "aaa");
  put(folder / "texts/b", "ab\xC3\xA9z");
  auto tokenizer = train_character_tokenizer("abz");
  const std::string message =
      error_of(config_of(folder, folder / "texts"), std::move(*tokenizer));
  EXPECT_TRUE(has(message, "texts/b'")) << message;
  EXPECT_TRUE(has(message, "(U+00E9) at byte 2")) << message;
}

TEST(Dataset, NoPermissionAndNoSpace) {
  const TempFolder folder;
  ::chmod(folder.path().c_str(), 0777);
  put(folder / "text", make_corpus(100'000, 1));
  const auto full = run_in_child([&] {
    if (!limit_file_size(50'000)) return std::string("no limit");
    return error_of(config_of(folder, folder / "text"));
  });
  EXPECT_TRUE(has(full.text, "File too large")) << full.text;
  EXPECT_TRUE(has(full.text, folder / "cache")) << full.text;
  for (const auto& entry :
       std::filesystem::directory_iterator(folder / "cache")) {
    EXPECT_FALSE(has(entry.path().string(), ".tmp")) << entry.path();
  }
  ::chmod((folder / "text").c_str(), 0);
  const auto denied = run_in_child([&] {
    if (!become_nobody()) return std::string("cannot change the user");
    return error_of(config_of(folder, folder / "text"));
  });
  EXPECT_TRUE(has(denied.text, "Permission denied")) << denied.text;
  EXPECT_TRUE(has(denied.text, folder / "text")) << denied.text;
}

TEST(Dataset, ReportsProgressToTheEnd) {
  const TempFolder folder;
  put(folder / "text", make_corpus(3'000'000, 1));
  int64_t calls = 0, last = 0, all = 0;
  const auto data =
      TokenDataset::prepare(config_of(folder, folder / "text"), nullptr,
                            [&](int64_t done, int64_t total) {
                              ++calls;
                              EXPECT_GT(done, last);
                              last = done;
                              all = total;
                            });
  ASSERT_TRUE(data.ok());
  EXPECT_GE(calls, 6);
  EXPECT_EQ(last, all);
}

TEST(Dataset, RangesAreChecked) {
  const TempFolder folder;
  put(folder / "text", "0123456789");
  const TokenDataset data = prepared(config_of(folder, folder / "text"));
  EXPECT_EQ(data.train_tokens(2, 3).sizes(), at::IntArrayRef({3}));
  EXPECT_EQ(data.train_tokens(9, 0).numel(), 0);
  EXPECT_EQ(data.validation_tokens(0, 1).item<int64_t>(), 9);
  EXPECT_THROW(data.train_tokens(0, 10), c10::Error);
  EXPECT_THROW(data.train_tokens(-1, 1), c10::Error);
  EXPECT_THROW(data.train_tokens(10, 0), c10::Error);
  EXPECT_THROW(data.validation_tokens(1, 1), c10::Error);
  EXPECT_THROW(data.train_tokens(1, INT64_MAX), c10::Error);
}

TEST(Batches, DependOnSeedIndexAndRowAlone) {
  const TempFolder folder;
  put(folder / "text", make_corpus(20'000, 1));
  const TokenDataset data = prepared(config_of(folder, folder / "text"));
  const auto [inputs, targets] = data.train_batch(7, 3, 4, 16);
  EXPECT_EQ(inputs.sizes(), at::IntArrayRef({4, 16}));
  EXPECT_EQ(inputs.scalar_type(), at::kLong);
  EXPECT_TRUE(at::equal(inputs.slice(1, 1), targets.slice(1, 0, 15)));
  EXPECT_TRUE(at::equal(data.train_batch(7, 3, 4, 16).first, inputs));
  EXPECT_TRUE(
      at::equal(data.train_batch(7, 3, 9, 16).first.slice(0, 0, 4), inputs));
  EXPECT_FALSE(at::equal(data.train_batch(8, 3, 4, 16).first, inputs));
  EXPECT_FALSE(at::equal(data.train_batch(7, 4, 4, 16).first, inputs));
  EXPECT_FALSE(at::equal(inputs[0], inputs[1]));
  EXPECT_THROW(data.train_batch(7, 0, 1, data.train_size()), c10::Error);
  EXPECT_THROW(data.train_batch(7, -1, 1, 4), c10::Error);
}

// Every start, the first and the last too, about equally often.
TEST(Batches, CoverTheTrainingPart) {
  const TempFolder folder;
  std::string text;
  for (int i = 0; i < 40; ++i) text += static_cast<char>('0' + i);
  put(folder / "text", text);  // 36 characters for training
  const TokenDataset data = prepared(config_of(folder, folder / "text"));
  ASSERT_EQ(data.train_size(), 36);
  const auto [inputs, targets] = data.train_batch(1, 0, 20'000, 16);
  std::vector<int> starts(20, 0);
  for (int64_t row = 0; row < 20'000; ++row) {
    ++starts[static_cast<size_t>(inputs[row][0].item<int64_t>())];
  }
  for (const int n : starts) EXPECT_NEAR(n, 1000, 150);
  EXPECT_EQ(targets.max().item<int64_t>(), 35);
}

}  // namespace
}  // namespace cosformer
