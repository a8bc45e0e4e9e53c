// A state on disk: one safetensors file with the tensors kv_state, k_sum, start
// and position (and log_scale: Performer's), and what made them as metadata.
// The format layer is no dependency of the operators (and reads models); four
// known tensors need little of it, and JSON is read by nlohmann-json.
#include <ATen/ops/empty.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "ops/errors.h"
#include "ops/linear_state.h"

namespace cosformer::ops {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kFormat[] = "cosformer.linear_state";
constexpr char kVersion[] = "1";
constexpr uint64_t kMaxHeader = uint64_t{1} << 20;
constexpr std::array<const char*, 5> kNames = {"kv_state", "k_sum", "start",
                                               "position", "log_scale"};

const char* dtype_name(at::ScalarType dtype) {
  if (dtype == at::kFloat) return "F32";
  if (dtype == at::kDouble) return "F64";
  return "I64";
}

std::string errno_text() { return std::strerror(errno); }

// A new file that appears under its name whole or not at all.
class AtomicFile {
 public:
  explicit AtomicFile(std::string path)
      : path_(std::move(path)), temporary_(path_ + ".tmp.XXXXXX") {
    descriptor_ = ::mkstemp(temporary_.data());
    if (descriptor_ < 0) {
      fail("LinearState::save: cannot create a file beside ", path_, ": ",
           errno_text());
    }
  }
  ~AtomicFile() {
    if (descriptor_ >= 0) ::close(descriptor_);
    if (!committed_) ::unlink(temporary_.c_str());
  }
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, size_t bytes) {
    const char* from = static_cast<const char*>(data);
    while (bytes > 0) {
      const ssize_t written = ::write(descriptor_, from, bytes);
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) {
        fail("LinearState::save: cannot write ", path_, ": ", errno_text());
      }
      from += written;
      bytes -= static_cast<size_t>(written);
    }
  }

  void commit() {
    // mkstemp makes the file private; others follow the process's mask.
    const mode_t mask = ::umask(0);
    ::umask(mask);
    ::fchmod(descriptor_, 0666 & ~mask);
    if (::fsync(descriptor_) != 0 || ::close(descriptor_) != 0) {
      fail("LinearState::save: cannot finish ", path_, ": ", errno_text());
    }
    descriptor_ = -1;
    if (::rename(temporary_.c_str(), path_.c_str()) != 0) {
      fail("LinearState::save: cannot put the file in place as ", path_, ": ",
           errno_text());
    }
    committed_ = true;
    const size_t slash = path_.rfind('/');
    const std::string folder =
        slash == std::string::npos ? "." : path_.substr(0, slash + 1);
    const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY);
    if (descriptor >= 0) {
      ::fsync(descriptor);
      ::close(descriptor);
    }
  }

 private:
  std::string path_, temporary_;
  int descriptor_ = -1;
  bool committed_ = false;
};

// Parts of the file behind error messages that name it. Nothing is read, and no
// memory taken, beyond what the file's size allows.
class StateReader {
 public:
  explicit StateReader(std::string_view path)
      : path_(path), file_(::open(path_.c_str(), O_RDONLY | O_NONBLOCK)) {
    struct stat status{};
    if (file_.descriptor < 0) bad("cannot be opened: ", errno_text());
    if (::fstat(file_.descriptor, &status) != 0 || !S_ISREG(status.st_mode))
      bad("is no regular file");
    size_ = static_cast<uint64_t>(status.st_size);
    parse_header();
  }

  const std::string& metadata(const char* key) const {
    const auto found = metadata_->find(key);
    if (found == metadata_->end() || !found->is_string())
      bad("has no metadata '", key, "'");
    return found->get_ref<const std::string&>();
  }

