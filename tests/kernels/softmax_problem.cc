#include "tests/kernels/softmax_problem.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "kernels/call_check.h"
#include "tests/kernels/tokens.h"

namespace cosformer::testing {
namespace {

constexpr std::string_view kScales[] = {"default", "own"};

bool set_field(SoftmaxPoint& p, std::string_view key, std::string_view text) {
  const int64_t number = std::atoll(std::string(text).c_str());
  const std::pair<std::string_view, int64_t SoftmaxPoint::*> numbers[] = {
      {"dilation", &SoftmaxPoint::dilation},
      {"block_size", &SoftmaxPoint::block_size},
      {"block_heads", &SoftmaxPoint::block_heads},
      {"reach", &SoftmaxPoint::reach},
      {"dropout", &SoftmaxPoint::dropout}};
  for (const auto& [name, field] : numbers) {
    if (name != key) continue;
    p.*field = number;
    return true;
  }
  if (key == "scale") return find_name(kScales, text, &p.scale);
  if (key == "globals") return find_name(kGlobalNames, text, &p.globals);
  if (key == "window") {
    for (size_t w = 0; w < std::size(kWindows); ++w) {
      if (kWindows[w].name != text) continue;
      p.window = static_cast<int64_t>(w);
      return true;
    }
    return false;
  }
  return set_call_field(p, key, text);
}

void make_globals(const SoftmaxPoint& point, Random& random,
                  SoftmaxProblem& problem) {
  if (point.globals == 0) return;
  problem.global_mask.assign(
      static_cast<size_t>(problem.k.size()[0] * problem.k.size()[1]), 0);
  for (int64_t r = 0; r < problem.rows(); ++r) {
    const AttentionRow row = problem.row(r);
    for (int64_t j = 0; j < row.kv_len; ++j) {
      bool global = true;
      switch (point.globals) {
        case 1:
          global = j < 3;
          break;
        case 2:
          global = j >= row.kv_len - 2;
          break;
        case 3:
          global = draw(random, 0, 15) == 0;
          break;
        case 4:
          global = !problem.key_is_real(row, j) || j == row.kv_len / 2;
          break;
        default:
          break;
      }
      const int64_t at = row.batch * problem.k.size()[1] + row.kv_offset + j;
      // Any nonzero byte means "global".
      problem.global_mask[static_cast<size_t>(at)] =
          global ? (draw(random, 0, 1) != 0 ? 1 : 128) : 0;
    }
  }
}

void make_blocks(const SoftmaxPoint& point, Random& random,
                 SoftmaxProblem& problem) {
  if (point.block_size == 0) return;
  problem.block_size = point.block_size;
  // Blocks for all positions, or a few less; a few where positions are far.
  const auto blocks_for = [&](int64_t end) {
    if (end > 5000) return draw(random, 1, 3);
    const int64_t all = (end + point.block_size - 1) / point.block_size;
    return std::max<int64_t>(1, all - draw(random, 0, 3) / 3);
  };
  int64_t q_end = 1, kv_end = 1;
  for (int64_t r = 0; r < problem.rows(); ++r) {
    const AttentionRow row = problem.row(r);
    q_end = std::max(q_end, row.q_start + row.q_len);
    kv_end = std::max(kv_end, row.kv_start + row.kv_len);
  }
  problem.q_blocks = blocks_for(q_end);
  problem.kv_blocks = blocks_for(kv_end);
  problem.block_mask_heads =
      point.block_heads == 0 ? 1 : point.kv_heads * point.group;
  const int64_t n =
      problem.block_mask_heads * problem.q_blocks * problem.kv_blocks;
  for (int64_t i = 0; i < n; ++i) {
    problem.block_mask.push_back(
        draw(random, 0, 3) == 0 ? (draw(random, 0, 1) != 0 ? 1 : 255) : 0);
  }
}

void hide_unseen_junk(Random& random, SoftmaxProblem& p) {
  for_unseen(
      p,
      [&](const AttentionRow& row, int64_t h, int64_t i) {
        fill_with_junk(p.q, row.batch, row.q_offset + i, h, random);
        fill_with_junk(p.d_out, row.batch, row.q_offset + i, h, random);
      },
      [&](const AttentionRow& row, int64_t h, int64_t j) {
        fill_with_junk(p.k, row.batch, row.kv_offset + j, h, random);
        fill_with_junk(p.v, row.batch, row.kv_offset + j, h, random);
      });
}

int64_t floor_div(int64_t a, int64_t b) {
  return a >= 0 ? a / b : -((-a + b - 1) / b);
}

}  // namespace

std::string describe(const SoftmaxPoint& p) {
  return str_cat(describe_call(p), " scale=", kScales[p.scale],
                 " window=", kWindows[p.window].name, " dilation=", p.dilation,
                 " globals=", kGlobalNames[p.globals],
                 " block_size=", p.block_size, " block_heads=", p.block_heads,
                 " reach=", p.reach, " dropout=", p.dropout);
}

std::optional<SoftmaxPoint> parse_softmax_point(std::string_view text) {
  SoftmaxPoint point;
  if (!for_fields(text, [&](std::string_view key, std::string_view value) {
        return set_field(point, key, value);
      })) {
    return std::nullopt;
  }
  return point;
}

SoftmaxAttentionInputs SoftmaxProblem::inputs() const {
  SoftmaxAttentionInputs in = inputs_of<SoftmaxAttentionInputs>(*this);
  in.global_mask = global_mask.empty() ? nullptr : global_mask.data();
  in.global_mask_stride = k.size()[1];
  in.block_mask = block_mask.empty() ? nullptr : block_mask.data();
  in.block_mask_heads = block_mask_heads;
  in.q_blocks = q_blocks;
  in.kv_blocks = kv_blocks;
  in.block_size = block_size;
  in.relative_bias = has_bias() ? relative_bias.view().data : nullptr;
  in.relative_reach = relative_reach;
  return in;
}

AttentionRow SoftmaxProblem::row(int64_t r) const {
  return attention_row(inputs(), r);
}

double SoftmaxProblem::scale() const {
  return options.scale != 0 ? options.scale
                            : 1 / std::sqrt(static_cast<double>(q.size()[3]));
}

bool SoftmaxProblem::sees(const AttentionRow& row, int64_t head, int64_t i,
                          int64_t j) const {
  if (!key_is_real(row, j)) return false;
  const int64_t p = row.q_start + i, s = row.kv_start + j;
  if (options.is_causal && s > p) return false;
  bool restricted = false;
  if (options.has_window) {
    restricted = true;
    const int64_t ahead = s - p, step = options.dilation;
    const bool left =
        options.window_left < 0 || ahead >= -options.window_left * step;
    const bool right =
        options.window_right < 0 || ahead <= options.window_right * step;
    if (left && right && std::abs(ahead) % step == 0) return true;
  }
  if (!global_mask.empty()) {
    restricted = true;
    const auto global_at = [&](int64_t position) {
      const int64_t at = position - row.kv_start;
      if (at < 0 || at >= row.kv_len) return false;
      return global_mask[static_cast<size_t>(row.batch * k.size()[1] +
                                             row.kv_offset + at)] != 0;
    };
    if (global_at(p) || global_at(s)) return true;
  }
  if (!block_mask.empty()) {
    restricted = true;
    const int64_t a = floor_div(p, block_size), b = floor_div(s, block_size);
    if (0 <= a && a < q_blocks && 0 <= b && b < kv_blocks) {
      const int64_t h = block_mask_heads > 1 ? head : 0;
      if (block_mask[static_cast<size_t>((h * q_blocks + a) * kv_blocks + b)])
        return true;
    }
  }
  return !restricted;
}

void for_unseen(
    const SoftmaxProblem& p,
    const std::function<void(const AttentionRow&, int64_t, int64_t)>& on_query,
    const std::function<void(const AttentionRow&, int64_t, int64_t)>& on_key) {
  const int64_t heads = p.q.size()[2], group = heads / p.k.size()[2];
  for (int64_t r = 0; r < p.rows(); ++r) {
    const AttentionRow row = p.row(r);
    std::vector<bool> seeing, seen;
    for (int64_t h = 0; h < heads; ++h) {
      // Heads differ by the block mask alone.
      if (h == 0 || p.block_mask_heads > 1) {
        seeing.assign(static_cast<size_t>(row.q_len), false);
        if (h % group == 0) seen.assign(static_cast<size_t>(row.kv_len), false);
        for (int64_t i = 0; i < row.q_len; ++i) {
          if (!p.query_is_real(row, i)) continue;
          for (int64_t j = 0; j < row.kv_len; ++j) {
            if (!p.sees(row, h, i, j)) continue;
            seeing[static_cast<size_t>(i)] = true;
            seen[static_cast<size_t>(j)] = true;
          }
        }
      }
      for (int64_t i = 0; i < row.q_len; ++i)
        if (!seeing[static_cast<size_t>(i)]) on_query(row, h, i);
      if (h % group != group - 1) continue;
      for (int64_t j = 0; j < row.kv_len; ++j)
        if (!seen[static_cast<size_t>(j)]) on_key(row, h / group, j);
    }
  }
}

SoftmaxProblem make_problem(const SoftmaxPoint& point) {
  Random random(static_cast<uint64_t>(point.seed));
  SoftmaxProblem problem;
  problem.text = describe(point);
  SoftmaxAttentionOptions& options = problem.options;
  options.is_causal = point.causal;
  options.scale = point.scale == 0 ? 0.0 : 0.37;
  options.has_window = point.window != 0;
  options.window_left = kWindows[point.window].left;
  options.window_right = kWindows[point.window].right;
  options.dilation = point.dilation;
  options.dropout_p = static_cast<double>(point.dropout) / 100;
  options.dropout_seed = static_cast<uint64_t>(point.seed) * 0x9E3779B97F4A7C15;
  make_call(point, random, problem);
  make_starts(point, (int64_t{1} << 40) + 3, random, problem);
  if (point.starts == 0) problem.q_start = problem.kv_start = {};
  make_globals(point, random, problem);
  make_blocks(point, random, problem);
  if (point.reach >= 0) {
    problem.relative_reach = point.reach;
    problem.relative_bias =
        Tensor({1, 1, point.kv_heads * point.group, 2 * point.reach + 1},
               accumulator_of(point.dtype));
    problem.relative_bias.fill_normal(random);
  }
  hide_masked_junk(random, problem);
  hide_unseen_junk(random, problem);
  return problem;
}

SoftmaxProblem softmax_problem(const std::string& text) {
  const auto point = parse_softmax_point(text);
  EXPECT_TRUE(point.has_value()) << text;
  return make_problem(*point);
}

SoftmaxProblem widen(const SoftmaxProblem& problem) {
  SoftmaxProblem wide = problem;
  widen_call(wide);
  wide.relative_bias = widen(problem.relative_bias);
  return wide;
}

SoftmaxProblem row_alone(const SoftmaxProblem& batch, int64_t b, int64_t q_len,
                         int64_t kv_len) {
  SoftmaxProblem p = batch;
  p.q = cut(batch.q, b, 0, q_len);
  p.d_out = cut(batch.d_out, b, 0, q_len);
  p.k = cut(batch.k, b, 0, kv_len);
  p.v = cut(batch.v, b, 0, kv_len);
  p.key_mask.clear();
  p.query_mask.clear();
  if (!batch.global_mask.empty()) {
    const auto begin = batch.global_mask.begin() + b * batch.k.size()[1];
    p.global_mask.assign(begin, begin + kv_len);
  }
  if (!p.q_start.empty()) p.q_start = {batch.q_start[static_cast<size_t>(b)]};
  if (!p.kv_start.empty())
    p.kv_start = {batch.kv_start[static_cast<size_t>(b)]};
  return p;
}

SoftmaxOutputs run_forward(const SoftmaxProblem& problem, Executor& executor,
                           int64_t layout) {
  SoftmaxOutputs o;
  const DType dtype = problem.q.dtype();
  const auto& size = problem.q.size();
  o.out = Tensor(problem.out_size(), dtype, layout_of(layout, 0));
  o.log_sum_exp = Tensor({size[0], size[1], size[2], 1}, accumulator_of(dtype));
  o.status =
      softmax_attention_forward(problem.options, problem.inputs(), o.out.view(),
                                o.log_sum_exp.view().data, executor);
  return o;
}

SoftmaxOutputs run(const SoftmaxProblem& problem, Executor& executor,
                   int64_t layout) {
  SoftmaxOutputs o = run_forward(problem, executor, layout);
  if (!o.status.ok()) return o;
  const DType dtype = problem.q.dtype();
  o.dq = Tensor(problem.q.size(), dtype, layout_of(layout, 1));
  o.dk = Tensor(problem.k.size(), dtype, layout_of(layout, 2));
  o.dv = Tensor(problem.v.size(), dtype, layout_of(layout, 3));
  if (problem.has_bias())
    o.d_bias = Tensor(problem.relative_bias.size(), accumulator_of(dtype));
  const SoftmaxOutputs& given = o;
  o.status = softmax_attention_backward(
      problem.options, problem.inputs(), given.out.view(),
      given.log_sum_exp.view().data, problem.d_out.view(), o.dq.view(),
      o.dk.view(), o.dv.view(),
      problem.has_bias() ? o.d_bias.view().data : nullptr, executor);
  return o;
}

SoftmaxOutputs run_reference(const SoftmaxProblem& narrow) {
  const SoftmaxProblem problem = widen(narrow);
  SoftmaxOutputs o;
  const auto& size = problem.q.size();
  o.out = Tensor(problem.out_size(), DType::kFloat64);
  o.log_sum_exp = Tensor({size[0], size[1], size[2], 1}, DType::kFloat64);
  o.status = reference::softmax_attention_forward(
      problem.options, problem.inputs(), o.out.view(),
      o.log_sum_exp.view().data);
  if (!o.status.ok()) return o;
  o.dq = Tensor(problem.q.size(), DType::kFloat64);
  o.dk = Tensor(problem.k.size(), DType::kFloat64);
  o.dv = Tensor(problem.v.size(), DType::kFloat64);
  if (problem.has_bias())
    o.d_bias = Tensor(problem.relative_bias.size(), DType::kFloat64);
  o.status = reference::softmax_attention_backward(
      problem.options, problem.inputs(), problem.d_out.view(), o.dq.view(),
      o.dk.view(), o.dv.view(),
      problem.has_bias() ? o.d_bias.view().data : nullptr);
  return o;
}

}  // namespace cosformer::testing
