#include "data/cache.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "cosformer/data.h"
#include "tests/text/child_process.h"
#include "tests/text/corpus.h"
#include "tests/text/temp_folder.h"

namespace cosformer {
namespace {

using testing::get;
using testing::make_corpus;
using testing::put;
using testing::run_in_child;
using testing::TempFolder;

class Cache : public ::testing::Test {
 protected:
  Cache() {
    text_ = make_corpus(30'000, 1);
    put(folder_ / "text", text_);
    config_.path = folder_ / "text";
    config_.cache_dir = folder_ / "cache";
    config_.vocab_size = 400;
  }

  TokenDataset prepare(std::shared_ptr<const Tokenizer> tokenizer = nullptr) {
    auto data = TokenDataset::prepare(config_, std::move(tokenizer));
    EXPECT_TRUE(data.ok()) << data.status().message();
    // Whatever happened to the cache, the tokens are those of the text.
    std::vector<int32_t> ids;
    const at::Tensor all =
        at::cat({data->train_tokens(0, data->train_size()),
                 data->validation_tokens(0, data->validation_size())});
    for (int64_t i = 0; i < all.numel(); ++i) {
      ids.push_back(static_cast<int32_t>(all.const_data_ptr<int64_t>()[i]));
    }
    EXPECT_TRUE(*data->tokenizer()->decode(ids) == text_);
    return std::move(*data);
  }

  // The only file of the cache with this ending.
  std::string file(const std::string& ending) {
    std::string found;
    for (const auto& entry :
         std::filesystem::directory_iterator(config_.cache_dir)) {
      const std::string path = entry.path().string();
      if (path.ends_with(ending)) {
        EXPECT_TRUE(found.empty());
        found = path;
      }
    }
    EXPECT_FALSE(found.empty()) << ending;
    return found;
  }

  TempFolder folder_;
  std::string text_;
  DataConfig config_;
};

TEST_F(Cache, IsReused) {
  EXPECT_FALSE(prepare().reused_cache());
  EXPECT_TRUE(prepare().reused_cache());
  // Seen from another folder, by a relative path.
  const std::string before = std::filesystem::current_path();
  std::filesystem::current_path(folder_.path());
  config_.path = "./text";
  EXPECT_TRUE(prepare().reused_cache());
  std::filesystem::current_path(before);
}

TEST_F(Cache, NoticesAnotherSource) {
  prepare();
  text_[100] = text_[100] == 'a' ? 'b' : 'a';  // same size
  put(config_.path, text_);
  EXPECT_FALSE(prepare().reused_cache());
  text_ += "more";
  put(config_.path, text_);
  EXPECT_FALSE(prepare().reused_cache());
  EXPECT_TRUE(prepare().reused_cache());
}

TEST_F(Cache, NoticesOtherOptions) {
  prepare();
  config_.train_fraction = 0.8;
  EXPECT_FALSE(prepare().reused_cache());
  config_.tokenizer = "bytes";
  EXPECT_FALSE(prepare().reused_cache());
  config_.tokenizer = "sentencepiece";
  const std::string first = prepare().tokenizer()->fingerprint();
  EXPECT_TRUE(prepare().reused_cache());
  config_.vocab_size = 410;
  EXPECT_FALSE(prepare().reused_cache());
  EXPECT_EQ(prepare().tokenizer()->vocab_size(), 410);
  // Those made before are there still.
  config_.vocab_size = 400;
  EXPECT_TRUE(prepare().reused_cache());
  EXPECT_EQ(prepare().tokenizer()->fingerprint(), first);
}

TEST_F(Cache, NoticesDamage) {
  prepare();
  const std::string tokens = file(".tokens"), manifest = file(".json"),
                    tokenizer = file(".tokenizer") + "/tokenizer.json";
  const std::string good_tokens = get(tokens), good_manifest = get(manifest);
  std::string bad = good_tokens;
  bad[bad.size() / 2] ^= 1;
  put(tokens, bad);
  EXPECT_FALSE(prepare().reused_cache()) << "a changed token";
  EXPECT_TRUE(get(tokens) == good_tokens);
  put(tokens, good_tokens.substr(0, good_tokens.size() - 2));
  EXPECT_FALSE(prepare().reused_cache()) << "a truncated file";
  put(tokens, good_tokens + "xx");
  EXPECT_FALSE(prepare().reused_cache()) << "bytes too many";
  std::filesystem::remove(tokens);
  EXPECT_FALSE(prepare().reused_cache()) << "no tokens";
  for (size_t n = 0; n < good_manifest.size(); n += 41) {
    put(manifest, good_manifest.substr(0, n));
    EXPECT_FALSE(prepare().reused_cache()) << "a manifest of " << n;
  }
  put(tokenizer, "{}");
  EXPECT_FALSE(prepare().reused_cache()) << "a damaged tokenizer";
  std::filesystem::remove(tokenizer);
  EXPECT_FALSE(prepare().reused_cache()) << "no tokenizer";
  auto other = train_character_tokenizer("abc");
  ASSERT_TRUE((*other)->save(file(".tokenizer")).ok());
  EXPECT_FALSE(prepare().reused_cache()) << "another tokenizer";
  EXPECT_TRUE(prepare().reused_cache());
}

TEST_F(Cache, ServesTheSameTokenizerGivenAgain) {
  const TokenDataset data = prepare();
  EXPECT_TRUE(prepare(data.tokenizer()).reused_cache());
  // Another one gets a cache of its own and leaves the first alone.
  auto wider = train_character_tokenizer(text_ + "\xE2\x82\xAC");
  const std::shared_ptr<const Tokenizer> given = std::move(*wider);
  EXPECT_FALSE(prepare(given).reused_cache());
  EXPECT_TRUE(prepare(given).reused_cache());
  EXPECT_TRUE(prepare().reused_cache());
  EXPECT_EQ(prepare(given).tokenizer()->vocab_size(),
            data.tokenizer()->vocab_size() + 1);
}

// The mapping outlives a cache that is made anew.
TEST_F(Cache, OpenDataSurvivesARebuild) {
  const TokenDataset data = prepare();
  const at::Tensor before = data.train_tokens(0, data.train_size());
  text_ = make_corpus(25'000, 2);
  put(config_.path, text_);
  prepare();
  EXPECT_TRUE(at::equal(data.train_tokens(0, data.train_size()), before));
}

TEST_F(Cache, ProcessesMayPrepareItAtOnce) {
  text_ = make_corpus(300'000, 3);
  put(config_.path, text_);
  for (const char* kind : {"characters", "sentencepiece"}) {
    config_.tokenizer = kind;
    std::vector<pid_t> children;
    for (int i = 0; i < 4; ++i) {
      const pid_t child = ::fork();
      if (child == 0) {
        bool good = true;
        for (int round = 0; round < 3 && good; ++round) {
          const auto data = TokenDataset::prepare(config_, nullptr);
          good = data.ok() && data->train_bytes() == 270'000;
          // Makes it anew while others read it.
          if (i != 0) continue;
          std::error_code ignored;
          for (const auto& entry :
               std::filesystem::directory_iterator(config_.cache_dir)) {
            if (entry.path().extension() == ".json") {
              std::filesystem::remove(entry.path(), ignored);
            }
          }
        }
        ::_exit(good ? 0 : 1);
      }
      children.push_back(child);
    }
    for (const pid_t child : children) {
      int status = -1;
      ::waitpid(child, &status, 0);
      EXPECT_EQ(status, 0);
    }
    prepare();
  }
}

TEST_F(Cache, AFileThatChangesWhileItIsReadIsAnError) {
  bool changed = false;
  const auto data =
      TokenDataset::prepare(config_, nullptr, [&](int64_t done, int64_t total) {
        if (changed || done * 2 < total) return;
        changed = true;
        put(config_.path, text_ + "!");
      });
  ASSERT_FALSE(data.ok());
  EXPECT_NE(data.status().message().find("changed while it was read"),
            std::string::npos)
      << data.status().message();
}

TEST(CacheManifest, HostileJson) {
  CacheManifest manifest;
  manifest.inputs.sources = {{"a", 1, 2, true}, {"b", 3, 4, false}};
  manifest.inputs.extensions = {".h", ""};
  manifest.checksum = 0xFEDCBA9876543210u;
  const std::string good = to_json(manifest);
  const auto back = cache_manifest_from_json(good, "m");
  ASSERT_TRUE(back.ok()) << back.status().message();
  EXPECT_EQ(to_json(*back), good);
  for (size_t n = 0; n + 1 < good.size(); ++n) {
    EXPECT_FALSE(cache_manifest_from_json(good.substr(0, n), "m").ok()) << n;
  }
  for (uint64_t i = 0; i < 3000; ++i) {
    const auto r = philox(5, 0, i);
    std::string bad = good;
    bad[r[0] % bad.size()] = static_cast<char>(r[1]);
    (void)cache_manifest_from_json(bad, "m").ok();
  }
}

long status_kib(const char* field) {
  const std::string status = get("/proc/self/status");
  const size_t at = status.find(field);
  return at == std::string::npos ? -1 : std::stol(status.substr(at + 6));
}

// The peak of resident memory while a large text is prepared does not follow
// its size. 300 MB when COSFORMER_LARGE_TESTS is set, else 20 MB (whose tokens
// alone would be 40 MB).
TEST(CacheMemory, DoesNotGrowWithTheText) {
  const TempFolder folder;
  const bool large = std::getenv("COSFORMER_LARGE_TESTS") != nullptr;
  const int pieces = large ? 300 : 20;
  {
    const std::string piece = make_corpus(1'000'000, 1);
    std::ofstream out(folder / "text", std::ios::binary);
    for (int i = 0; i < pieces; ++i) out << piece;
  }
  for (const char* kind : {"bytes", "characters", "sentencepiece"}) {
    // The sentencepiece trainer works on up to 4 MiB, in many times that; here
    // its tokenizer is given.
    const auto child = run_in_child([&] {
      DataConfig config;
      config.path = folder / "text";
      config.cache_dir = folder / "cache";
      config.tokenizer = kind;
      std::shared_ptr<const Tokenizer> tokenizer;
      if (config.tokenizer == "sentencepiece") {
        auto made =
            train_sentencepiece_tokenizer(make_corpus(100'000, 1), 400, 1);
        if (!made.ok()) return made.status().message();
        tokenizer = std::move(*made);
      }
      put("/proc/self/clear_refs", "5");  // the peak counts from here
      const long before = status_kib("VmHWM:");
      const auto data = TokenDataset::prepare(config, tokenizer);
      if (!data.ok()) return data.status().message();
      return std::to_string(status_kib("VmHWM:") - before);
    });
    ASSERT_EQ(child.exit_status, 0);
    EXPECT_GE(std::stol(child.text), 0);
    EXPECT_LT(std::stol(child.text), 14 * 1024) << kind;
    std::filesystem::remove_all(folder / "cache");
    RecordProperty(kind, child.text);
  }
}

}  // namespace
}  // namespace cosformer
