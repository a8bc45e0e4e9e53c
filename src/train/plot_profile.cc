// The weight of a key against its distance, for everything that depends on
// distance alone: cosine, window, T5 bias, rotary.
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <numbers>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "cosformer/ops.h"
#include "cosformer/train.h"
#include "plot/gnuplot.h"

namespace cosformer {
namespace train_internal {
namespace {

constexpr const char* kColours[] = {"#1f6fc4", "#d9541e", "#2e8b57", "#8a5cc2",
                                    "#c49a1f", "#3aa6a6", "#c2447d", "#777777"};

struct Curve {
  std::string title;
  std::vector<double> y;  // of distance 0, 1, ...
};
struct Panel {
  std::string title, ylabel, extra;  // extra: lines of gnuplot before the plot
  std::vector<Curve> curves;
  bool steps = false;
  int64_t most = 0;  // the longest distance shown; 0 = options.max_distance
};

Panel cosine_panel(const ProfileOptions& options) {
  Panel panel{
      "cosFormer: cos(pi/2 distance / M)", "factor of the weight", "", {}};
  for (const int64_t m : options.reweight_lens) {
    Curve curve{str_cat("M = ", m), {}};
    for (int64_t d = 0; d <= options.max_distance; ++d) {
      curve.y.push_back(std::cos(std::numbers::pi / 2 * static_cast<double>(d) /
                                 static_cast<double>(m)));
    }
    panel.curves.push_back(std::move(curve));
  }
  panel.extra = "set yrange [-1.05:1.3]\n";
  return panel;
}

Panel window_panel(const ProfileOptions& options) {
  Panel panel{"Windows: seen (1) or not (0)",
              "factor of the weight",
              "set yrange [-0.05:1.3]\n",
              {},
              true,
              // Close enough to tell one token from the next.
              std::min(options.max_distance,
                       options.window * options.dilation * 5 / 4 + 1)};
  const auto curve = [&](int64_t dilation) {
    Curve out{str_cat("window ", options.window,
                      dilation > 1 ? str_cat(", dilation ", dilation) : ""),
              {}};
    for (int64_t d = 0; d <= panel.most; ++d) {
      out.y.push_back(
          d % dilation == 0 && d / dilation <= options.window ? 1.0 : 0.0);
    }
    return out;
  };
  std::set<int64_t> dilations{1, options.dilation};
  for (const int64_t dilation : dilations) {
    panel.curves.push_back(curve(dilation));
  }
  return panel;
}

Panel t5_panel(const ProfileOptions& options) {
  const bool learned = options.relative_bias.defined();
  const torch::Tensor weight =
      learned ? options.relative_bias.to(torch::kFloat64)
              : torch::arange(options.relative_buckets, torch::kFloat64)
                    .view({-1, 1});
  const torch::Tensor bias = t5_relative_bias(weight, options.bidirectional,
                                              options.relative_distance);
  const int64_t reach = (bias.size(1) - 1) / 2;
  Panel panel{learned ? "T5: exp(bias), as learned, earlier keys"
                      : "T5: the bucket of a distance, earlier keys",
              learned ? "factor of the weight" : "bucket",
              "",
              {},
              !learned};
  for (int64_t head = 0; head < bias.size(0); ++head) {
    Curve curve{learned ? str_cat("head ", head)
                        : str_cat(options.relative_buckets, " buckets up to ",
                                  options.relative_distance),
                {}};
    for (int64_t d = 0; d <= options.max_distance; ++d) {
      const double b = bias[head][reach - std::min(d, reach)].item<double>();
      curve.y.push_back(learned ? std::exp(b) : b);
    }
    panel.curves.push_back(std::move(curve));
  }
  return panel;
}

// Of a query and a key whose pairs are all alike: the mean of their cosines.
Panel rotary_panel(const ProfileOptions& options) {
  Panel panel{str_cat("Rotary: score of equal q and k, ", options.rotary_dim,
                      " dims, over q.k"),
              "factor of the score",
              "",
              {}};
  for (const double base : options.rotary_bases) {
    Curve curve{str_cat("base ", base), {}};
    for (int64_t d = 0; d <= options.max_distance; ++d) {
      double sum = 0;
      for (int64_t c = 0; c < options.rotary_dim / 2; ++c) {
        sum += std::cos(
            static_cast<double>(d) *
            std::pow(base, -2.0 * static_cast<double>(c) /
                               static_cast<double>(options.rotary_dim)));
      }
      curve.y.push_back(sum / static_cast<double>(options.rotary_dim / 2));
    }
    panel.curves.push_back(std::move(curve));
  }
  return panel;
}

void append_panel(std::ostringstream& out, const Panel& panel,
                  int64_t max_distance, int index) {
  for (size_t c = 0; c < panel.curves.size(); ++c) {
    out << "$p" << index << "c" << c << " << END\n";
    const auto& y = panel.curves[c].y;
    for (size_t d = 0; d < y.size(); ++d) out << d << " " << y[d] << "\n";
    out << "END\n";
  }
  out << "set title " << plot::quoted(panel.title) << " noenhanced font ',18'\n"
      << "set xlabel 'distance (tokens)'\nset ylabel "
      << plot::quoted(panel.ylabel)
      << " noenhanced\nset autoscale y\nset xrange [0:"
      << (panel.most > 0 ? panel.most : max_distance) << "]\n"
      << panel.extra << "plot 0 with lines lw 1 lc rgb '#999999' notitle";
  for (size_t c = 0; c < panel.curves.size(); ++c) {
    out << ", $p" << index << "c" << c << " with "
        << (panel.steps ? "steps" : "lines") << " lw 2.5 lc rgb '"
        << kColours[c % std::size(kColours)] << "' title "
        << plot::quoted(panel.curves[c].title) << " noenhanced";
  }
  out << "\n";
}

std::string script_of(const ProfileOptions& options, const std::string& png) {
  std::ostringstream out;
  out << std::setprecision(8) << plot::gnuplot_header(1800, 1200, 15, png)
      << "set grid ytics lc rgb '#e4e4e4' lw 1 lt 1\n"
      << "set key top right horizontal maxrows 1 samplen 2 tc rgb "
         "'#333333'\n"
      << "set multiplot layout 2,2\n";
  int index = 0;
  for (const Panel& panel : {cosine_panel(options), window_panel(options),
                             t5_panel(options), rotary_panel(options)}) {
    append_panel(out, panel, options.max_distance, index++);
  }
  out << "unset multiplot\n";
  return out.str();
}

Status check(const ProfileOptions& options) {
  const auto positive = [](int64_t value, const char* name) {
    return value > 0 ? Status()
                     : invalid_argument("plot profile: ", name, " is ", value,
                                        ", expected a positive number");
  };
  COSFORMER_RETURN_IF_ERROR(positive(options.max_distance, "max_distance"));
  constexpr int64_t kMost = 1 << 20;  // points that a picture can show
  if (options.max_distance > kMost) {
    return invalid_argument("plot profile: max_distance is ",
                            options.max_distance, ", expected at most ", kMost);
  }
  for (const int64_t m : options.reweight_lens) {
    COSFORMER_RETURN_IF_ERROR(positive(m, "reweight_len"));
  }
  COSFORMER_RETURN_IF_ERROR(positive(options.window, "window"));
  COSFORMER_RETURN_IF_ERROR(positive(options.dilation, "dilation"));
  COSFORMER_RETURN_IF_ERROR(positive(options.rotary_dim / 2, "rotary_dim / 2"));
  for (const double base : options.rotary_bases) {
    if (!(base > 0)) {
      return invalid_argument("plot profile: rotary_base is ", base,
                              ", expected a positive number");
    }
  }
  return {};
}

// What a model's config says instead of the defaults.
Status read_profile(const std::string& folder, ProfileOptions* options) {
  auto text = read_file(folder + "/config.json");
  if (!text.ok()) return text.status();
  auto config = model_config_from_json(*text);
  const Status status = config.ok() ? validate(*config) : config.status();
  if (!status.ok()) {
    return Status(status.code(),
                  str_cat(folder, "/config.json: ", status.message()));
  }
  const ModelConfig& c = *config;
  options->max_distance = c.max_len;
  std::set<int64_t> lens;
  for (int64_t layer = 0; layer < c.num_layers; ++layer) {
    const AttentionConfig& a = c.layer_attention(layer);
    if (a.kind == "cosformer" || a.reweight_len > 0) {
      lens.insert(a.reweight_len > 0 ? a.reweight_len : c.max_len);
    }
    if (a.window > 0) {
      options->window = a.window;
      options->dilation = a.dilation;
    }
  }
  if (!lens.empty()) options->reweight_lens.assign(lens.begin(), lens.end());
  if (c.position == "rope") {
    options->rotary_bases = {c.rope_base};
    options->rotary_dim = c.rope_dim > 0 ? c.rope_dim : c.head_size();
  }
  if (c.position != "t5") return {};
  options->relative_buckets = c.relative_buckets;
  options->relative_distance = c.max_distance;
  options->bidirectional = !c.is_causal;
  auto file = SafetensorsFile::open(folder + "/model.safetensors");
  if (!file.ok()) return file.status();
  const auto found = file->tensors().find("relative_bias.weight");
  if (found == file->tensors().end() ||
      found->second.dtype != DType::kFloat32 ||
      found->second.shape !=
          std::vector<int64_t>{c.relative_buckets, c.num_heads}) {
    return data_loss(folder,
                     "/model.safetensors: expected a float32 tensor "
                     "relative_bias.weight of [",
                     c.relative_buckets, ", ", c.num_heads, "]");
  }
  options->relative_bias =
      torch::from_blob(const_cast<void*>(found->second.data),
                       {c.relative_buckets, c.num_heads}, torch::kFloat32)
          .clone();
  return {};
}

}  // namespace
}  // namespace train_internal

Result<ProfileOptions> profile_of_model(const std::string& model_folder) {
  ProfileOptions options;
  COSFORMER_RETURN_IF_ERROR(
      train_internal::read_profile(model_folder, &options));
  return options;
}

Status plot_profile(const ProfileOptions& options,
                    const std::string& png_path) {
  COSFORMER_RETURN_IF_ERROR(train_internal::check(options));
  return plot::draw_with_gnuplot(
      png_path, "this again", [&](const std::string& output) {
        return train_internal::script_of(options, output);
      });
}

}  // namespace cosformer
