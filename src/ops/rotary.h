// Rotary and sinusoidal positions as operators.
#ifndef COSFORMER_OPS_ROTARY_H_
#define COSFORMER_OPS_ROTARY_H_

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>
#include <utility>

namespace cosformer::ops {

// x [batch, seq, heads, dim]; positions int64 [batch, seq] or none = start + t.
using RotarySignature = at::Tensor(const at::Tensor& x,
                                   const std::optional<at::Tensor>& positions,
                                   c10::SymInt start, double base,
                                   bool interleaved, bool inverse);
RotarySignature call_rotary;
RotarySignature rotary_cpu;
RotarySignature rotary_meta;
RotarySignature rotary_portable;
RotarySignature rotary_autograd;

// float32 [max_len, dim]; device none = CPU.
using SinusoidalSignature = at::Tensor(int64_t max_len, int64_t dim,
                                       std::optional<at::Device> device);
SinusoidalSignature sinusoidal_cpu;
SinusoidalSignature sinusoidal_meta;
// Chooses by the device: the operator has no tensor that would tell.
SinusoidalSignature sinusoidal_select;

// cos and sin of position x base^(-2c / dim) for the dim / 2 pairs, computed in
// double where the device has it: positions [..., seq] -> [..., seq, dim / 2].
std::pair<at::Tensor, at::Tensor> rotary_tables(const at::Tensor& positions,
                                                int64_t dim, double base,
                                                at::ScalarType dtype);
// Turns pairs of the last dimension; cos and sin broadcast against x without
// its last dimension halved.
at::Tensor rotate_pairs(const at::Tensor& x, const at::Tensor& cos,
                        const at::Tensor& sin, bool interleaved);

}  // namespace cosformer::ops

#endif  // COSFORMER_OPS_ROTARY_H_
