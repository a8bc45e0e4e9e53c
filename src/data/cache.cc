#include "data/cache.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "cosformer/format.h"
#include "text/strict_json.h"

namespace cosformer {
namespace {

using nlohmann::json;

constexpr size_t kBufferBytes = size_t{1} << 20;

std::string hex(uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx",
                static_cast<unsigned long long>(value));
  return text;
}

// Reads members of an object; the first that is missing or of another type is
// remembered.
class Members {
 public:
  Members(const json& object, const std::string& where)
      : object_(object), where_(where) {
    if (!object.is_object()) {
      status = data_loss(where_, ": found ", describe(object),
                         ", expected an object");
    }
  }
  Status status;

  void read(const char* key, std::string* out) {
    if (const json* v = find(key, &json::is_string, "a string")) {
      *out = v->get<std::string>();
    }
  }
  void read(const char* key, bool* out) {
    if (const json* v = find(key, &json::is_boolean, "true or false")) {
      *out = v->get<bool>();
    }
  }
  void read(const char* key, double* out) {
    if (const json* v = find(key, &json::is_number, "a number")) {
      *out = v->get<double>();
    }
  }
  void read(const char* key, int64_t* out) {
    if (const json* v = find(key, &json::is_number_integer, "an integer")) {
      *out = v->get<int64_t>();
    }
  }
  void read(const char* key, uint64_t* out) {
    if (const json* v =
            find(key, &json::is_number_unsigned, "an integer from 0")) {
      *out = v->get<uint64_t>();
    }
  }
  const json* array(const char* key) {
    return find(key, &json::is_array, "an array");
  }

 private:
  const json* find(const char* key, bool (json::*is)() const noexcept,
                   const char* expected) {
    if (!status.ok()) return nullptr;
    const auto found = object_.find(key);
    if (found == object_.end() || !((*found).*is)()) {
      status = data_loss(where_, ": ", key, ": found ",
                         found == object_.end() ? "nothing" : describe(*found),
                         ", expected ", expected);
      return nullptr;
    }
    return &*found;
  }

  const json& object_;
  const std::string& where_;
};

}  // namespace

std::string to_json(const CacheManifest& manifest) {
  using Ordered = nlohmann::ordered_json;
  const CacheInputs& in = manifest.inputs;
  Ordered object;
  object["format_version"] = kCacheFormatVersion;
  object["tokenizer"] = in.kind;
  object["tokenizer_fingerprint"] = in.fingerprint;
  object["tokenizer_trained"] = manifest.trained;
  object["vocab_size"] = in.vocab_size;
  object["seed"] = in.seed;
  object["extensions"] = in.extensions;
  object["train_fraction"] = in.train_fraction;
  object["token_bytes"] = manifest.token_bytes;
  object["train_tokens"] = manifest.train_tokens;
  object["validation_tokens"] = manifest.validation_tokens;
  object["train_bytes"] = manifest.train_bytes;
  object["validation_bytes"] = manifest.validation_bytes;
  object["checksum"] = hex(manifest.checksum);
  Ordered sources = Ordered::array();
  for (const Source& source : in.sources) {
    Ordered one;
    one["path"] = source.path;
    one["size"] = source.size;
    one["mtime_ns"] = source.mtime_ns;
    if (source.skipped) one["skipped"] = true;
    sources.push_back(std::move(one));
  }
  object["sources"] = std::move(sources);
  // A file's name may be anything; one that is not UTF-8 will not compare
  // equal, and the cache is made again.
  return object.dump(1, ' ', false, Ordered::error_handler_t::replace) + "\n";
}

Result<CacheManifest> cache_manifest_from_json(std::string_view text,
                                               const std::string& where) {
  Result<json> parsed = parse_json(text, where);
  if (!parsed.ok()) return parsed.status();
  Members members(*parsed, where);
  int64_t version = 0;
  members.read("format_version", &version);
  if (!members.status.ok()) return members.status;
  if (version != kCacheFormatVersion) {
    return not_supported(where, ": format_version: found ", version,
                         ", expected ", kCacheFormatVersion);
  }
  CacheManifest manifest;
  CacheInputs& in = manifest.inputs;
  std::string checksum;
  members.read("tokenizer", &in.kind);
  members.read("tokenizer_fingerprint", &in.fingerprint);
  members.read("tokenizer_trained", &manifest.trained);
  members.read("vocab_size", &in.vocab_size);
  members.read("seed", &in.seed);
  members.read("train_fraction", &in.train_fraction);
  members.read("token_bytes", &manifest.token_bytes);
  members.read("train_tokens", &manifest.train_tokens);
  members.read("validation_tokens", &manifest.validation_tokens);
  members.read("train_bytes", &manifest.train_bytes);
  members.read("validation_bytes", &manifest.validation_bytes);
  members.read("checksum", &checksum);
  const json* extensions = members.array("extensions");
  const json* sources = members.array("sources");
  if (!members.status.ok()) return members.status;
  for (const json& e : *extensions) {
    if (!e.is_string()) return data_loss(where, ": extensions: not strings");
    in.extensions.push_back(e.get<std::string>());
  }
  for (const json& one : *sources) {
    Source source;
    Members fields(one, where);
    fields.read("path", &source.path);
    fields.read("size", &source.size);
    fields.read("mtime_ns", &source.mtime_ns);
    if (one.is_object() && one.contains("skipped")) {
      fields.read("skipped", &source.skipped);
    }
    if (!fields.status.ok()) return fields.status;
    in.sources.push_back(std::move(source));
  }
  char* end = nullptr;
  manifest.checksum = std::strtoull(checksum.c_str(), &end, 16);
  if (checksum.size() != 16 || *end != '\0') {
    return data_loss(where, ": checksum: found ", quote_text(checksum));
  }
  constexpr int64_t kMost = int64_t{1} << 56;
  for (const int64_t n : {manifest.train_tokens, manifest.validation_tokens,
                          manifest.train_bytes, manifest.validation_bytes}) {
    if (n < 0 || n > kMost) return data_loss(where, ": a count is ", n);
  }
  if (manifest.token_bytes != 2 && manifest.token_bytes != 4) {
    return data_loss(where, ": token_bytes: found ", manifest.token_bytes);
  }
  return manifest;
}

