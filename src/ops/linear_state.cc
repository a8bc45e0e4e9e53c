// LinearState: the same value in a new place.
#include "ops/linear_state.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/nan_to_num.h>

#include "cosformer/ops.h"
#include "ops/errors.h"

namespace cosformer {
namespace {

// The state with f applied to each tensor.
template <typename F>
LinearState map(const LinearState& state, const F& f) {
  LinearState result = state;
  result.kv_state = f(state.kv_state);
  result.k_sum = f(state.k_sum);
  result.start = f(state.start);
  result.position = f(state.position);
  if (state.log_scale.defined()) result.log_scale = f(state.log_scale);
  return result;
}

}  // namespace

LinearState LinearState::clone() const {
  return map(*this, [](const at::Tensor& t) {
    return t.clone(at::MemoryFormat::Contiguous);
  });
}

LinearState LinearState::detach() const {
  return map(*this, [](const at::Tensor& t) { return t.detach(); });
}

LinearState LinearState::select(const at::Tensor& rows) const {
  if (rows.dim() != 1 ||
      (rows.scalar_type() != at::kLong && rows.scalar_type() != at::kInt)) {
    ops::fail("LinearState::select: rows are ", rows.scalar_type(), " with ",
              rows.dim(), " dimensions, expected int64 [new rows]");
  }
  return map(*this,
             [&](const at::Tensor& t) { return at::index_select(t, 0, rows); });
}

LinearState LinearState::to(const at::TensorOptions& options) const {
  if (options.has_dtype()) {
    const at::ScalarType dtype = options.dtype().toScalarType();
    if (dtype != at::kFloat && dtype != at::kDouble) {
      ops::fail("LinearState::to: dtype is ", dtype,
                ", expected float32 or float64: a state accumulates");
    }
  }
  const at::TensorOptions place =
      at::TensorOptions().device(options.device_opt());
  LinearState moved = map(*this, [&](const at::Tensor& t) {
    const bool floating = at::isFloatingType(t.scalar_type());
    if (floating) return t.to(options);
    return options.has_device() ? t.to(place) : t;
  });
  if (log_scale.defined() &&
      moved.log_scale.scalar_type() != log_scale.scalar_type()) {
    // What the logarithms lose to rounding the sums take over.
    const at::Tensor wide = moved.log_scale.to(at::kDouble);
    const at::Tensor factor = (log_scale.to(wide.device(), at::kDouble) - wide)
                                  .nan_to_num(0)
                                  .exp()
                                  .to(moved.k_sum.scalar_type());
    moved.kv_state = moved.kv_state * factor.unsqueeze(-1);
    moved.k_sum = moved.k_sum * factor;
  }
  return moved;
}

void LinearState::save(const std::string& path) const {
  ops::save_state(
      kv_state, k_sum, start, position, kind, feature_map, reweight_len,
      rotary_base, rotary_interleaved,
      log_scale.defined() ? std::optional<at::Tensor>(log_scale) : std::nullopt,
      path);
}

LinearState LinearState::load(const std::string& path) {
  auto [kv_state, k_sum, start, position, kind, feature_map, reweight_len,
        rotary_base, rotary_interleaved, log_scale] = ops::load_state(path);
  return {kv_state,
          k_sum,
          start,
          position,
          kind,
          feature_map,
          reweight_len,
          rotary_base,
          rotary_interleaved,
          kind == "performer" ? log_scale : at::Tensor()};
}

}  // namespace cosformer
