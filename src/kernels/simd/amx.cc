#include "kernels/simd/amx.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace cosformer::simd {

bool amx_usable() {
#if defined(__x86_64__) && defined(__linux__)
  static const bool kUsable = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    constexpr unsigned kBFloat16 = 1u << 22, kTile = 1u << 24;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
    if ((d & kBFloat16) == 0 || (d & kTile) == 0) return false;
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return kUsable;
#else
  return false;
#endif
}

}  // namespace cosformer::simd
