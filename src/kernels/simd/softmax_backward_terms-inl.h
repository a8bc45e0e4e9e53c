// What depends on the positions of a cell's queries and keys: the relative bias
// and its gradient, and what dropout keeps.
#if defined(COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_BACKWARD_TERMS_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_BACKWARD_TERMS_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_BACKWARD_TERMS_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_BACKWARD_TERMS_INL_H_
#endif

#include <algorithm>
#include <limits>

#include "kernels/simd/softmax_backward_cell-inl.h"
#include "kernels/simd/softmax_backward_pack-inl.h"
#include "kernels/simd/softmax_dropout-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

// Which queries and keys a cell holds: elements [first_query, first_query +
// queries) of a list, and so for keys.
struct CellPlace {
  const IndexList* query_list;
  const IndexList* key_list;
  int64_t first_query, first_key;
  int64_t queries, keys;
};

template <typename T>
class BackwardTerms {
 public:
  BackwardTerms(const SoftmaxCall& call, const AttentionRow& row,
                int64_t row_index, int64_t head)
      : q_start_(row.q_start),
        kv_start_(row.kv_start),
        reach_(call.inputs.relative_reach),
        dropout_p_(call.options.dropout_p),
        dropout_(call, row_index, head) {
    if (call.inputs.relative_bias != nullptr) {
      const int64_t entries = 2 * reach_ + 1;
      bias_ = static_cast<const T*>(call.inputs.relative_bias) + head * entries;
      // An entry of -infinity only makes weights of 0.
      for (int64_t e = 0; e < entries; ++e)
        bias_finite_ &= bias_[e] < std::numeric_limits<T>::infinity();
    }
  }
  bool bias_finite() const { return bias_finite_; }

  // Fills the cell's bias and bits of dropout. bias: [kCellRows][kCellStride];
  // kept: [kCellRows][kCellWords].
  void prepare(const CellPlace& place, T* bias, uint64_t* kept,
               Cell<T>& cell) const {
    cell.bias = nullptr;
    cell.kept = nullptr;
    if (bias_ != nullptr) fill_bias(place, bias, cell);
    if (dropout_p_ > 0) {
      fill_kept(place, kept);
      std::fill(kept + place.queries * kCellWords,
                kept + cell.rows * kCellWords, uint64_t{0});
      cell.kept = kept;
      cell.kept_scale = static_cast<T>(1 / (1 - dropout_p_));
    }
  }

  // Adds the cell's dS to the gradient of the bias. sums: [kCellRows +
  // kCellStride].
  void add_d_bias(const CellPlace& place, const Cell<T>& cell, T* sums,
                  double* d_bias) const {
    const Tag<T> d;
    if (const int64_t step = shared_step(place); step != 0) {
      // By distance first.
      std::fill_n(sums, cell.rows + cell.keys, T{0});
      for (int64_t i = 0; i < cell.rows; ++i) {
        const T* from = cell.ds + i * kCellStride<T>;
        T* to = sums + cell.rows - 1 - i;
        for (int64_t j = 0; j < cell.keys; j += kLanes<T>) {
          hn::StoreU(hn::Add(hn::LoadU(d, to + j), hn::Load(d, from + j)), d,
                     to + j);
        }
      }
      const int64_t last = place.queries + place.keys - 1;
      const int64_t padding = cell.rows - place.queries;
      for (int64_t t = 0; t < last; ++t) {
        d_bias[entry(distance(place, place.queries - 1, 0) + t * step)] +=
            static_cast<double>(sums[padding + t]);
      }
      return;
    }
    for (int64_t i = 0; i < place.queries; ++i) {
      for (int64_t j = 0; j < place.keys; ++j) {
        d_bias[entry(distance(place, i, j))] +=
            static_cast<double>(cell.ds[i * kCellStride<T> + j]);
      }
    }
  }

 private:
  int64_t distance(const CellPlace& place, int64_t i, int64_t j) const {
    return kv_start_ + (*place.key_list)[place.first_key + j] - q_start_ -
           (*place.query_list)[place.first_query + i];
  }
  int64_t entry(int64_t distance) const {
    return std::clamp(distance, -reach_, reach_) + reach_;
  }
  // The step of both lists, where distances follow from j - i.
  static int64_t shared_step(const CellPlace& place) {
    const int64_t queries =
        run_step(*place.query_list, place.first_query, place.queries);
    const int64_t keys = run_step(*place.key_list, place.first_key, place.keys);
    return queries == keys ? keys : 0;
  }

  void fill_bias(const CellPlace& place, T* bias, Cell<T>& cell) const {
    const T factor = static_cast<T>(kLog2E);
    if (const int64_t step = shared_step(place); step != 0) {
      const int64_t low = distance(place, 0, 0) - (cell.rows - 1) * step;
      for (int64_t t = 0; t < cell.rows + cell.keys; ++t)
        bias[t] = bias_[entry(low + t * step)] * factor;
      cell.bias = bias + cell.rows - 1;
      cell.bias_step = -1;
      return;
    }
    for (int64_t i = 0; i < cell.rows; ++i) {
      T* row = bias + i * kCellStride<T>;
      std::fill_n(row, cell.keys, T{0});
      if (i >= place.queries) continue;
      for (int64_t j = 0; j < place.keys; ++j)
        row[j] = bias_[entry(distance(place, i, j))] * factor;
    }
    cell.bias = bias;
    cell.bias_step = kCellStride<T>;
  }

  void fill_kept(const CellPlace& place, uint64_t* kept) const {
    for (int64_t i = 0; i < place.queries; ++i) {
      const int64_t query =
          q_start_ + (*place.query_list)[place.first_query + i];
      const TileBits bits = dropout_.keeps(
          query, *place.key_list, place.first_key, place.keys, kv_start_);
      for (int64_t w = 0; w < kCellWords; ++w)
        kept[i * kCellWords + w] = bits.word[w];
    }
  }

  int64_t q_start_, kv_start_, reach_;
  double dropout_p_;
  const T* bias_ = nullptr;
  bool bias_finite_ = true;
  DropoutRows dropout_;
};

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_SOFTMAX_BACKWARD_TERMS_INL_H_
