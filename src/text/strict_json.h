// JSON from outside, read strictly: what a plain parser lets pass (two values
// for one key, nesting without end) is an error here.
#ifndef COSFORMER_SRC_TEXT_STRICT_JSON_H_
#define COSFORMER_SRC_TEXT_STRICT_JSON_H_

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "cosformer/base.h"

namespace cosformer {

// kDataLoss for text that is not JSON (with its byte offset), that is not
// UTF-8, that has a key twice in one object, or that nests deeper than
// kMaxJsonDepth. `what` names the text in messages: "config.json".
inline constexpr int kMaxJsonDepth = 64;
Result<nlohmann::json> parse_json(std::string_view text, std::string_view what);

// How messages name a value's type and value: `a string ("abc")`, `a number
// (4.5)`, `an object`; long ones are cut.
std::string describe(const nlohmann::json& value);

// A string from outside, fit for a message: control characters and bytes that
// are not UTF-8 are escaped, long ones are cut.
std::string quote_text(std::string_view text);

}  // namespace cosformer

#endif  // COSFORMER_SRC_TEXT_STRICT_JSON_H_
