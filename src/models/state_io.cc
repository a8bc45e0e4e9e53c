// A model's state to and from a file.
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <vector>

#include "cosformer/models.h"
#include "ops/dtypes.h"

namespace cosformer {
namespace {

constexpr const char* kFormat = "cosformer.model_state";
constexpr const char* kVersion = "1";
constexpr int64_t kMostLayers = int64_t{1} << 14;

std::string exact(double value) {
  char text[64];
  std::snprintf(text, sizeof(text), "%.17g", value);
  return text;
}

// What a file holds beside its tensors: the fields of each state, under names
// that saving and loading share.
template <typename State, typename Visitor>
void visit_linear(State& s, Visitor&& visit) {
  visit.tensor("kv_state", s.kv_state, 4);
  visit.tensor("k_sum", s.k_sum, 3);
  visit.tensor("start", s.start, 1);
  visit.tensor("position", s.position, 1);
  visit.tensor("log_scale", s.log_scale, 3);
  visit.text("state_kind", s.kind);
  visit.text("feature_map", s.feature_map);
  visit.integer("reweight_len", s.reweight_len);
  visit.real("rotary_base", s.rotary_base);
  visit.flag("rotary_interleaved", s.rotary_interleaved);
}

template <typename State, typename Visitor>
void visit_cache(State& s, Visitor&& visit) {
  visit.tensor("keys", s.keys, 4);
  visit.tensor("values", s.values, 4);
  visit.tensor("key_mask", s.key_mask, 2);
  visit.tensor("start", s.start, 1);
  visit.tensor("position", s.position, 1);
  visit.tensor("dropped", s.dropped, 1);
  visit.tensor("first_keys", s.first_keys, 4);
  visit.tensor("first_values", s.first_values, 4);
  visit.integer("kept_last", s.kept_last);
  visit.integer("kept_first", s.kept_first);
  visit.flag("is_ring", s.is_ring);
}

class Writer {
 public:
  void layer(int64_t index) { prefix_ = str_cat("layers.", index, "."); }
  void tensor(const char* name, const torch::Tensor& tensor, int64_t) {
    if (!tensor.defined()) return;
    const torch::Tensor value = tensor.detach().to(torch::kCPU).contiguous();
    const auto dtype = dtype_of(value.scalar_type());
    if (!dtype) {
      if (status.ok()) {
        status =
            not_supported(prefix_, name, " is ", str_cat(value.scalar_type()),
                          ", which no state of ours has");
      }
      return;
    }
    tensors[prefix_ + name] = {*dtype, value.sizes().vec(),
                               value.const_data_ptr(),
                               static_cast<size_t>(value.nbytes())};
    alive_.push_back(value);
  }
  void text(const char* name, const std::string& value) {
    metadata[prefix_ + name] = value;
  }
  void integer(const char* name, int64_t value) {
    text(name, std::to_string(value));
  }
  void real(const char* name, double value) { text(name, exact(value)); }
  void flag(const char* name, bool value) {
    text(name, value ? "true" : "false");
  }

  std::map<std::string, TensorEntry> tensors;
  std::map<std::string, std::string> metadata;
  Status status;

 private:
  std::string prefix_;
  std::vector<torch::Tensor> alive_;
};

class Reader {
 public:
  Reader(const SafetensorsFile& file, std::string path)
      : file_(file), path_(std::move(path)) {}
  void layer(int64_t index) { prefix_ = str_cat("layers.", index, "."); }

  // Missing is undefined; what must be there is the caller's to say.
  void tensor(const char* name, torch::Tensor& out, int64_t rank) {
    const auto found = file_.tensors().find(prefix_ + name);
    if (found == file_.tensors().end()) return;
    const TensorEntry& entry = found->second;
    const auto type = scalar_type_of(entry.dtype);
    if (!type || entry.shape.size() != static_cast<size_t>(rank)) {
      return bad(name,
                 str_cat("is ", cosformer::name(entry.dtype), " of ",
                         entry.shape.size(), " dimensions, expected ", rank));
    }
    out = torch::empty(entry.shape, *type);
    if (entry.bytes > 0) {
      std::memcpy(out.mutable_data_ptr(), entry.data, entry.bytes);
    }
    used_.insert(found->first);
  }
  void text(const char* name, std::string& out) {
    const auto found = file_.metadata().find(prefix_ + name);
    if (found == file_.metadata().end()) return bad(name, "is missing");
    out = found->second;
  }
  void integer(const char* name, int64_t& out) {
    std::string value;
    text(name, value);
    char* end = nullptr;
    errno = 0;
    out = std::strtoll(value.c_str(), &end, 10);
    if (value.empty() || *end != '\0' || errno != 0 || out < 0) {
      bad(name, "is '" + value + "', expected an integer of 0 or more");
    }
  }
  void real(const char* name, double& out) {
    std::string value;
    text(name, value);
    char* end = nullptr;
    out = std::strtod(value.c_str(), &end);
    if (value.empty() || *end != '\0' || !(out >= 0) || out > 1e300) {
      bad(name, "is '" + value + "', expected a number of 0 or more");
    }
  }
  void flag(const char* name, bool& out) {
    std::string value;
    text(name, value);
    if (value != "true" && value != "false") {
      bad(name, "is '" + value + "', expected true or false");
    }
    out = value == "true";
  }

  void bad(const std::string& name, const std::string& why) {
    if (status.ok()) {
      status = data_loss(path_, ": ", prefix_, name, " ", why);
    }
  }
  // After the last layer: nothing but what was read.
  void check_complete() {
    prefix_.clear();
    for (const auto& [name, entry] : file_.tensors()) {
      if (used_.count(name) == 0) {
        return bad("tensor '" + name + "'", "is part of no state");
      }
    }
  }

