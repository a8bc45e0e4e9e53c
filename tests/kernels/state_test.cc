// The state between calls: however a sequence is cut, the results are those of
// one call.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/kernels/compare.h"
#include "tests/kernels/problem.h"

namespace cosformer {
namespace {

using testing::make_problem;
using testing::make_state;
using testing::Outputs;
using testing::parse_point;
using testing::Point;
using testing::Problem;
using testing::relative_error;
using testing::State;
using testing::Tensor;

// What the layers compute: each is cut in the same ways below.
const char* const kKinds[] = {
    "feature_map=relu cosine=exact",
    "feature_map=elu1",
    "feature_map=relu cosine=far group=2 value_dim=5",
    "feature_map=elu1 cosine=far rotary=half",
    "feature_map=relu cosine=exact normalized=0 rotary=interleaved",
    "feature_map=relu cosine=exact dtype=float64",
};
constexpr double kAgreement = 1e-5;

Problem causal_problem(const std::string& kind, int64_t len,
                       const std::string& more = "") {
  const auto point = parse_point(str_cat(
      "causal=1 batch=2 kv_heads=2 head_dim=16 value_dim=16 q_len=", len,
      " kv_len=", len, " seed=11 ", kind, " ", more));
  Problem p = make_problem(*point);
  p.return_state = true;
  p.d_state_out.reset();
  return p;
}

// Tokens [from, to) of every row.
Tensor slice(const Tensor& x, int64_t from, int64_t to) {
  const auto [batch, seq, heads, dim] = x.size();
  Tensor y({batch, to - from, heads, dim}, x.dtype());
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t s = from; s < to; ++s)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t c = 0; c < dim; ++c)
          y.set(b, s - from, h, c, x.get(b, s, h, c));
  return y;
}
Problem slice(const Problem& whole, int64_t from, int64_t to) {
  Problem p = whole;
  for (Tensor Problem::* x :
       {&Problem::q, &Problem::k, &Problem::v, &Problem::d_out})
    p.*x = slice(whole.*x, from, to);
  p.q_start = p.kv_start = {};
  return p;
}
void append(std::vector<double>& all, const Tensor& part, int64_t batch_row) {
  for (int64_t s = 0; s < part.size()[1]; ++s)
    for (int64_t h = 0; h < part.size()[2]; ++h)
      for (int64_t c = 0; c < part.size()[3]; ++c)
        all.push_back(part.get(batch_row, s, h, c));
}
// Parts along the sequence, one after the other, as one tensor's values.
std::vector<double> joined(const std::vector<const Tensor*>& parts) {
  std::vector<double> all;
  for (int64_t b = 0; b < parts[0]->size()[0]; ++b)
    for (const Tensor* part : parts) append(all, *part, b);
  return all;
}

void expect_same_state(const State& got, const State& want,
                       const std::string& where) {
  EXPECT_LE(relative_error(got.kv_state.values(), want.kv_state.values()),
            kAgreement)
      << where;
  EXPECT_LE(relative_error(got.k_sum.values(), want.k_sum.values()), kAgreement)
      << where;
  EXPECT_EQ(got.start, want.start) << where;
  EXPECT_EQ(got.position, want.position) << where;
}

// Calls of the given lengths, the state handed on.
std::vector<Outputs> run_in_pieces(const Problem& whole,
                                   const std::vector<int64_t>& lengths) {
  std::vector<Outputs> pieces;
  std::optional<State> state;
  int64_t from = 0;
  for (int64_t n : lengths) {
    Problem piece = slice(whole, from, from + n);
    piece.state = state;
    pieces.push_back(run_forward(piece, serial_executor()));
    EXPECT_TRUE(pieces.back().status.ok()) << pieces.back().status.message();
    state = pieces.back().state;
    from += n;
  }
  return pieces;
}

void expect_pieces_agree(const Problem& whole, const Outputs& parallel,
                         const std::vector<int64_t>& lengths,
                         const std::string& where) {
  const std::vector<Outputs> pieces = run_in_pieces(whole, lengths);
  std::vector<const Tensor*> outs;
  for (const Outputs& piece : pieces) outs.push_back(&piece.out);
  EXPECT_LE(relative_error(joined(outs), parallel.out.values()), kAgreement)
      << where;
  expect_same_state(*pieces.back().state, *parallel.state, where);
}

