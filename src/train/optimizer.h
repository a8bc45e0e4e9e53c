// AdamW (Loshchilov & Hutter 2019) over a model's named parameters, through
// torch's fused CPU step: one pass over parameter, gradient and both moments.
#ifndef COSFORMER_SRC_TRAIN_OPTIMIZER_H_
#define COSFORMER_SRC_TRAIN_OPTIMIZER_H_

#include <torch/torch.h>

#include <map>
#include <string>
#include <vector>

#include "cosformer/format.h"
#include "cosformer/train.h"

namespace cosformer::train_internal {

class AdamW {
 public:
  // Weight decay acts on tensors of two or more dimensions only.
  AdamW(const torch::OrderedDict<std::string, torch::Tensor>& parameters,
        const TrainConfig& config);

  void zero_grad();
  // Norm of all gradients as one vector; scales them down to max_norm where it
  // is larger (0 = only measures).
  double clip_grad_norm(double max_norm);
  // The update of step 1, 2, ...: `step` sets the bias correction.
  void step(double lr, int64_t step);

  // Moments by "exp_avg.NAME" and "exp_avg_sq.NAME".
  Status save(const std::string& path) const;
  Status load(const std::string& path);

 private:
  struct Slot {
    std::string name;
    torch::Tensor parameter, exp_avg, exp_avg_sq;
    bool decays;
  };
  std::vector<Slot> slots_;
  double beta1_, beta2_, eps_, weight_decay_;
};

}  // namespace cosformer::train_internal

#endif  // COSFORMER_SRC_TRAIN_OPTIMIZER_H_
