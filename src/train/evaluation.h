// The loss over a run of tokens, each predicted once.
#ifndef COSFORMER_SRC_TRAIN_EVALUATION_H_
#define COSFORMER_SRC_TRAIN_EVALUATION_H_

#include <atomic>
#include <functional>
#include <optional>

#include "cosformer/models.h"
#include "cosformer/train.h"

namespace cosformer::train_internal {

// Tokens to read in order: ids[begin, begin + count) as int64 [count].
struct TokenSource {
  int64_t tokens = 0;
  torch::Tensor token_bytes;  // int64 [vocab_size], see bytes_of_tokens
  std::function<torch::Tensor(int64_t begin, int64_t count)> read;
};

// Bytes of text behind each token id, int64 [vocab_size].
torch::Tensor bytes_of_tokens(const Tokenizer& tokenizer);

// Sequences at a time that keep the logits of an evaluation near 64 MB.
int64_t evaluation_batch(int64_t context, int64_t vocab_size);

// Window w predicts tokens [w context + 1, (w + 1) context + 1) from the tokens
// one earlier; the last may be short. The model is put into evaluation mode and
// back. nullopt: *stop was set.
std::optional<EvalResult> evaluate_tokens(Transformer& model,
                                          const TokenSource& source,
                                          int64_t context, int64_t batch_size,
                                          const std::atomic<bool>* stop);

}  // namespace cosformer::train_internal

#endif  // COSFORMER_SRC_TRAIN_EVALUATION_H_
