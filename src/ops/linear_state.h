// The state's functions as operators take them: tensors and plain values.
#ifndef COSFORMER_OPS_LINEAR_STATE_H_
#define COSFORMER_OPS_LINEAR_STATE_H_

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>
#include <tuple>

namespace cosformer::ops {

void save_state(const at::Tensor& kv_state, const at::Tensor& k_sum,
                const at::Tensor& start, const at::Tensor& position,
                std::string_view kind, std::string_view feature_map,
                int64_t reweight_len, double rotary_base,
                bool rotary_interleaved, std::string_view path);
// In the order that save_state takes them.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, std::string,
           std::string, int64_t, double, bool>
load_state(std::string_view path);

}  // namespace cosformer::ops

#endif  // COSFORMER_OPS_LINEAR_STATE_H_
