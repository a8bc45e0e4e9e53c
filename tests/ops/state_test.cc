// LinearState: copies, rows, places, and its file read by another process.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "cosformer/ops.h"
#include "tests/ops/testing.h"

namespace cosformer {
namespace {

using testing::relative;
using testing::throws_with;

LinearAttentionArgs options() {
  LinearAttentionArgs args;
  args.is_causal = true;
  args.reweight_len = 64;
  args.return_state = true;
  return args;
}

at::Tensor tokens() {
  at::manual_seed(7);
  return at::randn({3, 20, 2, 8});
}

// The state after `count` of the tokens, and the output of the rest.
std::pair<LinearState, at::Tensor> run(int64_t count) {
  const at::Tensor x = tokens();
  const at::Tensor head = x.slice(1, 0, count), tail = x.slice(1, count);
  LinearAttentionArgs args = options();
  const LinearState state =
      *std::get<1>(linear_attention(head, head, head, args));
  args.state = state;
  return {state, std::get<0>(linear_attention(tail, tail, tail, args))};
}

void expect_equal(const LinearState& a, const LinearState& b) {
  EXPECT_TRUE(a.kv_state.equal(b.kv_state));
  EXPECT_TRUE(a.k_sum.equal(b.k_sum));
  EXPECT_TRUE(a.start.equal(b.start));
  EXPECT_TRUE(a.position.equal(b.position));
  EXPECT_EQ(a.kind, b.kind);
  EXPECT_EQ(a.feature_map, b.feature_map);
  EXPECT_EQ(a.reweight_len, b.reweight_len);
  EXPECT_EQ(a.rotary_base, b.rotary_base);
  EXPECT_EQ(a.rotary_interleaved, b.rotary_interleaved);
}

class StateFileTest : public ::testing::Test {
 protected:
  StateFileTest() {
    std::string name =
        (std::filesystem::temp_directory_path() / "stateXXXXXX").string();
    folder_ = ::mkdtemp(name.data());
  }
  ~StateFileTest() override { std::filesystem::remove_all(folder_); }
  std::string path(const char* name) const { return folder_ / name; }

  std::filesystem::path folder_;
};

TEST_F(StateFileTest, KeepsEverything) {
  LinearState state = run(11).first;
  state.rotary_base = 0.1;
  state.rotary_interleaved = true;
  state.save(path("state"));
  expect_equal(LinearState::load(path("state")), state);
  expect_equal(LinearState::load(path("state")),
               state.to(at::kDouble).to(at::kFloat));
}

// Runs itself once more, as a new process that is given the file's name.
TEST_F(StateFileTest, ANewProcessGoesOnFromIt) {
  constexpr char kFile[] = "COSFORMER_TEST_STATE";
  if (const char* file = std::getenv(kFile)) {
    LinearAttentionArgs args = options();
    args.state = LinearState::load(file);
    const at::Tensor tail = tokens().slice(1, 11);
    const at::Tensor out =
        std::get<0>(linear_attention(tail, tail, tail, args));
    EXPECT_TRUE(out.equal(run(11).second));
    return;
  }
  run(11).first.save(path("state"));
  const std::string program = std::filesystem::read_symlink("/proc/self/exe");
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::setenv(kFile, path("state").c_str(), 1);
    ::execl(program.c_str(), program.c_str(),
            "--gtest_filter=StateFileTest.ANewProcessGoesOnFromIt", nullptr);
    ::_exit(127);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST_F(StateFileTest, ATruncatedFileIsAnErrorAtEveryLength) {
  run(3).first.save(path("state"));
  std::ifstream file(path("state"), std::ios::binary);
  const std::string whole((std::istreambuf_iterator<char>(file)), {});
  for (size_t length = 0; length < whole.size();
       length += length < 900 ? 1 : 97) {
    std::ofstream(path("cut"), std::ios::binary) << whole.substr(0, length);
    EXPECT_TRUE(throws_with([&] { LinearState::load(path("cut")); },
                            "LinearState::load: " + path("cut")))
        << length;
  }
}

TEST(State, RowsAndCopies) {
  LinearState state = run(5).first;
  const LinearState chosen = state.select(at::tensor({2, 0, 0}, at::kLong));
  EXPECT_TRUE(chosen.kv_state[1].equal(state.kv_state[0]));
  EXPECT_TRUE(chosen.position.equal(at::full({3}, 5, at::kLong)));
  const LinearState kept = state.clone();
  const at::Tensor token = tokens().slice(1, 5, 6);
  LinearAttentionArgs args = options();
  args.return_state = false;
  const at::Tensor out =
      linear_attention_decode_step_(token, token, token, state, args);
  EXPECT_EQ(state.position[0].item<int64_t>(), 6);
  EXPECT_EQ(kept.position[0].item<int64_t>(), 5);
  args.state = kept;
  EXPECT_LT(
      relative(out, std::get<0>(linear_attention(token, token, token, args))),
      1e-6);
  EXPECT_EQ(state.to(at::kDouble).kv_state.scalar_type(), at::kDouble);
  EXPECT_EQ(state.to(at::kDouble).position.scalar_type(), at::kLong);
}

TEST(Positions, RotaryAndSinusoidal) {
  const at::Tensor x = tokens();
  const at::Tensor turned = apply_rotary(x, 7);
  EXPECT_LT(relative(turned.norm(), x.norm()), 1e-6);
  const at::Tensor positions =
      (at::arange(20, at::kLong) + 7).expand({3, 20}).contiguous();
  EXPECT_TRUE(apply_rotary(x, 0, positions).equal(turned));
  const at::Tensor table = sinusoidal_positions(3, 4);
  EXPECT_EQ(table[0][1].item<float>(), 1.0f);
  EXPECT_EQ(table[1][0].item<float>(), static_cast<float>(std::sin(1.0)));
}

}  // namespace
}  // namespace cosformer
