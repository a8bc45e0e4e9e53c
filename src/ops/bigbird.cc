// BigBird (Zaheer et al. 2020): a window, global and random blocks.
#include <ATen/Functions.h>

#include <algorithm>
#include <vector>

#include "cosformer/base.h"
#include "ops/call_checks.h"
#include "ops/errors.h"
#include "ops/softmax_kinds.h"

namespace cosformer::ops {
namespace {

void check_pattern(const char* where, int64_t num_heads, int64_t num_blocks,
                   int64_t num_random_blocks, int64_t window_blocks,
                   int64_t first, int64_t last) {
  if (num_heads < 1)
    fail(where, "num_heads is ", num_heads, ", expected at least 1");
  if (num_blocks < 0)
    fail(where, "num_blocks is ", num_blocks, ", expected 0 or more");
  if (num_random_blocks < 0) {
    fail(where, "num_random_blocks is ", num_random_blocks,
         ", expected 0 or more");
  }
  if (window_blocks < 1 || window_blocks % 2 == 0) {
    fail(where, "window_blocks is ", window_blocks,
         ", expected an odd number: a block and as many on each side");
  }
  if (first < 0 || last < 0) {
    fail(where, "global_blocks is (", first, ", ", last,
         "), expected numbers of first and of last blocks, 0 or more");
  }
}

// One row of the mask: the blocks that queries of block a see.
class RowOfBlocks {
 public:
  RowOfBlocks(int64_t num_blocks, int64_t window_blocks, int64_t first,
              int64_t last, bool is_causal)
      : blocks_(num_blocks),
        reach_(window_blocks / 2),
        first_(first),
        last_(is_causal ? 0 : last),
        is_causal_(is_causal) {}

  // Sets what row a sees; the blocks that are left to draw from go to rest.
  void fixed(int64_t a, bool* row, std::vector<int64_t>& rest) const {
    const bool sees_all = a < first_ || a >= blocks_ - last_;
    const int64_t end = is_causal_ ? a + 1 : blocks_;
    rest.clear();
    for (int64_t b = 0; b < end; ++b) {
      row[b] = sees_all || b < first_ || b >= blocks_ - last_ ||
               std::abs(a - b) <= reach_;
      if (!row[b]) rest.push_back(b);
    }
  }