TEST(LinearState, EverySplitPointAgreesWithTheParallelForm) {
  for (const char* kind : kKinds) {
    const Problem whole = causal_problem(kind, 70);
    const Outputs parallel = run_forward(whole, serial_executor());
    ASSERT_TRUE(parallel.status.ok()) << parallel.status.message();
    for (int64_t cut = 0; cut <= 70; ++cut) {
      expect_pieces_agree(whole, parallel, {cut, 70 - cut},
                          str_cat(kind, " cut at ", cut));
    }
  }
}

TEST(LinearState, ChunksOfAnySizeAgreeWithTheParallelForm) {
  for (const char* kind : kKinds) {
    const Problem whole = causal_problem(kind, 300);
    const Outputs parallel = run_forward(whole, serial_executor());
    for (int64_t chunk : {1, 2, 7, 64, 65, 299}) {
      std::vector<int64_t> lengths;
      for (int64_t left = 300; left > 0; left -= chunk)
        lengths.push_back(std::min(chunk, left));
      expect_pieces_agree(whole, parallel, lengths,
                          str_cat(kind, " chunks of ", chunk));
    }
    expect_pieces_agree(whole, parallel, {0, 100, 0, 0, 33, 167, 0},
                        str_cat(kind, " with empty chunks"));
  }
}

State fresh_state(const Problem& p, int64_t position) {
  State state = make_state(p.options, p.inputs());
  state.kv_state.fill(0);
  state.k_sum.fill(0);
  std::fill(state.start.begin(), state.start.end(), position);
  std::fill(state.position.begin(), state.position.end(), position);
  return state;
}

Status decode(const Problem& token, State& state, Tensor& out,
              Executor& executor) {
  Problem alone = token;
  alone.state.reset();
  alone.q_start = alone.kv_start = {};
  return linear_attention_decode_step(alone.options, alone.inputs(),
                                      state.view(), out.view(), executor);
}

TEST(LinearState, DecodingTokenByTokenAgreesWithTheParallelForm) {
  auto pool = make_thread_pool(2);
  for (std::string_view isa : supported_isas()) {
    ASSERT_TRUE(force_isa(isa).ok());
    for (const char* kind : kKinds) {
      const Problem whole = causal_problem(kind, 150);
      const Outputs parallel = run_forward(whole, serial_executor());
      State state = fresh_state(whole, 0);
      std::vector<Tensor> outs;
      for (int64_t t = 0; t < 150; ++t) {
        const Problem token = slice(whole, t, t + 1);
        outs.emplace_back(
            std::array<int64_t, 4>{2, 1, whole.q.size()[2], whole.v.size()[3]},
            whole.q.dtype());
        const Status status = decode(token, state, outs.back(), *pool);
        ASSERT_TRUE(status.ok()) << status.message();
      }
      std::vector<const Tensor*> parts;
      for (const Tensor& out : outs) parts.push_back(&out);
      EXPECT_LE(relative_error(joined(parts), parallel.out.values()),
                kAgreement)
          << kind << " " << isa;
      expect_same_state(state, *parallel.state, str_cat(kind, " ", isa));
    }
  }
  ASSERT_TRUE(force_isa("").ok());
}

// Prefill, then decode: the state of one continues as that of the other.
TEST(LinearState, DecodeAndPrefillGiveTheSameState) {
  for (const char* kind : kKinds) {
    const Problem whole = causal_problem(kind, 40);
    const Outputs parallel = run_forward(whole, serial_executor());
    const Outputs prefill = run_forward(slice(whole, 0, 37), serial_executor());
    State state = *prefill.state;
    for (int64_t t = 37; t < 40; ++t) {
      Tensor out({2, 1, whole.q.size()[2], whole.v.size()[3]}, whole.q.dtype());
      ASSERT_TRUE(
          decode(slice(whole, t, t + 1), state, out, serial_executor()).ok());
      std::vector<double> want = slice(parallel.out, t, t + 1).values();
      EXPECT_LE(relative_error(out.values(), want), kAgreement)
          << kind << " t=" << t;
    }
    expect_same_state(state, *parallel.state, kind);
  }
}

