// The operators' schemas and which implementation serves which dispatch key.
// The only file with registrations: find_operator, through which every call
// goes, brings them into a program.
#include <torch/library.h>

#include <string>

#include "cosformer/kernels.h"
#include "ops/decode_step.h"
#include "ops/find_operator.h"
#include "ops/linear_call.h"
#include "ops/linear_state.h"
#include "ops/performer_schema.h"
#include "ops/rotary.h"
#include "ops/softmax_schema.h"

namespace cosformer::ops {
namespace {

constexpr char kLinearArguments[] =
    "Tensor q, Tensor k, Tensor v, Tensor? q_start, Tensor? kv_start, "
    "Tensor? key_mask, Tensor? query_mask, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? kv_state, Tensor? k_sum, "
    "Tensor? state_start, Tensor? state_position, str feature_map, "
    "int? reweight_len, bool is_causal, str normalizer, float eps, "
    "float? rotary_base, bool rotary_interleaved";

template <ForwardImpl impl>
void implement_forward(torch::Library& m) {
  m.impl("linear_attention", TORCH_FN(ForwardKernel<impl>::call));
}
template <BackwardImpl impl>
void implement_backward(torch::Library& m) {
  m.impl("linear_attention_backward", TORCH_FN(BackwardKernel<impl>::call));
}

template <DecodeImpl impl>
void implement_decode_step(torch::Library& m) {
  m.impl("linear_attention_decode_step_", TORCH_FN(DecodeKernel<impl>::call));
}

constexpr char kSpecArguments[] =
    "str state_kind, str state_feature_map, int state_reweight_len, "
    "float state_rotary_base, bool state_rotary_interleaved";

}  // namespace

at::Tensor call_decode_step(const DecodeCall& c, const StateSpec& s) {
  using Signature = DecodeKernel<decode_step_cpu>::Signature;
  static const auto op =
      find_operator("cosformer::linear_attention_decode_step_")
          .typed<Signature>();
  return op.call(c.q, c.k, c.v, c.kv_state, c.k_sum, c.position, c.start,
                 c.key_mask, c.query_mask, c.feature_map, c.reweight_len,
                 c.normalizer, c.eps, c.rotary_base, c.rotary_interleaved,
                 s.kind, s.feature_map, s.reweight_len, s.rotary_base,
                 s.rotary_interleaved);
}

ForwardOutputs call_forward(const LinearCall& c, const StateSpec& s,
                            ForwardWanted wanted) {
  using Signature = ForwardKernel<forward_cpu>::Signature;
  static const auto op =
      find_operator("cosformer::linear_attention").typed<Signature>();
  return op.call(c.q, c.k, c.v, c.q_start, c.kv_start, c.key_mask, c.query_mask,
                 c.cu_seqlens_q, c.cu_seqlens_k, c.kv_state, c.k_sum,
                 c.state_start, c.state_position, c.feature_map, c.reweight_len,
                 c.is_causal, c.normalizer, c.eps, c.rotary_base,
                 c.rotary_interleaved, s.kind, s.feature_map, s.reweight_len,
                 s.rotary_base, s.rotary_interleaved, wanted.state,
                 wanted.denominator);
}

BackwardOutputs call_backward(const LinearGradients& g, const LinearCall& c) {
  using Signature = BackwardKernel<backward_cpu>::Signature;
  static const auto op =
      find_operator("cosformer::linear_attention_backward").typed<Signature>();
  return op.call(g.d_out, g.d_kv_state, g.d_k_sum, g.out, g.denominator,
                 g.needs, c.q, c.k, c.v, c.q_start, c.kv_start, c.key_mask,
                 c.query_mask, c.cu_seqlens_q, c.cu_seqlens_k, c.kv_state,
                 c.k_sum, c.state_start, c.state_position, c.feature_map,
                 c.reweight_len, c.is_causal, c.normalizer, c.eps,
                 c.rotary_base, c.rotary_interleaved);
}

c10::OperatorHandle find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

TORCH_LIBRARY(cosformer, m) {
  const std::string arguments = kLinearArguments;
  const std::string forward_rest =
      "(" + arguments + ", " + kSpecArguments +
      ", bool return_state, bool return_denominator) -> (Tensor out, "
      "Tensor denominator, Tensor kv_state, Tensor k_sum, Tensor start, "
      "Tensor position)";
  const std::string backward =
      "linear_attention_backward(Tensor? d_out, Tensor? d_kv_state, "
      "Tensor? d_k_sum, Tensor out, Tensor denominator, bool[5] needs, " +
      arguments +
      ") -> (Tensor dq, Tensor dk, Tensor dv, Tensor d_kv_state_in, "
      "Tensor d_k_sum_in)";
  m.def(torch::schema(("linear_attention" + forward_rest).c_str()));
  // The portable path by name: slower, but torch.func transforms and
  // forward-mode differentiation work on it.
  m.def(torch::schema(("linear_attention_portable" + forward_rest).c_str()),
        TORCH_FN(ForwardKernel<forward_portable>::call));
  m.def(torch::schema(backward.c_str()));
  const std::string decode_step =
      std::string(
          "linear_attention_decode_step_(Tensor q, Tensor k, Tensor v, "
          "Tensor(a!) kv_state, Tensor(b!) k_sum, Tensor(c!) position, "
          "Tensor start, Tensor? key_mask, Tensor? query_mask, "
          "str feature_map, int? reweight_len, str normalizer, float eps, "
          "float? rotary_base, bool rotary_interleaved, ") +
      kSpecArguments + ") -> Tensor";
  m.def(torch::schema(decode_step.c_str()));
  m.def(
      "apply_rotary(Tensor x, Tensor? positions, SymInt start, float base, "
      "bool interleaved, bool inverse) -> Tensor");
  m.def("version() -> str", [] { return std::string(version()); });
  m.def("isa() -> str", [] { return std::string(active_isa()); });
  m.def(
      "sinusoidal_positions(int max_len, int dim, *, Device? device=None) -> "
      "Tensor");
  m.def(
      "linear_state_save(Tensor kv_state, Tensor k_sum, Tensor start, "
      "Tensor position, str kind, str feature_map, int reweight_len, "
      "float rotary_base, bool rotary_interleaved, Tensor? log_scale, "
      "str path) -> ()",
      &save_state);
  m.def(
      "linear_state_load(str path) -> (Tensor kv_state, Tensor k_sum, "
      "Tensor start, Tensor position, str kind, str feature_map, "
      "int reweight_len, float rotary_base, bool rotary_interleaved, "
      "Tensor log_scale)",
      &load_state);
  define_softmax(m);
  define_performer(m);
}

// Devices without kernels.
TORCH_LIBRARY_IMPL(cosformer, CompositeExplicitAutograd, m) {
  implement_forward<forward_portable>(m);
  implement_backward<backward_portable>(m);
  implement_decode_step<decode_step_portable>(m);
  m.impl("apply_rotary", TORCH_FN(rotary_portable));
  implement_softmax(m, c10::DispatchKey::CompositeExplicitAutograd);
  implement_performer(m, c10::DispatchKey::CompositeExplicitAutograd);
}

TORCH_LIBRARY_IMPL(cosformer, CPU, m) {
  implement_forward<forward_cpu>(m);
  implement_backward<backward_cpu>(m);
  implement_decode_step<decode_step_cpu>(m);
  m.impl("apply_rotary", TORCH_FN(rotary_cpu));
  m.impl("sinusoidal_positions", TORCH_FN(sinusoidal_cpu));
  implement_softmax(m, c10::DispatchKey::CPU);
  implement_performer(m, c10::DispatchKey::CPU);
}

TORCH_LIBRARY_IMPL(cosformer, Meta, m) {
  implement_forward<forward_meta>(m);
  implement_backward<backward_meta>(m);
  implement_decode_step<decode_step_meta>(m);
  m.impl("apply_rotary", TORCH_FN(rotary_meta));
  m.impl("sinusoidal_positions", TORCH_FN(sinusoidal_meta));
  implement_softmax(m, c10::DispatchKey::Meta);
  implement_performer(m, c10::DispatchKey::Meta);
}

TORCH_LIBRARY_IMPL(cosformer, Autograd, m) {
  implement_forward<forward_autograd>(m);
  implement_backward<backward_autograd>(m);
  implement_decode_step<decode_step_autograd>(m);
  m.impl("apply_rotary", TORCH_FN(rotary_autograd));
  implement_softmax(m, c10::DispatchKey::Autograd);
  implement_performer(m, c10::DispatchKey::Autograd);
}

TORCH_LIBRARY_IMPL(cosformer, ADInplaceOrView, m) {
  implement_decode_step<decode_step_in_place>(m);
  implement_softmax(m, c10::DispatchKey::ADInplaceOrView);
  implement_performer(m, c10::DispatchKey::ADInplaceOrView);
}

TORCH_LIBRARY_IMPL(cosformer, AutocastCPU, m) {
  implement_forward<forward_autocast>(m);
  implement_decode_step<decode_step_autocast>(m);
  implement_softmax(m, c10::DispatchKey::AutocastCPU);
  implement_performer(m, c10::DispatchKey::AutocastCPU);
}
TORCH_LIBRARY_IMPL(cosformer, AutocastCUDA, m) {
  implement_forward<forward_autocast>(m);
  implement_decode_step<decode_step_autocast>(m);
  implement_softmax(m, c10::DispatchKey::AutocastCUDA);
  implement_performer(m, c10::DispatchKey::AutocastCUDA);
}

TORCH_LIBRARY_IMPL(cosformer, BackendSelect, m) {
  m.impl("sinusoidal_positions", TORCH_FN(sinusoidal_select));
  implement_softmax(m, c10::DispatchKey::BackendSelect);
  implement_performer(m, c10::DispatchKey::BackendSelect);
}

}  // namespace cosformer::ops
