// What a layer of each kind carries from token to token.
#include <gtest/gtest.h>

#include "cosformer/format.h"

namespace cosformer {
namespace {

AttentionConfig of(const std::string& kind) {
  AttentionConfig config;
  config.kind = kind;
  return config;
}

TEST(StateSize, LinearKindsCarrySumsOfOneSize) {
  // 2 heads of 8: the state and its sum of features, doubled by the cosine.
  for (const int64_t tokens : {0, 1, 100000}) {
    EXPECT_EQ(state_size(of("linear"), 2, 8).bytes_at(tokens), 2 * 8 * 9 * 4);
    EXPECT_EQ(state_size(of("cosformer"), 2, 8).bytes_at(tokens),
              2 * 16 * 9 * 4);
    // 4 x 8 features, with a logarithm each.
    EXPECT_EQ(state_size(of("performer"), 2, 8).bytes_at(tokens),
              2 * 32 * 10 * 4);
    EXPECT_EQ(state_size(of("linformer"), 2, 8).bytes_at(tokens), 0);
  }
  AttentionConfig cosine = of("linear");
  cosine.reweight_len = 100;
  EXPECT_EQ(state_size(cosine, 2, 8).bytes_at(5), 2 * 16 * 9 * 4);
}

TEST(StateSize, SoftmaxCarriesEveryTokenAndAWindowItsLast) {
  const int64_t token = 2 * 8 * 2 * 4;
  EXPECT_EQ(state_size(of("softmax"), 2, 8).bytes_at(1000), 1000 * token);
  EXPECT_EQ(state_size(of("bigbird"), 2, 8).bytes_at(1000), 1000 * token);
  EXPECT_EQ(state_size(of("softmax"), 2, 8, 2).bytes_at(1000),
            1000 * token / 2);
  AttentionConfig window = of("softmax");
  window.window = 4;
  window.dilation = 2;
  EXPECT_EQ(state_size(window, 2, 8).bytes_at(1000), 9 * token);
  EXPECT_EQ(state_size(window, 2, 8).bytes_at(5), 5 * token);
  AttentionConfig global = of("longformer");
  global.window = 3;
  global.global_tokens = 2;
  EXPECT_EQ(state_size(global, 2, 8).bytes_at(1000), 2 * (2 + 4) * token);
}

}  // namespace
}  // namespace cosformer
