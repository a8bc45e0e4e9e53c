// Tensors against the reference's, by the errors that their arithmetic allows:
// what the comparisons of all engines are made of.
#ifndef COSFORMER_TESTS_KERNELS_COMPARISON_H_
#define COSFORMER_TESTS_KERNELS_COMPARISON_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tests/kernels/tensor.h"

namespace cosformer::testing {

// Largest relative errors seen, in units of what was allowed.
struct Margins {
  double out = 0, gradients = 0;
};

// Half of the distance of 1 from the next number.
double unit_roundoff(DType dtype);

template <typename Use>
void for_each_element(const Tensor& x, const Use& use) {
  for (int64_t b = 0; b < x.size()[0]; ++b)
    for (int64_t s = 0; s < x.size()[1]; ++s)
      for (int64_t h = 0; h < x.size()[2]; ++h)
        for (int64_t c = 0; c < x.size()[3]; ++c) use(b, s, h, c);
}
Tensor absolute(const Tensor& x);

// Relative norms that results of a call with this dtype may be off by: sums of
// products in its accumulator, and one rounding to a half type. The backward of
// half types is given the rounded output, whose error enters its sums.
struct Tolerances {
  explicit Tolerances(DType dtype);
  double out, gradient;            // of results in the dtype
  double wide_out, wide_gradient;  // of results in the accumulator's type
};

class Comparison {
 public:
  explicit Comparison(Margins* margins) : margins_(margins) {}

  // name: "out", "dq", ...: gradients begin with d. tolerance: relative norm;
  // dtype: what the result was rounded to. terms: how large the terms are whose
  // sum the result is (where they cancel it may be off by roundings of them),
  // asked for only where the tolerance alone does not do; nullptr = no matter.
  void check(const char* name, const Tensor& got, const Tensor& want,
             double tolerance, DType dtype,
             const std::function<Tensor()>& terms = nullptr);
  void check_positions(const char* name, const std::vector<int64_t>& got,
                       const std::vector<int64_t>& want);

  // One line for each tensor that does not agree, naming the worst element.
  const std::string& text() const { return text_; }

 private:
  void fail(const char* name, const Tensor& got, const std::vector<double>& g,
            const std::vector<double>& w, double error, double allowed);

  Margins* margins_;
  std::string text_;
};

}  // namespace cosformer::testing

#endif  // COSFORMER_TESTS_KERNELS_COMPARISON_H_
