#include "cli/signals.h"

#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>

namespace cosformer::cli {
namespace {

std::atomic<bool> stop{false};
std::atomic<int> caught{0};
std::atomic<const char*> message{nullptr};
static_assert(std::atomic<bool>::is_always_lock_free &&
              std::atomic<int>::is_always_lock_free &&
              std::atomic<const char*>::is_always_lock_free);

// Only what a signal handler may do: atomics, write, signal.
void handle(int signal) {
  const int before = errno;
  stop.store(true);
  caught.store(signal);
  const char* text = message.load();
  if (text != nullptr && ::write(STDERR_FILENO, text, strlen(text)) < 0) {
    // Nobody is listening.
  }
  for (const int each : {SIGINT, SIGTERM, SIGHUP}) {
    ::signal(each, SIG_DFL);
  }
  errno = before;
}

}  // namespace

const std::atomic<bool>& catch_stop_signals(const char* text) {
  message.store(text);
  struct sigaction action{};
  action.sa_handler = handle;
  action.sa_flags = SA_RESTART;
  for (const int each : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction before{};
    // What nohup ignores stays ignored.
    if (::sigaction(each, nullptr, &before) == 0 &&
        before.sa_handler == SIG_IGN && each == SIGHUP) {
      continue;
    }
    ::sigaction(each, &action, nullptr);
  }
  return stop;
}

int caught_signal() { return caught.load(); }

}  // namespace cosformer::cli