// Prompts of different lengths, padded on the right: each row goes on from its
// own position, and gets what it would get alone.
TEST(LinearState, RowsAtDifferentPositionsDecodeAsIfAlone) {
  for (const char* kind : kKinds) {
    Problem prompts = causal_problem(kind, 20);
    prompts.key_mask.assign(40, 1);
    for (int64_t t = 13; t < 20; ++t) prompts.key_mask[20 + t] = 0;
    prompts.query_mask = prompts.key_mask;
    prompts.options.reweight_len *= 3;
    const Outputs prefill = run_forward(prompts, serial_executor());
    ASSERT_TRUE(prefill.status.ok()) << prefill.status.message();
    EXPECT_EQ(prefill.state->position, (std::vector<int64_t>{20, 13}));
    State state = *prefill.state;
    const Problem next = causal_problem(kind, 5);
    std::vector<Tensor> outs;
    for (int64_t t = 0; t < 5; ++t) {
      Problem token = slice(next, t, t + 1);
      token.options = prompts.options;
      outs.emplace_back(
          std::array<int64_t, 4>{2, 1, next.q.size()[2], next.v.size()[3]},
          next.q.dtype());
      ASSERT_TRUE(decode(token, state, outs.back(), serial_executor()).ok());
    }
    EXPECT_EQ(state.position, (std::vector<int64_t>{25, 18}));
    EXPECT_EQ(state.start, (std::vector<int64_t>{0, 0}));
    // Alone: row b's prompt and its five tokens in one call.
    for (int64_t b = 0; b < 2; ++b) {
      const int64_t prompt = b == 0 ? 20 : 13;
      Problem alone = prompts;
      alone.key_mask.clear();
      alone.query_mask.clear();
      const auto join_rows = [&](Tensor Problem::* x) {
        const Tensor &from = prompts.*x, &then = next.*x;
        const auto [batch, seq, heads, dim] = from.size();
        Tensor y({1, prompt + 5, heads, dim}, from.dtype());
        for (int64_t s = 0; s < prompt + 5; ++s)
          for (int64_t h = 0; h < heads; ++h)
            for (int64_t c = 0; c < dim; ++c)
              y.set(0, s, h, c,
                    s < prompt ? from.get(b, s, h, c)
                               : then.get(b, s - prompt, h, c));
        alone.*x = y;
      };
      join_rows(&Problem::q);
      join_rows(&Problem::k);
      join_rows(&Problem::v);
      const Outputs want = run_forward(alone, serial_executor());
      ASSERT_TRUE(want.status.ok()) << want.status.message();
      std::vector<double> got;
      for (const Tensor& out : outs) append(got, out, b);
      EXPECT_LE(
          relative_error(got, slice(want.out, prompt, prompt + 5).values()),
          kAgreement)
          << kind << " row " << b;
    }
  }
}

TEST(LinearState, RightPaddingDoesNotCountAndNoKeyMovesNothing) {
  Problem p = causal_problem("cosine=far", 6, "batch=3");
  p.kv_start = p.q_start = {5, 7, -4};
  p.options.reweight_len = 1000;
  p.key_mask = {1, 0, 1, 0, 0, 0,   // last real key: index 2
                0, 0, 0, 0, 0, 0,   // none
                0, 0, 0, 0, 0, 1};  // left padding
  Outputs o = run_forward(p, serial_executor());
  ASSERT_TRUE(o.status.ok()) << o.status.message();
  EXPECT_EQ(o.state->start, (std::vector<int64_t>{5, 7, -4}));
  EXPECT_EQ(o.state->position, (std::vector<int64_t>{8, 7, 2}));
  for (int64_t h = 0; h < 2; ++h) {
    const int64_t row = 1 * 2 * 32 + h * 32;
    for (int64_t f = 0; f < 32; ++f)
      EXPECT_EQ(o.state->k_sum.get(0, 0, 0, row + f), 0);
  }
  // The next call goes on from there; a row without real keys stays.
  p.state = o.state;
  p.kv_start = p.q_start = {};
  p.key_mask = std::vector<uint8_t>(18, 0);
  p.key_mask[6] = 1;
  o = run_forward(p, serial_executor());
  ASSERT_TRUE(o.status.ok()) << o.status.message();
  EXPECT_EQ(o.state->start, (std::vector<int64_t>{5, 7, -4}));
  EXPECT_EQ(o.state->position, (std::vector<int64_t>{8, 8, 2}));
  for (int64_t b : {0, 2})
    for (int64_t i = 0; i < 64; ++i)
      EXPECT_EQ(o.state->k_sum.get(0, 0, 0, b * 64 + i),
                p.state->k_sum.get(0, 0, 0, b * 64 + i));
}

