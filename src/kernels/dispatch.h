// Which instruction set the kernels run on: the only place that asks the CPU.
#ifndef COSFORMER_SRC_KERNELS_DISPATCH_H_
#define COSFORMER_SRC_KERNELS_DISPATCH_H_

#include <string_view>

#include "cosformer/base.h"

namespace cosformer {

enum class Isa { kGeneric, kAvx2, kAvx512 };  // ascending

std::string_view isa_name(Isa isa);

// The instruction set in force. kNotSupported where COSFORMER_ISA (or
// force_isa) names one that this build or this machine lacks.
Result<Isa> chosen_isa();

}  // namespace cosformer

#endif  // COSFORMER_SRC_KERNELS_DISPATCH_H_
