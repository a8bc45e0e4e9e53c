// The tokenizer that has nothing to learn: token = byte.
#include <string>
#include <vector>

#include "cosformer/text.h"
#include "text/tokenizer_files.h"

namespace cosformer {
namespace {

class ByteTokenizer : public Tokenizer {
 public:
  std::string_view kind() const override { return "bytes"; }
  int64_t vocab_size() const override { return 256; }
  std::string fingerprint() const override { return "bytes"; }

  Result<std::vector<int32_t>> encode(std::string_view text) const override {
    std::vector<int32_t> ids(text.size());
    for (size_t i = 0; i < text.size(); ++i) {
      ids[i] = static_cast<unsigned char>(text[i]);
    }
    return ids;
  }

  Result<std::string> decode(const std::vector<int32_t>& ids) const override {
    std::string text(ids.size(), '\0');
    for (size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] < 0 || ids[i] > 255) {
        return invalid_argument("token ", ids[i], " at place ", i,
                                " is not in the vocabulary of 256");
      }
      text[i] = static_cast<char>(ids[i]);
    }
    return text;
  }

  std::string piece(int32_t id) const override {
    if (id < 0 || id > 255) return "";
    return std::string(1, static_cast<char>(id));
  }

  Status save(const std::string& folder) const override {
    return save_tokenizer_json(folder, kind(),
                               nlohmann::ordered_json::object());
  }
};

}  // namespace

std::unique_ptr<Tokenizer> make_byte_tokenizer() {
  return std::make_unique<ByteTokenizer>();
}

}  // namespace cosformer
