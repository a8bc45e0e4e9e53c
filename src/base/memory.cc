#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <utility>

#include "cosformer/base.h"

namespace cosformer {
namespace {

constexpr size_t kAlignment = 64;  // a cache line, and the widest vector
std::atomic<size_t> current_bytes{0};
std::atomic<size_t> peak_bytes{0};

// Sizes are kept in front of the block, so that freeing can count: what was
// asked for, and what there is.
struct Header {
  size_t bytes, capacity;
};
Header& header_of(void* block) { return *static_cast<Header*>(block); }

// Set when a thread ends: buffers may be freed after its Kept.
thread_local bool ended = false;

// A few blocks that a thread keeps for its next call. The system would take the
// pages of a short call's working memory and give them out again, cleared,
// which can cost as much as the call (10 of 90 microseconds for 64 tokens of a
// head).
class Kept {
 public:
  Kept() = default;
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;
  ~Kept() {
    ended = true;
    for (void* block : blocks_) std::free(block);
  }

  // A block of at least so many bytes, and not much more; nullptr: none.
  void* take(size_t bytes) {
    for (void*& block : blocks_) {
      if (block == nullptr) continue;
      const size_t capacity = header_of(block).capacity;
      if (capacity < bytes || capacity / 2 > bytes) continue;
      return std::exchange(block, nullptr);
    }
    return nullptr;
  }
  // Whether it was kept.
  bool give(void* block) {
    if (header_of(block).capacity > kMost) return false;
    for (void*& place : blocks_) {
      if (place != nullptr) continue;
      place = block;
      return true;
    }
    // The oldest leaves: sizes that are no longer asked for do not stay.
    std::free(std::exchange(blocks_[next_], block));
    next_ = (next_ + 1) % blocks_.size();
    return true;
  }

 private:
  static constexpr size_t kMost = size_t{1} << 20;
  std::array<void*, 4> blocks_{};
  size_t next_ = 0;
};

// Not where the address sanitizer watches: it looks for uses of what was freed.
#if defined(__SANITIZE_ADDRESS__)
Kept* kept() { return nullptr; }
#else
Kept* kept() {
  thread_local Kept blocks;
  return ended ? nullptr : &blocks;
}
#endif

}  // namespace

AlignedBuffer::AlignedBuffer(size_t bytes) {
  if (bytes > SIZE_MAX - 2 * kAlignment) return;  // rounding up would wrap
  const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  Kept* const blocks = kept();
  void* block = blocks == nullptr ? nullptr : blocks->take(rounded);
  if (block == nullptr) {
    block = std::aligned_alloc(kAlignment, rounded + kAlignment);
    if (block == nullptr) return;
    header_of(block).capacity = rounded;
  }
  header_of(block).bytes = rounded;
  data_.reset(static_cast<char*>(block) + kAlignment);
  size_ = bytes;
  const size_t now = current_bytes.fetch_add(rounded) + rounded;
  size_t peak = peak_bytes.load();
  while (now > peak && !peak_bytes.compare_exchange_weak(peak, now)) {
  }
}

void AlignedBuffer::Free::operator()(void* p) const {
  void* block = static_cast<char*>(p) - kAlignment;
  current_bytes.fetch_sub(header_of(block).bytes);
  Kept* const blocks = kept();
  if (blocks == nullptr || !blocks->give(block)) std::free(block);
}

AllocationStats allocation_stats() {
  return {current_bytes.load(), peak_bytes.load()};
}
void reset_peak_allocation() { peak_bytes.store(current_bytes.load()); }

}  // namespace cosformer
