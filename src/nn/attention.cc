// The attention layer: projections around an operator, masks, state.
#include <array>
#include <utility>

#include "cosformer/nn.h"
#include "nn/softmax.h"

namespace cosformer {
namespace {

void set_default(int64_t& option, int64_t value) {
  if (option == 0) option = value;
}

void check_options(const AttentionOptions& o) {
  const auto positive = [](int64_t value, const char* name) {
    TORCH_CHECK(value > 0, "attention: ", name, " is ", value,
                ", expected a positive number");
  };
  TORCH_CHECK(
      o.kind == "cosformer" || o.kind == "linear" || o.kind == "softmax",
      "attention: kind is \"", o.kind,
      "\", expected \"cosformer\", \"linear\" or \"softmax\"");
  positive(o.embed_dim, "embed_dim");
  positive(o.num_heads, "num_heads");
  positive(o.num_kv_heads, "num_kv_heads");
  positive(o.head_dim, "head_dim");
  positive(o.value_dim, "value_dim");
  positive(o.kdim, "kdim");
  positive(o.vdim, "vdim");
  TORCH_CHECK(o.num_heads % o.num_kv_heads == 0, "attention: num_heads is ",
              o.num_heads, ", expected a multiple of num_kv_heads (",
              o.num_kv_heads, ")");
  TORCH_CHECK(o.normalizer == "sum" || o.normalizer == "none",
              "attention: normalizer is \"", o.normalizer,
              "\", expected \"sum\" or \"none\"");
  if (o.kind == "softmax") {
    TORCH_CHECK(
        o.feature_map.empty() && o.reweight_len == 0 && o.normalizer == "sum",
        "attention: feature_map, reweight_len and normalizer belong to "
        "the linear kinds, found them with kind \"softmax\"");
  } else {
    TORCH_CHECK(o.scale == 0.0,
                "attention: scale belongs to kind \"softmax\", "
                "found it with kind \"",
                o.kind, "\"");
    TORCH_CHECK(o.kind != "cosformer" || o.reweight_len > 0,
                "attention: reweight_len is ", o.reweight_len,
                ", expected M > 0 for kind \"cosformer\" (usually the greatest "
                "length)");
  }
  if (o.rotary_base != 0.0) {
    TORCH_CHECK(o.rotary_base > 0.0, "attention: rotary_base is ",
                o.rotary_base, ", expected a positive number");
    TORCH_CHECK(
        o.rotary_dim > 0 && o.rotary_dim <= o.head_dim && o.rotary_dim % 2 == 0,
        "attention: rotary_dim is ", o.rotary_dim,
        ", expected an even number up to head_dim (", o.head_dim, ")");
    TORCH_CHECK(o.kind == "softmax" || o.rotary_dim == o.head_dim,
                "attention: rotary_dim is ", o.rotary_dim,
                ", expected head_dim (", o.head_dim, "): kind \"", o.kind,
                "\" rotates whole heads");
  }
}

void check_input(const torch::Tensor& x, const char* name, int64_t width) {
  TORCH_CHECK(x.dim() == 3 && x.size(2) == width, "attention: ", name, " is ",
              x.sizes(), ", expected [batch, seq, ", width, "]");
}

void check_mask(const std::optional<torch::Tensor>& mask, const char* name,
                const torch::Tensor& x, const char* of) {
  if (!mask) return;
  TORCH_CHECK(mask->scalar_type() == torch::kBool, "attention: ", name, " is ",
              mask->scalar_type(), ", expected bool (true = takes part)");
  TORCH_CHECK(mask->dim() == 2 && mask->size(0) == x.size(0) &&
                  mask->size(1) == x.size(1),
              "attention: ", name, " is ", mask->sizes(), ", expected [",
              x.size(0), ", ", x.size(1), "] (batch and length of ", of, ")");
}

// What masked rows hold must not reach a weight's gradient (0 x NaN).
torch::Tensor without_masked(const torch::Tensor& x,
                             const std::optional<torch::Tensor>& mask) {
  if (!mask) return x;
  return torch::where(mask->unsqueeze(-1), x, torch::zeros({}, x.options()));
}

bool same(const std::optional<torch::Tensor>& a,
          const std::optional<torch::Tensor>& b) {
  return a && b ? a->is_same(*b) : !a && !b;
}

// Starts as the softmax path needs them: one number, or one a row.
struct Starts {
  int64_t number = 0;
  std::optional<torch::Tensor> rows;  // int64 [rows]: instead of number
};
Starts read_starts(const std::optional<torch::Tensor>& given, int64_t rows,
                   const char* name) {
  Starts out;
  if (!given) return out;
  TORCH_CHECK(given->scalar_type() == torch::kInt64 &&
                  (given->numel() == 1 ||
                   (given->dim() == 1 && given->size(0) == rows)),
              "attention: ", name, " is ", given->scalar_type(), " ",
              given->sizes(), ", expected int64, one number or [", rows, "]");
  if (given->numel() == 1) {
    out.number = given->item<int64_t>();
  } else {
    out.rows = *given;
  }
  return out;
}
torch::Tensor positions_from(const torch::Tensor& row_starts, int64_t count) {
  return row_starts.unsqueeze(1) +
         torch::arange(count, row_starts.options()).unsqueeze(0);
}

// "3", or "3 to 7" where rows differ.
std::string range_text(const torch::Tensor& numbers) {
  const auto low = numbers.min().item<int64_t>();
  const auto high = numbers.max().item<int64_t>();
  return low == high ? std::to_string(low)
                     : std::to_string(low) + " to " + std::to_string(high);
}

}  // namespace

struct AttentionImpl::Heads {
  torch::Tensor q, k, v;  // [batch, seq, heads, dim]
};

AttentionImpl::AttentionImpl(AttentionOptions options, bool initialize)
    : options_(std::move(options)) {
  AttentionOptions& o = options_;
  set_default(o.kdim, o.embed_dim);
  set_default(o.vdim, o.kdim);
  set_default(o.num_kv_heads, o.num_heads);
  if (o.head_dim == 0 && o.num_heads > 0) {
    TORCH_CHECK(o.embed_dim % o.num_heads == 0, "attention: embed_dim is ",
                o.embed_dim, ", expected a multiple of num_heads (",
                o.num_heads, "), or head_dim given");
    o.head_dim = o.embed_dim / o.num_heads;
  }
  set_default(o.value_dim, o.head_dim);
  set_default(o.rotary_dim, o.head_dim);
  check_options(o);
  if (is_linear() && o.feature_map.empty()) {
    o.feature_map = o.kind == "cosformer" ? "relu" : "elu1";
  }

  q_proj = register_module(
      "q_proj", Projection(o.embed_dim, o.num_heads * o.head_dim, o.qkv_bias));
  k_proj = register_module(
      "k_proj", Projection(o.kdim, o.num_kv_heads * o.head_dim, o.qkv_bias));
  v_proj = register_module(
      "v_proj", Projection(o.vdim, o.num_kv_heads * o.value_dim, o.qkv_bias));
  if (o.out_proj) {
    out_proj = register_module("out_proj", Projection(o.num_heads * o.value_dim,
                                                      o.embed_dim, o.out_bias));
  }
  if (initialize) reset_parameters();
}

void AttentionImpl::reset_parameters() {
  q_proj->reset_parameters();
  k_proj->reset_parameters();
  v_proj->reset_parameters();
  if (out_proj) out_proj->reset_parameters();
}

AttentionImpl::Heads AttentionImpl::project(const torch::Tensor& query,
                                            const torch::Tensor& key,
                                            const torch::Tensor& value) const {
  const auto heads = [](const torch::Tensor& x, int64_t count, int64_t dim) {
    return x.view({x.size(0), x.size(1), count, dim});
  };
  const AttentionOptions& o = options_;
  return {heads(q_proj->forward(query), o.num_heads, o.head_dim),
          heads(k_proj->forward(key), o.num_kv_heads, o.head_dim),
          heads(v_proj->forward(value), o.num_kv_heads, o.value_dim)};
}

torch::Tensor AttentionImpl::merge_heads(const torch::Tensor& heads) const {
  const torch::Tensor x = heads.reshape(
      {heads.size(0), heads.size(1), heads.size(2) * heads.size(3)});
  return out_proj ? out_proj->forward(x) : x;
}

AttentionResult AttentionImpl::forward(const torch::Tensor& query,
                                       const torch::Tensor& key_or_none,
                                       const torch::Tensor& value_or_none,
                                       const AttentionCall& call) {
  const bool is_self = !key_or_none.defined() || key_or_none.is_same(query);
  const torch::Tensor& key = is_self ? query : key_or_none;
  const torch::Tensor& value = value_or_none.defined() ? value_or_none : key;
  check_input(query, "query", options_.embed_dim);
  check_input(key, "key", options_.kdim);
  check_input(value, "value", options_.vdim);
  TORCH_CHECK(key.size(0) == query.size(0) && value.size(0) == key.size(0) &&
                  value.size(1) == key.size(1),
              "attention: query is ", query.sizes(), ", key ", key.sizes(),
              ", value ", value.sizes(),
              ": the batch of all, and the length of key and value, must "
              "agree");
  check_mask(call.key_mask, "key_mask", key, "key");
  check_mask(call.query_mask, "query_mask", query, "query");
  TORCH_CHECK(!call.cu_seqlens_q || (!call.key_mask && !call.query_mask),
              "attention: masks and cu_seqlens together; packed sequences have "
              "no padding to mask");
  TORCH_CHECK(call.cu_seqlens_q || !call.cu_seqlens_k,
              "attention: cu_seqlens_k without cu_seqlens_q");

  AttentionCall full = call;
  if (is_self && !full.query_mask) full.query_mask = full.key_mask;

  torch::Tensor q_in = without_masked(query, full.query_mask);
  const torch::Tensor k_in = is_self && same(full.query_mask, full.key_mask)
                                 ? q_in
                                 : without_masked(key, full.key_mask);
  const torch::Tensor v_in =
      value.is_same(key) ? k_in : without_masked(value, full.key_mask);
  Heads heads = project(q_in, k_in, v_in);

  AttentionResult result = is_linear()
                               ? linear_forward(heads, full)
                               : softmax_forward(std::move(heads), full);
  result.out = merge_heads(result.out);
  if (full.query_mask) {
    result.out = without_masked(result.out, full.query_mask);
  }
  return result;
}

LinearAttentionArgs AttentionImpl::linear_args() const {
  LinearAttentionArgs args;
  args.feature_map = options_.feature_map;
  if (options_.reweight_len > 0) args.reweight_len = options_.reweight_len;
  args.is_causal = options_.is_causal;
  args.normalizer = options_.normalizer;
  if (options_.rotary_base > 0.0) args.rotary_base = options_.rotary_base;
  args.rotary_interleaved = options_.rotary_interleaved;
  args.eps = options_.eps;
  return args;
}

namespace {

// Instead of the denominator: the scale of a head's output is divided out.
torch::Tensor rms_norm_heads(const torch::Tensor& out, double eps) {
  return at::rms_norm(out, {out.size(3)}, std::nullopt, eps);
}

}  // namespace

AttentionResult AttentionImpl::linear_forward(const Heads& heads,
                                              const AttentionCall& call) const {
  LinearAttentionArgs args = linear_args();
  args.q_start = call.q_start;
  args.kv_start = call.kv_start;
  args.key_mask = call.key_mask;
  args.query_mask = call.query_mask;
  args.cu_seqlens_q = call.cu_seqlens_q;
  args.cu_seqlens_k = call.cu_seqlens_k;
  args.return_state = call.return_state;
  if (const auto* state = std::get_if<LinearState>(&call.state)) {
    args.state = *state;
  } else {
    TORCH_CHECK(std::holds_alternative<std::monostate>(call.state),
                "attention: state is a KvCache, expected a LinearState: kind "
                "is \"",
                options_.kind, "\"");
  }
  AttentionResult result;
  std::optional<LinearState> state;
  if (call.return_denominator && options_.normalizer == "sum") {
    std::tie(result.out, state, result.denominator) =
        linear_attention_with_denominator(heads.q, heads.k, heads.v, args);
  } else {
    std::tie(result.out, state) =
        linear_attention(heads.q, heads.k, heads.v, args);
  }
  if (options_.normalizer == "none") {
    result.out = rms_norm_heads(result.out, options_.eps);
  }
  if (state) result.state = *std::move(state);
  return result;
}

torch::Tensor AttentionImpl::rotate(
    const torch::Tensor& x, int64_t start,
    const std::optional<torch::Tensor>& positions) const {
  const int64_t rotary_dim = options_.rotary_dim, dim = x.size(3);
  const auto rotated = [&](const torch::Tensor& part) {
    return apply_rotary(part, start, positions, options_.rotary_base,
                        options_.rotary_interleaved);
  };
  if (rotary_dim == dim) return rotated(x);
  return torch::cat({rotated(x.narrow(3, 0, rotary_dim)),
                     x.narrow(3, rotary_dim, dim - rotary_dim)},
                    3);
}

AttentionResult AttentionImpl::softmax_forward(
    Heads heads, const AttentionCall& call) const {
  TORCH_CHECK(!std::holds_alternative<LinearState>(call.state),
              "attention: state is a LinearState, expected a KvCache: kind is "
              "\"softmax\"");
  TORCH_CHECK(!call.return_denominator,
              "attention: kind \"softmax\" has no denominators to return");
  const auto* given = std::get_if<KvCache>(&call.state);
  TORCH_CHECK(!call.cu_seqlens_q || (!given && !call.return_state),
              "attention: kind \"softmax\" keeps no state of packed "
              "sequences: give one row a sequence, with key_mask");
  KvCache cache = given ? *given : KvCache{};
  const int64_t rows =
      call.cu_seqlens_q ? call.cu_seqlens_q->size(0) - 1 : heads.q.size(0);
  const int64_t seen = cache.size(), kv_len = heads.k.size(1);

  Starts q_start = read_starts(call.q_start, rows, "q_start");
  Starts kv_start = read_starts(call.kv_start, rows, "kv_start");
  if (seen > 0) {
    const torch::Tensor next =
        cache.position.defined()
            ? cache.position
            : torch::full({rows}, seen,
                          torch::dtype(torch::kInt64).device(heads.q.device()));
    for (const auto* start : {&call.q_start, &call.kv_start}) {
      TORCH_CHECK(
          !*start || ((*start)->expand_as(next) == next).all().item<bool>(),
          "attention: ", start == &call.q_start ? "q_start" : "kv_start",
          " contradicts the state, which continues at ", range_text(next));
    }
    Starts at;
    at.number = seen;
    if (cache.position.defined()) at.rows = cache.position;
    q_start = kv_start = at;
  }

  if (options_.rotary_base > 0.0) {
    const auto rotated = [&](const torch::Tensor& x, const Starts& start,
                             const std::optional<torch::Tensor>& packing,
                             const std::optional<torch::Tensor>& as_given) {
      if (packing) return rotate(x, 0, packed_positions(*packing, as_given));
      if (start.rows) {
        return rotate(x, 0, positions_from(*start.rows, x.size(1)));
      }
      return rotate(x, start.number, std::nullopt);
    };
    heads.q = rotated(heads.q, q_start, call.cu_seqlens_q, call.q_start);
    heads.k = rotated(heads.k, kv_start,
                      call.cu_seqlens_k ? call.cu_seqlens_k : call.cu_seqlens_q,
                      call.kv_start);
  }

  SoftmaxArgs args;
  args.is_causal = options_.is_causal;
  args.scale = options_.scale;
  args.cu_seqlens_q = call.cu_seqlens_q;
  args.cu_seqlens_k = call.cu_seqlens_k;
  args.key_mask = call.key_mask;
  if (seen > 0) {
    args.offset = seen;  // slots of the cache are in the order of positions
  } else if (q_start.rows || kv_start.rows) {
    const auto as_rows = [&](const Starts& start) {
      return start.rows
                 ? *start.rows
                 : torch::full(
                       {rows}, start.number,
                       torch::dtype(torch::kInt64).device(heads.q.device()));
    };
    args.row_offset = as_rows(q_start) - as_rows(kv_start);
  } else {
    args.offset = q_start.number - kv_start.number;
  }

  AttentionResult result;
  if (given || call.return_state) {
    KvCache grown = cache.append(heads.k, heads.v);
    if (call.key_mask || cache.key_mask.defined()) {
      const auto all_real = [&](int64_t count) {
        return torch::ones({rows, count},
                           torch::dtype(torch::kBool).device(heads.q.device()));
      };
      grown.key_mask = torch::cat(
          {cache.key_mask.defined() ? cache.key_mask : all_real(seen),
           call.key_mask ? *call.key_mask : all_real(kv_len)},
          1);
      args.key_mask = grown.key_mask;
    }
    if (call.key_mask || kv_start.rows || kv_start.number != seen) {
      const auto options = torch::dtype(torch::kInt64).device(heads.q.device());
      const torch::Tensor start =
          kv_start.rows ? *kv_start.rows
                        : torch::full({rows}, kv_start.number, options);
      // Right padding does not move a row on.
      const torch::Tensor count =
          call.key_mask && kv_len > 0
              ? (*call.key_mask * torch::arange(1, kv_len + 1, options)).amax(1)
              : torch::full({rows}, kv_len, options);
      grown.position = start + count;
    }
    heads.k = grown.keys;
    heads.v = grown.values;
    result.state = std::move(grown);
  }
  result.out = softmax_over_keys(heads.q, heads.k, heads.v, args);
  if (call.query_mask) {
    result.out = result.out.masked_fill(
        call.query_mask->logical_not().unsqueeze(-1).unsqueeze(-1), 0.0);
  }
  if (!call.return_state) result.state = std::monostate{};
  return result;
}

torch::Tensor AttentionImpl::decode_step(const torch::Tensor& query,
                                         AttentionState& state) {
  torch::NoGradGuard no_grad;
  TORCH_CHECK(options_.is_causal,
              "attention: decode_step needs is_causal, found a layer without");
  TORCH_CHECK(query.dim() == 3 && query.size(1) == 1 &&
                  query.size(2) == options_.embed_dim,
              "attention: decode_step: query is ", query.sizes(),
              ", expected [batch, 1, ", options_.embed_dim, "]");
  if (auto* linear = std::get_if<LinearState>(&state);
      linear != nullptr && is_linear()) {
    const Heads heads = project(query, query, query);
    torch::Tensor out = linear_attention_decode_step_(heads.q, heads.k, heads.v,
                                                      *linear, linear_args());
    if (options_.normalizer == "none") {
      out = rms_norm_heads(out, options_.eps);
    }
    return merge_heads(out);
  }
  AttentionCall call;
  call.state = std::move(state);
  call.return_state = true;
  AttentionResult result = forward(query, {}, {}, call);
  state = std::move(result.state);
  return result.out;
}

namespace {

AttentionOptions with_kind(AttentionOptions options, const char* kind) {
  options.kind = kind;
  return options;
}

}  // namespace

CosformerAttentionImpl::CosformerAttentionImpl(AttentionOptions options)
    : AttentionImpl(with_kind(std::move(options), "cosformer")) {}
LinearAttentionImpl::LinearAttentionImpl(AttentionOptions options)
    : AttentionImpl(with_kind(std::move(options), "linear")) {}
SoftmaxAttentionImpl::SoftmaxAttentionImpl(AttentionOptions options)
    : AttentionImpl(with_kind(std::move(options), "softmax")) {}

}  // namespace cosformer
