// A tiny model, a forward pass, a gradient.
#include <cosformer/models.h>

#include <cstdio>

int main() {
  cosformer::ModelConfig config;
  config.vocab_size = 11;
  config.embed_dim = 16;
  config.num_layers = 2;
  config.num_heads = 2;
  config.max_len = 32;
  cosformer::Transformer model(config);
  const torch::Tensor logits = model->forward(torch::randint(11, {2, 7}));
  logits.sum().backward();
  std::printf("%ld %ld %ld\n", logits.size(0), logits.size(1), logits.size(2));
  return logits.isfinite().all().item<bool>() ? 0 : 1;
}
