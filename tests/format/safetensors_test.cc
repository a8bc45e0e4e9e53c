#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "cosformer/format.h"
#include "tests/text/child_process.h"
#include "tests/text/temp_folder.h"

namespace cosformer {
namespace {

using testing::get;
using testing::put;
using testing::TempFolder;

const std::string kFixtures =
    std::string(COSFORMER_SOURCE_DIR) + "/tests/format/fixtures/";

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// The tensors of fixtures/make.py.
struct Fixture {
  bool b[3] = {true, false, true};
  float weight[6] = {0, 0.25f, 0.5f, 0.75f, 1, 1.25f};
  double real[2] = {1.5, -2.5};
  uint16_t half[1] = {0x3800};
  uint16_t brain[2] = {0x3F80, 0xC040};
  int64_t ids[2] = {-1, int64_t{1} << 40};
  int32_t small[1] = {-7};
  uint8_t bytes[2] = {255, 0};
  float scalar[1] = {2.25f};
  float one[1] = {1.0f};

  std::map<std::string, TensorEntry> tensors() const {
    return {
        {"b", {DType::kBool, {3}, b, 3}},
        {"layers.0.weight", {DType::kFloat32, {2, 3}, weight, 24}},
        {"double", {DType::kFloat64, {2}, real, 16}},
        {"half", {DType::kFloat16, {1}, half, 2}},
        {"brain", {DType::kBFloat16, {2, 1}, brain, 4}},
        {"ids", {DType::kInt64, {2}, ids, 16}},
        {"small", {DType::kInt32, {1}, small, 4}},
        {"bytes", {DType::kUInt8, {2}, bytes, 2}},
        {"scalar", {DType::kFloat32, {}, scalar, 4}},
        {"empty", {DType::kFloat32, {0, 4}, nullptr, 0}},
        {"gr\xC3\xB6\xC3\x9F"
         "e",
         {DType::kFloat32, {1}, one, 4}},
    };
  }
  std::map<std::string, std::string> metadata() const {
    return {{"format", "pt"}, {"note", "a \"quoted\" line\nand more"}};
  }
};

void expect_same(const SafetensorsFile& file, const Fixture& fixture) {
  const auto expected = fixture.tensors();
  EXPECT_EQ(file.metadata(), fixture.metadata());
  ASSERT_EQ(file.tensors().size(), expected.size());
  for (const auto& [name, entry] : expected) {
    ASSERT_TRUE(file.tensors().contains(name)) << name;
    const TensorEntry& found = file.tensors().at(name);
    EXPECT_EQ(found.dtype, entry.dtype) << name;
    EXPECT_EQ(found.shape, entry.shape) << name;
    ASSERT_EQ(found.bytes, entry.bytes) << name;
    if (entry.bytes == 0) continue;
    EXPECT_EQ(std::memcmp(found.data, entry.data, entry.bytes), 0) << name;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(found.data) % size_of(found.dtype),
              0u)
        << name;
  }
}

TEST(Safetensors, RoundTrip) {
  const TempFolder folder;
  const Fixture fixture;
  const std::string path = folder / "model.safetensors";
  const Status written =
      write_safetensors(path, fixture.tensors(), fixture.metadata());
  ASSERT_TRUE(written.ok()) << written.message();
  EXPECT_EQ(folder.entries(), 1);
  const Result<SafetensorsFile> file = SafetensorsFile::open(path);
  ASSERT_TRUE(file.ok()) << file.status().message();
  expect_same(*file, fixture);
  // The data begins at a multiple of 64.
  uint64_t header = 0;
  const std::string bytes = get(path);
  std::memcpy(&header, bytes.data(), 8);
  EXPECT_EQ((header + 8) % 64, 0u);
  EXPECT_EQ(bytes[8], '{');
}

TEST(Safetensors, ReadsWhatThePythonPackageWrote) {
  const Result<SafetensorsFile> file =
      SafetensorsFile::open(kFixtures + "python.safetensors");
  ASSERT_TRUE(file.ok()) << file.status().message();
  expect_same(*file, Fixture());
}

// The fixture was read by the Python package (fixtures/make.py), so files equal
// to it are read too.
TEST(Safetensors, WritesWhatThePythonPackageReads) {
  const TempFolder folder;
  const Fixture fixture;
  const std::string path = folder / "a";
  ASSERT_TRUE(
      write_safetensors(path, fixture.tensors(), fixture.metadata()).ok());
  const std::string expected = kFixtures + "cosformer.safetensors";
  if (std::getenv("COSFORMER_UPDATE_FIXTURES") != nullptr) {
    put(expected, get(path));
  }
  EXPECT_EQ(get(path), get(expected));
}

TEST(Safetensors, NoTensors) {
  const TempFolder folder;
  ASSERT_TRUE(write_safetensors(folder / "a", {}, {}).ok());
  const Result<SafetensorsFile> file = SafetensorsFile::open(folder / "a");
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_TRUE(file->tensors().empty());
  EXPECT_TRUE(file->metadata().empty());
}

TEST(Safetensors, RefusesToWriteWhatItCouldNotRead) {
  const TempFolder folder;
  const float one = 1;
  const auto write = [&](const std::string& name, TensorEntry entry) {
    return write_safetensors(folder / "a", {{name, std::move(entry)}}, {});
  };
  EXPECT_FALSE(write("w", {DType::kFloat32, {2}, &one, 4}).ok());
  EXPECT_FALSE(write("w", {DType::kFloat32, {-1}, &one, 4}).ok());
  EXPECT_FALSE(write("w", {DType::kFloat32, {1}, nullptr, 4}).ok());
  EXPECT_FALSE(write("w\xff", {DType::kFloat32, {1}, &one, 4}).ok());
  EXPECT_FALSE(write("__metadata__", {DType::kFloat32, {1}, &one, 4}).ok());
  const int64_t huge = int64_t{1} << 62;
  EXPECT_FALSE(write("w", {DType::kFloat32, {huge, huge}, &one, 0}).ok());
  EXPECT_FALSE(write_safetensors(folder / "a", {}, {{"k", "\xff"}}).ok());
  EXPECT_EQ(folder.entries(), 0);
  EXPECT_TRUE(write("w", {DType::kFloat32, {1}, &one, 4}).ok());
}

std::string file_of(const std::string& header, const std::string& data) {
  const uint64_t length = header.size();
  std::string out(reinterpret_cast<const char*>(&length), 8);
  return out + header + data;
}

std::string with_length(uint64_t length, const std::string& rest) {
  return std::string(reinterpret_cast<const char*>(&length), 8) + rest;
}

TEST(Safetensors, HostileFilesAreErrors) {
  const std::string w4 = R"({"dtype":"F32","shape":[1],"data_offsets":[0,4]})";
  const auto tensor = [](const std::string& fields) {
    return "{\"w\":{" + fields + "}}";
  };
  std::string deep = "{\"w\":";
  for (int i = 0; i < 100'000; ++i) deep += "[";
  struct Case {
    std::string bytes;
    std::string part;
    StatusCode code = StatusCode::kDataLoss;
  };
  const std::vector<Case> cases{
      {"", "has 0 bytes"},
      {"1234567", "has 7 bytes"},
      {with_length(0, ""), "empty"},
      {with_length(2, "{"), "truncated"},
      {with_length(~uint64_t{0}, "{}"), "at most 100000000"},
      {with_length(uint64_t{1} << 63, "{}"), "at most 100000000"},
      {with_length(100'000'001, "{}"), "at most 100000000"},
      {with_length(99'999'999, "{}"), "truncated"},
      {file_of("{", ""), "not JSON"},
      {file_of("", "1234"), "empty"},
      {file_of("[]", ""), "expected an object"},
      {file_of("3", ""), "expected an object"},
      {file_of("{} {}", ""), "not JSON"},
      {file_of("{\"w\":\xff}", ""), "not JSON"},
      {file_of("{\"\xff\":" + w4 + "}", "1234"), "not JSON"},
      {file_of("{\"\xed\xa0\x80\":" + w4 + "}", "1234"), "not JSON"},
      {file_of(deep, ""), "nests deeper"},
      {file_of("{\"w\":" + w4 + ",\"w\":" + w4 + "}", "1234"), "'w' twice"},
      {file_of("{\"w\":3}", "1234"), "tensor 'w'"},
      {file_of("{\"w\":[]}", "1234"), "tensor 'w'"},
      {file_of(tensor(R"("shape":[1],"data_offsets":[0,4])"), "1234"),
       "has no dtype"},
      {file_of(tensor(R"("dtype":"F32","data_offsets":[0,4])"), "1234"),
       "has no shape"},
      {file_of(tensor(R"("dtype":"F32","shape":[1])"), "1234"),
       "has no data_offsets"},
      {file_of(
           tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,4],"x":0)"),
           "1234"),
       "unknown key 'x'"},
      {file_of(tensor(R"("dtype":"F33","shape":[1],"data_offsets":[0,4])"),
               "1234"),
       "unknown dtype 'F33'"},
      {file_of(tensor(R"("dtype":"f32","shape":[1],"data_offsets":[0,4])"),
               "1234"),
       "unknown dtype 'f32'"},
      {file_of(tensor(R"("dtype":32,"shape":[1],"data_offsets":[0,4])"),
               "1234"),
       "dtype is the number 32"},
      {file_of(tensor(R"("dtype":"I8","shape":[4],"data_offsets":[0,4])"),
               "1234"),
       "dtype I8 is not supported by this version", StatusCode::kNotSupported},
      {file_of(tensor(R"("dtype":"F8_E4M3","shape":[4],"data_offsets":[0,4])"),
               "1234"),
       "dtype F8_E4M3 is not supported", StatusCode::kNotSupported},
      {file_of(tensor(R"("dtype":"F32","shape":1,"data_offsets":[0,4])"),
               "1234"),
       "shape is the number 1"},
      {file_of(tensor(R"("dtype":"F32","shape":[-1],"data_offsets":[0,4])"),
               "1234"),
       "shape has the number -1"},
      {file_of(tensor(R"("dtype":"F32","shape":[1.0],"data_offsets":[0,4])"),
               "1234"),
       "shape has the number 1.0"},
      {file_of(tensor(R"("dtype":"F32","shape":["1"],"data_offsets":[0,4])"),
               "1234"),
       "shape has the string '1'"},
      {file_of(
           tensor(
               R"("dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0])"),
           ""),
       "larger than any file"},
      {file_of(
           tensor(
               R"("dtype":"F32","shape":[4611686018427387904,4611686018427387904,0],"data_offsets":[0,0])"),
           ""),
       "larger than any file"},
      {file_of(
           tensor(
               R"("dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,4])"),
           "1234"),
       "shape has the number 18446744073709551615"},
      {file_of(
           tensor(
               R"("dtype":"F32","shape":[99999999999999999999999],"data_offsets":[0,4])"),
           "1234"),
       "shape has the number"},
      {file_of(tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,4])"),
               "123"),
       "ends at byte 4 of the data, the file has 3"},
      {file_of(tensor(R"("dtype":"F32","shape":[1],"data_offsets":[4,0])"),
               "1234"),
       "0 <= begin <= end"},
      {file_of(tensor(R"("dtype":"F32","shape":[1],"data_offsets":[-4,0])"),
               "1234"),
       "0 <= begin <= end"},
      {file_of(
           tensor(
               R"("dtype":"F32","shape":[1],"data_offsets":[18446744073709551612,18446744073709551616])"),
           "1234"),
       "0 <= begin <= end"},
      {file_of(tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0])"),
               "1234"),
       "expected [begin, end]"},
      {file_of(tensor(R"("dtype":"F32","shape":[1],"data_offsets":"0,4")"),
               "1234"),
       "expected [begin, end]"},
      {file_of(tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,4])"),
               "1234"),
       "span 4 bytes, shape [2] of F32 needs 8"},
      {file_of(tensor(R"("dtype":"F32","shape":[0],"data_offsets":[0,4])"),
               "1234"),
       "needs 0"},
      {file_of(
           R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}})",
           "123456"),
       "overlap"},
      {file_of(
           R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
           "1234"),
       "overlap"},
      {file_of(
           R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[6,10]}})",
           "1234567890"),
       "gap"},
      {file_of(tensor(R"("dtype":"F32","shape":[1],"data_offsets":[2,6])"),
               "123456"),
       "gap"},
      {file_of("{\"w\":" + w4 + "}", "12345"), "1 bytes more"},
      {file_of("{}", "1"), "1 bytes more"},
      {file_of("{\"__metadata__\":3}", ""), "__metadata__ is the number 3"},
      {file_of("{\"__metadata__\":{\"a\":1}}", ""), "__metadata__ 'a'"},
      {file_of("{\"__metadata__\":{\"a\":\"1\",\"a\":\"2\"}}", ""),
       "'a' twice"},
  };
  EXPECT_GE(cases.size(), 40u);
  const TempFolder folder;
  const std::string path = folder / "hostile";
  for (size_t i = 0; i < cases.size(); ++i) {
    put(path, cases[i].bytes);
    const Result<SafetensorsFile> file = SafetensorsFile::open(path);
    ASSERT_FALSE(file.ok()) << "case " << i << " of '" << cases[i].part << "'";
    EXPECT_EQ(file.status().code(), cases[i].code) << file.status().message();
    EXPECT_TRUE(has(file.status().message(), cases[i].part))
        << file.status().message() << "\nexpected: " << cases[i].part;
    EXPECT_TRUE(has(file.status().message(), path));
  }
}

