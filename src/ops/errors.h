// Statuses of the layers below as exceptions.
#ifndef COSFORMER_OPS_ERRORS_H_
#define COSFORMER_OPS_ERRORS_H_

#include <c10/util/Exception.h>

#include "cosformer/base.h"

namespace cosformer::ops {

// Throws c10::Error (a RuntimeError in Python) with the parts as its message.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  TORCH_CHECK(false, str_cat(parts...));
}

inline void throw_if_error(const Status& status) {
  TORCH_CHECK(status.ok(), status.message());
}

}  // namespace cosformer::ops

#endif  // COSFORMER_OPS_ERRORS_H_
