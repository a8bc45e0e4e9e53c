// `cosformer generate MODEL`: text, token by token.
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/model_path.h"
#include "cli/output.h"
#include "cli/signals.h"
#include "cosformer/models.h"
#include "text/utf8.h"

namespace cosformer::cli {
namespace {

using Json = nlohmann::ordered_json;

struct GenerateFlags {
  std::string model, prompt, prompt_file;
  GenerateOptions generate;
  bool json = false;
};

// Bytes in, whole UTF-8 characters out; what can never become one turns into
// U+FFFD.
class CharacterStream {
 public:
  std::string push(const std::string& bytes) {
    pending_ += bytes;
    return take(complete_utf8_prefix(pending_));
  }
  std::string finish() { return take(pending_.size()); }

 private:
  std::string take(size_t size) {
    std::string out;
    for (size_t at = 0; at < size;) {
      const Utf8Char character = decode_utf8(pending_, at);
      if (character.length > 0) {
        const auto length = static_cast<size_t>(character.length);
        out.append(pending_, at, length);
        at += length;
      } else {
        out += "\uFFFD";
        ++at;
      }
    }
    pending_.erase(0, size);
    return out;
  }
  std::string pending_;
};

Result<std::string> read_prompt(const GenerateFlags& options) {
  if (options.prompt_file.empty()) return options.prompt;
  return read_file(options.prompt_file, size_t{1} << 26);
}

int generate_command(const GenerateFlags& options) {
  auto prompt = read_prompt(options);
  if (!prompt.ok()) return fail(prompt.status());
  if (prompt->empty()) {
    return fail(
        invalid_argument(
            options.prompt_file.empty() ? "--prompt" : options.prompt_file,
            ": the prompt is empty, expected some text to go on from"),
        kWrongUse);
  }
  auto folder = find_model(options.model);
  if (!folder.ok()) return fail(folder.status());
  auto loaded = load_model(*folder);
  if (!loaded.ok()) return fail(loaded.status());
  if (loaded->tokenizer == nullptr) {
    return fail(not_found(*folder,
                          ": the model has no tokenizer, so it cannot read a "
                          "prompt: expected tokenizer files beside "
                          "config.json"));
  }
  const Tokenizer& tokenizer = *loaded->tokenizer;
  auto ids = tokenizer.encode(*prompt);
  if (!ids.ok()) {
    return fail(Status(ids.status().code(),
                       str_cat("prompt: ", ids.status().message())));
  }
  const std::atomic<bool>& stop = catch_stop_signals(nullptr);
  CharacterStream stream;
  std::string text;
  int64_t tokens = 0;
  const auto emit = [&](const std::string& characters) {
    text += characters;
    return options.json || write_out(characters);
  };
  if (!options.json) write_out(*prompt);
  const auto begin = std::chrono::steady_clock::now();
  auto written =
      generate(loaded->model, *ids, options.generate, [&](int32_t token) {
        ++tokens;
        return emit(stream.push(tokenizer.piece(token))) && !stop.load();
      });
  const std::chrono::duration<double> took =
      std::chrono::steady_clock::now() - begin;
  emit(stream.finish());
  if (options.json && written.ok()) {
    const Json json = {{"model", *folder},
                       {"prompt", *prompt},
                       {"text", text},
                       {"tokens", *written},
                       {"seed", options.generate.seed},
                       {"seconds", took.count()}};
    write_out(json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
  } else if (!options.json) {
    write_out("\n");
  }
  if (!written.ok()) return fail(written.status());
  if (const int status = check_output(); status != kDone) return status;
  return stop.load() ? 128 + caught_signal() : kDone;
}

}  // namespace

void add_generate_command(CLI::App& app, Run* run) {
  auto* command = app.add_subcommand("generate", "Let a model write text");
  const auto options = std::make_shared<GenerateFlags>();
  GenerateOptions& generate = options->generate;
  command
      ->add_option("MODEL", options->model,
                   "A run's folder (its best checkpoint), a checkpoint or a "
                   "model folder")
      ->required();
  auto* prompt =
      command->add_option("--prompt", options->prompt, "Text to go on from");
  auto* file = command->add_option("--prompt-file", options->prompt_file,
                                   "A file with the text to go on from");
  prompt->excludes(file);
  command->add_option("--tokens", generate.tokens, "Tokens to write")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command
      ->add_option("--temperature", generate.temperature,
                   "Of the sampling; 0 takes the likeliest token")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command
      ->add_option("--top-k", generate.top_k,
                   "Sample from the K likeliest tokens; 0 = all")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command
      ->add_option("--top-p", generate.top_p,
                   "Sample from the fewest tokens of this probability")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  command->add_option("--seed", generate.seed, "Of the sampling")
      ->capture_default_str();
  command->add_flag("--rolling", generate.rolling,
                    "Past the positions that the model knows, go on from the "
                    "latter half of the text");
  command->add_flag("--json", options->json,
                    "Print one JSON object at the end instead of the stream");
  command->footer(
      "Example:\n  cosformer generate runs/book --prompt \"Once upon a time\" "
      "--tokens 500 --temperature 0.7 --rolling");
  command->callback([options, run] {
    if (options->prompt_file.empty() && options->prompt.empty()) {
      throw CLI::RequiredError("--prompt TEXT or --prompt-file FILE");
    }
    *run = [options] { return generate_command(*options); };
  });
}

}  // namespace cosformer::cli
