// Our side of the training-step benchmark (compare.py): one optimiser step of
// the recipe's model on random tokens, timed; prints {"milliseconds": [...]}.
#include <ATen/Parallel.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <iostream>
#include <string>

#include "cosformer/models.h"
#include "cosformer/train.h"
#include "train/optimizer.h"

namespace {

constexpr int64_t kVocab = 65;

// 4 layers, 4 heads, 128 wide, GELU, no biases, learned positions, tied.
cosformer::ModelConfig recipe(const std::string& kind, int64_t context) {
  cosformer::ModelConfig config;
  config.vocab_size = kVocab;
  config.embed_dim = 128;
  config.num_layers = 4;
  config.num_heads = 4;
  config.ffn_dim = 512;
  config.max_len = context;
  config.qkv_bias = config.out_bias = config.mlp_bias = false;
  config.norm_bias = false;
  config.attention[0].kind = kind;
  return config;
}

}  // namespace

int main(int argc, char** argv) {
  std::string kind = "cosformer";
  int64_t context = 256, batch = 12, steps = 20, warmup = 2;
  int threads = 2;
  CLI::App app("One training step of the shakespeare recipe, timed");
  app.add_option("--kind", kind, "cosformer, linear or softmax");
  app.add_option("--context", context, "tokens a sequence");
  app.add_option("--batch", batch, "sequences");
  app.add_option("--steps", steps, "timed steps");
  app.add_option("--warmup", warmup, "steps before them");
  app.add_option("--threads", threads, "of torch");
  CLI11_PARSE(app, argc, argv);

  at::set_num_threads(threads);
  torch::manual_seed(1);
  cosformer::Transformer model(recipe(kind, context));
  const cosformer::TrainConfig train;
  cosformer::train_internal::AdamW optimizer(model->named_parameters(), train);
  const torch::Tensor data = torch::randint(kVocab, {batch, context + 1});

  int64_t count = 0;
  const auto step = [&] {
    optimizer.zero_grad();
    const torch::Tensor logits = model->forward(data.slice(1, 0, context));
    torch::Tensor loss = torch::nn::functional::cross_entropy(
        logits.flatten(0, 1), data.slice(1, 1).flatten());
    loss.backward();
    optimizer.clip_grad_norm(train.grad_clip);
    optimizer.step(train.lr, ++count);
    return loss.item<float>();
  };
  for (int64_t i = 0; i < warmup; ++i) step();
  std::cout << "{\"milliseconds\": [";
  for (int64_t i = 0; i < steps; ++i) {
    const auto start = std::chrono::steady_clock::now();
    step();
    const std::chrono::duration<double, std::milli> took =
        std::chrono::steady_clock::now() - start;
    std::cout << (i > 0 ? ", " : "") << took.count();
  }
  std::cout << "]}\n";
  return 0;
}
