// The tile registers of Intel's AMX (AMX-TILE, AMX-BF16): eight of 16 rows x 64
// bytes. Their products multiply bfloat16 and add up in float32, at 16 times
// the peak of AVX-512's multiply-adds: with numbers split into bfloat16 terms
// (split-inl.h) that is 2.7 times the peak also in float32.
//
// Inline assembly rather than intrinsics: those want the whole translation unit
// compiled for AMX, while this library compiles for what the running machine
// turns out to have.
#ifndef COSFORMER_SRC_KERNELS_SIMD_AMX_H_
#define COSFORMER_SRC_KERNELS_SIMD_AMX_H_

#include <cstdint>

namespace cosformer::simd {

// Whether the machine has them and the system lets this process use them (asks
// for it: Linux gives the registers to those that do).
bool amx_usable();

// A tile in memory, its rows one after another.
inline constexpr int64_t kTileRows = 16;
inline constexpr int64_t kTileRowBytes = 64;
inline constexpr int64_t kTileBytes = kTileRows * kTileRowBytes;
// bfloat16 of a row of the left operand: the depth of a product.
inline constexpr int64_t kTileDepth = 32;

// Makes all eight registers 16 x 64 bytes while it lives. A thread's registers
// are saved at every switch until they are released.
class AmxTiles {
 public:
  AmxTiles() {
    struct alignas(64) Config {
      uint8_t palette = 1, start_row = 0;
      uint8_t reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 8; ++tile) {
      config.row_bytes[tile] = kTileRowBytes;
      config.rows[tile] = kTileRows;
    }
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  ~AmxTiles() { asm volatile("tilerelease"); }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;
};

template <int kTile>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}
// Rows `stride` bytes apart.
template <int kTile>
inline void tile_load(const void* from, int64_t stride = kTileRowBytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2"
               :
               : "r"(from), "r"(stride), "i"(kTile)
               : "memory");
}
template <int kTile>
inline void tile_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)"
               :
               : "r"(to), "r"(stride), "i"(kTile)
               : "memory");
}
// C[m][n] += sum over p of A[m][2p] B[p][2n] + A[m][2p + 1] B[p][2n + 1]: rows
// of A are bfloat16 along the depth, rows of B hold two of it for each column.
template <int kC, int kA, int kB>
inline void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0"
               :
               : "i"(kC), "i"(kA), "i"(kB));
}

}  // namespace cosformer::simd

#endif  // COSFORMER_SRC_KERNELS_SIMD_AMX_H_
