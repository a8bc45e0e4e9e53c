#include "ops/rotary.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>

#include "cosformer/kernels.h"
#include "cosformer/ops.h"
#include "ops/autograd_util.h"
#include "ops/errors.h"
#include "ops/executor.h"
#include "ops/find_operator.h"
#include "ops/views.h"

namespace cosformer::ops {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

void check_rotary(const at::Tensor& x, const OptionalTensor& positions,
                  const c10::SymInt& start, double base) {
  if (x.dim() != 4) {
    fail("apply_rotary: x has ", x.dim(),
         " dimensions, expected 4: [batch, seq, heads, dim]");
  }
  if (!at::isFloatingType(x.scalar_type())) {
    fail("apply_rotary: x is ", x.scalar_type(), ", expected a floating dtype");
  }
  if (x.sym_size(3) % 2 != 0) {
    fail("apply_rotary: dim is ", x.sym_size(3),
         ", expected an even number: positions turn pairs");
  }
  if (!(base > 0)) fail("apply_rotary: base is ", base, ", expected > 0");
  if (!positions) return;
  if (positions->scalar_type() != at::kLong) {
    fail("apply_rotary: positions are ", positions->scalar_type(),
         ", expected int64");
  }
  if (positions->dim() != 2 || positions->sym_size(0) != x.sym_size(0) ||
      positions->sym_size(1) != x.sym_size(1)) {
    fail("apply_rotary: positions have shape ", positions->sym_sizes(),
         ", expected [batch, seq] = [", x.sym_size(0), ", ", x.sym_size(1),
         "]");
  }
  if (start != 0) {
    fail("apply_rotary: start is ", start,
         " and positions are given: give one of them");
  }
  if (positions->device() != x.device()) {
    fail("apply_rotary: positions are on ", positions->device(), ", x on ",
         x.device(), ": expected one device");
  }
}

class ApplyRotary : public torch::autograd::Function<ApplyRotary> {
 public:
  static constexpr bool is_traceable = true;

  static at::Tensor forward(torch::autograd::AutogradContext* ctx,
                            const at::Tensor& x,
                            const OptionalTensor& positions, c10::SymInt start,
                            double base, bool interleaved, bool inverse) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({positions ? *positions : at::Tensor()});
    ctx->saved_data["start"] = start;
    ctx->saved_data["base"] = base;
    ctx->saved_data["interleaved"] = interleaved;
    ctx->saved_data["inverse"] = inverse;
    return call_rotary(x, positions, std::move(start), base, interleaved,
                       inverse);
  }

  // A rotation's gradient is the rotation back: an operator call again, so any
  // order of differentiation works.
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* ctx,
      torch::autograd::variable_list grads) {
    const at::Tensor saved = ctx->get_saved_variables()[0];
    const OptionalTensor positions =
        saved.defined() ? OptionalTensor(saved) : std::nullopt;
    torch::autograd::variable_list result(6);
    result[0] =
        call_rotary(grads[0], positions, ctx->saved_data["start"].toSymInt(),
                    ctx->saved_data["base"].toDouble(),
                    ctx->saved_data["interleaved"].toBool(),
                    !ctx->saved_data["inverse"].toBool());
    return result;
  }
};

}  // namespace

at::Tensor call_rotary(const at::Tensor& x, const OptionalTensor& positions,
                       c10::SymInt start, double base, bool interleaved,
                       bool inverse) {
  static const auto op =
      find_operator("cosformer::apply_rotary").typed<RotarySignature>();
  return op.call(x, positions, std::move(start), base, interleaved, inverse);
}

at::Tensor rotary_cpu(const at::Tensor& x, const OptionalTensor& positions,
                      c10::SymInt start, double base, bool interleaved,
                      bool inverse) {
  check_rotary(x, positions, start, base);
  at::Tensor holder, positions_holder;
  const at::Tensor& input = dense_rows(x, holder);
  const int64_t* at_positions = nullptr;
  if (positions) {
    positions_holder = positions->contiguous();
    at_positions = positions_holder.const_data_ptr<int64_t>();
  }
  at::Tensor out = at::empty(x.sizes(), x.options());
  throw_if_error(
      cosformer::apply_rotary(view(input), mutable_view(out), at_positions,
                              start.guard_int(__FILE__, __LINE__), base,
                              interleaved, inverse, torch_executor()));
  return out;
}

at::Tensor rotary_meta(const at::Tensor& x, const OptionalTensor& positions,
                       c10::SymInt start, double base, bool, bool) {
  check_rotary(x, positions, positions ? start : c10::SymInt(0), base);
  return at::empty_symint(x.sym_sizes(), x.options());
}

