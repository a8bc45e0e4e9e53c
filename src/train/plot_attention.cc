// Who looks at whom: a heat map for each layer and head of a trained model.
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <sstream>
#include <string>
#include <vector>

#include "cosformer/models.h"
#include "cosformer/train.h"
#include "plot/gnuplot.h"

namespace cosformer {
namespace train_internal {
namespace {

struct Map {
  std::string title;
  torch::Tensor weights;  // [q, k] double
};

// A token as an axis label: what cannot be seen is written.
std::string label_of(const std::string& token) {
  std::string out;
  for (const char c : token) {
    if (c == ' ') {
      out += "\xe2\x90\xa3";  // open box
    } else if (c == '\n') {
      out += "\xe2\x8f\x8e";  // return symbol
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out += '?';
    } else {
      out += c;
    }
  }
  return out;
}

// The colours reach to this: a few peaks (the first token, often) would leave
// the rest white.
double top_of(const torch::Tensor& weights) {
  const torch::Tensor sorted = std::get<0>(weights.abs().flatten().sort());
  const int64_t n = sorted.numel();
  const double top = sorted[n - 1 - n / 200].item<double>();
  return top > 0 ? top : 1.0;
}

void append_map(std::ostringstream& out, const Map& map, int index) {
  const auto weights = map.weights.contiguous();
  const double* w = weights.data_ptr<double>();
  const int64_t rows = weights.size(0), columns = weights.size(1);
  out << "$m" << index << " << END\n";
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      // gnuplot has no word for what is not finite
      const double x = w[i * columns + j];
      out << (j > 0 ? " " : "") << (std::isfinite(x) ? x : 0.0);
    }
    out << "\n";
  }
  out << "END\n";
  const double top = top_of(weights);
  out << "set title " << plot::quoted(map.title) << " noenhanced font ',13'\n"
      << "set cbrange [" << (weights.min().item<double>() < 0 ? -top : 0) << ":"
      << top << "]\n"
      << "set palette defined "
      << (weights.min().item<double>() < 0
              ? "(-1 '#b2182b', 0 '#ffffff', 1 '#1f4f94')"
              : "(0 '#ffffff', 1 '#1f4f94')")
      << "\nplot $m" << index << " matrix with image notitle\n";
}

std::string tics(const std::vector<std::string>& tokens) {
  std::string out = "(";
  for (size_t i = 0; i < tokens.size(); ++i) {
    out +=
        str_cat(i > 0 ? ", " : "", plot::quoted(label_of(tokens[i])), " ", i);
  }
  return out + ")";
}

std::string script_of(const std::vector<Map>& maps, int64_t layers,
                      int64_t heads, const std::vector<std::string>& tokens,
                      const std::string& title, const std::string& png) {
  constexpr size_t kMostLabels = 40;
  const int cell = heads > 4 ? 360 : 480;
  std::ostringstream out;
  out << std::setprecision(6)
      << plot::gnuplot_header(static_cast<int>(heads) * cell + 40,
                              static_cast<int>(layers) * cell + 60, 11, png)
      << "unset key\nset border 15\nset size ratio -1\n"
      << "set yrange [" << tokens.size()
      << "-0.5:-0.5]\nset xrange [-0.5:" << tokens.size() << "-0.5]\n";
  if (tokens.size() <= kMostLabels) {
    out << "set ytics " << tics(tokens) << " noenhanced font ',8'\n"
        << "set xtics " << tics(tokens) << " noenhanced rotate font ',8'\n";
  }
  out << "set multiplot layout " << layers << "," << heads << " title "
      << plot::quoted(title) << " noenhanced font ',15'\n";
  int index = 0;
  for (const Map& map : maps) append_map(out, map, index++);
  out << "unset multiplot\n";
  return out.str();
}

// The chosen of 0 .. count - 1; none chosen = all.
Result<std::vector<int64_t>> chosen(const std::vector<int64_t>& wanted,
                                    int64_t count, const char* what) {
  std::vector<int64_t> out = wanted;
  if (out.empty()) {
    for (int64_t i = 0; i < count; ++i) out.push_back(i);
  }
  for (const int64_t i : out) {
    if (i < 0 || i >= count) {
      return invalid_argument("plot attention: ", what, " is ", i,
                              ", expected 0 to ", count - 1);
    }
  }
  return out;
}

}  // namespace
}  // namespace train_internal

Result<int64_t> plot_attention(const std::string& model_folder,
                               const std::string& text,
                               const AttentionPlotOptions& options,
                               const std::string& png_path) {
  using namespace train_internal;  // NOLINT: this file's own helpers
  auto loaded = load_model(model_folder);
  if (!loaded.ok()) return loaded.status();
  if (!loaded->tokenizer) {
    return not_found(model_folder,
                     ": no tokenizer in it, so that no text can "
                     "be read");
  }
  if (options.max_tokens < 1) {
    return invalid_argument("plot attention: max_tokens is ",
                            options.max_tokens, ", expected at least 1");
  }
  auto encoded = loaded->tokenizer->encode(text);
  if (!encoded.ok()) return encoded.status();
  std::vector<int32_t> ids = *encoded;
  if (ids.empty()) {
    return invalid_argument("plot attention: the text has no tokens");
  }
  int64_t most = options.max_tokens;
  if (const auto positions = loaded->model->max_positions()) {
    most = std::min(most, *positions);
  }
  if (static_cast<int64_t>(ids.size()) > most) {
    ids.resize(static_cast<size_t>(most));
  }
  const ModelConfig& config = loaded->model->config();
  auto layers = chosen(options.layers, config.num_layers, "layer");
  if (!layers.ok()) return layers.status();
  auto heads = chosen(options.heads, config.num_heads, "head");
  if (!heads.ok()) return heads.status();

  std::vector<std::string> tokens;
  for (const int32_t id : ids) {
    auto token = loaded->tokenizer->decode({id});
    tokens.push_back(token.ok() ? *token : str_cat(id));
  }
  torch::NoGradGuard no_grad;
  loaded->model->eval();
  const torch::Tensor matrix_ids =
      torch::tensor(std::vector<int64_t>(ids.begin(), ids.end())).unsqueeze(0);
  const std::vector<torch::Tensor> all =
      loaded->model->attention_matrices(matrix_ids);
  std::vector<Map> maps;
  for (const int64_t layer : *layers) {
    for (const int64_t head : *heads) {
      maps.push_back(
          {str_cat("layer ", layer, ", head ", head, ": ",
                   config.layer_attention(layer).kind),
           all[static_cast<size_t>(layer)][0][head].to(torch::kFloat64)});
    }
  }
  COSFORMER_RETURN_IF_ERROR(plot::draw_with_gnuplot(
      png_path, "this again", [&](const std::string& output) {
        return script_of(maps, static_cast<int64_t>(layers->size()),
                         static_cast<int64_t>(heads->size()), tokens,
                         "Weights of a query (row) on the keys (columns)",
                         output);
      }));
  return static_cast<int64_t>(ids.size());
}

}  // namespace cosformer