TEST(LinearState, GradientsThroughChunksEqualThoseOfOneCall) {
  for (const char* kind : kKinds) {
    Problem whole = causal_problem(kind, 90);
    const Outputs parallel = run(whole, serial_executor());
    ASSERT_TRUE(parallel.status.ok()) << parallel.status.message();
    const int64_t cuts[] = {0, 1, 30, 30, 64, 90};
    std::vector<Problem> pieces;
    std::optional<State> state;
    for (size_t i = 0; i + 1 < std::size(cuts); ++i) {
      pieces.push_back(slice(whole, cuts[i], cuts[i + 1]));
      pieces.back().state = state;
      state = run_forward(pieces.back(), serial_executor()).state;
    }
    // Backwards: what one piece says about its state is what the piece before
    // is told about the state that it returned.
    std::vector<Outputs> gradients(pieces.size());
    std::optional<State> d_state;
    for (size_t i = pieces.size(); i-- > 0;) {
      pieces[i].d_state_out = d_state;
      gradients[i] = run(pieces[i], serial_executor());
      ASSERT_TRUE(gradients[i].status.ok()) << gradients[i].status.message();
      d_state = gradients[i].d_state;
    }
    for (Tensor Outputs::* x : {&Outputs::dq, &Outputs::dk, &Outputs::dv}) {
      std::vector<const Tensor*> parts;
      for (const Outputs& g : gradients) parts.push_back(&(g.*x));
      EXPECT_LE(relative_error(joined(parts), (parallel.*x).values()),
                kAgreement)
          << kind;
    }
  }
}

// An encoder's memory: a state of all keys serves a non-causal call as the keys
// themselves do.
TEST(LinearState, NonCausalCallReadsAStateAsItReadsKeys) {
  for (const char* kind : kKinds) {
    Problem direct = make_problem(*parse_point(
        str_cat("batch=2 kv_heads=2 head_dim=16 value_dim=16 q_len=23 "
                "kv_len=31 seed=4 ",
                kind)));
    direct.q_start = {3, 8};
    direct.options.reweight_len *= 2;
    const Outputs want = run_forward(direct, serial_executor());
    ASSERT_TRUE(want.status.ok()) << want.status.message();
    Problem memory = direct;
    memory.q = Tensor({2, 0, direct.q.size()[2], 16}, direct.q.dtype());
    memory.return_state = true;
    const Outputs encoded = run_forward(memory, serial_executor());
    ASSERT_TRUE(encoded.status.ok()) << encoded.status.message();
    Problem cross = direct;
    cross.k = Tensor({2, 0, 2, 16}, direct.q.dtype());
    cross.v = Tensor({2, 0, 2, direct.v.size()[3]}, direct.q.dtype());
    cross.state = encoded.state;
    const Outputs got = run_forward(cross, serial_executor());
    ASSERT_TRUE(got.status.ok()) << got.status.message();
    EXPECT_LE(relative_error(got.out.values(), want.out.values()), kAgreement)
        << kind;
  }
}

