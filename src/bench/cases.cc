#include "bench/cases.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/version.h>

#include <algorithm>
#include <new>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "bench/kinds.h"
#include "cosformer/ops.h"
#include "ops/dtypes.h"

namespace cosformer::bench_internal {
namespace {

using at::Tensor;

constexpr int64_t kT5Reach = 128;
constexpr int64_t kGlobalTokens = 1;

int64_t bytes_of(const Tensor& x) { return static_cast<int64_t>(x.nbytes()); }

}  // namespace

struct CaseMaker::Inputs {
  BenchOptions options;
  BenchPass pass;
  bool is_causal;
  int64_t length, dim;
  Tensor q, k, v, d_out;  // [batch, seq, heads, dim]
  // Everything that gets a gradient, for release().
  std::vector<Tensor> leaves;

  bool is_decoding() const { return pass == BenchPass::kDecode; }
  bool has_backward() const { return pass == BenchPass::kBackward; }
  double heads() const {
    return static_cast<double>(options.heads * options.batch);
  }

  // Normal numbers; an input of the backward where there is one.
  Tensor input(at::IntArrayRef size) {
    return input(size, scalar_type_of(options.dtype).value());
  }
  Tensor input(at::IntArrayRef size, at::ScalarType dtype) {
    Tensor x = at::randn(size, dtype);
    if (has_backward()) {
      x.set_requires_grad(true);
      leaves.push_back(x);
    }
    return x;
  }
  Tensor tokens(int64_t count) {
    return input({options.batch, count, options.heads, dim});
  }

  // A call of attend() in this pass, with the gradients of `inputs`.
  Case call(double operations, const std::vector<Tensor>& inputs,
            std::function<Tensor()> attend, const Tensor& d_result) {
    Case out;
    out.operations = operations;
    out.result_bytes = bytes_of(q);
    if (!has_backward()) {
      out.run = [attend = std::move(attend)] {
        const at::NoGradGuard no_grad;
        attend();
      };
      return out;
    }
    for (const Tensor& x : inputs) out.result_bytes += bytes_of(x);
    out.run = [attend = std::move(attend), inputs, d_result] {
      for (const Tensor& x : inputs) x.mutable_grad().reset();
      attend().backward(d_result);
    };
    return out;
  }

  // One step over `slots` of cached keys and values, of which a step reads
  // `visible`.
  Case cached_step(int64_t slots, int64_t visible, bool is_ring,
                   std::optional<Tensor> start,
                   const SoftmaxAttentionArgs& args) {
    Tensor keys = tokens(slots), values = tokens(slots);
    Tensor position = at::zeros({options.batch}, at::kLong);
    Case out;
    out.floor_bytes = 2 * visible * bytes_of(q);
    out.state_bytes = 2 * bytes_of(keys);
    out.result_bytes = bytes_of(q);
    out.run = [q = q, k = k, v = v, keys, values, position, is_ring, start,
               args, length = length]() mutable {
      // Every step stands at the same place.
      std::fill_n(position.data_ptr<int64_t>(), position.numel(), length - 1);
      softmax_attention_decode_step_(q, k, v, keys, values, position, start,
                                     std::nullopt, is_ring, args);
    };
    return out;
  }

  // The state that one key leaves, moved to the end of the sequence.
  LinearState at_end(const std::optional<LinearState>& state) const {
    LinearState moved = state->clone();
    moved.position.fill_(length - 1);
    return moved;
  }
  Case state_step(LinearState state,
                  std::function<void(LinearState& state)> step) const {
    Case out;
    out.floor_bytes = bytes_of(state.kv_state) + bytes_of(state.k_sum);
    out.state_bytes = out.floor_bytes;
    out.is_update = true;
    out.result_bytes = bytes_of(q);
    out.run = [state = std::move(state), step = std::move(step),
               length = length]() mutable {
      std::fill_n(state.position.data_ptr<int64_t>(), state.position.numel(),
                  length - 1);
      step(state);
    };
    return out;
  }

