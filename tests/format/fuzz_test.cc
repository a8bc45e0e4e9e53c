// Seeded damage to small files: whatever the bytes, the answer is a value or a
// Status - no crash, no hang, no large allocation.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstring>
#include <string>

#include "cosformer/format.h"
#include "tests/text/temp_folder.h"

namespace cosformer {
namespace {

using testing::get;
using testing::put;
using testing::TempFolder;

// Deterministic damage number `index`: flips bits, replaces, removes and
// repeats bytes.
std::string damaged(std::string bytes, uint64_t index) {
  const auto r = philox(0xF022, 0, index);
  const auto s = philox(0xF022, 1, index);
  const size_t changes = 1 + r[0] % 4;
  for (size_t c = 0; c < changes && !bytes.empty(); ++c) {
    const auto n = philox(0xF022, 2 + c, index);
    const size_t at = n[0] % bytes.size();
    switch (n[1] % 5) {
      case 0:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << n[2] % 8));
        break;
      case 1:
        bytes[at] = static_cast<char>(n[2]);
        break;
      case 2:
        bytes.erase(at, 1 + n[2] % 4);
        break;
      case 3:
        bytes.insert(at, bytes.substr(n[2] % bytes.size(), 1 + n[3] % 8));
        break;
      default: {
        // A digit becomes another: sizes and offsets that nearly fit.
        const size_t digit = bytes.find_first_of("0123456789", at);
        if (digit != std::string::npos) {
          bytes[digit] = static_cast<char>('0' + n[2] % 10);
        }
      }
    }
  }
  if (s[0] % 8 == 0) bytes.resize(s[1] % (bytes.size() + 1));
  return bytes;
}

// Every entry of an accepted file can be read to its last byte.
uint64_t touch(const SafetensorsFile& file) {
  uint64_t sum = 0;
  for (const auto& [name, entry] : file.tensors()) {
    for (size_t i = 0; i < entry.bytes; ++i) {
      sum += static_cast<const unsigned char*>(entry.data)[i];
    }
  }
  return sum;
}

// The address sanitizer keeps up to 256 MiB of freed memory.
constexpr long kMaxGrowthKib = 400 * 1024;

long peak_kib() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss;
}

std::string small_file(const TempFolder& folder) {
  const float w[4] = {1, 2, 3, 4};
  const uint8_t mask[3] = {1, 0, 1};
  const Status s =
      write_safetensors(folder / "good",
                        {{"layers.0.weight", {DType::kFloat32, {2, 2}, w, 16}},
                         {"mask", {DType::kBool, {3}, mask, 3}},
                         {"empty", {DType::kInt64, {0}, nullptr, 0}}},
                        {{"format", "pt"}});
  EXPECT_TRUE(s.ok()) << s.message();
  return get(folder / "good");
}

TEST(Fuzz, SafetensorsTruncatedAtEveryByte) {
  const TempFolder folder;
  const std::string good = small_file(folder);
  for (size_t n = 0; n < good.size(); ++n) {
    put(folder / "bad", good.substr(0, n));
    const Result<SafetensorsFile> file = SafetensorsFile::open(folder / "bad");
    ASSERT_FALSE(file.ok()) << "accepted the first " << n << " bytes";
    EXPECT_EQ(file.status().code(), StatusCode::kDataLoss);
  }
  EXPECT_TRUE(SafetensorsFile::open(folder / "good").ok());
}

TEST(Fuzz, SafetensorsWithEveryBitOfTheHeaderFlipped) {
  const TempFolder folder;
  const std::string good = small_file(folder);
  uint64_t header = 0;
  std::memcpy(&header, good.data(), 8);
  const long before = peak_kib();
  for (size_t bit = 0; bit < (8 + header) * 8; ++bit) {
    std::string bad = good;
    bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << bit % 8));
    put(folder / "bad", bad);
    const Result<SafetensorsFile> file = SafetensorsFile::open(folder / "bad");
    if (file.ok()) touch(*file);
    if (bit < 64) {
      EXPECT_FALSE(file.ok()) << "header length, bit " << bit;
    }
  }
  EXPECT_LT(peak_kib() - before, kMaxGrowthKib);
}

TEST(Fuzz, SafetensorsDamaged) {
  const TempFolder folder;
  const std::string good = small_file(folder);
  const long before = peak_kib();
  int refused = 0;
  for (uint64_t i = 0; i < 5000; ++i) {
    put(folder / "bad", damaged(good, i));
    const Result<SafetensorsFile> file = SafetensorsFile::open(folder / "bad");
    if (file.ok()) {
      touch(*file);
    } else {
      ++refused;
      EXPECT_FALSE(file.status().message().empty());
    }
  }
  EXPECT_GT(refused, 2500);
  EXPECT_LT(peak_kib() - before, kMaxGrowthKib);
}

TEST(Fuzz, ConfigDamaged) {
  ModelConfig config;
  config.vocab_size = 65;
  config.attention.assign(4, AttentionConfig{});
  const std::string good = to_json(config);
  for (size_t n = 0; n + 1 < good.size(); ++n) {
    EXPECT_FALSE(model_config_from_json(good.substr(0, n)).ok()) << n;
  }
  const long before = peak_kib();
  int refused = 0;
  for (uint64_t i = 0; i < 10000; ++i) {
    const Result<ModelConfig> back = model_config_from_json(damaged(good, i));
    if (!back.ok()) {
      ++refused;
      continue;
    }
    // What is accepted is written and read again as it is.
    const Result<ModelConfig> again = model_config_from_json(to_json(*back));
    ASSERT_TRUE(again.ok()) << again.status().message();
    EXPECT_EQ(*again, *back);
    (void)validate(*back).ok();
  }
  EXPECT_GT(refused, 5000);
  EXPECT_LT(peak_kib() - before, kMaxGrowthKib);
}

}  // namespace
}  // namespace cosformer