TEST(DecodeStep, SkipsMaskedKeysAndKeepsTheirRowsPosition) {
  for (const char* kind : kKinds) {
    const Problem whole = causal_problem(kind, 12);
    State state = *run_forward(slice(whole, 0, 11), serial_executor()).state;
    Problem token = slice(whole, 11, 12);
    token.key_mask = {1, 0};
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t c = 0; c < 16; ++c) token.k.set(1, 0, h, c, NAN);
      for (int64_t c = 0; c < token.v.size()[3]; ++c)
        token.v.set(1, 0, h, c, INFINITY);
    }
    Problem as_call = token;
    as_call.state = state;
    const Outputs want = run_reference(as_call);
    ASSERT_TRUE(want.status.ok()) << want.status.message();
    Tensor out({2, 1, whole.q.size()[2], whole.v.size()[3]}, whole.q.dtype());
    ASSERT_TRUE(decode(token, state, out, serial_executor()).ok());
    EXPECT_LE(relative_error(out.values(), want.out.values()), kAgreement);
    expect_same_state(state, *want.state, kind);
    EXPECT_EQ(state.position, (std::vector<int64_t>{12, 11}));
  }
}

TEST(DecodeStep, QueryMaskGivesZeroRows) {
  Problem token = slice(causal_problem("cosine=exact", 3), 2, 3);
  token.query_mask = {0, 1};
  for (int64_t h = 0; h < 2; ++h) token.q.set(0, 0, h, 3, NAN);
  token.options.reweight_len = 50;
  State state = fresh_state(token, 2);
  Tensor out({2, 1, 2, 16}, DType::kFloat32);
  ASSERT_TRUE(decode(token, state, out, serial_executor()).ok());
  for (int64_t h = 0; h < 2; ++h)
    for (int64_t c = 0; c < 16; ++c) {
      EXPECT_EQ(out.get(0, 0, h, c), 0);
      // One key: what it holds comes back, wherever a feature is shared.
      EXPECT_NEAR(out.get(1, 0, h, c), token.v.get(1, 0, h, c), 1e-5);
    }
}

TEST(DecodeStep, HalfTypesKeepAFloat32State) {
  for (const char* dtype : {"bfloat16", "float16"}) {
    const Problem whole =
        causal_problem(str_cat("cosine=exact dtype=", dtype), 60);
    const Outputs want = run_reference(whole);
    State state = fresh_state(whole, 0);
    std::vector<Tensor> outs;
    for (int64_t t = 0; t < 60; ++t) {
      outs.emplace_back(std::array<int64_t, 4>{2, 1, 2, 16}, whole.q.dtype());
      ASSERT_TRUE(
          decode(slice(whole, t, t + 1), state, outs.back(), serial_executor())
              .ok());
    }
    std::vector<const Tensor*> parts;
    for (const Tensor& out : outs) parts.push_back(&out);
    EXPECT_LE(relative_error(joined(parts), want.out.values()), 0x1p-8);
    EXPECT_LE(
        relative_error(state.kv_state.values(), want.state->kv_state.values()),
        3e-6);
  }
}

TEST(DecodeStep, SaysWhatIsWrong) {
  Problem p = slice(causal_problem("cosine=exact", 2), 0, 1);
  State state = fresh_state(p, 0);
  Tensor out({2, 1, 2, 16}, DType::kFloat32);
  const auto message = [&](const Problem& problem, Tensor& to) {
    const Status status = linear_attention_decode_step(
        problem.options, problem.inputs(), state.view(), to.view(),
        serial_executor());
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    return status.message();
  };
  Problem two = slice(causal_problem("cosine=exact", 2), 0, 2);
  EXPECT_NE(message(two, out).find("query has length 2"), std::string::npos);
  Problem started = p;
  started.q_start = {0, 0};
  EXPECT_NE(message(started, out).find("must be empty"), std::string::npos);
  Tensor small({2, 1, 2, 15}, DType::kFloat32);
  EXPECT_NE(message(p, small).find("[2, 1, 2, 15]"), std::string::npos)
      << message(p, small);
  // The cosine ends at M: position 3 is the first that M = 2 cannot reach.
  p.options.reweight_len = 2;
  state.position = {2, 3};
  const std::string beyond = message(p, out);
  EXPECT_NE(beyond.find("reweight_len is 2"), std::string::npos) << beyond;
  EXPECT_EQ(state.position, (std::vector<int64_t>{2, 3}));
}

}  // namespace
}  // namespace cosformer
