#include "bench/memory.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <atomic>
#include <utility>

#include "cosformer/base.h"

namespace cosformer::bench_internal {
namespace {

// Torch's own allocator, counted.
class CountingAllocator : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::alloc_cpu(bytes);
    const int64_t now = current_ += static_cast<int64_t>(bytes);
    int64_t peak = peak_;
    while (now > peak && !peak_.compare_exchange_weak(peak, now)) {
    }
    auto* block = new Block{data, static_cast<int64_t>(bytes), this};
    return {data, block, &CountingAllocator::release, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  void reset_peak() { peak_ = current_.load(); }
  int64_t current() const { return current_; }
  int64_t peak() const { return peak_; }

 private:
  struct Block {
    void* data;
    int64_t bytes;
    CountingAllocator* owner;
  };
  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    block->owner->current_ -= block->bytes;
    c10::free_cpu(block->data);
    delete block;
  }
  std::atomic<int64_t> current_{0}, peak_{0};
};

CountingAllocator& counting_allocator() {
  // Never destroyed: tensors of static objects outlive it otherwise.
  static CountingAllocator& allocator = *[] {
    auto* made = new CountingAllocator;
    constexpr uint8_t kAboveTheDefault = 255;
    c10::SetCPUAllocator(made, kAboveTheDefault);
    return made;
  }();
  return allocator;
}

}  // namespace

int64_t peak_bytes(const std::function<void()>& run) {
  CountingAllocator& torch = counting_allocator();
  torch.reset_peak();
  reset_peak_allocation();
  const int64_t torch_before = torch.current();
  const size_t kernels_before = allocation_stats().current_bytes;
  run();
  const size_t kernels = allocation_stats().peak_bytes - kernels_before;
  return torch.peak() - torch_before + static_cast<int64_t>(kernels);
}

}  // namespace cosformer::bench_internal
