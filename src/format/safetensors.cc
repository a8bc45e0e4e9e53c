// The safetensors format: eight bytes of header length (little endian), a JSON
// header {name: {dtype, shape, data_offsets}}, the data without gaps.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "cosformer/format.h"
#include "format/mapped_file.h"
#include "text/files.h"
#include "text/strict_json.h"
#include "text/utf8.h"

namespace cosformer {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little,
              "safetensors data is little endian; it is mapped, not converted");

constexpr size_t kLengthBytes = 8;
// The limit that other readers of the format keep too.
constexpr uint64_t kMaxHeaderBytes = 100'000'000;
constexpr size_t kAlignment = 64;

struct DTypeName {
  DType dtype;
  const char* name;
};
constexpr std::array<DTypeName, 8> kDTypes{{
    {DType::kFloat32, "F32"},
    {DType::kFloat64, "F64"},
    {DType::kBFloat16, "BF16"},
    {DType::kFloat16, "F16"},
    {DType::kInt64, "I64"},
    {DType::kInt32, "I32"},
    {DType::kUInt8, "U8"},
    {DType::kBool, "BOOL"},
}};
// Names that the format has and DType lacks.
constexpr std::array<const char*, 14> kForeignDTypes{
    "I8",      "U16",     "I16",     "U32",         "U64",
    "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ",
    "F4",      "F6_E2M3", "F6_E3M2", "C64"};

const char* format_name(DType dtype) {
  for (const DTypeName& entry : kDTypes) {
    if (entry.dtype == dtype) return entry.name;
  }
  return "?";
}

std::string known_names() {
  std::string out;
  for (const DTypeName& entry : kDTypes) {
    if (!out.empty()) out += ", ";
    out += entry.name;
  }
  return out;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string out = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i == 8) return str_cat(out, ", ... ", shape.size(), " dimensions]");
    if (i > 0) out += ", ";
    out += std::to_string(shape[i]);
  }
  return out + "]";
}

// Bytes of a shape, or nothing when they (or the elements, zeros left out)
// overflow.
std::optional<size_t> bytes_of(const std::vector<int64_t>& shape, DType dtype) {
  uint64_t bytes = size_of(dtype);
  bool empty = false;
  for (const int64_t d : shape) {
    if (d == 0) {
      empty = true;
      continue;
    }
    constexpr auto kMax =
        static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
    if (bytes > kMax / static_cast<uint64_t>(d)) return std::nullopt;
    bytes *= static_cast<uint64_t>(d);
  }
  return empty ? 0 : static_cast<size_t>(bytes);
}

struct Parsed {
  TensorEntry entry;
  uint64_t begin = 0;
};

// Unsigned up to int64's maximum: every offset and dimension of a real file.
std::optional<uint64_t> as_size(const json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  const uint64_t n = value.get<uint64_t>();
  if (n > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    return std::nullopt;
  }
  return n;
}

Result<Parsed> parse_tensor(const std::string& where, const json& value,
                            size_t data_bytes) {
  if (!value.is_object()) {
    return data_loss(where, ": found ", describe(value),
                     ", expected an object with dtype, shape, data_offsets");
  }
  for (const char* key : {"dtype", "shape", "data_offsets"}) {
    if (!value.contains(key)) return data_loss(where, ": has no ", key);
  }
  for (const auto& [key, unused] : value.items()) {
    if (key != "dtype" && key != "shape" && key != "data_offsets") {
      return data_loss(where, ": has the unknown key ", quote_text(key));
    }
  }
  Parsed parsed;
  const json& dtype = value["dtype"];
  if (!dtype.is_string()) {
    return data_loss(where, ": dtype is ", describe(dtype),
                     ", expected a string");
  }
  const std::string& dtype_name = dtype.get_ref<const std::string&>();
  const auto known =
      std::find_if(kDTypes.begin(), kDTypes.end(),
                   [&](const DTypeName& e) { return dtype_name == e.name; });
  if (known == kDTypes.end()) {
    const bool foreign =
        std::any_of(kForeignDTypes.begin(), kForeignDTypes.end(),
                    [&](const char* name) { return dtype_name == name; });
    if (foreign) {
      return not_supported(where, ": dtype ", dtype_name,
                           " is not supported by this version, expected one "
                           "of ",
                           known_names());
    }
    return data_loss(where, ": unknown dtype ", quote_text(dtype_name),
                     ", expected one of ", known_names());
  }
  parsed.entry.dtype = known->dtype;

  const json& shape = value["shape"];
  if (!shape.is_array()) {
    return data_loss(where, ": shape is ", describe(shape),
                     ", expected an array of sizes");
  }
  for (const json& d : shape) {
    const std::optional<uint64_t> n = as_size(d);
    if (!n) {
      return data_loss(where, ": shape has ", describe(d),
                       ", expected a size of 0 or more");
    }
    parsed.entry.shape.push_back(static_cast<int64_t>(*n));
  }
  const std::optional<size_t> bytes =
      bytes_of(parsed.entry.shape, parsed.entry.dtype);
  if (!bytes) {
    return data_loss(where, ": shape ", shape_text(parsed.entry.shape), " of ",
                     dtype_name, " is larger than any file");
  }

  const json& offsets = value["data_offsets"];
  if (!offsets.is_array() || offsets.size() != 2) {
    return data_loss(where, ": data_offsets is ", describe(offsets),
                     ", expected [begin, end]");
  }
  const std::optional<uint64_t> begin = as_size(offsets[0]);
  const std::optional<uint64_t> end = as_size(offsets[1]);
  if (!begin || !end || *begin > *end) {
    return data_loss(where, ": data_offsets are ", describe(offsets[0]),
                     " and ", describe(offsets[1]),
                     ", expected 0 <= begin <= end");
  }
  if (*end > data_bytes) {
    return data_loss(where, ": ends at byte ", *end, " of the data, the file ",
                     "has ", data_bytes, ": it is truncated or malformed");
  }
  if (*end - *begin != *bytes) {
    return data_loss(where, ": data_offsets span ", *end - *begin,
                     " bytes, shape ", shape_text(parsed.entry.shape), " of ",
                     dtype_name, " needs ", *bytes);
  }
  parsed.begin = *begin;
  parsed.entry.bytes = *bytes;
  parsed.entry.data = nullptr;
  return parsed;
}