  Status status;

 private:
  const SafetensorsFile& file_;
  std::string path_, prefix_;
  std::set<std::string> used_;
};

// int64 [rows], undefined only where it may be.
bool is_rows(const torch::Tensor& x, int64_t rows, bool may_miss = false) {
  if (!x.defined()) return may_miss;
  return x.scalar_type() == torch::kInt64 && x.size(0) == rows;
}

const char* fault_of(const LinearState& s) {
  if (!s.kv_state.defined() || !s.k_sum.defined()) return "has no sums";
  const int64_t rows = s.kv_state.size(0);
  if (s.k_sum.sizes() != s.kv_state.sizes().slice(0, 3) ||
      s.k_sum.scalar_type() != s.kv_state.scalar_type() ||
      !s.kv_state.is_floating_point()) {
    return "has sums of keys that do not match kv_state";
  }
  if ((s.kind == "performer") != s.log_scale.defined() ||
      (s.log_scale.defined() && s.log_scale.sizes() != s.k_sum.sizes())) {
    return "has a log_scale that does not match its kind and k_sum";
  }
  if (!is_rows(s.start, rows) || !is_rows(s.position, rows) ||
      (s.start > s.position).any().item<bool>()) {
    return "has positions that do not match its rows";
  }
  return nullptr;
}

const char* fault_of(const KvCache& s) {
  if (!s.keys.defined() && !s.values.defined()) return nullptr;  // empty
  if (!s.keys.defined() || !s.values.defined() ||
      s.keys.sizes().slice(0, 3) != s.values.sizes().slice(0, 3) ||
      s.keys.scalar_type() != s.values.scalar_type() ||
      !s.keys.is_floating_point()) {
    return "has keys and values that do not match";
  }
  const int64_t rows = s.keys.size(0), slots = s.keys.size(1);
  if (s.key_mask.defined() &&
      (s.key_mask.scalar_type() != torch::kBool || s.key_mask.size(0) != rows ||
       s.key_mask.size(1) != slots)) {
    return "has a key_mask that does not match its keys";
  }
  if (!is_rows(s.start, rows) || !is_rows(s.position, rows) ||
      !is_rows(s.dropped, rows, /*may_miss=*/true)) {
    return "has positions that do not match its rows";
  }
  const torch::Tensor held = s.position - s.slot_start();
  if ((held < 0).any().item<bool>() ||
      (!s.is_ring && (held > slots).any().item<bool>()) ||
      (s.dropped.defined() && (s.dropped < 0).any().item<bool>())) {
    return "has positions that its slots cannot hold";
  }
  if (s.is_ring && (s.kept_first != 0 || s.kept_last != slots)) {
    return "is a ring of another size than it keeps";
  }
  if (s.first_keys.defined() != s.first_values.defined() ||
      (s.first_keys.defined() &&
       (s.first_keys.size(0) != rows || s.first_keys.size(1) > s.kept_first ||
        s.first_keys.sizes().slice(0, 3) !=
            s.first_values.sizes().slice(0, 3)))) {
    return "has first keys and values that do not match";
  }
  return nullptr;
}

}  // namespace

Status ModelState::save(const std::string& path) const {
  Writer writer;
  writer.metadata = {{"format", kFormat},
                     {"format_version", kVersion},
                     {"position", std::to_string(position)},
                     {"layers", std::to_string(layers.size())}};
  for (size_t i = 0; i < layers.size(); ++i) {
    writer.layer(static_cast<int64_t>(i));
    if (const auto* linear = std::get_if<LinearState>(&layers[i])) {
      writer.text("is", "linear");
      visit_linear(*linear, writer);
    } else if (const auto* cache = std::get_if<KvCache>(&layers[i])) {
      writer.text("is", "kv_cache");
      visit_cache(*cache, writer);
    } else {
      writer.text("is", "nothing");
    }
  }
  if (!writer.status.ok()) return writer.status;
  return write_safetensors(path, writer.tensors, writer.metadata);
}

Result<ModelState> ModelState::load(const std::string& path) {
  Result<SafetensorsFile> file = SafetensorsFile::open(path);
  if (!file.ok()) return file.status();
  Reader reader(*file, path);
  std::string format, version;
  int64_t count = 0;
  ModelState out;
  reader.text("format", format);
  reader.text("format_version", version);
  if (format != kFormat || version != kVersion) {
    return data_loss(path, ": is format '", format, "' version '", version,
                     "', expected '", kFormat, "' version '", kVersion, "'");
  }
  reader.integer("position", out.position);
  reader.integer("layers", count);
  if (reader.status.ok() && count > kMostLayers) {
    reader.bad("layers",
               str_cat("is ", count, ", expected at most ", kMostLayers));
  }
  for (int64_t i = 0; i < count && reader.status.ok(); ++i) {
    reader.layer(i);
    std::string is;
    reader.text("is", is);
    const char* fault = nullptr;
    if (is == "linear") {
      LinearState state;
      visit_linear(state, reader);
      if (reader.status.ok()) fault = fault_of(state);
      out.layers.emplace_back(std::move(state));
    } else if (is == "kv_cache") {
      KvCache cache;
      visit_cache(cache, reader);
      if (reader.status.ok()) fault = fault_of(cache);
      out.layers.emplace_back(std::move(cache));
    } else {
      out.layers.emplace_back();
      if (is != "nothing") {
        reader.bad("is",
                   "'" + is + "', expected 'linear', 'kv_cache' or 'nothing'");
      }
    }
    if (fault != nullptr) reader.bad("", fault);
  }
  if (reader.status.ok()) reader.check_complete();
  if (!reader.status.ok()) return reader.status;
  return out;
}

}  // namespace cosformer
