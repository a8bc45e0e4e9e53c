// What Performer's walks share: the call, and where a block of positions of a
// row and kv head lies in the caller's memory.
//
// With m_f the maximum of log feature f over the keys seen, keys are held as
// exp(log k_f - m_f) and a query as exp(log q_f + m_f - c), where c = max_f
// (log q_f + m_f) belongs to the row and cancels. Both are at most 1. In a
// causal block m_f covers keys that its first queries do not see, so that what
// those see may be as small as exp(-rise): a block is cut into pieces before a
// key that would raise some maximum by more than kRise, and the sums of a row
// stay above exp(-kRise).
#ifndef COSFORMER_SRC_KERNELS_SIMD_PERFORMER_CALL_H_
#define COSFORMER_SRC_KERNELS_SIMD_PERFORMER_CALL_H_

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "kernels/simd/performer.h"
#include "kernels/simd/performer_block.h"
#include "kernels/simd/schedule.h"

namespace cosformer::simd {

inline constexpr double kMinusInfinity =
    -std::numeric_limits<double>::infinity();

// Absolute logarithms up to which float32 serves: rounding then leaves an error
// of a weight of 1e-6 or so.
inline constexpr double kNarrow = 80;

template <typename T>
inline constexpr double kRise = std::is_same_v<T, double> ? 250 : 24;

template <typename T>
const PerformerKernels<T>& performer_kernels(Isa isa) {
  if constexpr (std::is_same_v<T, double>) {
    return performer_f64(isa);
  } else {
    return performer_f32(isa);
  }
}

// What all units of a call share. Read only.
template <typename T>
struct PerformerCall {
  // needs_all: keys that no query sees matter too (for the state). of: the
  // features that those given are a part of.
  PerformerCall(const PerformerAttentionOptions& options,
                const PerformerAttentionInputs& in, bool needs_all, Isa isa_,
                int64_t of = 0)
      : inputs(in),
        isa(isa_),
        kernels(performer_kernels<T>(isa_)),
        whole(linear_options(options), linear_inputs(in)),
        features(in.num_features),
        stride(padded(in.num_features)),
        log_features(
            std::log(static_cast<double>(of > 0 ? of : in.num_features))),
        half(size_of(in.call.q.dtype) < 4) {
    // Any address: units_of only asks whether there is one.
    if (needs_all) whole.d_state_out.kv_state = this;
    units = units_of(whole);
  }

  // Makes `all`, and for a backward `w`.
  Status prepare(bool for_gradients) {
    const int64_t dim = whole.dim, size = features * dim;
    const T* projection = static_cast<const T*>(inputs.projection);
    all = {features, dim, whole.value_dim, projection, length_of_rows()};
    // Whole groups of four rows: a copy where there are fewer.
    const int64_t copied = all.rows() == features ? 0 : all.rows() * dim;
    const int64_t along = for_gradients ? stride * padded(dim) : 0;
    const size_t bytes = static_cast<size_t>(copied + along + 16) * sizeof(T);
    projection_memory = AlignedBuffer(bytes + 64);
    if (projection_memory.data() == nullptr) return out_of_memory(bytes);
    T* copy = projection_memory.template as<T>() + (along + 15) / 16 * 16;
    if (copied > 0) {
      std::copy_n(projection, size, copy);
      std::fill_n(copy + size, copied - size, T{0});
      all.projection = copy;
    }
    w = {features, dim, whole.value_dim, projection_memory.template as<T>()};
    if (for_gradients) kernels.pack_projection(projection, w);
    return Status();
  }

  const T* log_scale_in(const Unit& unit) const {
    const T* at = static_cast<const T*>(inputs.state.log_scale);
    return inputs.state.sums.kv_state == nullptr ? nullptr
                                                 : at + state_at(unit);
  }
  int64_t state_at(const Unit& unit) const {
    return (unit.row_index * whole.kv_heads + unit.head) * features;
  }

  const PerformerAttentionInputs& inputs;
  const Isa isa;
  const PerformerKernels<T>& kernels;
  LinearCall whole;  // the call as the engine sees it but for the features
  const int64_t features, stride;
  const double log_features;
  const bool half;  // inputs are narrower than T
  std::vector<Unit> units;
  PerformerFeatures<T> all{};
  PerformerProjection<T> w{};  // for a backward
  AlignedBuffer projection_memory;

