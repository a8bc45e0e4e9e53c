#include "text/tokenizer_files.h"

#include <cstdio>
#include <utility>

#include "text/files.h"
#include "text/strict_json.h"

namespace cosformer {

Status save_tokenizer_json(const std::string& folder, std::string_view kind,
                           const nlohmann::ordered_json& fields) {
  COSFORMER_RETURN_IF_ERROR(files::make_folders(folder));
  nlohmann::ordered_json object;
  object["format_version"] = kTokenizerFormatVersion;
  object["kind"] = kind;
  for (const auto& [key, value] : fields.items()) object[key] = value;
  return files::write_atomically(folder + "/tokenizer.json",
                                 object.dump(2) + "\n");
}

std::string digest(std::string_view bytes) {
  uint64_t hash = 0xCBF29CE484222325u;
  for (const char c : bytes) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
  }
  char text[17];
  std::snprintf(text, sizeof text, "%016llx",
                static_cast<unsigned long long>(hash));
  return text;
}

Result<std::unique_ptr<Tokenizer>> load_tokenizer(const std::string& folder) {
  // Every character of Unicode, escaped, fits in several times over.
  constexpr size_t kMaxBytes = size_t{64} << 20;
  const std::string path = folder + "/tokenizer.json";
  Result<std::string> text = files::read(path, kMaxBytes);
  if (!text.ok()) return text.status();
  Result<nlohmann::json> parsed = parse_json(*text, path);
  if (!parsed.ok()) return parsed.status();
  const nlohmann::json& object = *parsed;
  if (!object.is_object()) {
    return data_loss(path, ": found ", describe(object),
                     ", expected an object");
  }
  const auto version = object.find("format_version");
  if (version == object.end() || !version->is_number_unsigned()) {
    return data_loss(path, ": format_version: found ",
                     version == object.end() ? "nothing" : describe(*version),
                     ", expected ", kTokenizerFormatVersion);
  }
  const uint64_t number = version->get<uint64_t>();
  if (number != static_cast<uint64_t>(kTokenizerFormatVersion)) {
    return not_supported(path, ": format_version: found ", number,
                         ", this version reads ", kTokenizerFormatVersion,
                         number == 0 ? ""
                                     : ": the tokenizer was written by a newer "
                                       "cosformer");
  }
  const auto kind = object.find("kind");
  if (kind == object.end() || !kind->is_string()) {
    return data_loss(path, ": kind: found ",
                     kind == object.end() ? "nothing" : describe(*kind),
                     ", expected 'bytes', 'characters' or 'sentencepiece'");
  }
  const std::string& name = kind->get_ref<const std::string&>();
  const auto refuse_others =
      [&](std::initializer_list<const char*> known) -> Status {
    for (const auto& [key, value] : object.items()) {
      bool found = key == "format_version" || key == "kind";
      for (const char* k : known) found = found || key == k;
      if (!found) {
        return data_loss(path, ": unknown key ", quote_text(key), " for kind '",
                         name, "'");
      }
    }
    return {};
  };
  if (name == "bytes") {
    COSFORMER_RETURN_IF_ERROR(refuse_others({}));
    return make_byte_tokenizer();
  }
  if (name == "characters") {
    COSFORMER_RETURN_IF_ERROR(refuse_others({"characters"}));
    return load_character_tokenizer(object, path);
  }
  if (name == "sentencepiece") {
    COSFORMER_RETURN_IF_ERROR(
        refuse_others({"vocab_size", "model_bytes", "model_digest"}));
    return load_sentencepiece_tokenizer(object, path, folder);
  }
  return data_loss(path, ": kind: found ", quote_text(name),
                   ", expected 'bytes', 'characters' or 'sentencepiece'");
}

}  // namespace cosformer