std::pair<at::Tensor, at::Tensor> rotary_tables(const at::Tensor& positions,
                                                int64_t dim, double base,
                                                at::ScalarType dtype) {
  const at::ScalarType exact =
      positions.device().is_mps() ? at::kFloat : at::kDouble;
  const at::Tensor pairs = at::arange(
      dim / 2, at::TensorOptions().dtype(exact).device(positions.device()));
  const at::Tensor frequencies = at::pow(base, pairs * (-2.0 / dim));
  const at::Tensor angles = positions.to(exact).unsqueeze(-1) * frequencies;
  return {angles.cos().to(dtype), angles.sin().to(dtype)};
}

at::Tensor rotate_pairs(const at::Tensor& x, const at::Tensor& cos,
                        const at::Tensor& sin, bool interleaved) {
  const int64_t half = x.size(-1) / 2;
  if (interleaved) {
    const at::Tensor pairs = x.unflatten(-1, {half, 2});
    const at::Tensor a = pairs.select(-1, 0), b = pairs.select(-1, 1);
    return at::stack({a * cos - b * sin, b * cos + a * sin}, -1).flatten(-2);
  }
  const at::Tensor a = x.slice(-1, 0, half), b = x.slice(-1, half);
  return at::cat({a * cos - b * sin, b * cos + a * sin}, -1);
}

at::Tensor rotary_portable(const at::Tensor& x, const OptionalTensor& positions,
                           c10::SymInt start, double base, bool interleaved,
                           bool inverse) {
  check_rotary(x, positions, start, base);
  const at::ScalarType dtype =
      x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor where =
      positions
          ? *positions
          : (at::arange(x.size(1), at::TensorOptions().dtype(at::kLong).device(
                                       x.device())) +
             start.guard_int(__FILE__, __LINE__))
                .unsqueeze(0);
  auto [cos, sin] = rotary_tables(where, x.size(3), base, dtype);
  if (inverse) sin = -sin;
  return rotate_pairs(x.to(dtype), cos.unsqueeze(2), sin.unsqueeze(2),
                      interleaved)
      .to(x.scalar_type());
}

at::Tensor rotary_autograd(const at::Tensor& x, const OptionalTensor& positions,
                           c10::SymInt start, double base, bool interleaved,
                           bool inverse) {
  if (!is_differentiated({&x}, {})) {
    at::AutoDispatchBelowADInplaceOrView below;
    return call_rotary(x, positions, std::move(start), base, interleaved,
                       inverse);
  }
  return ApplyRotary::apply(x, positions, std::move(start), base, interleaved,
                            inverse);
}

namespace {
void check_sinusoidal(int64_t max_len, int64_t dim) {
  if (max_len < 0 || dim < 0 || dim % 2 != 0) {
    fail("sinusoidal_positions: max_len is ", max_len, ", dim is ", dim,
         ": expected max_len >= 0 and an even dim >= 0");
  }
}
}  // namespace

at::Tensor sinusoidal_cpu(int64_t max_len, int64_t dim,
                          std::optional<at::Device>) {
  check_sinusoidal(max_len, dim);
  at::Tensor table = at::empty({max_len, dim}, at::kFloat);
  cosformer::sinusoidal_positions(max_len, dim,
                                  table.mutable_data_ptr<float>());
  return table;
}

at::Tensor sinusoidal_meta(int64_t max_len, int64_t dim,
                           std::optional<at::Device>) {
  check_sinusoidal(max_len, dim);
  return at::empty({max_len, dim},
                   at::TensorOptions().dtype(at::kFloat).device(at::kMeta));
}

at::Tensor sinusoidal_select(int64_t max_len, int64_t dim,
                             std::optional<at::Device> device) {
  if (device && device->is_meta()) return sinusoidal_meta(max_len, dim, device);
  const at::Tensor table = sinusoidal_cpu(max_len, dim, device);
  return device && !device->is_cpu() ? table.to(*device) : table;
}

}  // namespace cosformer::ops

namespace cosformer {

at::Tensor apply_rotary(const at::Tensor& x, int64_t start,
                        const std::optional<at::Tensor>& positions, double base,
                        bool interleaved) {
  return ops::call_rotary(x, positions, start, base, interleaved,
                          /*inverse=*/false);
}

at::Tensor sinusoidal_positions(int64_t max_len, int64_t dim) {
  return ops::sinusoidal_cpu(max_len, dim, std::nullopt);
}

}  // namespace cosformer