// The tensors must tile [0, data_bytes).
Status check_tiling(const std::string& path,
                    const std::map<std::string, Parsed>& tensors,
                    size_t data_bytes) {
  std::vector<std::pair<const std::string*, const Parsed*>> order;
  order.reserve(tensors.size());
  for (const auto& [name, parsed] : tensors) order.push_back({&name, &parsed});
  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return std::pair(a.second->begin, a.second->entry.bytes) <
           std::pair(b.second->begin, b.second->entry.bytes);
  });
  uint64_t at = 0;
  for (const auto& [name, parsed] : order) {
    if (parsed->begin != at) {
      return data_loss(
          path, ": tensor ", quote_text(*name), ": begins at byte ",
          parsed->begin, " of the data, the tensor before ends ", "at ", at,
          ": ",
          parsed->begin < at ? "they overlap" : "there is a gap between them");
    }
    at += parsed->entry.bytes;
  }
  if (at != data_bytes) {
    return data_loss(path, ": the tensors end at byte ", at,
                     " of the data, the file has ", data_bytes - at,
                     " bytes more");
  }
  return {};
}

}  // namespace

struct SafetensorsFile::Impl {
  explicit Impl(MappedFile mapped) : file(std::move(mapped)) {}

  MappedFile file;
  std::map<std::string, TensorEntry> tensors;
  std::map<std::string, std::string> metadata;
  std::vector<AlignedBuffer> copies;  // of tensors that the file misaligns
};

SafetensorsFile::SafetensorsFile(std::unique_ptr<Impl> impl)
    : impl_(std::move(impl)) {}
SafetensorsFile::SafetensorsFile(SafetensorsFile&&) noexcept = default;
SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&&) noexcept =
    default;
SafetensorsFile::~SafetensorsFile() = default;

const std::map<std::string, TensorEntry>& SafetensorsFile::tensors() const {
  return impl_->tensors;
}
const std::map<std::string, std::string>& SafetensorsFile::metadata() const {
  return impl_->metadata;
}

Result<SafetensorsFile> SafetensorsFile::open(const std::string& path) {
  Result<MappedFile> mapped = MappedFile::open(path);
  if (!mapped.ok()) return mapped.status();
  auto impl = std::make_unique<Impl>(std::move(*mapped));
  const std::string_view bytes = impl->file.bytes();
  if (bytes.size() < kLengthBytes) {
    return data_loss(path, ": has ", bytes.size(),
                     " bytes, expected a safetensors file: it is truncated or "
                     "of another format");
  }
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), kLengthBytes);
  const size_t rest = bytes.size() - kLengthBytes;
  if (header_bytes > kMaxHeaderBytes) {
    return data_loss(path, ": its header claims ", header_bytes,
                     " bytes, expected at most ", kMaxHeaderBytes,
                     ": not a safetensors file");
  }
  if (header_bytes > rest) {
    return data_loss(path, ": its header claims ", header_bytes,
                     " bytes, the file has ", rest,
                     " after the length: it is truncated");
  }
  const std::string_view header =
      bytes.substr(kLengthBytes, static_cast<size_t>(header_bytes));
  Result<json> parsed = parse_json(header, path + ": header");
  if (!parsed.ok()) return parsed.status();
  if (!parsed->is_object()) {
    return data_loss(path, ": header is ", describe(*parsed),
                     ", expected an object");
  }
  const char* data = header.data() + header.size();
  const size_t data_bytes = rest - header.size();
  std::map<std::string, Parsed> tensors;
  for (const auto& [name, value] : parsed->items()) {
    if (name == "__metadata__") {
      if (!value.is_object()) {
        return data_loss(path, ": __metadata__ is ", describe(value),
                         ", expected an object of strings");
      }
      for (const auto& [key, text] : value.items()) {
        if (!text.is_string()) {
          return data_loss(path, ": __metadata__ ", quote_text(key), " is ",
                           describe(text), ", expected a string");
        }
        impl->metadata[key] = text.get<std::string>();
      }
      continue;
    }
    Result<Parsed> one = parse_tensor(
        str_cat(path, ": tensor ", quote_text(name)), value, data_bytes);
    if (!one.ok()) return one.status();
    tensors.emplace(name, std::move(*one));
  }
  COSFORMER_RETURN_IF_ERROR(check_tiling(path, tensors, data_bytes));

  for (auto& [name, one] : tensors) {
    TensorEntry& entry = one.entry;
    if (entry.bytes > 0) {
      const char* from = data + one.begin;
      entry.data = from;
      if (reinterpret_cast<uintptr_t>(from) % size_of(entry.dtype) != 0) {
        AlignedBuffer copy(entry.bytes);
        if (copy.data() == nullptr) {
          return Status(
              StatusCode::kOutOfMemory,
              str_cat(path, ": no memory for a copy of tensor ",
                      quote_text(name), " of ", entry.bytes, " bytes"));
        }
        std::memcpy(copy.data(), from, entry.bytes);
        entry.data = copy.data();
        impl->copies.push_back(std::move(copy));
      }
    }
    impl->tensors.emplace(name, std::move(entry));
  }
  return SafetensorsFile(std::move(impl));
}

