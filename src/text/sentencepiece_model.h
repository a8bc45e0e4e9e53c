// The bytes of a sentencepiece model, checked before the library sees them: it
// trusts what it loads.
#ifndef COSFORMER_SRC_TEXT_SENTENCEPIECE_MODEL_H_
#define COSFORMER_SRC_TEXT_SENTENCEPIECE_MODEL_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cosformer/base.h"

namespace cosformer {

struct SentencepieceModel {
  // The text of each token: U+2581 made a space again, a byte token its byte,
  // "" for the unknown token.
  std::vector<std::string> pieces;
  std::vector<int32_t> byte_ids;  // [256]
};

// Accepts the models that are lossless: BPE with all 256 byte tokens, no
// normalisation, no dummy prefix, white space kept. `where` names the file.
Result<SentencepieceModel> parse_sentencepiece_model(std::string_view bytes,
                                                     const std::string& where);

}  // namespace cosformer

#endif  // COSFORMER_SRC_TEXT_SENTENCEPIECE_MODEL_H_
