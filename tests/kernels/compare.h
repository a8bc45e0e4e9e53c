// What the kernels of the linear engine gave against what the reference gives,
// by the errors that their arithmetic allows.
#ifndef COSFORMER_TESTS_KERNELS_COMPARE_H_
#define COSFORMER_TESTS_KERNELS_COMPARE_H_

#include <string>

#include "tests/kernels/comparison.h"
#include "tests/kernels/problem.h"

namespace cosformer::testing {

// Empty where `got` agrees with `want` (from run_reference); otherwise one line
// for each tensor that does not, naming the worst element.
std::string compare(const Problem& problem, const Outputs& got,
                    const Outputs& want, Margins* margins = nullptr);

}  // namespace cosformer::testing

#endif  // COSFORMER_TESTS_KERNELS_COMPARE_H_
