// The tokenised cache on disk: NAME.json (the manifest: what it was made from,
// counts, checksum), NAME.tokens (the ids of the training part, then those of
// the validation part, little endian, 2 or 4 bytes each) and, where the
// tokenizer was trained on this text, NAME.tokenizer/.
#ifndef COSFORMER_SRC_DATA_CACHE_H_
#define COSFORMER_SRC_DATA_CACHE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cosformer/base.h"
#include "cosformer/data.h"
#include "data/sources.h"
#include "format/mapped_file.h"
#include "text/files.h"

namespace cosformer {

inline constexpr int64_t kCacheFormatVersion = 1;

// Everything that the tokens depend on.
struct CacheInputs {
  std::vector<Source> sources;  // skipped is an outcome: not compared
  std::vector<std::string> extensions;
  std::string kind;         // of the tokenizer
  int64_t vocab_size = 0;   // asked for; sentencepiece trained here only
  uint64_t seed = 0;        // the same
  std::string fingerprint;  // of the tokenizer; "" = to be trained
  double train_fraction = 0;
};

struct CacheManifest {
  CacheInputs inputs;    // sources with skipped, fingerprint always
  bool trained = false;  // the tokenizer was trained on this text
  int64_t token_bytes = 2;
  int64_t train_tokens = 0, validation_tokens = 0;
  int64_t train_bytes = 0, validation_bytes = 0;  // of text
  uint64_t checksum = 0;                          // of NAME.tokens
};

std::string to_json(const CacheManifest& manifest);
Result<CacheManifest> cache_manifest_from_json(std::string_view json,
                                               const std::string& where);
// Whether the manifest's tokens are those that `wanted` asks for.
bool is_current(const CacheManifest& manifest, const CacheInputs& wanted);

// A checksum over bytes that come in pieces; every piece but the last has a
// multiple of 8 bytes.
class Checksum {
 public:
  void add(const void* data, size_t bytes);
  uint64_t value() const { return state_; }

 private:
  uint64_t state_ = 0x9E3779B97F4A7C15u;
};

// Appends ids to NAME.tokens.
class TokenWriter {
 public:
  static Result<TokenWriter> create(const std::string& path,
                                    int64_t token_bytes);
  Status add(const std::vector<int32_t>& ids);
  Status commit();
  int64_t count() const { return count_; }
  uint64_t checksum() const { return checksum_.value(); }

 private:
  TokenWriter(files::AtomicFile file, int64_t token_bytes)
      : file_(std::move(file)), token_bytes_(token_bytes) {}
  Status flush();

  files::AtomicFile file_;
  int64_t token_bytes_;
  std::string buffer_;
  int64_t count_ = 0;
  Checksum checksum_;
};

struct OpenCache {
  CacheManifest manifest;
  MappedFile tokens;
};
// A cache that is current, whole and undamaged, or nothing: then it is to be
// made again.
std::optional<OpenCache> open_cache(const std::string& stem,
                                    const CacheInputs& wanted);

}  // namespace cosformer

#endif  // COSFORMER_SRC_DATA_CACHE_H_
