// The growing cache of softmax attention.
#include <algorithm>

#include "cosformer/nn.h"

namespace cosformer {
namespace {

constexpr int64_t kMinCapacity = 64;

torch::Tensor grown(const torch::Tensor& seen, int64_t capacity) {
  std::vector<int64_t> size = seen.sizes().vec();
  size[1] = capacity;
  torch::Tensor buffer = torch::empty(size, seen.options());
  buffer.narrow(1, 0, seen.size(1)).copy_(seen);
  return buffer;
}

}  // namespace

// `used` rows are written; whoever has seen exactly that many may append in
// place, everyone else copies first. So a copy of a cache never changes.
struct KvCache::Storage {
  torch::Tensor keys, values;  // [batch, capacity, kv_heads, dim]
  int64_t used = 0;
};

KvCache KvCache::append(const torch::Tensor& more_keys,
                        const torch::Tensor& more_values) const {
  KvCache out = *this;
  const int64_t seen = size();
  const int64_t total = seen + more_keys.size(1);
  if (keys.defined()) {
    TORCH_CHECK(keys.size(0) == more_keys.size(0) &&
                    keys.size(2) == more_keys.size(2) &&
                    keys.size(3) == more_keys.size(3) &&
                    values.size(3) == more_values.size(3),
                "KvCache: holds keys ", keys.sizes(), " and values ",
                values.sizes(), ", asked to append keys ", more_keys.sizes(),
                " and values ", more_values.sizes(),
                ": batch, kv_heads and dims must agree");
  }
  const bool differentiable =
      torch::GradMode::is_enabled() &&
      (more_keys.requires_grad() || more_values.requires_grad() ||
       (keys.defined() && (keys.requires_grad() || values.requires_grad())));
  if (differentiable) {  // writing in place would break the graph
    out.storage_ = nullptr;
    out.keys = seen > 0 ? torch::cat({keys, more_keys}, 1) : more_keys;
    out.values = seen > 0 ? torch::cat({values, more_values}, 1) : more_values;
    return out;
  }
  torch::NoGradGuard no_grad;
  if (!storage_ || storage_->used != seen || total > storage_->keys.size(1)) {
    auto storage = std::make_shared<Storage>();
    const int64_t capacity = std::max({kMinCapacity, total, 2 * seen});
    storage->keys =
        grown(keys.defined() ? keys : more_keys.narrow(1, 0, 0), capacity);
    storage->values = grown(
        values.defined() ? values : more_values.narrow(1, 0, 0), capacity);
    out.storage_ = std::move(storage);
  }
  Storage& storage = *out.storage_;
  storage.keys.narrow(1, seen, total - seen).copy_(more_keys);
  storage.values.narrow(1, seen, total - seen).copy_(more_values);
  storage.used = total;
  out.keys = storage.keys.narrow(1, 0, total);
  out.values = storage.values.narrow(1, 0, total);
  return out;
}

namespace {

// A cache of other tensors, each made from its counterpart.
template <typename Function>
KvCache mapped(const KvCache& cache, const Function& function) {
  KvCache out;
  if (cache.keys.defined()) {
    out.keys = function(cache.keys);
    out.values = function(cache.values);
  }
  if (cache.key_mask.defined()) out.key_mask = function(cache.key_mask);
  if (cache.position.defined()) out.position = function(cache.position);
  return out;
}

template <typename Function>
AttentionState mapped_state(const AttentionState& state,
                            const Function& function) {
  return std::visit(
      [&](const auto& held) -> AttentionState {
        if constexpr (std::is_same_v<std::decay_t<decltype(held)>,
                                     std::monostate>) {
          return held;
        } else {
          return function(held);
        }
      },
      state);
}

}  // namespace

KvCache KvCache::clone() const {
  return mapped(*this, [](const torch::Tensor& t) { return t.clone(); });
}
KvCache KvCache::detach() const {
  KvCache out = *this;
  if (keys.defined()) {
    out.keys = keys.detach();
    out.values = values.detach();
  }
  return out;
}
KvCache KvCache::select(const torch::Tensor& rows) const {
  return mapped(
      *this, [&](const torch::Tensor& t) { return t.index_select(0, rows); });
}
KvCache KvCache::to(const torch::TensorOptions& options) const {
  return mapped(*this, [&](const torch::Tensor& t) {
    if (t.is_floating_point()) return t.to(options);
    return options.has_device() ? t.to(options.device()) : t;
  });
}

AttentionState clone(const AttentionState& state) {
  return mapped_state(state, [](const auto& held) { return held.clone(); });
}
AttentionState detach(const AttentionState& state) {
  return mapped_state(state, [](const auto& held) { return held.detach(); });
}
AttentionState select(const AttentionState& state, const torch::Tensor& rows) {
  return mapped_state(state,
                      [&](const auto& held) { return held.select(rows); });
}

}  // namespace cosformer