// Data that the file misaligns is copied: entries are always aligned.
TEST(Safetensors, MisalignedData) {
  const TempFolder folder;
  std::string header =
      R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
      R"("b":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}})";
  while ((header.size() + 8) % 64 != 0) header += ' ';
  const float value = 3.5f;
  std::string data = "x";
  data.append(reinterpret_cast<const char*>(&value), 4);
  put(folder / "a", file_of(header, data));
  Result<SafetensorsFile> file = SafetensorsFile::open(folder / "a");
  ASSERT_TRUE(file.ok()) << file.status().message();
  // The entries stay good when the object moves.
  const SafetensorsFile moved = std::move(*file);
  const TensorEntry& b = moved.tensors().at("b");
  ASSERT_EQ(reinterpret_cast<uintptr_t>(b.data) % 4, 0u);
  EXPECT_EQ(*static_cast<const float*>(b.data), 3.5f);
}

TEST(Safetensors, FileErrors) {
  const TempFolder folder;
  const Result<SafetensorsFile> missing = SafetensorsFile::open(folder / "no");
  EXPECT_EQ(missing.status().code(), StatusCode::kNotFound);
  EXPECT_TRUE(has(missing.status().message(), "No such file"));
  const Result<SafetensorsFile> is_folder =
      SafetensorsFile::open(folder.path());
  EXPECT_EQ(is_folder.status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace cosformer
