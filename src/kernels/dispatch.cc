#include "kernels/dispatch.h"

#include <cstdlib>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cosformer/kernels.h"
#include "kernels/simd/targets.h"

namespace cosformer {
namespace {

// The last 512-bit subset that the AVX-512 kernels are compiled for is F, BW,
// CD, DQ and VL: what Highway calls AVX3.
bool machine_has(Isa isa) {
  const int64_t targets = hwy::SupportedTargets();
  switch (isa) {
    case Isa::kAvx512:
      return kBuiltForAvx512 && (targets & HWY_AVX3) != 0;
    case Isa::kAvx2:
      return kBuiltForAvx2 && (targets & HWY_AVX2) != 0;
    case Isa::kGeneric:
      return true;
  }
  return false;
}

std::string list_of_supported() {
  std::string list;
  for (std::string_view isa : supported_isas())
    list += str_cat(list.empty() ? "" : ", ", isa);
  return list;
}

Result<Isa> choose(std::string_view forced, std::string_view by) {
  constexpr Isa kAll[] = {Isa::kAvx512, Isa::kAvx2, Isa::kGeneric};
  if (forced.empty()) {
    for (Isa isa : kAll)
      if (machine_has(isa)) return isa;
  }
  for (Isa isa : kAll) {
    if (forced != isa_name(isa)) continue;
    if (machine_has(isa)) return isa;
    return not_supported("kernels: ", by, " forces the instruction set ",
                         forced, ", which this machine or build lacks: it has ",
                         list_of_supported());
  }
  return not_supported("kernels: ", by, " forces the instruction set \"",
                       forced, "\", expected one of avx512, avx2, generic; ",
                       "this machine has ", list_of_supported());
}

// Chosen once and read by every call.
std::mutex choice_mutex;
std::optional<Result<Isa>> choice;

Result<Isa> choose_by_environment() {
  const char* forced = std::getenv("COSFORMER_ISA");
  return choose(forced == nullptr ? "" : forced, "COSFORMER_ISA");
}

}  // namespace

std::string_view isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kGeneric:
      break;
  }
  return "generic";
}

Result<Isa> chosen_isa() {
  std::lock_guard lock(choice_mutex);
  if (!choice) choice = choose_by_environment();
  return *choice;
}

std::string_view active_isa() {
  const Result<Isa> isa = chosen_isa();
  if (isa.ok()) return isa_name(*isa);
  // Every kernel refuses; name what was asked for.
  const char* forced = std::getenv("COSFORMER_ISA");
  return forced == nullptr ? "" : forced;
}

std::vector<std::string_view> supported_isas() {
  std::vector<std::string_view> isas;
  for (Isa isa : {Isa::kAvx512, Isa::kAvx2, Isa::kGeneric})
    if (machine_has(isa)) isas.push_back(isa_name(isa));
  return isas;
}

Status force_isa(std::string_view isa) {
  std::lock_guard lock(choice_mutex);
  Result<Isa> chosen =
      isa.empty() ? choose_by_environment() : choose(isa, "force_isa");
  if (chosen.ok() || isa.empty()) choice = chosen;
  return chosen.ok() ? Status() : chosen.status();
}

}  // namespace cosformer