  at::Tensor tensor(const char* name, int64_t rank) {
    const auto found = header_.find(name);
    if (found == header_.end()) bad("has no tensor ", name);
    const Json& entry = *found;
    if (!entry.is_object() || !entry.contains("dtype") ||
        !entry["dtype"].is_string() || !entry.contains("shape") ||
        !entry["shape"].is_array() || !entry.contains("data_offsets") ||
        !entry["data_offsets"].is_array() ||
        entry["data_offsets"].size() != 2) {
      bad("tensor ", name, " has a malformed entry");
    }
    const std::string dtype = entry["dtype"].get<std::string>();
    const bool is_float = rank > 1;
    at::ScalarType type = at::kLong;
    uint64_t width = 8;
    if (is_float && dtype == "F32") {
      type = at::kFloat;
      width = 4;
    } else if (is_float && dtype == "F64") {
      type = at::kDouble;
    } else if (is_float || dtype != "I64") {
      bad("tensor ", name, " is ", dtype, ", expected ",
          is_float ? "F32 or F64" : "I64");
    }
    std::vector<int64_t> shape;
    uint64_t bytes = width;
    for (const Json& size : entry["shape"]) {
      if (!size.is_number_unsigned()) bad("tensor ", name, " has a bad shape");
      const uint64_t n = size.get<uint64_t>();
      if (__builtin_mul_overflow(bytes, n, &bytes) ||
          n > static_cast<uint64_t>(INT64_MAX)) {
        bad("tensor ", name, " has more elements than a file can hold");
      }
      shape.push_back(static_cast<int64_t>(n));
    }
    if (static_cast<int64_t>(shape.size()) != rank) {
      bad("tensor ", name, " has ", shape.size(), " dimensions, expected ",
          rank);
    }
    const Json& offsets = entry["data_offsets"];
    if (!offsets[0].is_number_unsigned() || !offsets[1].is_number_unsigned())
      bad("tensor ", name, " has bad offsets");
    const uint64_t begin = offsets[0].get<uint64_t>();
    const uint64_t end = offsets[1].get<uint64_t>();
    if (begin > end || end > data_bytes() || end - begin != bytes) {
      bad("tensor ", name, " lies at [", begin, ", ", end, ") of ",
          data_bytes(), " bytes, expected ", bytes, " bytes inside");
    }
    used_ += bytes;
    places_.emplace(begin, end);
    at::Tensor result = at::empty(shape, type);
    if (bytes > 0) read(data_ + begin, result.mutable_data_ptr(), bytes);
    return result;
  }

  // After the last tensor: nothing but them, one behind the other.
  void check_complete() const {
    if (used_ != data_bytes()) {
      bad("has ", data_bytes(), " bytes of data, its tensors take ", used_);
    }
    uint64_t end = 0;
    for (const auto& [from, to] : places_) {
      if (from != end) {
        bad("has a tensor at byte ", from, ", expected it at ", end,
            ": tensors follow one another");
      }
      end = to;
    }
  }

  template <typename... Parts>
  [[noreturn]] void bad(const Parts&... parts) const {
    fail("LinearState::load: ", path_, " ", parts...);
  }

 private:
  struct File {
    explicit File(int d) : descriptor(d) {}
    ~File() {
      if (descriptor >= 0) ::close(descriptor);
    }
    File(const File&) = delete;
    File& operator=(const File&) = delete;
    const int descriptor;
  };

  uint64_t data_bytes() const { return size_ - data_; }

