// The Performer operators on CPU tensors: views and buffers for the kernels,
// nothing else.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <vector>

#include "ops/backward_buffers.h"
#include "ops/cpu_inputs.h"
#include "ops/errors.h"
#include "ops/executor.h"
#include "ops/performer_checks.h"

namespace cosformer::ops {
namespace {

// The kernels' inputs, and what has to live as long as they do.
class Inputs {
 public:
  explicit Inputs(const PerformerCall& call)
      : linear_(call.linear(call.q, call.k, call.v, call.kv_state, call.k_sum,
                            /*eps=*/1)),
        cpu_(linear_),
        projection_(call.projection.contiguous()) {
    inputs_.call = cpu_.inputs();
    inputs_.state.sums = inputs_.call.state;
    inputs_.call.state = {};
    inputs_.projection = projection_.const_data_ptr();
    inputs_.num_features = projection_.size(0);
    if (!call.log_scale) return;
    log_scale_ = call.log_scale->contiguous();
    inputs_.state.log_scale = log_scale_.const_data_ptr();
  }
  Inputs(const Inputs&) = delete;
  Inputs& operator=(const Inputs&) = delete;

  const PerformerAttentionInputs& get() const { return inputs_; }
  int64_t rows() const { return cpu_.rows(); }

 private:
  const LinearCall linear_;
  CpuInputs cpu_;
  at::Tensor projection_, log_scale_;
  PerformerAttentionInputs inputs_;
};

}  // namespace

PerformerOutputs performer_cpu(const PerformerCall& call,
                               const PerformerSpec& spec,
                               ForwardWanted wanted) {
  check_performer_call(call, spec);
  const Inputs inputs(call);
  const at::TensorOptions same = call.q.options();
  const at::TensorOptions accumulation = same.dtype(accumulation_dtype(call.q));
  const at::TensorOptions integers = same.dtype(at::kLong);
  at::Tensor out = empty(
      {call.q.size(0), call.q.size(1), call.q.size(2), call.v.size(3)}, same);
  at::Tensor log_denominator =
      wanted.denominator
          ? empty({call.q.size(0), call.q.size(1), call.q.size(2)},
                  same.dtype(at::kDouble))
          : empty({0}, same.dtype(at::kDouble));
  std::vector<int64_t> sums = {0}, states = {0}, rows = {0};
  if (wanted.state) {
    rows = {inputs.rows()};
    sums = {inputs.rows(), call.k.size(2), call.projection.size(0)};
    states = {sums[0], sums[1], sums[2], call.v.size(3)};
  }
  at::Tensor kv_state = empty(states, accumulation);
  at::Tensor k_sum = empty(sums, accumulation);
  at::Tensor log_scale = empty(sums, accumulation);
  at::Tensor start = empty(rows, integers);
  at::Tensor position = empty(rows, integers);
  PerformerStateView state_out;
  if (wanted.state) {
    state_out = {{kv_state.mutable_data_ptr(), k_sum.mutable_data_ptr(),
                  start.mutable_data_ptr<int64_t>(),
                  position.mutable_data_ptr<int64_t>()},
                 log_scale.mutable_data_ptr()};
  }
  throw_if_error(performer_attention_forward(
      {call.is_causal}, inputs.get(), mutable_view(out),
      wanted.denominator ? log_denominator.mutable_data_ptr<double>() : nullptr,
      state_out, torch_executor()));
  return {out, log_denominator, kv_state, k_sum, log_scale, start, position};
}

PerformerBackwardOutputs performer_backward_cpu(
    const PerformerGradients& gradients, const PerformerCall& call) {
  check_performer_call(call);
  check_performer_gradients(gradients, call);
  const Inputs inputs(call);
  const at::TensorOptions same = call.q.options();
  const at::TensorOptions accumulation = same.dtype(accumulation_dtype(call.q));

  at::Tensor out_holder, d_out_holder;
  const at::Tensor d_out = gradients.d_out
                               ? dense_rows(*gradients.d_out, d_out_holder)
                               : at::zeros(gradients.out.sizes(), same);
  const at::Tensor& out = dense_rows(gradients.out, out_holder);
  const at::Tensor log_denominator = gradients.log_denominator.contiguous();
  StateGradients state(
      gradients.d_kv_state, gradients.d_k_sum,
      {inputs.rows(), call.k.size(2), call.projection.size(0), call.v.size(3)},
      accumulation);
  if (call.kv_state && (gradients.needs[4] || gradients.needs[5]))
    state.want(*call.kv_state, *call.k_sum);
  at::Tensor dq = gradient_of(gradients.needs[0], call.q);
  at::Tensor dk = gradient_of(gradients.needs[1], call.k);
  at::Tensor dv = gradient_of(gradients.needs[2], call.v);
  at::Tensor d_projection = gradient_of(gradients.needs[3], call.projection);
  throw_if_error(performer_attention_backward(
      {call.is_causal}, inputs.get(), view(out),
      log_denominator.const_data_ptr<double>(), view(d_out), state.out(),
      target(gradients.needs[0], dq), target(gradients.needs[1], dk),
      target(gradients.needs[2], dv),
      gradients.needs[3] ? d_projection.mutable_data_ptr() : nullptr,
      state.in(), torch_executor()));
  return {dq, dk, dv, d_projection, state.d_kv_in(), state.d_k_sum_in()};
}

at::Tensor performer_decode_cpu(const PerformerDecodeCall& call,
                                const PerformerSpec& spec) {
  check_performer_decode(call, spec);
  const std::pair<const at::Tensor*, const char*> updated[] = {
      {&call.kv_state, "kv_state"},
      {&call.k_sum, "k_sum"},
      {&call.log_scale, "log_scale"},
      {&call.position, "position"},
      {&call.start, "start"}};
  for (const auto& [tensor, name] : updated) {
    if (!tensor->is_contiguous()) {
      fail("performer_attention_decode_step_: state.", name,
           " is not contiguous and cannot be updated in place: pass "
           "state.clone()");
    }
  }
  const AsPerformerCall alone(call, /*with_state=*/false);
  const PerformerCall performer = alone.get();
  const Inputs inputs(performer);
  at::Tensor out = empty({call.q.size(0), 1, call.q.size(2), call.v.size(3)},
                         call.q.options());
  const PerformerStateView state{
      {call.kv_state.mutable_data_ptr(), call.k_sum.mutable_data_ptr(),
       call.start.mutable_data_ptr<int64_t>(),
       call.position.mutable_data_ptr<int64_t>()},
      call.log_scale.mutable_data_ptr()};
  throw_if_error(performer_attention_decode_step(
      inputs.get(), state, mutable_view(out), torch_executor()));
  return out;
}

namespace {

void check_projection(int64_t num_features, int64_t head_dim) {
  if (num_features < 1 || head_dim < 1) {
    fail("performer_projection: num_features is ", num_features,
         ", head_dim is ", head_dim, ", expected at least 1");
  }
}

}  // namespace

at::Tensor projection_cpu(int64_t num_features, int64_t head_dim,
                          bool orthogonal, int64_t seed,
                          std::optional<at::Device>) {
  check_projection(num_features, head_dim);
  const at::Tensor wide =
      empty({num_features, head_dim}, at::TensorOptions().dtype(at::kDouble));
  performer_projection(num_features, head_dim, orthogonal,
                       static_cast<uint64_t>(seed),
                       wide.mutable_data_ptr<double>());
  return wide.to(at::kFloat);
}

at::Tensor projection_meta(int64_t num_features, int64_t head_dim, bool,
                           int64_t, std::optional<at::Device>) {
  check_projection(num_features, head_dim);
  return at::empty({num_features, head_dim},
                   at::TensorOptions().dtype(at::kFloat).device(at::kMeta));
}

at::Tensor projection_select(int64_t num_features, int64_t head_dim,
                             bool orthogonal, int64_t seed,
                             std::optional<at::Device> device) {
  if (device && device->is_meta()) {
    return projection_meta(num_features, head_dim, orthogonal, seed, device);
  }
  const at::Tensor projection =
      projection_cpu(num_features, head_dim, orthogonal, seed, device);
  return device && !device->is_cpu() ? projection.to(*device) : projection;
}

}  // namespace cosformer::ops
