#include "tests/kernels/call_problem.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <limits>
#include <sstream>
#include <utility>

#include "kernels/call_check.h"

namespace cosformer::testing {
namespace {

constexpr std::string_view kDTypes[] = {"float32", "float64", "bfloat16",
                                        "float16"};
constexpr DType kDTypeValues[] = {DType::kFloat32, DType::kFloat64,
                                  DType::kBFloat16, DType::kFloat16};
constexpr std::string_view kLayouts[] = {"contiguous", "padded", "transposed",
                                         "offset", "mixed"};

AttentionRow row_of(const CallProblem& problem, int64_t r) {
  return attention_row(inputs_of<SoftmaxAttentionInputs>(problem), r);
}

// What must never have an effect.
double junk(Random& random, DType dtype) {
  const double huge = dtype == DType::kFloat64   ? 1e308
                      : dtype == DType::kFloat16 ? 65504.0
                                                 : 3e38;
  const double kinds[] = {std::numeric_limits<double>::quiet_NaN(),
                          std::numeric_limits<double>::infinity(),
                          -std::numeric_limits<double>::infinity(), huge,
                          -huge};
  return kinds[draw(random, 0, 4)];
}

std::vector<int64_t> offsets_of(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> offsets = {0};
  for (int64_t n : lengths) offsets.push_back(offsets.back() + n);
  return offsets;
}

// Four parts that sum to total, some of them perhaps empty.
std::vector<int64_t> split(int64_t total, Random& random) {
  std::vector<int64_t> cuts = {0, total};
  for (int i = 0; i < 3; ++i) cuts.push_back(draw(random, 0, total));
  std::sort(cuts.begin(), cuts.end());
  std::vector<int64_t> lengths;
  for (size_t i = 1; i < cuts.size(); ++i)
    lengths.push_back(cuts[i] - cuts[i - 1]);
  return lengths;
}

void make_packing(const CallPoint& point, Random& random, CallProblem& problem,
                  int64_t& q_len, int64_t& kv_len) {
  std::vector<int64_t> q, k;
  switch (point.packing) {
    case 0:
      return;
    case 1:
      q = {q_len};
      k = {kv_len};
      break;
    case 2:
      q = k = {0, 5, 0, 1};
      if (point.q_len != point.kv_len) k = {3, 4, 0, 2};
      break;
    default:
      q = split(q_len, random);
      k = point.q_len == point.kv_len ? q : split(kv_len, random);
  }
  problem.cu_seqlens_q = offsets_of(q);
  problem.cu_seqlens_k = offsets_of(k);
  q_len = problem.cu_seqlens_q.back();
  kv_len = problem.cu_seqlens_k.back();
}

void make_masks(const CallPoint& point, Random& random, CallProblem& problem) {
  const int64_t batch = problem.q.size()[0], q_len = problem.q.size()[1],
                kv_len = problem.k.size()[1];
  const bool self = q_len == kv_len;
  std::vector<uint8_t> keys(static_cast<size_t>(batch * kv_len), 1),
      queries(static_cast<size_t>(batch * q_len), 1);
  for (int64_t b = 0; b < batch; ++b) {
    uint8_t* key = keys.data() + b * kv_len;
    uint8_t* query = queries.data() + b * q_len;
    const int64_t real = draw(random, 0, kv_len);
    const int64_t real_queries = self ? real : draw(random, 0, q_len);
    switch (point.mask) {
      case 1:
        std::fill(key + real, key + kv_len, 0);
        std::fill(query + real_queries, query + q_len, 0);
        break;
      case 2:
        std::fill(key, key + kv_len - real, 0);
        std::fill(query, query + q_len - real_queries, 0);
        break;
      case 3:
        for (int64_t j = 0; j < kv_len; ++j) key[j] = draw(random, 0, 3) != 0;
        for (int64_t i = 0; i < q_len; ++i) query[i] = draw(random, 0, 7) != 0;
        break;
      case 4:  // every other row, the first one included
        if (b % 2 == 0) std::fill(key, key + kv_len, 0);
        break;
      case 5:
        for (int64_t i = 0; i < q_len; ++i) query[i] = draw(random, 0, 1) != 0;
        break;
      case 6:
        std::fill(key, key + kv_len, 0);
        std::fill(query, query + q_len, b % 2 == 0);
        break;
      default:
        break;
    }
  }
  // Any nonzero byte means "takes part".
  for (uint8_t& bit : keys) bit = bit != 0 ? (draw(random, 0, 1) ? 1 : 255) : 0;
  if (point.mask != 0 && point.mask != 5) problem.key_mask = keys;
  if (point.mask != 0 && point.mask != 4) problem.query_mask = queries;
}

}  // namespace

int64_t draw(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

Layout layout_of(int64_t layout, int64_t n) {
  return static_cast<Layout>(layout < kNumLayouts ? layout
                                                  : (n + 1) % kNumLayouts);
}

std::string describe_call(const CallPoint& p) {
  return str_cat(
      "batch=", p.batch, " q_len=", p.q_len, " kv_len=", p.kv_len,
      " kv_heads=", p.kv_heads, " group=", p.group, " head_dim=", p.head_dim,
      " value_dim=", p.value_dim, " dtype=", name(p.dtype),
      " causal=", p.causal, " starts=", kStartsNames[p.starts],
      " mask=", kMaskNames[p.mask], " packing=", kPackingNames[p.packing],
      " layout=", kLayouts[p.layout], " threads=", p.threads, " seed=", p.seed);
}

bool set_call_field(CallPoint& p, std::string_view key, std::string_view text) {
  const int64_t number = std::atoll(std::string(text).c_str());
  const std::pair<std::string_view, int64_t CallPoint::*> numbers[] = {
      {"batch", &CallPoint::batch},
      {"q_len", &CallPoint::q_len},
      {"kv_len", &CallPoint::kv_len},
      {"kv_heads", &CallPoint::kv_heads},
      {"group", &CallPoint::group},
      {"head_dim", &CallPoint::head_dim},
      {"value_dim", &CallPoint::value_dim},
      {"threads", &CallPoint::threads},
      {"seed", &CallPoint::seed}};
  for (const auto& [name, field] : numbers) {
    if (name != key) continue;
    p.*field = number;
    return true;
  }
  if (key == "causal") {
    p.causal = number != 0;
    return true;
  }
  if (key == "dtype") {
    int64_t index = 0;
    if (!find_name(kDTypes, text, &index)) return false;
    p.dtype = kDTypeValues[index];
    return true;
  }
  if (key == "starts") return find_name(kStartsNames, text, &p.starts);
  if (key == "mask") return find_name(kMaskNames, text, &p.mask);
  if (key == "packing") return find_name(kPackingNames, text, &p.packing);
  if (key == "layout") return find_name(kLayouts, text, &p.layout);
  return false;
}

bool for_fields(
    std::string_view text,
    const std::function<bool(std::string_view, std::string_view)>& set) {
  std::istringstream words{std::string(text)};
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    if (equals == std::string::npos) return false;
    const std::string_view all(word);
    if (!set(all.substr(0, equals), all.substr(equals + 1))) return false;
  }
  return true;
}

int64_t CallProblem::rows() const {
  return cu_seqlens_q.empty() ? q.size()[0]
                              : static_cast<int64_t>(cu_seqlens_q.size()) - 1;
}
std::array<int64_t, 4> CallProblem::out_size() const {
  return {q.size()[0], q.size()[1], q.size()[2], v.size()[3]};
}
bool CallProblem::key_is_real(const AttentionRow& row, int64_t j) const {
  return key_mask.empty() ||
         key_mask[static_cast<size_t>(row.batch * k.size()[1] + row.kv_offset +
                                      j)] != 0;
}
bool CallProblem::query_is_real(const AttentionRow& row, int64_t i) const {
  return query_mask.empty() ||
         query_mask[static_cast<size_t>(row.batch * q.size()[1] + row.q_offset +
                                        i)] != 0;
}

void make_call(const CallPoint& point, Random& random, CallProblem& problem) {
  int64_t q_len = point.q_len, kv_len = point.kv_len;
  make_packing(point, random, problem, q_len, kv_len);
  const int64_t batch = point.packing != 0 ? 1 : point.batch;
  const int64_t heads = point.kv_heads * point.group;
  const auto make = [&](int64_t len, int64_t num_heads, int64_t dim,
                        int64_t n) {
    Tensor x({batch, len, num_heads, dim}, point.dtype,
             layout_of(point.layout, n));
    x.fill_normal(random);
    return x;
  };
  problem.q = make(q_len, heads, point.head_dim, 0);
  problem.k = make(kv_len, point.kv_heads, point.head_dim, 1);
  problem.v = make(kv_len, point.kv_heads, point.value_dim, 2);
  problem.d_out = make(q_len, heads, point.value_dim, 3);
  if (point.packing == 0) make_masks(point, random, problem);
}

void make_starts(const CallPoint& point, int64_t far, Random& random,
                 CallProblem& problem) {
  const int64_t rows = problem.rows();
  // The problem sees them when all are there: its inputs read one a row.
  std::vector<int64_t> q_start, kv_start;
  for (int64_t r = 0; r < rows; ++r) {
    const AttentionRow row = row_of(problem, r);
    int64_t q = 0, kv = 0;
    switch (point.starts) {
      case 1:
        q = kv = 17;
        break;
      case 2:
        q = std::max<int64_t>(0, row.kv_len - row.q_len);
        break;
      case 3:
        q = draw(random, 0, 20);
        kv = draw(random, 0, 20);
        break;
      case 4:
        q = far + draw(random, 0, 20);
        kv = far + draw(random, 0, 20);
        break;
      case 5:
        kv = -row.kv_len / 2 - 1;
        q = kv + draw(random, 0, 5);
        break;
      default:
        break;
    }
    q_start.push_back(q);
    kv_start.push_back(kv);
  }
  problem.q_start = std::move(q_start);
  problem.kv_start = std::move(kv_start);
}

void fill_with_junk(Tensor& x, int64_t b, int64_t s, int64_t h,
                    Random& random) {
  for (int64_t c = 0; c < x.size()[3]; ++c)
    x.set(b, s, h, c, junk(random, x.dtype()));
}
void fill_with_junk(Tensor& x, int64_t b, int64_t s, Random& random) {
  for (int64_t h = 0; h < x.size()[2]; ++h) fill_with_junk(x, b, s, h, random);
}

void hide_masked_junk(Random& random, CallProblem& problem) {
  for (int64_t r = 0; r < problem.rows(); ++r) {
    const AttentionRow row = row_of(problem, r);
    for (int64_t j = 0; j < row.kv_len; ++j) {
      if (problem.key_is_real(row, j)) continue;
      fill_with_junk(problem.k, row.batch, row.kv_offset + j, random);
      fill_with_junk(problem.v, row.batch, row.kv_offset + j, random);
    }
    for (int64_t i = 0; i < row.q_len; ++i) {
      if (problem.query_is_real(row, i)) continue;
      fill_with_junk(problem.q, row.batch, row.q_offset + i, random);
      fill_with_junk(problem.d_out, row.batch, row.q_offset + i, random);
    }
  }
}

Tensor widen(const Tensor& x) {
  Tensor y(x.size(), DType::kFloat64);
  for (int64_t b = 0; b < x.size()[0]; ++b)
    for (int64_t s = 0; s < x.size()[1]; ++s)
      for (int64_t h = 0; h < x.size()[2]; ++h)
        for (int64_t c = 0; c < x.size()[3]; ++c)
          y.set(b, s, h, c, x.get(b, s, h, c));
  return y;
}
void widen_call(CallProblem& p) {
  for (Tensor* x : {&p.q, &p.k, &p.v, &p.d_out}) *x = widen(*x);
}

}  // namespace cosformer::testing
