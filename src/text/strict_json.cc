#include "text/strict_json.h"

#include <cstdio>
#include <utility>
#include <vector>

#include "text/utf8.h"

namespace cosformer {
namespace {

using nlohmann::json;

// Builds the document from the parser's events, so that what a document cannot
// hold any more (a second value under one key) is seen.
class Builder : public nlohmann::json_sax<json> {
 public:
  explicit Builder(std::string_view what) : what_(what) {}

  Status status;
  json root;

  bool null() override { return add(json()); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(value); }
  bool number_unsigned(number_unsigned_t value) override { return add(value); }
  bool number_float(number_float_t value, const string_t&) override {
    return add(value);
  }
  bool string(string_t& value) override { return add(std::move(value)); }
  bool binary(binary_t&) override { return fail("has a binary value"); }
  bool start_object(size_t) override { return open(json::object()); }
  bool start_array(size_t) override { return open(json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& value) override {
    if (stack_.back()->contains(value)) {
      return fail(str_cat("has the key ", quote_text(value), " twice"));
    }
    key_ = std::move(value);
    return true;
  }

  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    if (error.id / 100 == 4) {  // out_of_range
      return fail(str_cat("has a number out of range near byte ", position));
    }
    return fail(str_cat("is not JSON: stopped at byte ", position));
  }

 private:
  bool fail(const std::string& message) {
    if (status.ok()) status = data_loss(what_, ": ", message);
    return false;
  }

  json* place(json value) {
    if (stack_.empty()) {
      root = std::move(value);
      return &root;
    }
    json& top = *stack_.back();
    if (top.is_array()) {
      top.push_back(std::move(value));
      return &top.back();
    }
    json& slot = top[key_];
    slot = std::move(value);
    return &slot;
  }

  bool add(json value) {
    place(std::move(value));
    return true;
  }

  bool open(json value) {
    if (stack_.size() >= static_cast<size_t>(kMaxJsonDepth)) {
      return fail(str_cat("nests deeper than ", kMaxJsonDepth, " levels"));
    }
    // The parent gets no other child before this one is closed, so the pointer
    // stays good.
    stack_.push_back(place(std::move(value)));
    return true;
  }

  bool close() {
    stack_.pop_back();
    return true;
  }

  std::string what_;
  std::vector<json*> stack_;
  std::string key_;
};

}  // namespace

Result<json> parse_json(std::string_view text, std::string_view what) {
  if (text.find_first_not_of(" \t\r\n") == std::string_view::npos) {
    return data_loss(what, ": is empty, expected JSON");
  }
  Builder builder(what);
  const bool done =
      json::sax_parse(text.begin(), text.end(), &builder,
                      json::input_format_t::json, /*strict=*/true);
  if (!builder.status.ok()) return builder.status;
  if (!done) return data_loss(what, ": is not JSON");
  return std::move(builder.root);
}

std::string quote_text(std::string_view text) {
  constexpr size_t kLongest = 80;
  std::string out = "'";
  size_t at = 0;
  while (at < text.size()) {
    if (at >= kLongest) {
      return str_cat(out, "...' (", text.size(), " bytes)");
    }
    const Utf8Char c = decode_utf8(text, at);
    if (c.length == 0 || c.code < 0x20 || c.code == 0x7F) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\x%02X",
                    static_cast<unsigned char>(text[at]));
      out += escaped;
      ++at;
    } else {
      out += text.substr(at, static_cast<size_t>(c.length));
      at += static_cast<size_t>(c.length);
    }
  }
  return out + "'";
}

std::string describe(const json& value) {
  switch (value.type()) {
    case json::value_t::null:
      return "null";
    case json::value_t::object:
      return "an object";
    case json::value_t::array:
      return str_cat("an array of ", value.size());
    case json::value_t::string:
      return str_cat("the string ",
                     quote_text(value.get_ref<const std::string&>()));
    case json::value_t::boolean:
      return value.get<bool>() ? "true" : "false";
    case json::value_t::number_integer:
    case json::value_t::number_unsigned:
    case json::value_t::number_float:
      return str_cat("the number ", value.dump());
    default:
      return "something else";
  }
}

}  // namespace cosformer
