// Performer's forward on a block of positions: the kernels of one instruction
// set and type behind plain functions (performer_block-inl.h says how they
// work).
#ifndef COSFORMER_SRC_KERNELS_SIMD_PERFORMER_BLOCK_H_
#define COSFORMER_SRC_KERNELS_SIMD_PERFORMER_BLOCK_H_

#include <cstdint>

#include "cosformer/kernels.h"
#include "kernels/dispatch.h"
#include "kernels/simd/performer.h"

namespace cosformer::simd {

// Positions of a piece, at most: what is taken at once of a block.
inline constexpr int64_t kPerformerPiece = 32;
// Features of a strip of them.
inline constexpr int64_t kPerformerStrip = 32;
// Rows of arrays of a block: tiles write whole groups of four.
inline constexpr int64_t kPerformerRows = kPerformerBlock + 4;

// The features of a call that are taken together, and the sizes beside them.
template <typename T>
struct PerformerFeatures {
  int64_t count, dim, value_dim;
  const T* projection;  // [rows()][dim], zeros from row `count` on
  double reach;         // the longest row's length
  int64_t rows() const { return (count + 3) / 4 * 4; }
};

// Logarithms of features of a block's keys, or of its queries of one head.
// Positions are columns: element (f, j) lies at [f * kPerformerBlock + j].
template <typename T>
struct PerformerLogs {
  void* logs;  // of T, or of double where `wide`
  bool wide = false;
  double* half_norm;  // [kPerformerBlock]: |x'|^2 / 2
};

// A unit's state: sums at the scale of exp(maxima).
template <typename T>
struct PerformerSums {
  T* maxima;  // [rows]
  T* kv;      // [rows] x value_dim, in panels
  T* sum;     // [rows]
};

// Rows of the next block, which `project` brings into the cache on the way: of
// several tensors, the first of which has rows if any has.
struct PerformerAhead {
  const void* data = nullptr;
  int64_t row_bytes = 0, bytes = 0, rows = 0;
};
inline constexpr int kPerformerAhead = 3;

// Memory of a thread for these kernels.
template <typename T>
struct PerformerWork {
  T* rows;            // [kPerformerRows][padded(dim)]
  T* x;               // [padded(dim)][kPerformerBlock]
  double* wide_x;     // the same
  double* wide_w;     // [8][dim]: rows of the projection
  T *queries, *keys;  // [kPerformerStrip][kPerformerPiece]
  T* scores;          // [kPerformerPiece][kPerformerPiece]
  T* risen;           // [features]
};

// A piece of a block: `n` positions from column `begin` on. Rows of v and out
// are those of the block.
template <typename T>
struct PerformerPiece {
  int64_t begin, n;
  const PerformerLogs<T>* queries = nullptr;  // nullptr: none ask
  const PerformerLogs<T>* keys = nullptr;     // nullptr: none are there
  uint64_t real_keys = 0;                     // bits of the block
  const T* v = nullptr;                       // [kPerformerRows][v_stride]
  bool finite = true;                         // v is
  bool read = true, update = true;            // the state
  // Of queries: sums of weighted values, of weights, and what the logarithms
  // of the weights were shifted by.
  T* out = nullptr;
  T* denominator = nullptr;
  double* top = nullptr;
};

template <typename T>
struct PerformerBlockKernels {
  int64_t (*value_stride)(int64_t value_dim);
  // A state from the caller's sums [count][value_dim], [count] and their
  // logarithms of scale, or (nullptr) from nothing, and back.
  void (*load_state)(const PerformerFeatures<T>& f, const T* kv, const T* sum,
                     const T* log_scale, const PerformerSums<T>& to);
  void (*store_state)(const PerformerFeatures<T>& f,
                      const PerformerSums<T>& from, T* kv, T* sum,
                      T* log_scale);
  // Rows first + r, r < n, of strided memory, zeros where the bit of `real` is
  // 0, and the logarithms of their features: of keys with their norms, and
  // -infinity where `real` is 0. limit: the largest absolute logarithm that T
  // is taken for.
  void (*project)(const PerformerFeatures<T>& f, DType dtype, const void* data,
                  int64_t first, int64_t stride, uint64_t real, int64_t n,
                  bool keys, double limit,
                  const PerformerAhead ahead[kPerformerAhead],
                  const PerformerWork<T>& work, PerformerLogs<T>& to);
  // Rows of values; whether they are finite.
  bool (*load_values)(DType dtype, const void* data, int64_t first,
                      int64_t stride, uint64_t real, int64_t n,
                      int64_t value_dim, T* to);
  // Takes the keys of columns [from, to) into the maxima; stops before a key
  // that would raise one by more than `bound` while queries look. seen: a key
  // stands before `from`. Returns where it stopped.
  int64_t (*raise)(const PerformerFeatures<T>& f, const PerformerLogs<T>& keys,
                   uint64_t real, int64_t from, int64_t to, double bound,
                   bool seen, const PerformerWork<T>& work, T* maxima);
  // Brings a state at the scale of `before` to that of its maxima.
  void (*rescale)(const PerformerFeatures<T>& f, const T* before,
                  const PerformerSums<T>& state);
  // Features of columns [begin, begin + n) as rows: out[j][i] = exp(L_ij - m_i)
  // of keys (shift is nullptr), exp(L_ij + m_i - shift[j]) of queries, where
  // shift and out begin with column `begin`. Writes up to 3 rows more.
  void (*form_rows)(const PerformerFeatures<T>& f, const PerformerLogs<T>& logs,
                    int64_t begin, int64_t n, const T* maxima,
                    const double* shift, const PerformerWork<T>& work, T* out,
                    int64_t out_stride);
  // top[j] = max_i (L_ij + m_i) of columns [begin, begin + n), 0 where nothing
  // was seen; top begins with column 0.
  void (*find_tops)(const PerformerFeatures<T>& f, const PerformerLogs<T>& logs,
                    int64_t begin, int64_t n, const T* maxima, double* top);
  // Answers the piece's queries from the state and the piece's keys, and puts
  // these into the state.
  void (*attend)(const PerformerFeatures<T>& f, const PerformerPiece<T>& piece,
                 const PerformerWork<T>& work, const PerformerSums<T>& state);
  // Rows of out times scale, into the rows of `written`; zeros where `live` is
  // 0. stream: past the caches.
  void (*write)(DType dtype, const T* out, const T* scale, uint64_t written,
                uint64_t live, int64_t value_dim, void* data, int64_t first,
                int64_t stride, bool stream);
};

// Sizes of a thread's work, and pieces of its memory.
template <typename T, typename Carver>
PerformerWork<T> carve_performer_work(int64_t features, int64_t dim,
                                      Carver& carver) {
  const int64_t width = padded(dim);
  PerformerWork<T> work{};
  work.rows = carver.template take<T>(kPerformerRows * width);
  work.x = carver.template take<T>(width * kPerformerBlock);
  if constexpr (sizeof(T) == 4) {
    work.wide_x = carver.template take<double>(width * kPerformerBlock);
    work.wide_w = carver.template take<double>(8 * width);
  }
  work.queries = carver.template take<T>(kPerformerStrip * kPerformerPiece);
  work.keys = carver.template take<T>(kPerformerStrip * kPerformerPiece);
  work.scores = carver.template take<T>(kPerformerPiece * kPerformerPiece);
  work.risen = carver.template take<T>(features);
  return work;
}
template <typename T, typename Carver>
PerformerLogs<T> carve_performer_logs(int64_t rows, Carver& carver) {
  // A piece reads whole vectors from any column on.
  return {
      carver.template take<double>(rows * kPerformerBlock + kPerformerPiece),
      false, carver.template take<double>(kPerformerBlock)};
}

const PerformerBlockKernels<float>& performer_block_f32(Isa isa);
const PerformerBlockKernels<double>& performer_block_f64(Isa isa);
template <typename T>
const PerformerBlockKernels<T>& performer_block(Isa isa) {
  if constexpr (sizeof(T) == 8) {
    return performer_block_f64(isa);
  } else {
    return performer_block_f32(isa);
  }
}

}  // namespace cosformer::simd

#endif  // COSFORMER_SRC_KERNELS_SIMD_PERFORMER_BLOCK_H_
