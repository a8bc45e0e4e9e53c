#include "ops/softmax_schema.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>

#include "ops/find_operator.h"
#include "ops/softmax_call.h"
#include "ops/softmax_kinds.h"

namespace cosformer::ops {
namespace {

constexpr char kArguments[] =
    "Tensor q, Tensor k, Tensor v, Tensor? q_start, Tensor? kv_start, "
    "Tensor? key_mask, Tensor? query_mask, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? global_mask, Tensor? block_mask, "
    "Tensor? relative_bias, Tensor? dropout_seed, bool is_causal, "
    "float? scale, int? window_left, int? window_right, int dilation, "
    "int? block_size, float dropout_p";

template <SoftmaxForwardImpl forward, SoftmaxDecodeImpl decode>
void implement_forward(torch::Library& m) {
  m.impl("softmax_attention", TORCH_FN(SoftmaxForwardKernel<forward>::call));
  m.impl("softmax_attention_decode_step_",
         TORCH_FN(SoftmaxDecodeKernel<decode>::call));
}
template <SoftmaxForwardImpl forward, SoftmaxBackwardImpl backward,
          SoftmaxDecodeImpl decode>
void implement(torch::Library& m) {
  implement_forward<forward, decode>(m);
  m.impl("softmax_attention_backward",
         TORCH_FN(SoftmaxBackwardKernel<backward>::call));
}

// The kinds: the arguments of softmax attention and their own.
template <typename>
struct Kinds;
template <typename... S>
struct Kinds<TypeList<S...>> {
  static at::Tensor linformer(S... softmax, const at::Tensor& key_len_proj,
                              const at::Tensor& value_len_proj) {
    return ops::linformer(SoftmaxCall{softmax...}, key_len_proj,
                          value_len_proj);
  }
  static at::Tensor longformer(S... softmax, const at::Tensor& q_global,
                               const at::Tensor& k_global,
                               const at::Tensor& v_global) {
    return ops::longformer(SoftmaxCall{softmax...}, q_global, k_global,
                           v_global);
  }
  static at::Tensor bigbird(S... softmax, int64_t num_random_blocks,
                            int64_t window_blocks, int64_t first_global_blocks,
                            int64_t last_global_blocks, int64_t seed) {
    return ops::bigbird(SoftmaxCall{softmax...},
                        {num_random_blocks, window_blocks, first_global_blocks,
                         last_global_blocks, seed});
  }
};

// Without an implementation a key, so made of what other operators do there.
void define_kinds(torch::Library& m) {
  using OfSoftmax = Kinds<SoftmaxTypes>;
  const std::string arguments = kArguments;
  const auto define = [&](const std::string& name, const std::string& own,
                          auto&& kernel) {
    const std::string schema =
        name + "(" + arguments + ", " + own + ") -> Tensor";
    m.def(torch::schema(schema.c_str()), kernel);
  };
  define("linformer_attention", "Tensor key_len_proj, Tensor value_len_proj",
         TORCH_FN(OfSoftmax::linformer));
  define("longformer_attention",
         "Tensor q_global, Tensor k_global, Tensor v_global",
         TORCH_FN(OfSoftmax::longformer));
  define("bigbird_attention",
         "int num_random_blocks, int window_blocks, int first_global_blocks, "
         "int last_global_blocks, int seed",
         TORCH_FN(OfSoftmax::bigbird));
  m.def(
      "bigbird_block_mask(int num_heads, int num_blocks, "
      "int num_random_blocks, int window_blocks, int first_global_blocks, "
      "int last_global_blocks, bool is_causal, int seed, *, "
      "Device? device=None) -> Tensor");
  m.def(
      "t5_relative_bias(Tensor weight, bool bidirectional, int max_distance) "
      "-> Tensor",
      TORCH_FN(t5_bias));
}

}  // namespace

at::Tensor call_block_mask(int64_t num_heads, int64_t num_blocks,
                           int64_t num_random_blocks, int64_t window_blocks,
                           int64_t first_global_blocks,
                           int64_t last_global_blocks, bool is_causal,
                           int64_t seed, std::optional<at::Device> device) {
  static const auto op = find_operator("cosformer::bigbird_block_mask")
                             .typed<BlockMaskSignature>();
  return op.call(num_heads, num_blocks, num_random_blocks, window_blocks,
                 first_global_blocks, last_global_blocks, is_causal, seed,
                 device);
}

SoftmaxOutputs call_softmax(const SoftmaxCall& c, bool return_log_sum_exp) {
  static const auto op =
      find_operator("cosformer::softmax_attention")
          .typed<SoftmaxForwardKernel<softmax_cpu>::Signature>();
  return op.call(c.q, c.k, c.v, c.q_start, c.kv_start, c.key_mask, c.query_mask,
                 c.cu_seqlens_q, c.cu_seqlens_k, c.global_mask, c.block_mask,
                 c.relative_bias, c.dropout_seed, c.is_causal, c.scale,
                 c.window_left, c.window_right, c.dilation, c.block_size,
                 c.dropout_p, return_log_sum_exp);
}

SoftmaxBackwardOutputs call_softmax_backward(const SoftmaxGradients& g,
                                             const SoftmaxCall& c) {
  static const auto op =
      find_operator("cosformer::softmax_attention_backward")
          .typed<SoftmaxBackwardKernel<softmax_backward_cpu>::Signature>();
  return op.call(g.d_out, g.out, g.log_sum_exp, g.needs, c.q, c.k, c.v,
                 c.q_start, c.kv_start, c.key_mask, c.query_mask,
                 c.cu_seqlens_q, c.cu_seqlens_k, c.global_mask, c.block_mask,
                 c.relative_bias, c.dropout_seed, c.is_causal, c.scale,
                 c.window_left, c.window_right, c.dilation, c.block_size,
                 c.dropout_p);
}

at::Tensor call_softmax_decode(const SoftmaxDecodeCall& c) {
  static const auto op =
      find_operator("cosformer::softmax_attention_decode_step_")
          .typed<SoftmaxDecodeKernel<softmax_decode_cpu>::Signature>();
  return op.call(c.q, c.k, c.v, c.keys, c.values, c.position, c.start,
                 c.cache_mask, c.query_mask, c.global_mask, c.block_mask,
                 c.relative_bias, c.is_ring, c.scale, c.window_left,
                 c.window_right, c.dilation, c.block_size);
}

void define_softmax(torch::Library& m) {
  const std::string arguments = kArguments;
  const std::string forward_rest =
      "(" + arguments +
      ", bool return_log_sum_exp) -> (Tensor out, Tensor log_sum_exp)";
  m.def(torch::schema(("softmax_attention" + forward_rest).c_str()));
  // The portable path by name, as linear_attention_portable.
  m.def(torch::schema(("softmax_attention_portable" + forward_rest).c_str()),
        TORCH_FN(SoftmaxForwardKernel<softmax_portable>::call));
  const std::string backward =
      "softmax_attention_backward(Tensor d_out, Tensor out, "
      "Tensor log_sum_exp, bool[4] needs, " +
      arguments +
      ") -> (Tensor dq, Tensor dk, Tensor dv, Tensor d_relative_bias)";
  m.def(torch::schema(backward.c_str()));
  m.def(
      "softmax_attention_decode_step_(Tensor q, Tensor k, Tensor v, "
      "Tensor(a!) keys, Tensor(b!) values, Tensor(c!) position, "
      "Tensor? start, Tensor? cache_mask, Tensor? query_mask, "
      "Tensor? global_mask, Tensor? block_mask, Tensor? relative_bias, "
      "bool is_ring, float? scale, int? window_left, int? window_right, "
      "int dilation, int? block_size) -> Tensor");
  define_kinds(m);
}

void implement_softmax(torch::Library& m, c10::DispatchKey key) {
  switch (key) {
    case c10::DispatchKey::CompositeExplicitAutograd:
      return implement<softmax_portable, softmax_backward_portable,
                       softmax_decode_portable>(m);
    case c10::DispatchKey::CPU:
      m.impl("bigbird_block_mask", TORCH_FN(block_mask_cpu));
      return implement<softmax_cpu, softmax_backward_cpu, softmax_decode_cpu>(
          m);
    case c10::DispatchKey::BackendSelect:
      m.impl("bigbird_block_mask", TORCH_FN(block_mask_select));
      return;
    case c10::DispatchKey::Meta:
      m.impl("bigbird_block_mask", TORCH_FN(block_mask_meta));
      return implement<softmax_meta, softmax_backward_meta,
                       softmax_decode_meta>(m);
    case c10::DispatchKey::Autograd:
      return implement<softmax_autograd, softmax_backward_autograd,
                       softmax_decode_autograd>(m);
    case c10::DispatchKey::ADInplaceOrView:
      m.impl("softmax_attention_decode_step_",
             TORCH_FN(SoftmaxDecodeKernel<softmax_decode_in_place>::call));
      return;
    case c10::DispatchKey::AutocastCPU:
    case c10::DispatchKey::AutocastCUDA:
      return implement_forward<softmax_autocast, softmax_decode_autocast>(m);
    default:
      return;
  }
}

}  // namespace cosformer::ops