bool is_current(const CacheManifest& manifest, const CacheInputs& wanted) {
  const CacheInputs& have = manifest.inputs;
  if (have.kind != wanted.kind || have.extensions != wanted.extensions ||
      have.train_fraction != wanted.train_fraction ||
      have.sources.size() != wanted.sources.size()) {
    return false;
  }
  for (size_t i = 0; i < have.sources.size(); ++i) {
    Source a = have.sources[i], b = wanted.sources[i];
    a.skipped = b.skipped = false;
    if (!(a == b)) return false;
  }
  if (!wanted.fingerprint.empty()) {
    return have.fingerprint == wanted.fingerprint;
  }
  return manifest.trained && have.vocab_size == wanted.vocab_size &&
         have.seed == wanted.seed;
}

void Checksum::add(const void* data, size_t bytes) {
  const auto* from = static_cast<const unsigned char*>(data);
  const auto mix = [this](uint64_t word) {
    state_ = (state_ ^ word) * 0xD6E8FEB86659FD93u;
    state_ ^= state_ >> 32;
  };
  size_t at = 0;
  for (; at + 8 <= bytes; at += 8) {
    uint64_t word;
    std::memcpy(&word, from + at, 8);
    mix(word);
  }
  if (at < bytes) {
    uint64_t word = 0;
    std::memcpy(&word, from + at, bytes - at);
    mix(word ^ (uint64_t{bytes - at} << 56));
  }
}

Result<TokenWriter> TokenWriter::create(const std::string& path,
                                        int64_t token_bytes) {
  Result<files::AtomicFile> file = files::AtomicFile::create(path);
  if (!file.ok()) return file.status();
  TokenWriter writer(std::move(*file), token_bytes);
  writer.buffer_.reserve(kBufferBytes);
  return writer;
}

Status TokenWriter::add(const std::vector<int32_t>& ids) {
  for (const int32_t id : ids) {
    buffer_.append(reinterpret_cast<const char*>(&id),
                   static_cast<size_t>(token_bytes_));
    if (buffer_.size() == kBufferBytes) COSFORMER_RETURN_IF_ERROR(flush());
  }
  count_ += static_cast<int64_t>(ids.size());
  return {};
}

Status TokenWriter::flush() {
  checksum_.add(buffer_.data(), buffer_.size());
  const Status status = file_.append(buffer_.data(), buffer_.size());
  buffer_.clear();
  return status;
}

Status TokenWriter::commit() {
  COSFORMER_RETURN_IF_ERROR(flush());
  return file_.commit();
}

std::optional<OpenCache> open_cache(const std::string& stem,
                                    const CacheInputs& wanted) {
  const Result<std::string> text = read_file(stem + ".json");
  if (!text.ok()) return std::nullopt;
  Result<CacheManifest> manifest =
      cache_manifest_from_json(*text, stem + ".json");
  if (!manifest.ok() || !is_current(*manifest, wanted)) return std::nullopt;
  Result<MappedFile> tokens = MappedFile::open(stem + ".tokens");
  if (!tokens.ok()) return std::nullopt;
  const std::string_view bytes = tokens->bytes();
  const int64_t expected =
      (manifest->train_tokens + manifest->validation_tokens) *
      manifest->token_bytes;
  if (static_cast<int64_t>(bytes.size()) != expected) return std::nullopt;
  Checksum checksum;
  for (size_t at = 0; at < bytes.size(); at += kBufferBytes) {
    const size_t n = std::min(kBufferBytes, bytes.size() - at);
    checksum.add(bytes.data() + at, n);
    // Read once: the pages need not stay.
    ::madvise(const_cast<char*>(bytes.data()) + at, n, MADV_DONTNEED);
  }
  if (checksum.value() != manifest->checksum) return std::nullopt;
  if (!bytes.empty()) {
    // Batches are drawn from anywhere: reading ahead would fetch what nobody
    // asked for.
    ::madvise(const_cast<char*>(bytes.data()), bytes.size(), MADV_RANDOM);
  }
  return OpenCache{std::move(*manifest), std::move(*tokens)};
}

}  // namespace cosformer
