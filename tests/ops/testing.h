#ifndef COSFORMER_TESTS_OPS_TESTING_H_
#define COSFORMER_TESTS_OPS_TESTING_H_

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <string>

namespace cosformer::testing {

// Norm of the difference over the norm of what is expected.
inline double relative(const at::Tensor& found, const at::Tensor& expected) {
  if (found.sizes() != expected.sizes()) return 1e300;
  if (expected.numel() == 0) return 0;
  const at::Tensor a = found.detach().to(at::kDouble),
                   b = expected.detach().to(at::kDouble);
  const double difference = (a - b).norm().item<double>(),
               norm = b.norm().item<double>();
  return norm > 0 ? difference / norm : difference;
}

// Whether f throws a c10::Error whose message contains the text.
template <typename F>
bool throws_with(const F& f, const std::string& text) {
  try {
    f();
  } catch (const c10::Error& error) {
    const std::string message = error.what_without_backtrace();
    if (message.find(text) != std::string::npos) return true;
    ADD_FAILURE() << "other message: " << message;
    return false;
  }
  return false;
}

// q with 4 heads of 8; k and v with 2, v of width 5.
struct Tensors {
  at::Tensor q, k, v;
};
inline Tensors random_tensors(int64_t batch, int64_t q_len, int64_t kv_len,
                              at::ScalarType dtype) {
  at::manual_seed(1);
  const auto random = [&](int64_t length, int64_t heads, int64_t dim) {
    return at::randn({batch, length, heads, dim}, at::kDouble).to(dtype);
  };
  return {random(q_len, 4, 8), random(kv_len, 2, 8), random(kv_len, 2, 5)};
}

}  // namespace cosformer::testing

#endif  // COSFORMER_TESTS_OPS_TESTING_H_
