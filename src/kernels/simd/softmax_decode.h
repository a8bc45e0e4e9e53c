// One token a row over a KV cache: what a call visits, the kernels of one
// instruction set and type behind plain functions, and what runs them.
//
// A row's candidates are the positions in its cache that a window leaves; they
// are cut into spans by shape alone, a task each. A task lists the visible ones
// among them, at most kDecodeKeys at a time, and reads their keys and values
// where they lie, each once for all query heads that share them. What it
// gathers (a maximum, a sum of weights, a weighted sum of values a head) is
// put together span by span, in order.
#ifndef COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_DECODE_H_
#define COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_DECODE_H_

#include <cstddef>
#include <cstdint>

#include "cosformer/kernels.h"
#include "kernels/dispatch.h"

namespace cosformer::simd {

inline constexpr int64_t kDecodeKeys = 64;

struct SoftmaxDecodeCall {
  SoftmaxDecodeCall(const SoftmaxAttentionOptions& options,
                    const SoftmaxAttentionInputs& inputs,
                    const KvCacheView& cache, const View4& out);

  SoftmaxAttentionOptions options;
  SoftmaxAttentionInputs inputs;
  KvCacheView cache;
  View4 out;
  DType dtype;
  int64_t dim, value_dim, heads, kv_heads, group, capacity;
  double scale;

  bool has_pattern() const {
    return options.has_window || inputs.global_mask != nullptr ||
           inputs.block_mask != nullptr;
  }
  // Whether query heads may see different keys.
  bool heads_differ() const { return inputs.block_mask_heads > 1; }
  bool query_is_real(int64_t row) const {
    return inputs.query_mask == nullptr ||
           inputs.query_mask[row * inputs.query_mask_stride] != 0;
  }
};

// A row and its candidates: positions first + c step, c in [0, count), the last
// of which is the query's own.
struct DecodeRow {
  int64_t row = 0, start = 0, position = 0;
  int64_t first = 0, step = 1, count = 0;
  bool sees_all = false;  // no pattern binds its query
};
DecodeRow decode_row(const SoftmaxDecodeCall& call, int64_t row);

struct DecodeKey {
  int64_t slot, position;
};

// The visible ones among candidates [begin, end) of a row, for one query head.
class DecodeKeys {
 public:
  DecodeKeys(const SoftmaxDecodeCall& call, const DecodeRow& row, int64_t head,
             int64_t begin, int64_t end);
  // The next of them, at most kDecodeKeys; 0: no more.
  int64_t next(DecodeKey* keys);

 private:
  uint64_t bits(int64_t c, int64_t n) const;

  const SoftmaxDecodeCall& call_;
  const DecodeRow row_;
  int64_t head_, c_, end_;
  uint64_t rest_ = 0;  // of the group of candidates before c_
  int64_t group_ = 0;
};

// What a task gathered for each query head: the largest score in units of
// log 2, the sum of weights over 2^that, and the weighted sum of values.
// [heads][2 + value_dim].
inline int64_t partial_size(const SoftmaxDecodeCall& call) {
  return call.heads * (2 + call.value_dim);
}

struct SoftmaxDecode {
  size_t (*scratch_bytes)(const SoftmaxDecodeCall& call);
  // Candidates [begin, end) of a row; partial: of the accumulator's type.
  void (*attend)(const SoftmaxDecodeCall& call, const DecodeRow& row,
                 int64_t begin, int64_t end, void* scratch, void* partial);
};
const SoftmaxDecode& softmax_decode_f32(Isa isa);
const SoftmaxDecode& softmax_decode_f64(Isa isa);

// Writes call.out for what the cache holds; the new token is in it.
Status run_softmax_decode(const SoftmaxDecodeCall& call,
                          const SoftmaxDecode& decode, Executor& executor);

}  // namespace cosformer::simd

#endif  // COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_DECODE_H_
