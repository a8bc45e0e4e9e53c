// Packing of the next chunk, a row at a time between the tiles of the present
// one: its loads and stores then run beside the multiply-adds, and cost little.
#if defined(COSFORMER_SRC_KERNELS_SIMD_PACK_QUEUE_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef COSFORMER_SRC_KERNELS_SIMD_PACK_QUEUE_INL_H_
#undef COSFORMER_SRC_KERNELS_SIMD_PACK_QUEUE_INL_H_
#else
#define COSFORMER_SRC_KERNELS_SIMD_PACK_QUEUE_INL_H_
#endif

#include "kernels/simd/pack-inl.h"
#include "kernels/simd/state-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cosformer::simd::HWY_NAMESPACE {

// Rows to pack: zeros where the bit of `valid` is 0.
template <typename T>
struct PackJob {
  // Packs rows [first, last); whether they are finite.
  bool (*pack)(const PackJob& job, int64_t first, int64_t last);
  Rows from;
  uint64_t valid;
  int64_t rows, dim;
  T* out;
  int64_t stride;  // whole vectors
  // Where given, row r is multiplied by factor[r]; where other is given, that
  // times ratio[r] goes there.
  const T* factor = nullptr;
  T* other = nullptr;
  const T* ratio = nullptr;
  // Rows of output gradients: their dot products with these rows, negated,
  // where dot[r] is not 0 beforehand; after these, rows are multiplied by
  // main[r], where given.
  Rows with{nullptr, 0, 0};
  T* dot = nullptr;
  const T* main = nullptr;
};

// A vector of n elements, and zeros. Apart, so that its memory does not weigh
// on rows of whole vectors.
template <typename T, typename In>
HWY_NOINLINE void load_last(const In* HWY_RESTRICT from, int64_t n,
                            T* HWY_RESTRICT out) {
  In last[kLanes<T>] = {};
  std::memcpy(last, from, static_cast<size_t>(n) * sizeof(In));
  hn::Store(load_wide(last), Tag<T>(), out);
}

// Whether the lanes are: x * 0 is 0 for every finite x, else NaN.
template <typename V>
HWY_INLINE bool all_finite(V x) {
  const hn::DFromV<V> d;
  return hn::AllTrue(d, hn::Eq(hn::Mul(x, hn::Zero(d)), hn::Zero(d)));
}

template <typename T, typename In, FeatureMap kMap, bool kFactor, bool kOther>
HWY_NOINLINE bool pack_job_rows(const PackJob<T>& job, int64_t first,
                                int64_t last) {
  const Tag<T> d;
  const Vec<T> zero = hn::Zero(d);
  constexpr int64_t kLane = kLanes<T>;
  const int64_t dim = job.dim, stride = job.stride;
  const int64_t whole = dim - dim % kLane;
  // Additions run beside the multiply-adds around them. Where the sum of finite
  // elements overflows, a slower way is taken for nothing.
  Vec<T> sum = zero;
  for (int64_t r = first; r < last; ++r) {
    T* HWY_RESTRICT out = job.out + r * stride;
    T* HWY_RESTRICT other = kOther ? job.other + r * stride : nullptr;
    int64_t c = 0;
    if (HWY_LIKELY((job.valid >> r & 1) != 0)) {
      const Vec<T> factor = hn::Set(d, kFactor ? job.factor[r] : T{1});
      const Vec<T> ratio = hn::Set(d, kOther ? job.ratio[r] : T{0});
      const auto put = [&](Vec<T> x, int64_t at) COSFORMER_LAMBDA {
        sum = hn::Add(sum, x);
        if constexpr (kFactor) x = hn::Mul(x, factor);
        hn::Store(x, d, out + at);
        if constexpr (kOther) hn::Store(hn::Mul(x, ratio), d, other + at);
      };
      const In* HWY_RESTRICT row = static_cast<const In*>(job.from.data) +
                                   (job.from.first + r) * job.from.stride;
      for (; c + 4 * kLane <= whole; c += 4 * kLane) {
        unroll<4>([&](auto n) COSFORMER_LAMBDA {
          put(feature<kMap, T>(load_wide(row + c + n * kLane)), c + n * kLane);
        });
      }
      for (; c < whole; c += kLane)
        put(feature<kMap, T>(load_wide(row + c)), c);
      if (HWY_UNLIKELY(c < dim)) {
        load_last<T, In>(row + c, dim - c, out + c);
        put(hn::IfThenElseZero(hn::FirstN(d, static_cast<size_t>(dim - c)),
                               feature<kMap, T>(hn::Load(d, out + c))),
            c);
        c += kLane;
      }
    }
    for (; c < stride; c += kLane) {
      hn::Store(zero, d, out + c);
      if constexpr (kOther) hn::Store(zero, d, other + c);
    }
  }
  return all_finite(sum);
}