Status write_safetensors(const std::string& path,
                         const std::map<std::string, TensorEntry>& tensors,
                         const std::map<std::string, std::string>& metadata) {
  std::vector<std::pair<const std::string*, const TensorEntry*>> order;
  for (const auto& [name, entry] : tensors) {
    const std::string where =
        str_cat("cannot write '", path, "': tensor ", quote_text(name));
    if (name == "__metadata__") {
      return invalid_argument(where, ": the format keeps this name");
    }
    if (find_invalid_utf8(name) != name.size()) {
      return invalid_argument(where, ": the name is not UTF-8");
    }
    for (const int64_t d : entry.shape) {
      if (d < 0) {
        return invalid_argument(where, ": shape ", shape_text(entry.shape),
                                " has a negative size");
      }
    }
    const std::optional<size_t> bytes = bytes_of(entry.shape, entry.dtype);
    if (!bytes || *bytes != entry.bytes) {
      return invalid_argument(where, ": found ", entry.bytes, " bytes, shape ",
                              shape_text(entry.shape), " of ",
                              cosformer::name(entry.dtype), " needs ",
                              bytes ? std::to_string(*bytes) : "too many");
    }
    if (entry.data == nullptr && entry.bytes > 0) {
      return invalid_argument(where, ": its data is null");
    }
    order.push_back({&name, &entry});
  }
  std::stable_sort(order.begin(), order.end(),
                   [](const auto& a, const auto& b) {
                     return size_of(a.second->dtype) > size_of(b.second->dtype);
                   });
  for (const auto& [key, value] : metadata) {
    if (find_invalid_utf8(key) != key.size() ||
        find_invalid_utf8(value) != value.size()) {
      return invalid_argument("cannot write '", path, "': metadata ",
                              quote_text(key), " is not UTF-8");
    }
  }

  using Ordered = nlohmann::ordered_json;
  // As text, entry by entry: ordered_json looks keys up one by one, which is
  // slow for thousands of tensors.
  std::string header = "{";
  if (!metadata.empty()) {
    header += "\"__metadata__\":" + json(metadata).dump();
  }
  uint64_t at = 0;
  for (const auto& [name, entry] : order) {
    Ordered one;
    one["dtype"] = format_name(entry->dtype);
    one["shape"] = entry->shape;
    one["data_offsets"] = {at, at + entry->bytes};
    if (header.size() > 1) header += ",";
    header += json(*name).dump() + ":" + one.dump();
    at += entry->bytes;
  }
  header += "}";
  const size_t unpadded = kLengthBytes + header.size();
  header.append((kAlignment - unpadded % kAlignment) % kAlignment, ' ');
  if (header.size() > kMaxHeaderBytes) {
    return invalid_argument("cannot write '", path, "': its header has ",
                            header.size(), " bytes, the format allows ",
                            kMaxHeaderBytes);
  }

  Result<files::AtomicFile> file = files::AtomicFile::create(path);
  if (!file.ok()) return file.status();
  file->expect(kLengthBytes + header.size() + at);
  const uint64_t length = header.size();
  COSFORMER_RETURN_IF_ERROR(file->append(&length, kLengthBytes));
  COSFORMER_RETURN_IF_ERROR(file->append(header.data(), header.size()));
  for (const auto& [name, entry] : order) {
    if (entry->bytes == 0) continue;
    COSFORMER_RETURN_IF_ERROR(file->append(entry->data, entry->bytes));
  }
  return file->commit();
}

}  // namespace cosformer