  void read(uint64_t at, void* to, uint64_t bytes) const {
    uint64_t done = 0;
    while (done < bytes) {
      const ssize_t count =
          ::pread(file_.descriptor, static_cast<char*>(to) + done, bytes - done,
                  static_cast<off_t>(at + done));
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) {
        bad("cannot be read: ", count < 0 ? errno_text() : "it became shorter");
      }
      done += static_cast<uint64_t>(count);
    }
  }

  void parse_header() {
    uint64_t length = 0;
    std::array<unsigned char, sizeof(length)> prefix;
    if (size_ < sizeof(length)) {
      bad("has ", size_,
          " bytes, too short for a state: truncated or not a state file");
    }
    read(0, prefix.data(), sizeof(length));
    for (int i = 7; i >= 0; --i) length = length << 8 | prefix[i];
    if (length > kMaxHeader || length > size_ - sizeof(length)) {
      bad("announces a header of ", length, " bytes, has ",
          size_ - sizeof(length), " left: truncated or not a state file");
    }
    data_ = sizeof(length) + length;
    std::set<std::string> seen;
    std::string duplicate;
    const auto callback = [&](int depth, Json::parse_event_t event,
                              Json& parsed) {
      if (depth == 1 && event == Json::parse_event_t::key &&
          !seen.insert(parsed.get<std::string>()).second) {
        duplicate = parsed.get<std::string>();
      }
      return true;
    };
    std::string text(length, '\0');
    read(sizeof(length), text.data(), length);
    header_ = Json::parse(text, callback,
                          /*allow_exceptions=*/false);
    if (!header_.is_object()) bad("has a header that is not a JSON object");
    if (!duplicate.empty()) bad("names '", duplicate, "' twice");
    const auto metadata = header_.find("__metadata__");
    if (metadata == header_.end() || !metadata->is_object())
      bad("has no metadata, expected format ", kFormat);
    metadata_ = &*metadata;
    for (const auto& [name, entry] : header_.items()) {
      bool known = name == "__metadata__";
      for (const char* expected : kNames) known = known || name == expected;
      if (!known) bad("has an unknown tensor '", name, "'");
    }
  }

  std::string path_;
  File file_;
  uint64_t size_ = 0, data_ = 0, used_ = 0;
  std::multiset<std::pair<uint64_t, uint64_t>>
      places_;  // of the tensors' bytes
  Json header_;
  const Json* metadata_ = nullptr;
};

int64_t parse_integer(const StateReader& reader, const char* key) {
  const std::string& text = reader.metadata(key);
  char* end = nullptr;
  errno = 0;
  const long long value = std::strtoll(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || errno != 0 || value < 0)
    reader.bad("has ", key, " '", text, "', expected an integer >= 0");
  return value;
}

double parse_double(const StateReader& reader, const char* key) {
  const std::string& text = reader.metadata(key);
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !(value >= 0) || value > 1e300)
    reader.bad("has ", key, " '", text, "', expected a number >= 0");
  return value;
}

}  // namespace

