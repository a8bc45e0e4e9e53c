// LinearState: the same value in a new place.
#include "ops/linear_state.h"

#include <ATen/ops/index_select.h>

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
  return map(*this, [&](const at::Tensor& t) {
    const bool floating = at::isFloatingType(t.scalar_type());
    if (floating) return t.to(options);
    return options.has_device() ? t.to(place) : t;
  });
}

void LinearState::save(const std::string& path) const {
  ops::save_state(kv_state, k_sum, start, position, kind, feature_map,
                  reweight_len, rotary_base, rotary_interleaved, path);
}

LinearState LinearState::load(const std::string& path) {
  auto [kv_state, k_sum, start, position, kind, feature_map, reweight_len,
        rotary_base, rotary_interleaved] = ops::load_state(path);
  return {kv_state,    k_sum,        start,       position,          kind,
          feature_map, reweight_len, rotary_base, rotary_interleaved};
}

}  // namespace cosformer
