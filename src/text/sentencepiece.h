// What the trainer of the sentencepiece tokenizer looks at.
#ifndef COSFORMER_SRC_TEXT_SENTENCEPIECE_H_
#define COSFORMER_SRC_TEXT_SENTENCEPIECE_H_

#include <cstddef>

namespace cosformer {

// Above this, a sample of the text drawn in blocks of kSampleBlockBytes: merges
// are settled long before, and time and memory stay small.
inline constexpr size_t kMaxSampleBytes = size_t{4} << 20;
inline constexpr size_t kSampleBlockBytes = size_t{64} << 10;

}  // namespace cosformer

#endif  // COSFORMER_SRC_TEXT_SENTENCEPIECE_H_