void save_state(const at::Tensor& kv_state, const at::Tensor& k_sum,
                const at::Tensor& start, const at::Tensor& position,
                std::string_view kind, std::string_view feature_map,
                int64_t reweight_len, double rotary_base,
                bool rotary_interleaved,
                const std::optional<at::Tensor>& log_scale,
                std::string_view path) {
  if ((kind == "performer") != log_scale.has_value()) {
    fail("LinearState::save: a state of kind '", kind, "' has ",
         log_scale ? "a" : "no", " log_scale, expected ",
         log_scale ? "none" : "one");
  }
  std::vector<const at::Tensor*> tensors = {&kv_state, &k_sum, &start,
                                            &position};
  if (log_scale) tensors.push_back(&*log_scale);
  char base[64];
  std::snprintf(base, sizeof(base), "%.17g", rotary_base);
  Json header;
  header["__metadata__"] = {
      {"format", kFormat},
      {"format_version", kVersion},
      {"kind", kind},
      {"feature_map", feature_map},
      {"reweight_len", std::to_string(reweight_len)},
      {"rotary_base", base},
      {"rotary_interleaved", rotary_interleaved ? "true" : "false"}};
  std::vector<at::Tensor> dense(tensors.size());
  uint64_t offset = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    dense[i] = tensors[i]->detach().to(at::kCPU).contiguous();
    const at::ScalarType dtype = dense[i].scalar_type();
    const bool is_float = i < 2 || i == 4;
    const bool valid = is_float ? dtype == at::kFloat || dtype == at::kDouble
                                : dtype == at::kLong;
    if (!valid) {
      fail("LinearState::save: ", kNames[i], " is ", dtype, ", expected ",
           is_float ? "float32 or float64" : "int64");
    }
    const uint64_t bytes = dense[i].nbytes();
    header[kNames[i]] = {{"dtype", dtype_name(dtype)},
                         {"shape", dense[i].sizes().vec()},
                         {"data_offsets", {offset, offset + bytes}}};
    offset += bytes;
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');  // tensors start aligned
  std::array<unsigned char, 8> length;
  for (int i = 0; i < 8; ++i)
    length[i] = static_cast<unsigned char>(text.size() >> (8 * i));

  AtomicFile file{std::string(path)};
  file.write(length.data(), length.size());
  file.write(text.data(), text.size());
  for (const at::Tensor& tensor : dense)
    file.write(tensor.const_data_ptr(), tensor.nbytes());
  file.commit();
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, std::string,
           std::string, int64_t, double, bool, at::Tensor>
load_state(std::string_view path) {
  StateReader reader(path);
  if (reader.metadata("format") != kFormat) {
    reader.bad("has format '", reader.metadata("format"), "', expected '",
               kFormat, "'");
  }
  if (reader.metadata("format_version") != kVersion) {
    reader.bad("has format_version '", reader.metadata("format_version"),
               "', this version reads '", kVersion, "'");
  }
  const std::string kind = reader.metadata("kind");
  const bool performer = kind == "performer";
  if (kind != "linear" && !performer) {
    reader.bad("holds a state of kind '", kind,
               "', expected 'linear' or 'performer'");
  }
  const std::string feature_map = reader.metadata("feature_map");
  if (performer ? feature_map != "performer"
                : feature_map != "relu" && feature_map != "elu1" &&
                      feature_map != "identity") {
    reader.bad("has feature_map '", feature_map, "', expected ",
               performer ? "'performer'" : "'relu', 'elu1' or 'identity'");
  }
  const int64_t reweight_len = parse_integer(reader, "reweight_len");
  const double rotary_base = parse_double(reader, "rotary_base");
  const std::string& interleaved = reader.metadata("rotary_interleaved");
  if (interleaved != "true" && interleaved != "false")
    reader.bad("has rotary_interleaved '", interleaved, "'");

  at::Tensor kv_state = reader.tensor("kv_state", 4);
  at::Tensor k_sum = reader.tensor("k_sum", 3);
  at::Tensor start = reader.tensor("start", 1);
  at::Tensor position = reader.tensor("position", 1);
  at::Tensor log_scale = at::empty({0});
  if (performer) log_scale = reader.tensor("log_scale", 3);
  reader.check_complete();
  const int64_t rows = kv_state.size(0);
  if (k_sum.scalar_type() != kv_state.scalar_type() ||
      k_sum.sizes() != kv_state.sizes().slice(0, 3) || start.size(0) != rows ||
      position.size(0) != rows) {
    reader.bad("has kv_state ", kv_state.sizes(), ", k_sum ", k_sum.sizes(),
               ", start ", start.sizes(), ", position ", position.sizes(),
               ": expected [rows, heads, features, value_dim], [rows, heads, "
               "features], [rows], [rows], the first two of one dtype");
  }
  if (performer && (log_scale.scalar_type() != k_sum.scalar_type() ||
                    log_scale.sizes() != k_sum.sizes())) {
    reader.bad("has log_scale ", log_scale.scalar_type(), " ",
               log_scale.sizes(), ", expected ", k_sum.scalar_type(), " ",
               k_sum.sizes(), " as k_sum");
  }
  if (reweight_len > 0 && kv_state.size(2) % 2 != 0) {
    reader.bad("has ", kv_state.size(2),
               " features, expected an even number with reweight_len ",
               reweight_len);
  }
  const int64_t* starts = start.const_data_ptr<int64_t>();
  const int64_t* positions = position.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < rows; ++row) {
    if (starts[row] > positions[row]) {
      reader.bad("has start ", starts[row], " after position ", positions[row],
                 " in row ", row);
    }
  }
  return {kv_state,     k_sum,       start,
          position,     kind,        feature_map,
          reweight_len, rotary_base, interleaved == "true",
          log_scale};
}

}  // namespace cosformer::ops
