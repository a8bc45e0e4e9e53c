#include "ops/performer_schema.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>

#include "ops/find_operator.h"
#include "ops/performer_call.h"

namespace cosformer::ops {
namespace {

constexpr char kArguments[] =
    "Tensor q, Tensor k, Tensor v, Tensor projection, Tensor? q_start, "
    "Tensor? kv_start, Tensor? key_mask, Tensor? query_mask, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? kv_state, "
    "Tensor? k_sum, Tensor? log_scale, Tensor? state_start, "
    "Tensor? state_position, bool is_causal";

template <PerformerForwardImpl forward, PerformerDecodeImpl decode>
void implement_forward(torch::Library& m) {
  m.impl("performer_attention",
         TORCH_FN(PerformerForwardKernel<forward>::call));
  m.impl("performer_attention_decode_step_",
         TORCH_FN(PerformerDecodeKernel<decode>::call));
}
template <PerformerForwardImpl forward, PerformerBackwardImpl backward,
          PerformerDecodeImpl decode>
void implement(torch::Library& m) {
  implement_forward<forward, decode>(m);
  m.impl("performer_attention_backward",
         TORCH_FN(PerformerBackwardKernel<backward>::call));
}

}  // namespace

PerformerOutputs call_performer(const PerformerCall& c, const PerformerSpec& s,
                                ForwardWanted wanted) {
  static const auto op =
      find_operator("cosformer::performer_attention")
          .typed<PerformerForwardKernel<performer_cpu>::Signature>();
  return op.call(c.q, c.k, c.v, c.projection, c.q_start, c.kv_start, c.key_mask,
                 c.query_mask, c.cu_seqlens_q, c.cu_seqlens_k, c.kv_state,
                 c.k_sum, c.log_scale, c.state_start, c.state_position,
                 c.is_causal, s.kind, s.feature_map, wanted.state,
                 wanted.denominator);
}

PerformerBackwardOutputs call_performer_backward(const PerformerGradients& g,
                                                 const PerformerCall& c) {
  static const auto op =
      find_operator("cosformer::performer_attention_backward")
          .typed<PerformerBackwardKernel<performer_backward_cpu>::Signature>();
  return op.call(g.d_out, g.d_kv_state, g.d_k_sum, g.out, g.log_denominator,
                 g.needs, c.q, c.k, c.v, c.projection, c.q_start, c.kv_start,
                 c.key_mask, c.query_mask, c.cu_seqlens_q, c.cu_seqlens_k,
                 c.kv_state, c.k_sum, c.log_scale, c.state_start,
                 c.state_position, c.is_causal);
}

at::Tensor call_performer_decode_step(const PerformerDecodeCall& c,
                                      const PerformerSpec& s) {
  static const auto op =
      find_operator("cosformer::performer_attention_decode_step_")
          .typed<PerformerDecodeKernel<performer_decode_cpu>::Signature>();
  return op.call(c.q, c.k, c.v, c.projection, c.kv_state, c.k_sum, c.log_scale,
                 c.position, c.start, c.key_mask, s.kind, s.feature_map);
}

void define_performer(torch::Library& m) {
  const std::string arguments = kArguments;
  const std::string forward_rest =
      "(" + arguments +
      ", str state_kind, str state_feature_map, bool return_state, "
      "bool return_log_denominator) -> (Tensor out, Tensor log_denominator, "
      "Tensor kv_state, Tensor k_sum, Tensor log_scale, Tensor start, "
      "Tensor position)";
  m.def(torch::schema(("performer_attention" + forward_rest).c_str()));
  // The portable path by name, as linear_attention_portable.
  m.def(torch::schema(("performer_attention_portable" + forward_rest).c_str()),
        TORCH_FN(PerformerForwardKernel<performer_fallback>::call));
  const std::string backward =
      "performer_attention_backward(Tensor? d_out, Tensor? d_kv_state, "
      "Tensor? d_k_sum, Tensor out, Tensor log_denominator, bool[6] needs, " +
      arguments +
      ") -> (Tensor dq, Tensor dk, Tensor dv, Tensor d_projection, "
      "Tensor d_kv_state_in, Tensor d_k_sum_in)";
  m.def(torch::schema(backward.c_str()));
  m.def(
      "performer_attention_decode_step_(Tensor q, Tensor k, Tensor v, "
      "Tensor projection, Tensor(a!) kv_state, Tensor(b!) k_sum, "
      "Tensor(c!) log_scale, Tensor(d!) position, Tensor start, "
      "Tensor? key_mask, str state_kind, str state_feature_map) -> Tensor");
  m.def(
      "performer_projection(int num_features, int head_dim, bool orthogonal, "
      "int seed, *, Device? device=None) -> Tensor");
}

void implement_performer(torch::Library& m, c10::DispatchKey key) {
  switch (key) {
    case c10::DispatchKey::CompositeExplicitAutograd:
      return implement<performer_fallback, performer_backward_fallback,
                       performer_decode_fallback>(m);
    case c10::DispatchKey::CPU:
      m.impl("performer_projection", TORCH_FN(projection_cpu));
      return implement<performer_cpu, performer_backward_cpu,
                       performer_decode_cpu>(m);
    case c10::DispatchKey::BackendSelect:
      m.impl("performer_projection", TORCH_FN(projection_select));
      return;
    case c10::DispatchKey::Meta:
      m.impl("performer_projection", TORCH_FN(projection_meta));
      return implement<performer_meta, performer_backward_meta,
                       performer_decode_meta>(m);
    case c10::DispatchKey::Autograd:
      return implement<performer_autograd, performer_backward_autograd,
                       performer_decode_autograd>(m);
    case c10::DispatchKey::ADInplaceOrView:
      m.impl("performer_attention_decode_step_",
             TORCH_FN(PerformerDecodeKernel<performer_decode_in_place>::call));
      return;
    case c10::DispatchKey::AutocastCPU:
    case c10::DispatchKey::AutocastCUDA:
      return implement_forward<performer_autocast, performer_decode_autocast>(
          m);
    default:
      return;
  }
}

}  // namespace cosformer::ops
