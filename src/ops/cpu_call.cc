#include "ops/cpu_call.h"

#include <algorithm>

namespace cosformer::ops {
namespace {

template <typename T>
void copy_integers(const at::Tensor& tensor, int64_t count, int64_t stride,
                   int64_t* to) {
  const T* data = tensor.const_data_ptr<T>();
  for (int64_t i = 0; i < count; ++i) to[i] = data[i * stride];
}

void check_has_values(const at::Tensor& tensor) {
  if (!tensor.key_set().has(c10::DispatchKey::Python) && !tensor.is_meta())
    return;
  fail(
      "cosformer: the portable path looks at the values of starts, offsets and "
      "masks, and found a tensor that is only traced (torch.compile, "
      "torch.export, opcheck), expected values: trace the operator without "
      "_portable in its name");
}

}  // namespace

std::vector<int64_t> host_integers(const at::Tensor& tensor) {
  check_has_values(tensor);
  const at::Tensor host = tensor.to(at::kCPU, at::kLong).contiguous();
  const int64_t* data = host.const_data_ptr<int64_t>();
  return {data, data + host.numel()};
}

const int64_t* integers(const at::Tensor& tensor, int64_t rows,
                        Integers& buffer) {
  check_has_values(tensor);
  if (!tensor.is_cpu()) return integers(tensor.to(at::kCPU), rows, buffer);
  const int64_t count = tensor.dim() == 0 ? rows : tensor.size(0);
  const int64_t stride = tensor.dim() == 0 ? 0 : tensor.stride(0);
  buffer.resize(static_cast<size_t>(std::max<int64_t>(count, 1)));
  if (tensor.scalar_type() == at::kInt) {
    copy_integers<int32_t>(tensor, count, stride, buffer.data());
  } else {
    copy_integers<int64_t>(tensor, count, stride, buffer.data());
  }
  return buffer.data();
}

MaskView mask_view(const at::Tensor& mask, at::Tensor& holder) {
  holder = mask.size(1) <= 1 || mask.stride(1) == 1 ? mask : mask.contiguous();
  return {static_cast<const uint8_t*>(holder.const_data_ptr()),
          holder.stride(0)};
}

ConstView4 placeholder(const at::Tensor& tensor) {
  static const double somewhere = 0;
  ConstView4 result;
  result.data = &somewhere;
  result.dtype = dtype_of(tensor);
  for (int i = 0; i < 4; ++i) result.size[i] = tensor.size(i);
  result.stride = contiguous_strides(result.size);
  return result;
}

}  // namespace cosformer::ops
