// Which instruction set the kernels run on: the only place that asks the CPU.
#ifndef COSFORMER_SRC_KERNELS_DISPATCH_H_
#define COSFORMER_SRC_KERNELS_DISPATCH_H_

#include <string_view>

#include "cosformer/base.h"

namespace cosformer {

// Ascending; kAmx: AVX-512 and tiles of bfloat16 (simd/amx.h).
enum class Isa { kGeneric, kAvx2, kAvx512, kAmx };

std::string_view isa_name(Isa isa);

// The instruction set in force. kNotSupported where COSFORMER_ISA (or
// force_isa) names one that this build or this machine lacks.
Result<Isa> chosen_isa();
// Whether it was named so: then its kernels serve every call, else those calls
// where they are faster.
bool isa_is_forced();

// By its name; kGeneric where there is none.
Isa isa_of(std::string_view name);

}  // namespace cosformer

#endif  // COSFORMER_SRC_KERNELS_DISPATCH_H_
