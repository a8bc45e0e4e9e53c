// The entry points of the softmax engine: check, then compute.
#include "cosformer/kernels.h"
#include "kernels/call_check.h"
#include "kernels/dispatch.h"
#include "kernels/simd/flush_tiny.h"
#include "kernels/simd/softmax_backward.h"
#include "kernels/simd/softmax_pass.h"

namespace cosformer {
namespace {

// Outputs that will not fit into the caches anyway are written past them.
bool too_large_for_cache(const ConstView4& out) {
  constexpr int64_t kBytes = 1 << 20;
  return out.size[0] * out.size[1] * out.size[2] * out.size[3] *
             static_cast<int64_t>(size_of(out.dtype)) >=
         kBytes;
}

// Calls that are faster on AMX tiles: below that a cell of 32 queries x 64 keys
// has too little to do, or a head too little for a step of 32 features.
bool tiles_pay(const simd::SoftmaxCall& call) {
  const int64_t keys = call.inputs.k.size[1];
  const int64_t least = call.dtype == DType::kBFloat16 ? 64 : 256;
  return keys >= least && call.inputs.q.size[1] >= 32 && call.dim >= 24;
}

const simd::SoftmaxForward& forward_of(const simd::SoftmaxCall& call, Isa isa) {
  if (call.dtype == DType::kFloat64) return simd::softmax_forward_f64(isa);
  if (isa == Isa::kAmx && (isa_is_forced() || tiles_pay(call)))
    return simd::softmax_forward_amx(call.dtype);
  return simd::softmax_forward_f32(isa);
}

}  // namespace

Status softmax_attention_forward(const SoftmaxAttentionOptions& options,
                                 const SoftmaxAttentionInputs& inputs,
                                 const View4& out, void* log_sum_exp,
                                 Executor& executor) {
  COSFORMER_RETURN_IF_ERROR(check_softmax_attention(options, inputs));
  COSFORMER_RETURN_IF_ERROR(check_softmax_forward(inputs, out));
  const Result<Isa> isa = chosen_isa();
  COSFORMER_RETURN_IF_ERROR(isa.status());
  simd::SoftmaxCall call(options, inputs);
  call.out = out;
  call.log_sum_exp = log_sum_exp;
  call.stream = too_large_for_cache(out);
  simd::FlushingExecutor flushing(executor);
  return simd::run_softmax_forward(call, forward_of(call, *isa), flushing);
}

Status softmax_attention_backward(const SoftmaxAttentionOptions& options,
                                  const SoftmaxAttentionInputs& inputs,
                                  const ConstView4& out,
                                  const void* log_sum_exp,
                                  const ConstView4& d_out, const View4& dq,
                                  const View4& dk, const View4& dv,
                                  void* d_relative_bias, Executor& executor) {
  COSFORMER_RETURN_IF_ERROR(check_softmax_attention(options, inputs));
  COSFORMER_RETURN_IF_ERROR(
      check_softmax_backward(inputs, d_out, dq, dk, dv, d_relative_bias));
  COSFORMER_RETURN_IF_ERROR(check_softmax_saved(inputs, out, log_sum_exp));
  const Result<Isa> isa = chosen_isa();
  COSFORMER_RETURN_IF_ERROR(isa.status());
  simd::SoftmaxCall call(options, inputs);
  call.saved_out = out;
  call.saved_log_sum_exp = log_sum_exp;
  call.d_out = d_out;
  call.dq = dq;
  call.dk = dk;
  call.dv = dv;
  call.d_relative_bias = d_relative_bias;
  call.stream = too_large_for_cache(d_out);
  simd::FlushingExecutor flushing(executor);
  return simd::run_softmax_backward(call,
                                    inputs.q.dtype == DType::kFloat64
                                        ? simd::softmax_backward_f64(*isa)
                                        : simd::softmax_backward_f32(*isa),
                                    flushing);
}

}  // namespace cosformer