template <typename T, typename In, FeatureMap kMap>
HWY_INLINE auto pack_job_for(const PackJob<T>& job) {
  if (job.factor == nullptr) {
    return job.other == nullptr ? &pack_job_rows<T, In, kMap, false, false>
                                : &pack_job_rows<T, In, kMap, false, true>;
  }
  return job.other == nullptr ? &pack_job_rows<T, In, kMap, true, false>
                              : &pack_job_rows<T, In, kMap, true, true>;
}
template <typename T, typename In>
HWY_INLINE auto pack_job_for(FeatureMap map, const PackJob<T>& job) {
  switch (map) {
    case FeatureMap::kRelu:
      return pack_job_for<T, In, FeatureMap::kRelu>(job);
    case FeatureMap::kElu1:
      return pack_job_for<T, In, FeatureMap::kElu1>(job);
    case FeatureMap::kIdentity:
      break;
  }
  return pack_job_for<T, In, FeatureMap::kIdentity>(job);
}
// The function for a job, whose outputs are set.
template <typename T>
HWY_INLINE auto pack_job_for(FeatureMap map, DType dtype,
                             const PackJob<T>& job) {
  if constexpr (sizeof(T) == 8) {
    return pack_job_for<T, double>(map, job);
  } else {
    switch (dtype) {
      case DType::kBFloat16:
        return pack_job_for<T, BFloat16>(map, job);
      case DType::kFloat16:
        return pack_job_for<T, Float16>(map, job);
      default:
        return pack_job_for<T, float>(map, job);
    }
  }
}

// All rows of a job, now. Whether they are finite.
template <typename T>
HWY_INLINE bool pack_now(PackJob<T> job, FeatureMap map, DType dtype) {
  return pack_job_for<T>(map, dtype, job)(job, 0, job.rows);
}

// Jobs in the order in which they are done.
template <typename T>
class PackQueue {
 public:
  // Spread over so many tiles.
  void start(int64_t tiles) {
    count_ = at_ = 0;
    row_ = rows_ = 0;
    tiles_ = tiles;
    waited_ = 0;
    finite_ = true;
  }
  void add(const PackJob<T>& job) {
    jobs_[count_++] = job;
    rows_ += job.rows;
    wait_ = tiles_ * kAtOnce / rows_;
  }
  void add(PackJob<T> job, FeatureMap map, DType dtype) {
    job.pack = pack_job_for<T>(map, dtype, job);
    add(job);
  }
  HWY_INLINE void tile() {
    if (at_ == count_ || ++waited_ < wait_) return;
    waited_ = 0;
    some(kAtOnce);
  }
  // The rest. Whether everything was finite.
  bool finish() {
    while (at_ < count_) some(kMaxChunk);
    return finite_;
  }

 private:
  // Up to so many rows of the job at hand.
  HWY_NOINLINE void some(int64_t rows) {
    const PackJob<T>& job = jobs_[at_];
    const int64_t last = std::min(row_ + rows, job.rows);
    finite_ = job.pack(job, row_, last) && finite_;
    row_ = last;
    if (row_ == job.rows) {
      row_ = 0;
      ++at_;
    }
  }

  static constexpr int64_t kAtOnce = 4;
  static constexpr int kMost = 6;
  PackJob<T> jobs_[kMost];
  int count_ = 0, at_ = 0;
  int64_t rows_ = 0, row_ = 0, tiles_ = 0, wait_ = 0, waited_ = 0;
  bool finite_ = true;
};

// What is done between tiles.
template <typename T>
struct Beside {
  Ahead ahead;
  PackQueue<T> queue;
  // Amid a tile.
  HWY_INLINE void step() { ahead.tile(); }
  HWY_INLINE void tile() {
    ahead.tile();
    queue.tile();
  }
};

}  // namespace cosformer::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // COSFORMER_SRC_KERNELS_SIMD_PACK_QUEUE_INL_H_
