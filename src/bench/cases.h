// What is run: one call of a kind, ready to be repeated. The side of the bench
// that knows torch.
#ifndef COSFORMER_SRC_BENCH_CASES_H_
#define COSFORMER_SRC_BENCH_CASES_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "cosformer/bench.h"

namespace cosformer::bench_internal {

// A call and what it is counted by.
struct Case {
  std::function<void()> run;  // may throw what torch throws
  double operations = 0;      // multiplications and additions; decode: 0
  // Decode: what a step moves; whether it also writes it back.
  int64_t floor_bytes = 0;
  bool is_update = false;
  int64_t state_bytes = 0;  // decode: what is carried from token to token
  // Outputs and gradients, which are not extra memory.
  int64_t result_bytes = 0;
};

// The inputs that all kinds of one length share, and the calls over them.
class CaseMaker {
 public:
  CaseMaker(const BenchOptions& options, BenchPass pass, bool is_causal,
            int64_t length, int64_t head_dim);
  // Valid while the maker lives. Errors: what torch or an operator refuses, and
  // memory that is not there.
  Result<Case> make(const BenchKind& kind) const;
  // What the time of that call grows with, without making it: operations
  // (bigbird: about), or decoding the tokens that a step sees (linear kinds:
  // 1).
  double work(const BenchKind& kind) const;
  // Drops the gradients of the last run.
  void release() const;

 private:
  struct Inputs;
  std::shared_ptr<Inputs> inputs_;
};

// Runs it once; what it throws becomes a status.
Status run_once(const Case& one);

// Torch's threads inside an operator, set by number; 0 keeps them. Returns how
// many there are now.
int64_t use_torch_threads(int64_t threads);
// "2.13.0".
std::string torch_version();

}  // namespace cosformer::bench_internal

#endif  // COSFORMER_SRC_BENCH_CASES_H_
