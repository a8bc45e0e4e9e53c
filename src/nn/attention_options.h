// Defaults and contradictions of a layer's options.
#ifndef COSFORMER_SRC_NN_ATTENTION_OPTIONS_H_
#define COSFORMER_SRC_NN_ATTENTION_OPTIONS_H_

#include "cosformer/nn.h"

namespace cosformer {

// The options with every default in its place. Throws c10::Error for what
// contradicts itself or what the kind lacks.
AttentionOptions complete_options(AttentionOptions options);

}  // namespace cosformer

#endif  // COSFORMER_SRC_NN_ATTENTION_OPTIONS_H_
