// What an attention entry of a config may say.
#ifndef COSFORMER_SRC_FORMAT_ATTENTION_RULES_H_
#define COSFORMER_SRC_FORMAT_ATTENTION_RULES_H_

#include <cstddef>

#include "cosformer/format.h"

namespace cosformer {

// Contradictions of config.attention[index], in itself and with the model:
// options that its kind lacks, forms that it does not have. Each value by
// itself has kept its rule.
Status check_attention(const ModelConfig& config, size_t index);

}  // namespace cosformer

#endif  // COSFORMER_SRC_FORMAT_ATTENTION_RULES_H_
