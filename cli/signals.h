// Ctrl-C and its kin as a flag that loops look at.
#ifndef COSFORMER_CLI_SIGNALS_H_
#define COSFORMER_CLI_SIGNALS_H_

#include <atomic>

namespace cosformer::cli {

// From here on the first SIGINT, SIGTERM or SIGHUP sets the flag and prints
// `message` to stderr; a second one ends the process.
const std::atomic<bool>& catch_stop_signals(const char* message);
// The signal that was caught, or 0.
int caught_signal();

}  // namespace cosformer::cli

#endif  // COSFORMER_CLI_SIGNALS_H_
