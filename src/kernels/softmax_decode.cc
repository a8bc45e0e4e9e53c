// The softmax engine's step of one token a row: check, write the token into the
// cache, attend.
#include "kernels/simd/softmax_decode.h"

#include <cstring>

#include "cosformer/kernels.h"
#include "kernels/call_check.h"
#include "kernels/dispatch.h"
#include "kernels/simd/flush_tiny.h"

namespace cosformer {
namespace {

constexpr std::string_view kWhere = "softmax_attention_decode_step";

Status check_cache(const SoftmaxAttentionInputs& inputs,
                   const KvCacheView& cache) {
  const int64_t rows = inputs.q.size[0], capacity = cache.keys.size[1];
  COSFORMER_RETURN_IF_ERROR(check_output_view(
      kWhere, "cache keys", cache.keys,
      {rows, capacity, inputs.k.size[2], inputs.k.size[3]}, inputs.q.dtype));
  COSFORMER_RETURN_IF_ERROR(check_output_view(
      kWhere, "cache values", cache.values,
      {rows, capacity, inputs.v.size[2], inputs.v.size[3]}, inputs.q.dtype));
  COSFORMER_RETURN_IF_ERROR(check_mask(kWhere, "cache key_mask", cache.key_mask,
                                       cache.key_mask_stride, rows));
  if (cache.position == nullptr && rows > 0)
    return invalid_argument(kWhere, ": the cache has no position");
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t start = cache.start != nullptr ? cache.start[row] : 0;
    const int64_t position = cache.position[row];
    COSFORMER_RETURN_IF_ERROR(
        check_position(kWhere, "cache start", row, start));
    // The step leaves the next token's position behind.
    COSFORMER_RETURN_IF_ERROR(
        check_position(kWhere, "cache position", row, position + 1));
    if (position < start) {
      return invalid_argument(kWhere, ": cache position of row ", row, " is ",
                              position, ", before its start ", start);
    }
    const int64_t held = position - start;
    if (capacity == 0 || (!cache.is_ring && held >= capacity)) {
      return invalid_argument(kWhere, ": the cache has capacity ", capacity,
                              ", row ", row, " holds ", held,
                              " tokens: expected room for one more (or a "
                              "ring)");
    }
  }
  return Status();
}

// The token's keys (or values) into their slots.
void write_token(const ConstView4& token, const View4& cache,
                 const KvCacheView& places, int64_t row) {
  const int64_t start = places.start != nullptr ? places.start[row] : 0;
  const int64_t slot = (places.position[row] - start) % cache.size[1];
  const int64_t bytes = static_cast<int64_t>(size_of(token.dtype));
  for (int64_t head = 0; head < token.size[2]; ++head) {
    const int64_t from = row * token.stride[0] + head * token.stride[2];
    const int64_t to =
        row * cache.stride[0] + slot * cache.stride[1] + head * cache.stride[2];
    std::memcpy(static_cast<char*>(cache.data) + to * bytes,
                static_cast<const char*>(token.data) + from * bytes,
                static_cast<size_t>(token.size[3] * bytes));
  }
}

}  // namespace

Status softmax_attention_decode_step(const SoftmaxAttentionOptions& options,
                                     const SoftmaxAttentionInputs& inputs,
                                     const KvCacheView& cache, const View4& out,
                                     Executor& executor) {
  if (inputs.q_start != nullptr || inputs.kv_start != nullptr ||
      inputs.cu_seqlens_q != nullptr || inputs.cu_seqlens_k != nullptr ||
      inputs.key_mask != nullptr) {
    return invalid_argument(
        kWhere,
        ": starts, packing and key_mask must be empty: the cache gives the "
        "positions and has a mask of its own");
  }
  if (inputs.q.size[1] != 1 || inputs.k.size[1] != 1) {
    return invalid_argument(kWhere, ": query has length ", inputs.q.size[1],
                            ", key has ", inputs.k.size[1],
                            ", expected 1: one token a row");
  }
  COSFORMER_RETURN_IF_ERROR(check_softmax_attention(options, inputs));
  COSFORMER_RETURN_IF_ERROR(check_cache(inputs, cache));
  COSFORMER_RETURN_IF_ERROR(check_output_view(
      kWhere, "out", out,
      {inputs.q.size[0], 1, inputs.q.size[2], inputs.v.size[3]},
      inputs.q.dtype));
  const Result<Isa> isa = chosen_isa();
  COSFORMER_RETURN_IF_ERROR(isa.status());
  const int64_t rows = inputs.q.size[0];
  for (int64_t row = 0; row < rows; ++row) {
    write_token(inputs.k, cache.keys, cache, row);
    write_token(inputs.v, cache.values, cache, row);
  }
  const simd::SoftmaxDecodeCall call(options, inputs, cache, out);
  simd::FlushingExecutor flushing(executor);
  COSFORMER_RETURN_IF_ERROR(simd::run_softmax_decode(
      call,
      inputs.q.dtype == DType::kFloat64 ? simd::softmax_decode_f64(*isa)
                                        : simd::softmax_decode_f32(*isa),
      flushing));
  for (int64_t row = 0; row < rows; ++row) ++cache.position[row];
  return Status();
}

}  // namespace cosformer