 private:
  double length_of_rows() const {
    const T* row = static_cast<const T*>(inputs.projection);
    double longest = 0;
    for (int64_t f = 0; f < features; ++f, row += whole.dim) {
      T square[8] = {};
      int64_t c = 0;
      for (; c + 8 <= whole.dim; c += 8)
        for (int64_t l = 0; l < 8; ++l) square[l] += row[c + l] * row[c + l];
      for (; c < whole.dim; ++c) square[0] += row[c] * row[c];
      const double sum = static_cast<double>(
          ((square[0] + square[1]) + (square[2] + square[3])) +
          ((square[4] + square[5]) + (square[6] + square[7])));
      // A NaN is kept: nothing is below it.
      longest = sum <= longest ? longest : sum;
    }
    return std::sqrt(longest);
  }
  static LinearAttentionOptions linear_options(
      const PerformerAttentionOptions& options) {
    LinearAttentionOptions linear;
    linear.feature_map = FeatureMap::kIdentity;
    linear.is_causal = options.is_causal;
    linear.eps = std::is_same_v<T, double> ? DBL_MIN : FLT_MIN;
    return linear;
  }
  static LinearAttentionInputs linear_inputs(
      const PerformerAttentionInputs& in) {
    LinearAttentionInputs linear = in.call;
    linear.state = in.state.sums;
    return linear;
  }
};

// Features of a part (of all but the last), where units are so few that their
// features are cut: by shape alone, so that no result depends on the threads.
template <typename T>
int64_t features_of_part(const PerformerCall<T>& call) {
  constexpr int64_t kEnoughUnits = 4, kLeastFeatures = 128, kLeastSteps = 256;
  int64_t steps = 0;
  for (const Unit& unit : call.units)
    steps = std::max(steps, unit.row.q_len + unit.row.kv_len);
  const int64_t parts =
      std::ssize(call.units) >= kEnoughUnits || steps < kLeastSteps
          ? 1
          : std::max<int64_t>(1, call.features / kLeastFeatures);
  return ((call.features + parts - 1) / parts + 15) / 16 * 16;
}

// Whether little may be left over of maxima and logarithms in float32.
template <typename T>
bool are_large(const T* maxima, int64_t count) {
  const T unseen = static_cast<T>(kMinusInfinity);
  int64_t large = 0;
  for (int64_t f = 0; f < count; ++f) {
    large +=
        maxima[f] != unseen && std::fabs(maxima[f]) > static_cast<T>(kNarrow);
  }
  return large > 0;
}

// Hands out aligned arrays of several types; from nullptr it only counts.
class ArrayCarver {
 public:
  explicit ArrayCarver(void* memory) : memory_(static_cast<char*>(memory)) {}
  template <typename E>
  E* take(int64_t count) {
    char* at = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += (static_cast<size_t>(count) * sizeof(E) + 63) / 64 * 64;
    return reinterpret_cast<E*>(at);
  }
  size_t bytes() const { return used_; }

 private:
  char* memory_;
  size_t used_ = 0;
};

// A block of a unit's positions: which slots count, and where their rows lie.
template <typename T>
class PerformerPlace {
 public:
  static constexpr int64_t kBlock = kPerformerBlock;

  PerformerPlace(const PerformerCall<T>& call, const Unit& unit)
      : call_(call), unit_(unit), dtype_(call.inputs.call.q.dtype) {}

 protected:
  void stand_at(int64_t begin, int64_t end) {
    begin_ = begin;
    n_ = end - begin;
    query_bits_ = query_slots(call_.whole, unit_, begin, n_);
    key_bits_ = seen_key_slots(call_.whole, unit_, begin, n_);
  }

  // The first row of a block in the caller's memory, and its first head.
  int64_t first_key() const { return key_at(begin_); }
  int64_t first_query() const { return query_at(begin_); }
  int64_t first_head() const { return unit_.head * call_.whole.group; }
  int64_t key_at(int64_t position) const {
    return unit_.row.kv_offset + position - unit_.row.kv_start;
  }
  int64_t query_at(int64_t position) const {
    return unit_.row.q_offset + position - unit_.row.q_start;
  }
  static const char* head_of(const ConstView4& view, int64_t batch,
                             int64_t head) {
    return static_cast<const char*>(view.data) +
           (batch * view.stride[0] + head * view.stride[2]) *
               static_cast<int64_t>(size_of(view.dtype));
  }

  // Whether a key stands before a position.
  bool seen_before(int64_t position) const {
    return unit_.row.state_position > unit_.row.state_start ||
           unit_.visible_from < position;
  }

  const PerformerCall<T>& call_;
  const Unit& unit_;
  const DType dtype_;
  int64_t begin_ = 0, n_ = 0;
  Slots query_bits_, key_bits_;
};

}  // namespace cosformer::simd

#endif  // COSFORMER_SRC_KERNELS_SIMD_PERFORMER_CALL_H_
