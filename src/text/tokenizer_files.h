// tokenizer.json of a model folder: what every kind of tokenizer writes.
#ifndef COSFORMER_SRC_TEXT_TOKENIZER_FILES_H_
#define COSFORMER_SRC_TEXT_TOKENIZER_FILES_H_

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "cosformer/text.h"

namespace cosformer {

inline constexpr int64_t kTokenizerFormatVersion = 1;

// Writes folder/tokenizer.json with kind, format_version and `fields`; the
// folder is made when missing.
Status save_tokenizer_json(const std::string& folder, std::string_view kind,
                           const nlohmann::ordered_json& fields);

// 16 hexadecimal digits that tell contents apart (FNV-1a, 64 bits): against
// mix-ups and damage, not against forgery.
std::string digest(std::string_view bytes);

// From a parsed tokenizer.json; `where` names it in messages.
Result<std::unique_ptr<Tokenizer>> load_character_tokenizer(
    const nlohmann::json& object, const std::string& where);
Result<std::unique_ptr<Tokenizer>> load_sentencepiece_tokenizer(
    const nlohmann::json& object, const std::string& where,
    const std::string& folder);

}  // namespace cosformer

#endif  // COSFORMER_SRC_TEXT_TOKENIZER_FILES_H_
