#include "kernels/dispatch.h"

#include <cstdlib>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cosformer/kernels.h"
#include "kernels/simd/amx.h"
#include "kernels/simd/targets.h"

namespace cosformer {
namespace {

// The last 512-bit subset that the AVX-512 kernels are compiled for is F, BW,
// CD, DQ and VL: what Highway calls AVX3.
constexpr Isa kAll[] = {Isa::kAmx, Isa::kAvx512, Isa::kAvx2, Isa::kGeneric};

bool machine_has(Isa isa) {
  const int64_t targets = hwy::SupportedTargets();
  switch (isa) {
    case Isa::kAmx:
      return machine_has(Isa::kAvx512) && simd::amx_usable();
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
                       forced,
                       "\", expected one of amx, avx512, avx2, generic; ",
                       "this machine has ", list_of_supported());
}

// Chosen once and read by every call.
std::mutex choice_mutex;
struct Choice {
  Result<Isa> isa;
  bool forced;
};
std::optional<Choice> choice;

Choice choose_by_environment() {
  const char* forced = std::getenv("COSFORMER_ISA");
  const std::string_view name = forced == nullptr ? "" : forced;
  return {choose(name, "COSFORMER_ISA"), !name.empty()};
}

Choice chosen() {
  std::lock_guard lock(choice_mutex);
  if (!choice) choice = choose_by_environment();
  return *choice;
}

}  // namespace

std::string_view isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAmx:
      return "amx";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kGeneric:
      break;
  }
  return "generic";
}

Isa isa_of(std::string_view name) {
  for (Isa isa : kAll)
    if (name == isa_name(isa)) return isa;
  return Isa::kGeneric;
}

Result<Isa> chosen_isa() { return chosen().isa; }
bool isa_is_forced() { return chosen().forced; }

std::string_view active_isa() {
  const Result<Isa> isa = chosen_isa();
  if (isa.ok()) return isa_name(*isa);
  // Every kernel refuses; name what was asked for.
  const char* forced = std::getenv("COSFORMER_ISA");
  return forced == nullptr ? "" : forced;
}

std::vector<std::string_view> supported_isas() {
  std::vector<std::string_view> isas;
  for (Isa isa : kAll)
    if (machine_has(isa)) isas.push_back(isa_name(isa));
  return isas;
}

Status force_isa(std::string_view isa) {
  std::lock_guard lock(choice_mutex);
  const Choice found = isa.empty() ? choose_by_environment()
                                   : Choice{choose(isa, "force_isa"), true};
  if (found.isa.ok() || isa.empty()) choice = found;
  return found.isa.status();
}

}  // namespace cosformer
