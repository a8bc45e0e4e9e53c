// Packed tiles of keys and values, kept for what comes next: blocks of queries
// of a row and the query heads of a group see the same keys, and packing them
// takes as long as thirty queries do. Each thread keeps its own, so that no
// other is waited for.
#if defined(COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_PACKED_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_PACKED_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_PACKED_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_PACKED_INL_H_
#endif

#include <algorithm>

#include "kernels/simd/chunk-inl.h"
#include "kernels/simd/softmax_pack-inl.h"
#include "kernels/simd/softmax_plan.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

template <typename T>
struct PackedTile {
  T *keys, *values;
  bool* finite;  // whether all values that take part are
};

template <typename T>
class PackedTiles {
 public:
  // In the memory of a thread; block_queries: of a block, at most.
  PackedTiles(const SoftmaxCall& call, int64_t block_queries, Carver<T>& carver)
      : PackedTiles(call, block_queries, across_size<T>(kForwardKeys, call.dim),
                    kForwardKeys * row_length<T>(call.value_dim), carver) {}
  // Of tiles of these sizes, in elements of T.
  PackedTiles(const SoftmaxCall& call, int64_t block_queries, int64_t keys_size,
              int64_t values_size, Carver<T>& carver)
      : keys_size_(keys_size), values_size_(values_size) {
    is_ring_ = call.options.has_window || call.inputs.block_mask != nullptr;
    slots_ = count(call, block_queries);
    // One more for what is not kept.
    head_ = take_as<Head>(carver, 1);
    slot_ = take_as<Slot>(carver, slots_ + 1);
    keys_ = carver.take((slots_ + 1) * keys_size_);
    values_ = carver.take((slots_ + 1) * values_size_);
  }

  void forget() { head_->row = kNone; }

  // From here on of this row and head.
  void start(int64_t row, int64_t kv_head) {
    if (head_->row == row && head_->kv_head == kv_head) return;
    *head_ = {row, kv_head};
    for (int64_t s = 0; s < slots_; ++s) slot_[s].first = kNone;
  }
  // The tile of elements list[first .. first + count), and whether it is packed
  // already; if not, it belongs to that tile from now on.
  PackedTile<T> tile(const IndexList& list, int64_t first, int64_t count,
                     bool* packed) {
    const int64_t key = is_run(list, first, count) ? list[first] : kNone;
    const int64_t s = slot_of(key);
    *packed = key != kNone && slot_[s].first == key;
    slot_[s].first = key;
    return at(s);
  }
  // That tile, if it is packed; else nothing.
  const T* find(const IndexList& list, int64_t first, int64_t count,
                int64_t row, int64_t kv_head, const T** values) const {
    if (head_->row != row || head_->kv_head != kv_head ||
        !is_run(list, first, count))
      return nullptr;
    const int64_t s = slot_of(list[first]);
    if (slot_[s].first != list[first]) return nullptr;
    *values = at(s).values;
    return at(s).keys;
  }

  // Tiles that are kept: of neighbours. Those of a row start at the same
  // element, or whole tiles from it; of a list they are whole, as those of a
  // pattern's blocks.
  static bool is_run(const IndexList& list, int64_t first, int64_t count) {
    if (list.list == nullptr) return list.step == 1;
    return count == kForwardKeys &&
           list[first + count - 1] - list[first] == count - 1;
  }

 private:
  static constexpr int64_t kNone = -1;
  struct Head {
    int64_t row, kv_head;
  };
  struct Slot {
    int64_t first;
    bool finite;
  };

  // All keys of a row, or those that a window leaves to a block, as far as they
  // fit; where a tile is seen but once, the one at hand.
  int64_t count(const SoftmaxCall& call, int64_t block_queries) const {
    constexpr int64_t kMostBytes = 4 << 20;
    const SoftmaxAttentionOptions& o = call.options;
    const SoftmaxAttentionInputs& in = call.inputs;
    if (o.has_window && o.dilation > 1) return 1;
    if (call.group == 1 && in.q.size[1] <= block_queries) return 1;
    int64_t keys = in.k.size[1];
    if (o.has_window && in.block_mask == nullptr) {
      const int64_t before = o.window_left < 0 ? keys : o.window_left;
      int64_t after = o.window_right < 0 ? keys : o.window_right;
      if (o.is_causal) after = 0;
      keys = std::min(keys, std::min(before, keys) + std::min(after, keys) +
                                block_queries + kForwardKeys);
    }
    const int64_t tiles = (keys + kForwardKeys - 1) / kForwardKeys + 1;
    const int64_t bytes =
        (keys_size_ + values_size_) * static_cast<int64_t>(sizeof(T));
    return std::min(tiles, std::max<int64_t>(1, kMostBytes / bytes));
  }
  template <typename As>
  static As* take_as(Carver<T>& carver, int64_t n) {
    const int64_t bytes = n * static_cast<int64_t>(sizeof(As));
    return reinterpret_cast<As*>(
        carver.take(bytes / static_cast<int64_t>(sizeof(T)) + 1));
  }
  // Beyond the slots tiles share the last one; a window leaves the first ones
  // behind.
  int64_t slot_of(int64_t key) const {
    if (key == kNone) return slots_;
    const int64_t tile = key / kForwardKeys;
    return is_ring_ ? tile % slots_ : std::min(tile, slots_ - 1);
  }
  PackedTile<T> at(int64_t s) const {
    return {keys_ + s * keys_size_, values_ + s * values_size_,
            &slot_[s].finite};
  }

  int64_t keys_size_, values_size_, slots_;
  bool is_ring_;
  Head* head_;
  Slot* slot_;
  T *keys_, *values_;
};

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_PACKED_INL_H_