 private:
  int64_t blocks_, reach_, first_, last_;
  bool is_causal_;
};

}  // namespace

at::Tensor block_mask_cpu(int64_t num_heads, int64_t num_blocks,
                          int64_t num_random_blocks, int64_t window_blocks,
                          int64_t first_global_blocks,
                          int64_t last_global_blocks, bool is_causal,
                          int64_t seed, std::optional<at::Device>) {
  check_pattern("bigbird_block_mask: ", num_heads, num_blocks,
                num_random_blocks, window_blocks, first_global_blocks,
                last_global_blocks);
  at::Tensor mask = at::zeros({num_heads, num_blocks, num_blocks}, at::kBool);
  bool* row = mask.mutable_data_ptr<bool>();
  const RowOfBlocks rows(num_blocks, window_blocks, first_global_blocks,
                         last_global_blocks, is_causal);
  std::vector<int64_t> rest;
  for (int64_t h = 0; h < num_heads; ++h) {
    for (int64_t a = 0; a < num_blocks; ++a, row += num_blocks) {
      rows.fixed(a, row, rest);
      // The first draws of a shuffle whose numbers follow from (seed, h, a).
      const std::array<uint32_t, 4> words =
          philox(static_cast<uint64_t>(seed), static_cast<uint64_t>(h),
                 static_cast<uint64_t>(a));
      const uint64_t key = (uint64_t{words[1]} << 32) | words[0];
      const uint64_t left = rest.size();
      const uint64_t draws =
          std::min(left, static_cast<uint64_t>(num_random_blocks));
      for (uint64_t t = 0; t < draws; ++t) {
        const uint64_t number = philox(key, 0, t)[0];
        const uint64_t pick = t + ((number * (left - t)) >> 32);
        std::swap(rest[t], rest[pick]);
        row[rest[t]] = true;
      }
    }
  }
  return mask;
}

at::Tensor block_mask_meta(int64_t num_heads, int64_t num_blocks,
                           int64_t num_random_blocks, int64_t window_blocks,
                           int64_t first_global_blocks,
                           int64_t last_global_blocks, bool, int64_t,
                           std::optional<at::Device>) {
  check_pattern("bigbird_block_mask: ", num_heads, num_blocks,
                num_random_blocks, window_blocks, first_global_blocks,
                last_global_blocks);
  return at::empty({num_heads, num_blocks, num_blocks},
                   at::TensorOptions().dtype(at::kBool).device(at::kMeta));
}

at::Tensor block_mask_select(int64_t num_heads, int64_t num_blocks,
                             int64_t num_random_blocks, int64_t window_blocks,
                             int64_t first_global_blocks,
                             int64_t last_global_blocks, bool is_causal,
                             int64_t seed, std::optional<at::Device> device) {
  if (device && device->is_meta()) {
    return block_mask_meta(num_heads, num_blocks, num_random_blocks,
                           window_blocks, first_global_blocks,
                           last_global_blocks, is_causal, seed, device);
  }
  const at::Tensor mask = block_mask_cpu(
      num_heads, num_blocks, num_random_blocks, window_blocks,
      first_global_blocks, last_global_blocks, is_causal, seed, device);
  return device && !device->is_cpu() ? mask.to(*device) : mask;
}

namespace {

// A position that no query or key of the call reaches; the first one, unless it
// is packed.
int64_t end_of(const SoftmaxCall& call) {
  const auto end = [](const OptionalTensor& start, int64_t length) {
    if (!start || start->numel() == 0) return length;
    return start->max().item<int64_t>() + length;
  };
  const int64_t q_len = call.q.sym_size(1).guard_int(__FILE__, __LINE__);
  const int64_t kv_len = call.k.sym_size(1).guard_int(__FILE__, __LINE__);
  return std::max(end(call.q_start, q_len), end(call.kv_start, kv_len));
}

at::Tensor by_one_mask(const SoftmaxCall& call, const BigBirdPattern& pattern) {
  const int64_t size = *call.block_size;
  const int64_t num_blocks =
      (std::max<int64_t>(end_of(call), 1) + size - 1) / size;
  const OptionalTensor mask = call_block_mask(
      call.q.sym_size(2).guard_int(__FILE__, __LINE__), num_blocks,
      pattern.num_random_blocks, pattern.window_blocks,
      pattern.first_global_blocks, pattern.last_global_blocks, call.is_causal,
      pattern.seed, call.q.device());
  return std::get<0>(call_softmax({call.q,
                                   call.k,
                                   call.v,
                                   call.q_start,
                                   call.kv_start,
                                   call.key_mask,
                                   call.query_mask,
                                   call.cu_seqlens_q,
                                   call.cu_seqlens_k,
                                   call.global_mask,
                                   mask,
                                   call.relative_bias,
                                   call.dropout_seed,
                                   call.is_causal,
                                   call.scale,
                                   call.window_left,
                                   call.window_right,
                                   call.dilation,
                                   call.block_size,
                                   call.dropout_p},
                                  false));
}

}  // namespace

at::Tensor bigbird(const SoftmaxCall& call, const BigBirdPattern& pattern) {
  constexpr const char* where = "bigbird_attention: ";
  const AttentionCall common = attention_call(where, call);
  check_queries_keys_values(common);
  check_layout(common, "");
  check_pattern(where, 1, 0, pattern.num_random_blocks, pattern.window_blocks,
                pattern.first_global_blocks, pattern.last_global_blocks);
  if (!call.block_size || *call.block_size < 1) {
    fail(where, "block_size is ", call.block_size.value_or(0),
         ", expected at least 1");
  }
  if (call.window_left || call.global_mask || call.block_mask) {
    fail(where,
         call.window_left   ? "window"
         : call.global_mask ? "global_mask"
                            : "block_mask",
         " is given: a BigBird's pattern is made of its own options (for "
         "others, softmax_attention)");
  }
  // Causal rows do not depend on the length; of the others the last blocks and
  // the random ones do, so each packed sequence has a mask of its own.
  if (!call.cu_seqlens_q || call.is_causal) return by_one_mask(call, pattern);
  return for_each_sequence(
      call, [&](const SoftmaxCall& one, int64_t, int64_t, int64_t, int64_t) {
        return by_one_mask(one, pattern);
      });
}

}  // namespace cosformer::ops