  double operations(std::string_view kind) const;
  int64_t tokens_seen(std::string_view kind) const;

  Case sdpa();
  Case softmax(SoftmaxAttentionArgs args, double operations, int64_t visible);
  Case t5();
  Case window();
  Case longformer();
  Case bigbird();
  Case linear(std::string_view kind);
  Case performer();
  Case linformer();
  double pairs(int64_t reach) const {
    return visible_pairs(length, is_causal, reach) * heads();
  }
};

// Of a call of that kind. bigbird: about; its own count is exact.
double CaseMaker::Inputs::operations(std::string_view kind) const {
  const bool both = has_backward();
  const auto n = static_cast<double>(length);
  if (kind == "window") {
    return softmax_operations(pairs(options.window), dim, both);
  }
  if (kind == "longformer") {
    // The window, the global column, and (not causal) the global row.
    const auto far =
        static_cast<double>(std::max<int64_t>(length - 1 - options.window, 0));
    const double count =
        pairs(options.window) + far * heads() * (is_causal ? 1 : 2);
    return softmax_operations(count, dim, both);
  }
  if (kind == "bigbird") {
    const double seen = n * static_cast<double>(tokens_seen(kind)) * heads();
    return softmax_operations(std::min(seen, pairs(-1)), dim, both);
  }
  if (kind == "linear" || kind == "relu" || kind == "cosformer") {
    // The cosine doubles the features.
    const int64_t features = kind == "cosformer" ? 2 * dim : dim;
    return linear_operations(features, dim, both) * n * heads();
  }
  if (kind == "performer") {
    // The features of queries and keys, a product each; backward once more for
    // the features and once for their gradient.
    const int64_t features = options.num_features;
    const double projected = (both ? 12 : 4) * static_cast<double>(features) *
                             static_cast<double>(dim);
    const double each = linear_operations(features, dim, both) + projected;
    return each * n * heads();
  }
  if (kind == "linformer") {
    // Keys and values by the projections, then exact softmax over the result;
    // backward twice that product each.
    const int64_t projected = std::min(options.projected_len, length);
    const double each = (both ? 12 : 4) * static_cast<double>(projected * dim);
    const double count = static_cast<double>(length * projected) * heads();
    return each * n * heads() + softmax_operations(count, dim, both);
  }
  return softmax_operations(pairs(-1), dim, both);
}

// By a row far from the first. A linear kind: its state, of one token's size.
int64_t CaseMaker::Inputs::tokens_seen(std::string_view kind) const {
  if (kind == "window") return std::min(length, options.window + 1);
  if (kind == "longformer") {
    return std::min(length, kGlobalTokens + options.window + 1);
  }
  if (kind == "bigbird") {
    const BigBirdAttentionArgs usual;
    return std::min(length, usual.block_size *
                                (usual.num_random_blocks + usual.window_blocks +
                                 usual.global_blocks.first));
  }
  const bool is_exact =
      kind == "sdpa" || kind == "softmax" || kind == "softmax-t5";
  return is_exact ? length : 1;
}

// In torch's own layout, [batch, heads, seq, dim]. A decoding program would
// also copy the new key and value into its cache, which is left out here.
Case CaseMaker::Inputs::sdpa() {
  const std::vector<int64_t> size = {options.batch, options.heads,
                                     is_decoding() ? 1 : length, dim};
  const std::vector<int64_t> all = {options.batch, options.heads, length, dim};
  const Tensor query = input(size), key = input(all), value = input(all);
  const bool masked = is_causal && !is_decoding();
  Case out = call(
      operations("sdpa"), {query, key, value},
      [=] {
        return at::scaled_dot_product_attention(query, key, value, std::nullopt,
                                                0.0, masked);
      },
      has_backward() ? d_out.transpose(1, 2).contiguous() : Tensor());
  if (is_decoding()) out.floor_bytes = out.state_bytes = 2 * bytes_of(key);
  return out;
}

Case CaseMaker::Inputs::softmax(SoftmaxAttentionArgs args, double operations,
                                int64_t visible) {
  if (is_decoding()) {
    return cached_step(length, visible, /*is_ring=*/false, std::nullopt, args);
  }
  args.is_causal = is_causal;
  std::vector<Tensor> inputs = {q, k, v};
  if (args.relative_bias) inputs.push_back(*args.relative_bias);
  return call(
      operations, inputs,
      [=, this] { return softmax_attention(q, k, v, args); }, d_out);
}

Case CaseMaker::Inputs::t5() {
  SoftmaxAttentionArgs args;
  const bool is_double = options.dtype == DType::kFloat64;
  args.relative_bias = input({options.heads, 2 * kT5Reach + 1},
                             is_double ? at::kDouble : at::kFloat);
  return softmax(args, operations("softmax-t5"), length);
}

Case CaseMaker::Inputs::window() {
  SoftmaxAttentionArgs args;
  const int64_t window = options.window;
  args.window = {window, is_causal ? 0 : window};
  if (is_decoding()) {
    const int64_t slots = tokens_seen("window");
    return cached_step(slots, slots, /*is_ring=*/slots < length, std::nullopt,
                       args);
  }
  return softmax(args, operations("window"), 0);
}

Case CaseMaker::Inputs::longformer() {
  SoftmaxAttentionArgs args;
  const int64_t window = options.window;
  args.window = {window, is_causal ? 0 : window};
  if (is_decoding()) {
    // As the layers keep it: the first tokens ahead of the last ones. Theirs
    // grows to twice as many tokens before it drops those out of sight, which
    // state_size() counts and no step reads.
    const int64_t slots = tokens_seen("longformer");
    Tensor mask = at::zeros({options.batch, slots}, at::kBool);
    mask.narrow(1, 0, std::min(slots, kGlobalTokens)).fill_(true);
    args.global_mask = mask;
    const Tensor start = at::zeros({options.batch}, at::kLong);
    start.fill_(length - slots);
    return cached_step(slots, slots, /*is_ring=*/false, start, args);
  }
  Tensor mask = at::zeros({options.batch, length}, at::kBool);
  mask.narrow(1, 0, std::min(length, kGlobalTokens)).fill_(true);
  args.global_mask = mask;
  args.is_causal = is_causal;
  const Tensor q_global = tokens(length), k_global = tokens(length),
               v_global = tokens(length);
  return call(
      operations("longformer"), {q, k, v, q_global, k_global, v_global},
      [=, this] {
        return longformer_attention(q, k, v, q_global, k_global, v_global,
                                    args);
      },
      d_out);
}

Case CaseMaker::Inputs::bigbird() {
  const BigBirdAttentionArgs usual;
  SoftmaxAttentionArgs args;
  const int64_t block = usual.block_size;
  const int64_t blocks = (length + block - 1) / block;
  // Made once, as the layers do.
  args.block_mask = bigbird_block_mask(
      options.heads, blocks, usual.num_random_blocks, usual.window_blocks,
      usual.global_blocks, is_causal || is_decoding(), usual.seed);
  args.block_size = block;
  // Whole blocks; the diagonal ones of a causal call by half.
  const double marked = args.block_mask->sum().item<double>() *
                        static_cast<double>(options.batch);
  const double diagonal = static_cast<double>(blocks) * heads();
  const auto square = static_cast<double>(block * block);
  const double whole = square * (is_causal ? marked - diagonal / 2 : marked);
  const int64_t visible =
      args.block_mask->select(1, blocks - 1).sum().item<int64_t>() * block /
      options.heads;
  // Of a short sequence, no more than there is.
  return softmax(
      args, softmax_operations(std::min(whole, pairs(-1)), dim, has_backward()),
      std::min(visible, length));
}

Case CaseMaker::Inputs::linear(std::string_view kind) {
  LinearAttentionArgs args;
  args.feature_map = kind == "linear" ? "elu1" : "relu";
  if (kind == "cosformer") args.reweight_len = length;
  args.is_causal = is_causal;
  if (is_decoding()) {
    args.return_state = true;
    args.is_causal = true;
    LinearState state = at_end(std::get<1>(linear_attention(q, k, v, args)));
    args.return_state = false;
    return state_step(std::move(state), [=, this](LinearState& state) {
      linear_attention_decode_step_(q, k, v, state, args);
    });
  }
  return call(
      operations(kind), {q, k, v},
      [=, this] { return std::get<0>(linear_attention(q, k, v, args)); },
      d_out);
}

Case CaseMaker::Inputs::performer() {
  const int64_t features = options.num_features;
  const Tensor projection = performer_projection(features, dim)
                                .to(scalar_type_of(options.dtype).value());
  PerformerAttentionArgs args;
  args.is_causal = is_causal;
  if (is_decoding()) {
    args.is_causal = args.return_state = true;
    LinearState state =
        at_end(std::get<1>(performer_attention(q, k, v, projection, args)));
    return state_step(std::move(state), [=, this](LinearState& state) {
      performer_attention_decode_step_(q, k, v, projection, state);
    });
  }
  return call(
      operations("performer"), {q, k, v},
      [=, this] {
        return std::get<0>(performer_attention(q, k, v, projection, args));
      },
      d_out);
}

Case CaseMaker::Inputs::linformer() {
  const int64_t projected = std::min(options.projected_len, length);
  const Tensor key_proj = input({length, projected}),
               value_proj = input({length, projected});
  return call(
      operations("linformer"), {q, k, v, key_proj, value_proj},
      [=, this] { return linformer_attention(q, k, v, key_proj, value_proj); },
      d_out);
}

CaseMaker::CaseMaker(const BenchOptions& options, BenchPass pass,
                     bool is_causal, int64_t length, int64_t head_dim)
    : inputs_(std::make_shared<Inputs>()) {
  inputs_->options = options;
  inputs_->pass = pass;
  inputs_->is_causal = is_causal;
  inputs_->length = length;
  inputs_->dim = head_dim;
}

Result<Case> CaseMaker::make(const BenchKind& kind) const {
  Inputs& in = *inputs_;
  try {
    if (!in.q.defined()) {
      const int64_t count = in.is_decoding() ? 1 : in.length;
      in.q = in.tokens(count);
      in.k = in.tokens(count);
      in.v = in.tokens(count);
      if (in.has_backward()) in.d_out = at::randn(in.q.sizes(), in.q.options());
    }
    if (kind.name == "sdpa") return in.sdpa();
    if (kind.name == "softmax") {
      return in.softmax({}, in.operations(kind.name), in.length);
    }
    if (kind.name == "softmax-t5") return in.t5();
    if (kind.name == "window") return in.window();
    if (kind.name == "longformer") return in.longformer();
    if (kind.name == "bigbird") return in.bigbird();
    if (kind.name == "performer") return in.performer();
    if (kind.name == "linformer") return in.linformer();
    return in.linear(kind.name);
  } catch (const c10::Error& error) {
    return invalid_argument(error.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory, "out of memory");
  }
}

double CaseMaker::work(const BenchKind& kind) const {
  const Inputs& in = *inputs_;
  return in.is_decoding() ? static_cast<double>(in.tokens_seen(kind.name))
                          : in.operations(kind.name);
}

void CaseMaker::release() const {
  for (const Tensor& x : inputs_->leaves) x.mutable_grad().reset();
}

Status run_once(const Case& one) {
  try {
    one.run();
  } catch (const c10::Error& error) {
    return invalid_argument(error.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory, "out of memory");
  }
  return {};
}

int64_t use_torch_threads(int64_t threads) {
  if (threads > 0) at::set_num_threads(static_cast<int>(threads));
  return at::get_num_threads();
}

std::string torch_version() { return TORCH_VERSION; }

}  // namespace cosformer::bench_internal
