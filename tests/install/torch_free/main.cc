// One query against three equal keys: the answer is a mean of their values.
#include <cosformer/format.h>
#include <cosformer/kernels.h>

#include <cmath>
#include <cstdio>

int main() {
  const float q[2] = {1, 2}, k[6] = {1, 1, 1, 1, 1, 1}, v[3] = {1, 2, 6};
  float out[1];
  cosformer::LinearAttentionInputs inputs;
  inputs.q = {q, cosformer::DType::kFloat32, {1, 1, 1, 2}, {2, 2, 2, 1}};
  inputs.k = {k, cosformer::DType::kFloat32, {1, 3, 1, 2}, {6, 2, 2, 1}};
  inputs.v = {v, cosformer::DType::kFloat32, {1, 3, 1, 1}, {3, 1, 1, 1}};
  const cosformer::View4 view = {
      out, cosformer::DType::kFloat32, {1, 1, 1, 1}, {1, 1, 1, 1}};
  const cosformer::Status status = cosformer::linear_attention_forward(
      {}, inputs, view, nullptr, {}, cosformer::serial_executor());
  if (!status.ok()) {
    std::puts(status.message().c_str());
    return 1;
  }
  if (!cosformer::validate(cosformer::ModelConfig{.vocab_size = 10}).ok())
    return 1;
  std::printf("%.3f\n", static_cast<double>(out[0]));
  return std::abs(out[0] - 3.0f) < 1e-6f ? 0 : 1;
}
