// What calls of all engines have alike, as a test sees them: the fields of a
// point, their text, and the tensors, masks, starts and offsets made from them.
#ifndef COSFORMER_TESTS_KERNELS_CALL_PROBLEM_H_
#define COSFORMER_TESTS_KERNELS_CALL_PROBLEM_H_

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cosformer/kernels.h"
#include "kernels/check.h"
#include "tests/kernels/tensor.h"

namespace cosformer::testing {

// Each field is a small number; describe() and parse_point() print and read
// them.
struct CallPoint {
  int64_t batch = 1, q_len = 8, kv_len = 8, kv_heads = 1, group = 1;
  int64_t head_dim = 8, value_dim = 8;
  DType dtype = DType::kFloat32;
  bool causal = false;
  int64_t starts = 0;   // see kStartsNames
  int64_t mask = 0;     // see kMaskNames
  int64_t packing = 0;  // see kPackingNames
  int64_t layout = 0;   // Layout, or kNumLayouts: another for each tensor
  int64_t threads = 1;
  int64_t seed = 1;
};

inline constexpr std::string_view kStartsNames[] = {
    "none", "equal", "bottom-right", "rows", "large", "negative"};
inline constexpr std::string_view kMaskNames[] = {
    "none",        "right-padding", "left-padding",   "holes",
    "masked-rows", "query-only",    "nothing-visible"};
inline constexpr std::string_view kPackingNames[] = {"none", "one", "0-5-0-1",
                                                     "many"};

// "batch=1 q_len=8 ...", and back: whether the key is one of these fields and
// the text a value of it.
std::string describe_call(const CallPoint& point);
bool set_call_field(CallPoint& point, std::string_view key,
                    std::string_view text);
// The number of `name` among names.
template <size_t N>
bool find_name(const std::string_view (&names)[N], std::string_view name,
               int64_t* index) {
  for (size_t i = 0; i < N; ++i) {
    if (names[i] == name) {
      *index = static_cast<int64_t>(i);
      return true;
    }
  }
  return false;
}
// set(key, value) for each "key=value"; false where one is refused.
bool for_fields(
    std::string_view text,
    const std::function<bool(std::string_view, std::string_view)>& set);

struct CallProblem {
  Tensor q, k, v, d_out;
  std::vector<int64_t> q_start, kv_start;           // empty = not given
  std::vector<uint8_t> key_mask, query_mask;        // empty = not given
  std::vector<int64_t> cu_seqlens_q, cu_seqlens_k;  // empty = not packed
  std::string text;  // the point it was made from

  int64_t rows() const;
  std::array<int64_t, 4> out_size() const;
  bool key_is_real(const AttentionRow& row, int64_t j) const;
  bool query_is_real(const AttentionRow& row, int64_t i) const;
};

// The fields that all engines' inputs have.
template <typename Inputs>
Inputs inputs_of(const CallProblem& p) {
  const auto pointer = [](const auto& x) {
    return x.empty() ? nullptr : x.data();
  };
  Inputs in;
  in.q = p.q.view();
  in.k = p.k.view();
  in.v = p.v.view();
  in.q_start = pointer(p.q_start);
  in.kv_start = pointer(p.kv_start);
  in.key_mask = pointer(p.key_mask);
  in.key_mask_stride = p.k.size()[1];
  in.query_mask = pointer(p.query_mask);
  in.query_mask_stride = p.q.size()[1];
  in.cu_seqlens_q = pointer(p.cu_seqlens_q);
  in.cu_seqlens_k = pointer(p.cu_seqlens_k);
  in.num_sequences = p.cu_seqlens_q.empty() ? 0 : p.rows();
  return in;
}

int64_t draw(Random& random, int64_t low, int64_t high);

// Packing, normal tensors and masks for a point.
void make_call(const CallPoint& point, Random& random, CallProblem& problem);
// A start of queries and keys for each row. far: a large position.
void make_starts(const CallPoint& point, int64_t far, Random& random,
                 CallProblem& problem);

// NaN, infinity and huge numbers: what must never have an effect.
void fill_with_junk(Tensor& x, int64_t b, int64_t s, int64_t h, Random& random);
void fill_with_junk(Tensor& x, int64_t b, int64_t s, Random& random);
// At every masked key, value, query and its output gradient.
void hide_masked_junk(Random& random, CallProblem& problem);

Tensor widen(const Tensor& x);
// Tensors as float64, contiguous.
void widen_call(CallProblem& problem);

// Which layout the n-th tensor of a point has.
Layout layout_of(int64_t layout, int64_t n);

}  // namespace cosformer::testing

#endif  // COSFORMER_TESTS_KERNELS_CALL_PROBLEM_H_
