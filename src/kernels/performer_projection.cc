// Random projections of Performer (Choromanski et al., ICLR 2021), from a
// counter-based generator: row r, column c is the same whatever is drawn
// beside.
#include <algorithm>
#include <cmath>
#include <numbers>
#include <vector>

#include "cosformer/kernels.h"

namespace cosformer {
namespace {

// Streams of the generator: rows, and the norms of orthogonal ones.
constexpr uint64_t kRows = 0, kNorms = uint64_t{1} << 62;

// n standard normal numbers of row r (Box and Muller 1958).
void fill_normal(uint64_t seed, uint64_t stream, int64_t r, int64_t n,
                 double* x) {
  for (int64_t c = 0; c < n; c += 2) {
    const auto bits = philox(seed, stream + static_cast<uint64_t>(r),
                             static_cast<uint64_t>(c / 2));
    const auto uniform = [&](size_t at) {  // in (0, 1)
      const uint64_t both = uint64_t{bits[at]} << 32 | bits[at + 1];
      return (static_cast<double>(both >> 11) + 0.5) * 0x1p-53;
    };
    const double radius = std::sqrt(-2 * std::log(uniform(0)));
    const double angle = 2 * std::numbers::pi * uniform(2);
    x[c] = radius * std::cos(angle);
    if (c + 1 < n) x[c + 1] = radius * std::sin(angle);
  }
}

double dot(const double* a, const double* b, int64_t n) {
  double sum = 0;
  for (int64_t c = 0; c < n; ++c) sum += a[c] * b[c];
  return sum;
}

// Rows of a block orthogonal to those before them. Twice is enough for full
// precision (Giraud et al. 2005).
void orthogonalise(int64_t rows, int64_t dim, double* block) {
  for (int64_t r = 0; r < rows; ++r) {
    double* row = block + r * dim;
    for (int pass = 0; pass < 2; ++pass) {
      for (int64_t before = 0; before < r; ++before) {
        const double* other = block + before * dim;
        const double along = dot(row, other, dim);
        for (int64_t c = 0; c < dim; ++c) row[c] -= along * other[c];
      }
    }
    const double length = std::sqrt(dot(row, row, dim));
    for (int64_t c = 0; c < dim; ++c) row[c] /= length;
  }
}

}  // namespace

void performer_projection(int64_t num_features, int64_t head_dim,
                          bool orthogonal, uint64_t seed, double* projection) {
  for (int64_t r = 0; r < num_features; ++r)
    fill_normal(seed, kRows, r, head_dim, projection + r * head_dim);
  if (!orthogonal) return;
  std::vector<double> draw(static_cast<size_t>(head_dim));
  for (int64_t first = 0; first < num_features; first += head_dim) {
    const int64_t rows = std::min(head_dim, num_features - first);
    orthogonalise(rows, head_dim, projection + first * head_dim);
    for (int64_t r = first; r < first + rows; ++r) {
      fill_normal(seed, kNorms, r, head_dim, draw.data());
      const double length = std::sqrt(dot(draw.data(), draw.data(), head_dim));
      for (int64_t c = 0; c < head_dim; ++c)
        projection[r * head_dim + c] *= length;
    }
  }
}

}  // namespace cosformer
