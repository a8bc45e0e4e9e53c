// What the program writes: results to stdout, everything else to stderr.
#ifndef COSFORMER_CLI_OUTPUT_H_
#define COSFORMER_CLI_OUTPUT_H_

#include <string>
#include <string_view>
#include <vector>

#include "base/format_text.h"
#include "cosformer/base.h"

namespace cosformer::cli {

inline constexpr int kDone = 0;
inline constexpr int kFailed = 1;
inline constexpr int kWrongUse = 2;

// Writes at once, unbuffered. False after an error (a closed pipe, a full
// disk): check_output says which.
bool write_out(std::string_view text);
// kDone, or kFailed with a line on stderr when any write_out failed.
int check_output();

// One line on stderr: "cosformer: MESSAGE". Returns status.
int fail(const Status& error, int status = kFailed);
void note(std::string_view message);

// Seconds as "8s", "2m05s", "3h10m".
std::string duration(double seconds);

// "avx512, 2 threads": what the kernels use.
std::string machine(int threads);

}  // namespace cosformer::cli

#endif  // COSFORMER_CLI_OUTPUT_H_
