#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "cosformer/base.h"

namespace cosformer {
namespace {

class Serial final : public Executor {
 public:
  int num_threads() const override { return 1; }
  void run(int64_t num_tasks,
           const std::function<void(int64_t, int)>& task) override {
    for (int64_t i = 0; i < num_tasks; ++i) task(i, 0);
  }
};

// Workers sleep between calls; a call hands out task numbers by an atomic
// counter. The calling thread is thread 0. One call at a time: a second caller
// waits for the first.
class Pool final : public Executor {
 public:
  explicit Pool(int num_threads) {
    // Fewer threads than asked for are no error: the work gets done.
    try {
      for (int thread = 1; thread < num_threads; ++thread)
        workers_.emplace_back([this, thread] { work(thread); });
    } catch (const std::system_error&) {
    }
  }

  ~Pool() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  int num_threads() const override {
    return static_cast<int>(workers_.size()) + 1;
  }

  void run(int64_t num_tasks,
           const std::function<void(int64_t, int)>& task) override {
    // Nothing to share: waking the workers would cost more than it gives.
    if (num_tasks <= 1 || workers_.empty()) {
      for (int64_t i = 0; i < num_tasks; ++i) task(i, 0);
      return;
    }
    std::lock_guard call(call_mutex_);
    {
      std::lock_guard lock(mutex_);
      task_ = &task;
      num_tasks_ = num_tasks;
      next_.store(0);
      busy_ = static_cast<int>(workers_.size());
      ++generation_;
    }
    wake_.notify_all();
    take(task, num_tasks, 0);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  void take(const std::function<void(int64_t, int)>& task, int64_t num_tasks,
            int thread) {
    for (int64_t i = next_.fetch_add(1); i < num_tasks; i = next_.fetch_add(1))
      task(i, thread);
  }

  void work(int thread) {
    uint64_t seen = 0;
    for (;;) {
      const std::function<void(int64_t, int)>* task;
      int64_t num_tasks;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [&] { return stop_ || generation_ != seen; });
        if (stop_) return;
        seen = generation_;
        task = task_;
        num_tasks = num_tasks_;
      }
      take(*task, num_tasks, thread);
      std::lock_guard lock(mutex_);
      if (--busy_ == 0) done_.notify_one();
    }
  }

  std::vector<std::thread> workers_;
  std::mutex call_mutex_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  const std::function<void(int64_t, int)>* task_ = nullptr;
  int64_t num_tasks_ = 0;
  std::atomic<int64_t> next_{0};
  int busy_ = 0;
  uint64_t generation_ = 0;
  bool stop_ = false;
};

int usable_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0)
    return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

}  // namespace

Executor& serial_executor() {
  static Serial serial;
  return serial;
}

std::unique_ptr<Executor> make_thread_pool(int num_threads) {
  return std::make_unique<Pool>(num_threads > 0 ? num_threads : usable_cores());
}

}  // namespace cosformer
