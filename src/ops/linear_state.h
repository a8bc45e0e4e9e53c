// The state's functions as operators take them: tensors and plain values.
#ifndef COSFORMER_OPS_LINEAR_STATE_H_
#define COSFORMER_OPS_LINEAR_STATE_H_

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>
#include <tuple>

namespace cosformer::ops {

// log_scale: of a state of kind "performer", nothing of another.
void save_state(const at::Tensor& kv_state, const at::Tensor& k_sum,
                const at::Tensor& start, const at::Tensor& position,
                std::string_view kind, std::string_view feature_map,
                int64_t reweight_len, double rotary_base,
                bool rotary_interleaved,
                const std::optional<at::Tensor>& log_scale,
                std::string_view path);
// In the order that save_state takes them; log_scale is empty where there is
// none.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, std::string,
           std::string, int64_t, double, bool, at::Tensor>
load_state(std::string_view path);

}  // namespace cosformer::ops

#endif  // COSFORMER_OPS_LINEAR_STATE_H_
