// Text generation: prompt prefill, then a constant cost a token.
#include <algorithm>
#include <span>

#include "cosformer/models.h"
#include "models/sampling.h"

namespace cosformer {
namespace {

Status check(const ModelConfig& config, const std::vector<int32_t>& prompt,
             const GenerateOptions& options) {
  if (!config.is_causal) {
    return not_supported(
        "generate: the model is not causal (is_causal: false): it cannot "
        "write text token by token");
  }
  if (options.tokens < 0) {
    return invalid_argument("generate: tokens is ", options.tokens,
                            ", expected 0 or more");
  }
  if (!(options.temperature >= 0.0)) {
    return invalid_argument("generate: temperature is ", options.temperature,
                            ", expected 0 (greedy) or more");
  }
  if (options.top_k < 0) {
    return invalid_argument("generate: top_k is ", options.top_k,
                            ", expected 0 (all) or more");
  }
  if (!(options.top_p > 0.0 && options.top_p <= 1.0)) {
    return invalid_argument("generate: top_p is ", options.top_p,
                            ", expected more than 0, at most 1");
  }
  if (prompt.empty()) {
    return invalid_argument(
        "generate: the prompt is empty, expected at least one token to "
        "continue from");
  }
  for (const int32_t id : prompt) {
    if (id < 0 || id >= config.vocab_size) {
      return invalid_argument("generate: the prompt holds id ", id,
                              ", expected 0 to ", config.vocab_size - 1);
    }
  }
  return {};
}

class EvaluationScope {
 public:
  explicit EvaluationScope(Transformer& model)
      : model_(model), was_training_(model->is_training()) {
    model_->eval();
  }
  ~EvaluationScope() { model_->train(was_training_); }
  EvaluationScope(const EvaluationScope&) = delete;
  EvaluationScope& operator=(const EvaluationScope&) = delete;

 private:
  Transformer& model_;
  bool was_training_;
};

}  // namespace

Result<std::vector<int32_t>> generate(
    Transformer& model, const std::vector<int32_t>& prompt,
    const GenerateOptions& options,
    const std::function<bool(int32_t token)>& on_token) {
  COSFORMER_RETURN_IF_ERROR(check(model->config(), prompt, options));
  const std::optional<int64_t> limit = model->max_positions();
  const auto prompt_size = static_cast<int64_t>(prompt.size());
  if (limit && prompt_size > *limit && !options.rolling) {
    return invalid_argument(
        "generate: the prompt has ", prompt_size, " tokens, the model knows ",
        *limit,
        " positions: shorten the prompt, or use --rolling to go on from its "
        "latter half");
  }
  if (limit && options.rolling && *limit < 2) {
    return not_supported(
        "generate: --rolling needs a model of at least 2 "
        "positions, found ",
        *limit);
  }

  torch::NoGradGuard no_grad;
  const EvaluationScope evaluation(model);
  const SamplingOptions sampling{options.temperature, options.top_k,
                                 options.top_p, options.seed};
  const at::Device device = model->parameters().front().device();
  std::vector<int32_t> history = prompt;
  std::vector<int32_t> written;
  ModelState state;

  const auto feed = [&](std::span<const int32_t> tokens) {
    const torch::Tensor ids =
        torch::tensor(std::vector<int64_t>(tokens.begin(), tokens.end()))
            .unsqueeze(0)
            .to(device);
    return model->forward_with_state(ids, state, /*last_only=*/true)
        .flatten()
        .to(torch::kCPU, torch::kFloat)
        .contiguous();
  };
  // Starts anew from the latter half of what the model can hold.
  const auto roll = [&] {
    state = ModelState{};
    const auto keep = static_cast<size_t>(*limit / 2);
    const size_t count = std::min(history.size(), std::max<size_t>(keep, 1));
    return feed(std::span(history).last(count));
  };

  try {
    torch::Tensor logits;
    for (int64_t step = 0; step < options.tokens; ++step) {
      const bool is_first = step == 0;
      const int64_t needed =
          is_first ? prompt_size : state.position + 1;  // positions in use
      if (limit && needed > *limit) {
        if (!options.rolling) {
          return invalid_argument(
              "generate: stopped after ", step, " of ", options.tokens,
              " tokens: the model knows ", *limit,
              " positions, the prompt "
              "took ",
              prompt_size,
              ": ask for fewer tokens, shorten the prompt, or use --rolling");
        }
        logits = roll();
      } else {
        logits = is_first ? feed(history) : feed(std::span(history).last(1));
      }
      const int32_t token = sample(
          {logits.const_data_ptr<float>(), static_cast<size_t>(logits.numel())},
          sampling, static_cast<uint64_t>(step));
      history.push_back(token);
      written.push_back(token);
      if (on_token && !on_token(token)) break;
    }
  } catch (const c10::Error& e) {
    return Status(StatusCode::kInvalidArgument,
                  str_cat("generate: ", e.what_without_backtrace()));
  }
  return written;
}

}  // namespace cosformer
