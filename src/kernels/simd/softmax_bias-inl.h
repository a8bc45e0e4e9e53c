// Relative biases as rows that a score tile starts from: powers of 2, and a
// table a head that goes on at both ends, so that the biases of keys in a row
// are a run of it.
#if defined(COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_BIAS_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_BIAS_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_BIAS_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_BIAS_INL_H_
#endif

#include <algorithm>
#include <numbers>

#include "kernels/simd/softmax_plan.h"
#include "kernels/simd/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

// Entries of a head: those of distances [-reach - kTileKeys, reach +
// kTileKeys].
inline int64_t bias_length(const SoftmaxCall& call) {
  return 2 * (call.inputs.relative_reach + kTileKeys) + 1;
}

template <typename T>
int64_t bias_elements(const SoftmaxCall& call) {
  return call.inputs.relative_bias == nullptr ? 0
                                              : call.heads * bias_length(call);
}

template <typename T>
void expand_bias(const SoftmaxCall& call, void* bias) {
  const int64_t reach = call.inputs.relative_reach, length = bias_length(call);
  const T* from = static_cast<const T*>(call.inputs.relative_bias);
  T* to = static_cast<T*>(bias);
  for (int64_t h = 0; h < call.heads; ++h) {
    for (int64_t i = 0; i < length; ++i) {
      const int64_t at = std::clamp<int64_t>(i - kTileKeys, 0, 2 * reach);
      to[h * length + i] =
          from[h * (2 * reach + 1) + at] * std::numbers::log2e_v<T>;
    }
  }
}

template <typename T>
class BiasTable {
 public:
  BiasTable(const SoftmaxCall& call, const T* bias, int64_t head)
      : reach_(call.inputs.relative_reach),
        table_(bias + head * bias_length(call)) {}

  // Entries of inner elements [at, at + count), at most a tile, of a list;
  // distance of an inner index y: y + shift. memory: kTileKeys, for those that
  // are no run. Readable for a whole tile where it is one, else to kTileKeys.
  const T* row(const IndexList& list, int64_t at, int64_t count, int64_t shift,
               T* memory) const {
    if (list.list == nullptr && list.step == 1) {
      return table_ +
             entry(std::clamp(list[at] + shift, -reach_ - kTileKeys, reach_));
    }
    for (int64_t c = 0; c < count; ++c) {
      memory[c] =
          table_[entry(std::clamp(list[at + c] + shift, -reach_, reach_))];
    }
    return memory;
  }

 private:
  int64_t entry(int64_t distance) const {
    return distance + reach_ + kTileKeys;
  }

  int64_t reach_;
  const T* table_;
};

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_BIAS_INL_H_
