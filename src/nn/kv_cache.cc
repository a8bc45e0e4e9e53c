// The cache of the softmax kinds: growing, or bounded by a window.
#include <algorithm>

#include "cosformer/nn.h"

namespace cosformer {
namespace {

constexpr int64_t kMinCapacity = 64;

// The first slots of a new buffer of `capacity`.
torch::Tensor grown(const torch::Tensor& seen, int64_t capacity) {
  std::vector<int64_t> size = seen.sizes().vec();
  size[1] = capacity;
  torch::Tensor buffer = torch::empty(size, seen.options());
  buffer.narrow(1, 0, seen.size(1)).copy_(seen);
  return buffer;
}

torch::Tensor slot_numbers(int64_t count, const torch::Tensor& like) {
  return torch::arange(count, like.options()).unsqueeze(0);
}

// x [batch, slots, ...] -> [batch, n, ...]: slot index[b, i] of row b.
// Differentiable.
torch::Tensor take_slots(const torch::Tensor& x, const torch::Tensor& index) {
  std::vector<int64_t> size = index.sizes().vec();
  torch::Tensor wide = index;
  for (int64_t d = 2; d < x.dim(); ++d) {
    wide = wide.unsqueeze(-1);
    size.push_back(x.size(d));
  }
  return at::gather(x, 1, wide.expand(size));
}

template <typename Function>
void for_each_slotted(KvCache* cache, const Function& function) {
  cache->keys = function(cache->keys);
  cache->values = function(cache->values);
  if (cache->key_mask.defined()) cache->key_mask = function(cache->key_mask);
}

}  // namespace

// `version` counts what was written: whoever has seen all of it may write on in
// place, everyone else copies first. So a copy of a cache never changes. A ring
// overwrites what its copies see: it is written in place only when it has none.
struct KvCache::Storage {
  torch::Tensor keys, values;  // [batch, capacity, kv_heads, dim]
  // What decode steps need of every slot, once they need it: bool [batch,
  // capacity], a free slot is real.
  torch::Tensor key_mask;
  torch::Tensor first_mask;  // the kept first tokens
  int64_t version = 0;
};

torch::Tensor KvCache::slot_start() const {
  return dropped.defined() ? start + dropped : start;
}

std::optional<torch::Tensor> KvCache::real_slots() const {
  TORCH_INTERNAL_ASSERT(!is_ring);
  const torch::Tensor length = position - slot_start();
  const bool even = length.eq(size()).all().item<bool>();
  if (even && !key_mask.defined()) return std::nullopt;
  const torch::Tensor there =
      slot_numbers(size(), length) < length.unsqueeze(1);
  return key_mask.defined() ? there.logical_and(key_mask) : there;
}

KvCache KvCache::in_order() const {
  if (!is_ring) return *this;
  KvCache out = *this;
  const int64_t slots = size();
  const torch::Tensor seen = position - start;
  out.dropped = (seen - slots).clamp_min(0);
  const torch::Tensor index =
      (slot_numbers(slots, seen) + out.dropped.unsqueeze(1)).remainder(slots);
  for_each_slotted(
      &out, [&](const torch::Tensor& x) { return take_slots(x, index); });
  out.is_ring = false;
  out.storage_ = nullptr;
  return out;
}

KvCache KvCache::append(const torch::Tensor& more_keys,
                        const torch::Tensor& more_values,
                        const torch::Tensor& more_mask,
                        const torch::Tensor& first_position) const {
  TORCH_CHECK(!is_ring,
              "KvCache: a ring has no order to append to: in_order() "
              "first");
  KvCache out = *this;
  const int64_t rows = more_keys.size(0), count = more_keys.size(1);
  const auto integers = torch::dtype(torch::kInt64).device(more_keys.device());
  if (!keys.defined()) {
    out.keys = more_keys.narrow(1, 0, 0);
    out.values = more_values.narrow(1, 0, 0);
    out.start = first_position.defined()
                    ? first_position.to(integers).expand({rows}).clone()
                    : torch::zeros({rows}, integers);
    out.position = out.start;
  } else {
    TORCH_CHECK(keys.size(0) == rows && keys.size(2) == more_keys.size(2) &&
                    keys.size(3) == more_keys.size(3) &&
                    values.size(3) == more_values.size(3) &&
                    keys.scalar_type() == more_keys.scalar_type(),
                "KvCache: holds keys ", keys.sizes(), " and values ",
                values.sizes(), " of ", keys.scalar_type(),
                ", asked to append keys ", more_keys.sizes(), " and values ",
                more_values.sizes(), " of ", more_keys.scalar_type(),
                ": batch, kv_heads, dims and type must agree");
  }
  const int64_t seen = out.keys.size(1), total = seen + count;
  const torch::Tensor length = out.position - out.slot_start();
  const bool even = length.eq(seen).all().item<bool>();
  // Right padding does not move a row on.
  const torch::Tensor moved =
      more_mask.defined() && count > 0
          ? (more_mask * torch::arange(1, count + 1, integers)).amax(1)
          : torch::full({rows}, count, integers);
  out.position = out.position + moved;

  torch::Tensor mask;  // of seen + count slots, as they are appended
  if (key_mask.defined() || more_mask.defined()) {
    const auto all_real = [&](int64_t n) {
      return torch::ones({rows, n}, integers.dtype(torch::kBool));
    };
    mask = torch::cat({key_mask.defined() ? key_mask : all_real(seen),
                       more_mask.defined() ? more_mask : all_real(count)},
                      1);
  }

  const bool differentiable =
      torch::GradMode::is_enabled() &&
      (more_keys.requires_grad() || more_values.requires_grad() ||
       out.keys.requires_grad() || out.values.requires_grad());
  if (!even) {
    // Slot s of a row: its own token, or the one of the call behind them.
    const torch::Tensor slot = slot_numbers(total, length);
    const torch::Tensor own = length.unsqueeze(1);
    const torch::Tensor index = torch::where(
        slot < own, slot, (slot - own + seen).clamp_max(total - 1));
    out.keys = take_slots(torch::cat({out.keys, more_keys}, 1), index);
    out.values = take_slots(torch::cat({out.values, more_values}, 1), index);
    if (mask.defined()) mask = take_slots(mask, index);
    out.storage_ = nullptr;
  } else if (differentiable) {  // writing in place would break the graph
    out.keys = torch::cat({out.keys, more_keys}, 1);
    out.values = torch::cat({out.values, more_values}, 1);
    out.storage_ = nullptr;
  } else {
    torch::NoGradGuard no_grad;
    out.reserve(total);
    Storage& storage = *out.storage_;
    storage.keys.narrow(1, seen, count).copy_(more_keys);
    storage.values.narrow(1, seen, count).copy_(more_values);
    storage.key_mask = torch::Tensor();  // of fewer slots
    out.version_ = ++storage.version;
    out.keys = storage.keys.narrow(1, 0, total);
    out.values = storage.values.narrow(1, 0, total);
  }

  const torch::Tensor reach = length + moved;
  const int64_t slots =
      rows > 0 ? std::min(total, reach.max().item<int64_t>()) : total;
  out.keys = out.keys.narrow(1, 0, slots);
  out.values = out.values.narrow(1, 0, slots);
  if (mask.defined()) {
    // Slots behind a row's end are free: whatever comes there is real.
    mask = mask.narrow(1, 0, slots)
               .logical_or(slot_numbers(slots, reach) >= reach.unsqueeze(1));
    if (mask.all().item<bool>()) mask = torch::Tensor();
  }
  out.key_mask = mask;
  return out;
}

KvCache KvCache::bounded(int64_t last, int64_t first) const {
  KvCache out = *this;
  out.kept_last = last;
  out.kept_first = first;
  if (last == 0 || is_ring) return out;
  // With first tokens to keep, room for as many again before tokens move.
  if (first > 0 ? size() < first + 2 * last : size() <= last) return out;
  const torch::Tensor length = position - slot_start();
  torch::Tensor index;
  if (first == 0) {
    // Slot s holds the last token whose number leaves s modulo `last`.
    const torch::Tensor newest = (position - start - 1).unsqueeze(1);
    const torch::Tensor number =
        newest - (newest - slot_numbers(last, length)).remainder(last);
    index = (dropped.defined() ? number - dropped.unsqueeze(1) : number)
                .clamp_min(0);
    out.dropped = torch::Tensor();
    out.is_ring = true;
  } else {
    const torch::Tensor more = (length - (first + last)).clamp_min(0);
    const torch::Tensor slot = slot_numbers(first + last, length);
    index = torch::where(slot < first, slot, slot + more.unsqueeze(1))
                .expand({length.size(0), first + last});
    out.dropped = dropped.defined() ? dropped + more : more;
  }
  for_each_slotted(
      &out, [&](const torch::Tensor& x) { return take_slots(x, index); });
  if (out.is_ring && out.key_mask.defined()) {
    // A short row's slots that hold nothing yet.
    out.key_mask = out.key_mask.logical_or(slot_numbers(last, length) >=
                                           (position - start).unsqueeze(1));
  }
  out.storage_ = nullptr;
  return out;
}

// Storage of this cache's own with room for that many slots (a ring: as many as
// it has).
void KvCache::reserve(int64_t slots) {
  torch::NoGradGuard no_grad;
  const bool may_write = storage_ && storage_->version == version_ &&
                         (!is_ring || storage_.use_count() == 1);
  if (may_write && slots <= storage_->keys.size(1)) return;
  int64_t capacity = slots;
  if (!is_ring) capacity = std::max({kMinCapacity, slots, 2 * size()});
  auto storage = std::make_shared<Storage>();
  storage->keys = grown(keys.detach(), capacity);
  storage->values = grown(values.detach(), capacity);
  storage_ = std::move(storage);
  version_ = 0;
}

torch::Tensor KvCache::decode_step(const torch::Tensor& q,
                                   const torch::Tensor& k,
                                   const torch::Tensor& v,
                                   SoftmaxAttentionArgs args) {
  torch::NoGradGuard no_grad;
  const int64_t seen = size();
  if (kept_last > 0 && !is_ring) {
    if (kept_first > 0) {
      if (seen >= kept_first + 2 * kept_last) {
        *this = bounded(kept_last, kept_first);
      }
    } else if (seen == kept_last) {
      is_ring = true;  // full: the slots are those of the ring
    }
  }
  const int64_t slots = is_ring ? kept_last : size() + 1;
  reserve(slots);
  Storage& storage = *storage_;
  torch::Tensor all_keys = storage.keys, all_values = storage.values;
  const auto for_slots = [&](bool value) {
    return torch::full({keys.size(0), storage.keys.size(1)}, value,
                       torch::dtype(torch::kBool).device(keys.device()));
  };
  if (key_mask.defined() && !storage.key_mask.defined()) {
    storage.key_mask = for_slots(true);
    storage.key_mask.narrow(1, 0, key_mask.size(1)).copy_(key_mask);
  }
  std::optional<torch::Tensor> mask;
  if (key_mask.defined()) mask = storage.key_mask;
  if (is_ring) {
    all_keys = all_keys.narrow(1, 0, slots);
    all_values = all_values.narrow(1, 0, slots);
    if (mask) {
      mask = mask->narrow(1, 0, slots);
      mask->scatter_(1, (position - start).remainder(slots).unsqueeze(1), true);
    }
  }
  if (kept_first > 0) {
    if (!storage.first_mask.defined()) {
      storage.first_mask = for_slots(false);
      storage.first_mask
          .narrow(1, 0, std::min(kept_first, storage.first_mask.size(1)))
          .fill_(true);
    }
    args.global_mask = storage.first_mask;
  }
  torch::Tensor next = position.clone();  // copies keep theirs
  torch::Tensor out = softmax_attention_decode_step_(
      q, k, v, all_keys, all_values, next, slot_start(), mask, is_ring, args);
  position = next;
  version_ = ++storage.version;
  keys = all_keys.narrow(1, 0, slots);
  values = all_values.narrow(1, 0, slots);
  if (mask) key_mask = mask->narrow(1, 0, slots);
  return out;
}

namespace {

// A cache of other tensors, each made from its counterpart.
template <typename Function>
KvCache mapped(const KvCache& cache, const Function& function) {
  KvCache out;
  for (const auto member :
       {&KvCache::keys, &KvCache::values, &KvCache::key_mask, &KvCache::start,
        &KvCache::position, &KvCache::dropped, &KvCache::first_keys,
        &KvCache::first_values}) {
    if ((cache.*member).defined()) out.*member = function(cache.*member);
  }
  out.kept_last = cache.kept_last;
  out.kept_first = cache.kept_first;
  out.is_ring = cache.is_ring;
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
  KvCache out =
      mapped(*this, [](const torch::Tensor& t) { return t.detach(); });
  out.storage_ = storage_;
  out.version_ = version_;
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
