// Text data sets: files, tokenised once into a memory-mapped cache.
#ifndef COSFORMER_DATA_H_
#define COSFORMER_DATA_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cosformer/base.h"
#include "cosformer/text.h"

namespace cosformer {

// [data] of a run's config.
struct DataConfig {
  std::string path;  // a file, or a folder read recursively in name order
  // Of a folder's files: ".h", ...; "" = files without a suffix; none given =
  // all. Hidden files are left out, binary ones skipped (see messages()).
  std::vector<std::string> extensions;
  std::string tokenizer =
      "characters";             // "bytes", "characters", "sentencepiece"
  int64_t vocab_size = 4096;    // sentencepiece only
  double train_fraction = 0.9;  // the first part of the text, by characters'
                                // bytes; the rest is validation
  std::string cache_dir;        // where the tokenised cache lives; train() puts
                          // "" beside the run's output, prepare() refuses it
  uint64_t seed = 1;  // of the tokenizer's training sample
};

// Token ids of the training and the validation part, mapped from the cache.
class TokenDataset {
 public:
  // Progress: bytes done, bytes in all.
  using Progress = std::function<void(int64_t, int64_t)>;

  // Reads the text, trains the tokenizer where the kind has to learn one (on
  // the whole text for characters), tokenises into cache_dir; reuses a cache
  // whose sources (names, sizes, modification times), tokenizer and options are
  // unchanged and whose checksum holds. Works in pieces: memory does not grow
  // with the text. Several processes may prepare the same cache at once.
  // tokenizer: use this one instead of training (evaluation, resume); may be
  // null.
  // The training part ends at the last character boundary within the first
  // train_fraction of the bytes; the parts are tokenised apart.
  // Errors name the path: missing, empty, no match, a binary file (a NUL byte,
  // except with the tokenizer bytes; bytes that are not UTF-8 with
  // characters), a character that a given tokenizer does not know, no space.
  static Result<TokenDataset> prepare(
      const DataConfig& config, std::shared_ptr<const Tokenizer> tokenizer,
      const Progress& progress = {});

  TokenDataset(TokenDataset&&) noexcept;
  TokenDataset& operator=(TokenDataset&&) noexcept;
  ~TokenDataset();

  std::shared_ptr<const Tokenizer> tokenizer() const;
  int64_t train_size() const;        // tokens
  int64_t validation_size() const;   // tokens
  int64_t train_bytes() const;       // bytes of text behind them
  int64_t validation_bytes() const;  // the same (bits a byte)
  bool reused_cache() const;         // prepare() found everything made already
  // What a user should know: how many files of a folder were skipped, and why.
  const std::vector<std::string>& messages() const;
  // ids[begin, begin + count) of a part as int64 [count]; a range outside the
  // part throws c10::Error.
  at::Tensor train_tokens(int64_t begin, int64_t count) const;
  at::Tensor validation_tokens(int64_t begin, int64_t count) const;

  // Batch `index` of training: inputs and targets (the next tokens), both int64
  // [batch_size, context], at positions drawn by Philox from (seed, index, row)
  // alone: a sampler with no state to save. Throws c10::Error when the training
  // part has fewer than context + 1 tokens.
  std::pair<at::Tensor, at::Tensor> train_batch(uint64_t seed, int64_t index,
                                                int64_t batch_size,
                                                int64_t context) const;

 private:
  struct Impl;
  explicit TokenDataset(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Nats a token of the validation part under counts of the training part, single
// tokens and pairs, smoothed by interpolated absolute discounting
// (src/data/baseline.cc). As for a model, every token but the first is
// predicted; NaN with fewer than two. Of larger parts the first 2^27 tokens.
struct Baselines {
  double unigram_loss = 0;
  double bigram_loss = 0;
};
Baselines count_baselines(const TokenDataset& data);

}  // namespace cosformer

#endif  // COSFORMER_DATA_H_
