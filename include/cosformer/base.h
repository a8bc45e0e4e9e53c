// The lowest layer: errors as values, element types, views of strided memory,
// threads. Nothing here (or in any torch-free layer) throws, prints or exits on
// bad input: it returns a Status.
#ifndef COSFORMER_BASE_H_
#define COSFORMER_BASE_H_

#include <array>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>

namespace cosformer {

// The library's version, "major.minor.patch".
std::string_view version();

enum class StatusCode {
  kOk,
  kInvalidArgument,  // the caller's input is wrong: a shape, an option, a
                     // config key
  kNotFound,         // a file, a tensor or a key that should be there is not
  kDataLoss,         // a file is truncated, malformed or inconsistent
  kIoError,          // the operating system refused: no space, no permission
  kNotSupported,     // well-formed, but this kind or build cannot do it
  kOutOfMemory,
};

// What went wrong: found, expected, where. An empty (default) Status is
// success.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message)
      : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

// A value, or the Status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}  // NOLINT: implicit by intent
  Result(Status status) : status_(std::move(status)) {  // NOLINT
    assert(!status_.ok() && "a Result without a value needs an error");
  }

  bool ok() const { return status_.ok(); }
  const Status& status() const { return status_; }
  // Precondition: ok().
  T& operator*() { return *value_; }
  const T& operator*() const { return *value_; }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }

 private:
  Status status_;
  std::optional<T> value_;
};

// "a", 3, 'c' -> "a3c": messages are built with it.
template <typename... Parts>
std::string str_cat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <typename... Parts>
Status invalid_argument(const Parts&... parts) {
  return Status(StatusCode::kInvalidArgument, str_cat(parts...));
}
template <typename... Parts>
Status not_found(const Parts&... parts) {
  return Status(StatusCode::kNotFound, str_cat(parts...));
}
template <typename... Parts>
Status data_loss(const Parts&... parts) {
  return Status(StatusCode::kDataLoss, str_cat(parts...));
}
template <typename... Parts>
Status io_error(const Parts&... parts) {
  return Status(StatusCode::kIoError, str_cat(parts...));
}
template <typename... Parts>
Status not_supported(const Parts&... parts) {
  return Status(StatusCode::kNotSupported, str_cat(parts...));
}

#define COSFORMER_RETURN_IF_ERROR(expression)                      \
  do {                                                             \
    if (::cosformer::Status status_ = (expression); !status_.ok()) \
      return status_;                                              \
  } while (false)

// Element types of tensors, in memory and on disk.
enum class DType : uint8_t {
  kFloat32,
  kFloat64,
  kBFloat16,
  kFloat16,
  kInt64,
  kInt32,
  kUInt8,
  kBool
};
size_t size_of(DType dtype);
// "float32", "bfloat16", ...
std::string_view name(DType dtype);

// A four-dimensional view of memory that someone else owns: [batch, seq, heads,
// dim]. Strides count elements; the last one is 1. size 0 in any dimension is
// allowed.
struct ConstView4 {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::array<int64_t, 4> size{};
  std::array<int64_t, 4> stride{};
};
struct View4 {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::array<int64_t, 4> size{};
  std::array<int64_t, 4> stride{};

  operator ConstView4() const {
    return {data, dtype, size, stride};
  }  // NOLINT: implicit by intent
};
// Row-major strides for a size.
std::array<int64_t, 4> contiguous_strides(const std::array<int64_t, 4>& size);

// Where kernels run their tasks. Tasks are independent; which thread runs which
// is unspecified, and no result may depend on it.
class Executor {
 public:
  virtual ~Executor() = default;
  virtual int num_threads() const = 0;
  // Calls task(i, thread) once for each i in [0, num_tasks), thread in [0,
  // num_threads()); returns when all are done. No two concurrent calls share a
  // `thread`, so it may index scratch memory.
  virtual void run(
      int64_t num_tasks,
      const std::function<void(int64_t task, int thread)>& task) = 0;
};
// Runs everything on the calling thread.
Executor& serial_executor();
// A pool of its own; num_threads 0 = one for each core that this process may
// use.
std::unique_ptr<Executor> make_thread_pool(int num_threads);

// 64-byte aligned memory that frees itself; data is not initialised. An
// allocation that fails gives data() == nullptr.
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(size_t bytes);
  void* data() const { return data_.get(); }
  size_t size() const { return size_; }

  template <typename T>
  T* as() const {
    return static_cast<T*>(data());
  }

 private:
  struct Free {
    void operator()(void* p) const;
  };
  std::unique_ptr<void, Free> data_;
  size_t size_ = 0;
};

// Bytes that AlignedBuffer holds now and held at most since the last reset: how
// tests and benchmarks measure the extra memory of a kernel.
struct AllocationStats {
  size_t current_bytes;
  size_t peak_bytes;
};
AllocationStats allocation_stats();
void reset_peak_allocation();

// Philox 4x32-10 (Salmon et al., SC 2011): a counter-based generator. The same
// key and counter give the same numbers on every machine, in any order.
std::array<uint32_t, 4> philox(uint64_t key, uint64_t counter_high,
                               uint64_t counter_low);

}  // namespace cosformer

#endif  // COSFORMER_BASE_H_
