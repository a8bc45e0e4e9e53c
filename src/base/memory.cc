#include <atomic>
#include <cstdint>
#include <cstdlib>

#include "cosformer/base.h"

namespace cosformer {
namespace {

constexpr size_t kAlignment = 64;  // a cache line, and the widest vector
std::atomic<size_t> current_bytes{0};
std::atomic<size_t> peak_bytes{0};

// The size is kept in front of the block, so that freeing can count.
struct Header {
  size_t bytes;
};

}  // namespace

AlignedBuffer::AlignedBuffer(size_t bytes) {
  if (bytes > SIZE_MAX - 2 * kAlignment) return;  // rounding up would wrap
  const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  void* block = std::aligned_alloc(kAlignment, rounded + kAlignment);
  if (block == nullptr) return;
  static_cast<Header*>(block)->bytes = rounded;
  data_.reset(static_cast<char*>(block) + kAlignment);
  size_ = bytes;
  const size_t now = current_bytes.fetch_add(rounded) + rounded;
  size_t peak = peak_bytes.load();
  while (now > peak && !peak_bytes.compare_exchange_weak(peak, now)) {
  }
}

void AlignedBuffer::Free::operator()(void* p) const {
  void* block = static_cast<char*>(p) - kAlignment;
  current_bytes.fetch_sub(static_cast<Header*>(block)->bytes);
  std::free(block);
}

AllocationStats allocation_stats() {
  return {current_bytes.load(), peak_bytes.load()};
}
void reset_peak_allocation() { peak_bytes.store(current_bytes.load()); }

}  // namespace cosformer
