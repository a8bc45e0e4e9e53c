#include "train/evaluation.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numbers>
#include <utility>

namespace cosformer {
namespace train_internal {
namespace {

// Nats over all targets; inputs, targets: [batch, seq].
double sum_of_losses(Transformer& model, const torch::Tensor& inputs,
                     const torch::Tensor& targets) {
  const torch::Tensor logits = model->forward(inputs);
  const torch::Tensor losses =
      at::cross_entropy_loss(logits.flatten(0, 1).to(torch::kFloat32),
                             targets.flatten(), {}, at::Reduction::None);
  return losses.sum(torch::kFloat64).item<double>();
}

}  // namespace

torch::Tensor bytes_of_tokens(const Tokenizer& tokenizer) {
  torch::Tensor bytes = torch::empty({tokenizer.vocab_size()}, torch::kInt64);
  auto* out = bytes.mutable_data_ptr<int64_t>();
  for (int64_t id = 0; id < tokenizer.vocab_size(); ++id) {
    out[id] =
        static_cast<int64_t>(tokenizer.piece(static_cast<int32_t>(id)).size());
  }
  return bytes;
}

int64_t evaluation_batch(int64_t context, int64_t vocab_size) {
  constexpr int64_t kMaxLogits = int64_t{1} << 24;
  constexpr int64_t kMaxTokens = 8192;
  const int64_t tokens =
      std::min(kMaxTokens, kMaxLogits / std::max<int64_t>(vocab_size, 1));
  return std::max<int64_t>(1, tokens / std::max<int64_t>(context, 1));
}

std::optional<EvalResult> evaluate_tokens(Transformer& model,
                                          const TokenSource& source,
                                          int64_t context, int64_t batch_size,
                                          const std::atomic<bool>* stop) {
  torch::NoGradGuard no_grad;
  const bool was_training = model->is_training();
  model->eval();
  double nats = 0.0;
  int64_t bytes = 0;
  const int64_t predictions = std::max<int64_t>(source.tokens - 1, 0);
  bool stopped = false;
  for (int64_t begin = 0; begin < predictions && !stopped;) {
    // Whole windows in a batch, then what is left of the last one.
    const int64_t left = predictions - begin;
    const int64_t rows = std::clamp<int64_t>(left / context, 1, batch_size);
    const int64_t width = std::min(context, left);
    const int64_t count = rows * width;
    const torch::Tensor ids = source.read(begin, count + 1);
    const torch::Tensor targets = ids.slice(0, 1, count + 1);
    nats += sum_of_losses(model, ids.slice(0, 0, count).view({rows, width}),
                          targets.view({rows, width}));
    bytes += source.token_bytes.index_select(0, targets).sum().item<int64_t>();
    begin += count;
    stopped = stop != nullptr && stop->load() && begin < predictions;
  }
  model->train(was_training);
  if (stopped) return std::nullopt;
  EvalResult result;
  result.tokens = predictions;
  if (predictions == 0) return result;
  result.loss = nats / static_cast<double>(predictions);
  result.perplexity = std::exp(result.loss);
  result.bits_per_byte = nats / std::numbers::ln2 /
                         static_cast<double>(std::max<int64_t>(bytes, 1));
  return result;
}

namespace {

// A folder that goes when the scope ends.
class TemporaryFolder {
 public:
  static Result<TemporaryFolder> make() {
    std::error_code error;
    const auto base = std::filesystem::temp_directory_path(error);
    if (error) return io_error("no temporary folder: ", error.message());
    std::string path = (base / "cosformer-eval-XXXXXX").string();
    if (mkdtemp(path.data()) == nullptr) {
      return io_error(path, ": cannot create: ", strerror(errno));
    }
    return TemporaryFolder(std::move(path));
  }
  TemporaryFolder(TemporaryFolder&& other) noexcept
      : path_(std::exchange(other.path_, {})) {}
  TemporaryFolder& operator=(TemporaryFolder&&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  explicit TemporaryFolder(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

Result<EvalResult> evaluate_with_cache(const std::string& model_dir,
                                       const DataConfig& data, int64_t context,
                                       int64_t batch_size, bool whole_text) {
  auto loaded = load_model(model_dir);
  if (!loaded.ok()) return loaded.status();
  if (loaded->tokenizer == nullptr) {
    return not_found(model_dir,
                     ": the folder has no tokenizer, so text cannot be turned "
                     "into tokens");
  }
  const ModelConfig& model = loaded->model->config();
  if (context == 0) context = model.max_len;
  if (context < 1 || context > model.max_len) {
    return invalid_argument("eval: context is ", context,
                            ", expected 1 to the model's max_len of ",
                            model.max_len);
  }
  if (batch_size == 0) batch_size = evaluation_batch(context, model.vocab_size);
  auto dataset = TokenDataset::prepare(data, loaded->tokenizer);
  if (!dataset.ok()) return dataset.status();
  const int64_t train_size = whole_text ? dataset->train_size() : 0;
  TokenSource source;
  source.tokens = train_size + dataset->validation_size();
  source.token_bytes = bytes_of_tokens(*loaded->tokenizer);
  source.read = [&](int64_t begin, int64_t count) {
    const int64_t from_train =
        std::clamp<int64_t>(train_size - begin, 0, count);
    torch::Tensor tail = dataset->validation_tokens(
        std::max<int64_t>(begin - train_size, 0), count - from_train);
    if (from_train == 0) return tail;
    return at::cat({dataset->train_tokens(begin, from_train), tail});
  };
  if (source.tokens < 2) {
    return invalid_argument(data.path, ": ", source.tokens,
                            " token(s) to evaluate, expected 2 or more",
                            whole_text ? "" : " in the validation part");
  }
  return *evaluate_tokens(loaded->model, source, context, batch_size, nullptr);
}

}  // namespace
}  // namespace train_internal

Result<EvalResult> evaluate(const std::string& model_dir,
                            const DataConfig& data, int64_t context,
                            int64_t batch_size, bool whole_text) {
  using namespace train_internal;  // NOLINT: this file's own helpers
  try {
    if (!data.cache_dir.empty()) {
      return evaluate_with_cache(model_dir, data, context, batch_size,
                                 whole_text);
    }
    auto folder = TemporaryFolder::make();
    if (!folder.ok()) return folder.status();
    DataConfig cached = data;
    cached.cache_dir = folder->path();
    return evaluate_with_cache(model_dir, cached, context, batch_size,
                               whole_text);
  } catch (const c10::Error& error) {
    return invalid_argument("eval: ", error.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory,
                  "eval: out of memory: use a smaller batch or context");
  }
}

}  // namespace cosformer
