// What a sequence carries from token to token through a layer of each kind.
#include <algorithm>

#include "cosformer/format.h"

namespace cosformer {

int64_t StateSize::bytes_at(int64_t tokens) const {
  const int64_t kept = max_tokens > 0 ? std::min(tokens, max_tokens) : tokens;
  return constant_bytes + bytes_per_token * kept;
}

StateSize state_size(const AttentionConfig& attention, int64_t num_kv_heads,
                     int64_t head_dim, int64_t cache_element_bytes) {
  constexpr int64_t kSum = 4;  // sums are float32
  const std::string& kind = attention.kind;
  StateSize size;
  if (kind == "linformer") return size;
  if (kind == "cosformer" || kind == "linear") {
    const bool cosine = kind == "cosformer" || attention.reweight_len > 0;
    size.constant_bytes =
        num_kv_heads * (cosine ? 2 : 1) * head_dim * (head_dim + 1) * kSum;
  } else if (kind == "performer") {
    const int64_t features =
        attention.num_features > 0 ? attention.num_features : 4 * head_dim;
    size.constant_bytes = num_kv_heads * features * (head_dim + 2) * kSum;
  } else {
    size.bytes_per_token = num_kv_heads * head_dim * 2 * cache_element_bytes;
    if (attention.window > 0) {
      // First tokens are kept twice, and as many of the window again ahead.
      const int64_t last = attention.window * attention.dilation + 1;
      size.max_tokens = attention.global_tokens > 0
                            ? 2 * (attention.global_tokens + last)
                            : last;
    }
  }
  return size;
}

}  // namespace cosformer
