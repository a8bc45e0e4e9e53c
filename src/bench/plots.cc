// time.png and memory.png: every kind against length on log-log axes, a panel a
// pass and form, one legend for all.
#include <algorithm>
#include <cmath>
#include <iomanip>
#include <limits>
#include <sstream>

#include "bench/kinds.h"
#include "bench/report.h"
#include "plot/gnuplot.h"

namespace cosformer {
namespace bench_internal {
namespace {

constexpr int kPanelWidth = 640, kPanelHeight = 520;
constexpr int kHead = 56;  // pixels of the title over all panels

// How a kind looks everywhere: families share a hue (exact blue, local orange,
// linear green), and no two a marker.
struct Look {
  const char* kind;
  const char* colour;
  int marker;
  const char* dash;
  double width;
};
// In the order of drawing: what matters most lies on top.
constexpr Look kLooks[] = {{"linformer", "#7f7f7f", 10, "solid", 1.8},
                           {"longformer", "#e69f00", 13, "solid", 2.2},
                           {"bigbird", "#8c510a", 12, "solid", 2.2},
                           {"window", "#d55e00", 5, "solid", 2.2},
                           {"performer", "#7b3294", 11, "solid", 2.2},
                           {"linear", "#1b7837", 9, "solid", 2.2},
                           {"relu", "#7fbf7b", 8, "solid", 1.8},
                           {"softmax-t5", "#56b4e9", 6, "solid", 1.8},
                           {"softmax", "#0b5fa5", 7, "solid", 2.4},
                           {"sdpa", "#000000", 4, "(8,5)", 3.0},
                           {"cosformer", "#c2185b", 7, "solid", 3.0}};

std::string style_of(const Look& look) {
  return str_cat("with linespoints lw ", look.width, " lc rgb '", look.colour,
                 "' pt ", look.marker, " ps 1.35 dt ", look.dash);
}

// "512", "4k".
std::string short_length(double tokens) {
  const auto n = static_cast<int64_t>(tokens + 0.5);
  return n >= 1024 && n % 1024 == 0 ? str_cat(n / 1024, "k") : str_cat(n);
}

struct Quantity {
  const char* file;  // without .png
  const char* title;
  double (*of)(const BenchPoint& point);  // 0 = nothing to show
  const char* (*unit)(const BenchSeries& series);
};
const Quantity kQuantities[] = {
    {"time", "Time of one layer's attention",
     [](const BenchPoint& p) {
       return p.seconds * (p.pass == BenchPass::kDecode ? 1e6 : 1e3);
     },
     [](const BenchSeries& series) {
       return series.pass == BenchPass::kDecode ? "microseconds a token"
                                                : "milliseconds";
     }},
    {"memory",
     "Memory beyond inputs, outputs and gradients (decode: state or cache)",
     [](const BenchPoint& p) {
       return static_cast<double>(p.extra_bytes) / (1 << 20);
     },
     [](const BenchSeries&) { return "MiB"; }}};

using Curve = std::vector<std::pair<double, double>>;

Curve points_of(const BenchReport& report, const BenchSeries& series,
                const std::string& kind, const Quantity& quantity) {
  Curve curve;
  for (const int64_t length : report.options.lengths) {
    const BenchPoint* p = find_point(report, series, kind, length);
    if (p == nullptr || !p->measured()) continue;
    const double value = quantity.of(*p);
    if (value > 0) curve.emplace_back(static_cast<double>(length), value);
  }
  return curve;
}

// Lengths on the axis: all where there are few, else every other one.
std::string length_tics(const std::vector<int64_t>& lengths) {
  const size_t step = (lengths.size() + 5) / 6;
  std::string tics;
  for (size_t i = (lengths.size() - 1) % step; i < lengths.size(); i += step) {
    const auto length = static_cast<double>(lengths[i]);
    tics += str_cat(tics.empty() ? "" : ", ", "'", short_length(length), "' ",
                    lengths[i]);
  }
  return "(" + tics + ")";
}

// One panel; false where no kind has anything to show.
bool append_panel(std::ostringstream& out, const BenchReport& report,
                  const BenchSeries& series, const Quantity& quantity,
                  int index) {
  std::string plots;
  double low = std::numeric_limits<double>::infinity(), high = 0;
  for (const Look& look : kLooks) {
    const Curve curve = points_of(report, series, look.kind, quantity);
    if (curve.empty()) continue;
    const std::string block = str_cat("$panel", index, "_", plots.size());
    out << block << " << END\n";
    for (const auto& [x, y] : curve) {
      out << x << " " << y << "\n";
      low = std::min(low, y);
      high = std::max(high, y);
    }
    out << "END\n";
    plots += str_cat(plots.empty() ? "plot " : ", ", block, " ", style_of(look),
                     " notitle");
  }
  if (plots.empty()) return false;
  const auto& lengths = report.options.lengths;
  out << "set title "
      << plot::quoted(std::string(title_of(series.pass)) +
                      (series.pass == BenchPass::kDecode ? ", one token"
                       : series.is_causal                ? ", causal"
                                                         : ", not causal"))
      << " noenhanced font ',17' tc rgb '#222222'\n"
      << "set xrange [" << 0.85 * static_cast<double>(lengths.front()) << ":"
      << 1.18 * static_cast<double>(lengths.back()) << "]\nset yrange ["
      << low / 1.6 << ":" << high * 1.6 << "]\nset ylabel "
      << plot::quoted(quantity.unit(series)) << "\n"
      << plots << "\n";
  return true;
}

const Look& look_of(const std::string& kind) {
  return *std::find_if(std::begin(kLooks), std::end(kLooks),
                       [&](const Look& look) { return kind == look.kind; });
}

// The kinds of any panel, in a cell of their own.
void append_legend(std::ostringstream& out, const BenchReport& report) {
  out << "unset title\nunset xlabel\nunset ylabel\nunset border\nunset tics\n"
         "unset grid\nunset logscale\nset xrange [0:1]\nset yrange [0:1]\n"
         "set key center center vertical maxcols 1 spacing 1.45 samplen 4 "
         "font ',16' tc rgb '#222222' Left reverse\n";
  std::string plots;
  for (const std::string& kind : report.options.kinds) {
    const auto series = series_of(report);
    const bool shown =
        std::any_of(series.begin(), series.end(), [&](const BenchSeries& each) {
          return !curve_of(report, each, kind).empty();
        });
    if (!shown) continue;
    plots +=
        str_cat(plots.empty() ? "plot " : ", ", "NaN ", style_of(look_of(kind)),
                " title ", plot::quoted(find_bench_kind(kind)->title));
  }
  out << plots << "\n";
}

// All passes and forms of one head dim and number of threads.
std::string script_of(const BenchReport& report,
                      const std::vector<BenchSeries>& panels,
                      const Quantity& quantity, const std::string& png) {
  const auto cells = static_cast<int>(panels.size()) + 1;  // and the legend
  const int columns = cells <= 3 ? cells : (cells <= 4 ? 2 : 3);
  const int rows = (cells + columns - 1) / columns;
  const int width = columns * kPanelWidth;
  const int height = rows * kPanelHeight + kHead;
  const double top = 1.0 - static_cast<double>(kHead) / height;
  const BenchSeries& first = panels.front();
  std::ostringstream out;
  out << std::setprecision(8) << plot::gnuplot_header(width, height, 14, png)
      << "set multiplot\n"
      << "set label 1 "
      << plot::quoted(str_cat(
             quantity.title, ": ", counted(report.options.heads, "head"),
             " of ", first.head_dim, ", batch ", report.options.batch, ", ",
             name(report.options.dtype), ", ", counted(first.threads, "thread"),
             " of ", report.machine.cpu, " (", report.machine.isa, ")"))
      << " at screen 0.5, " << 1.0 - 0.5 * kHead / height
      << " center noenhanced font ',18' tc rgb '#222222'\n"
      << "set logscale xy\nset format y '%g'\nunset mxtics\n"
      << "set xtics " << length_tics(report.options.lengths) << "\n"
      << "set grid xtics ytics lc rgb '#e4e4e4' lw 1 lt 1\n"
      << "set xlabel 'tokens' tc rgb '#333333'\n"
      << "set lmargin 10\nset rmargin 3\nset bmargin 3.6\nset tmargin 2.6\n";
  int cell = 0;
  const auto place = [&] {
    const int row = cell / columns, column = cell % columns;
    out << "set size " << 1.0 / columns << "," << top / rows << "\nset origin "
        << static_cast<double>(column) / columns << ","
        << top * (rows - 1 - row) / rows << "\n";
  };
  for (const BenchSeries& series : panels) {
    place();
    cell += append_panel(out, report, series, quantity, cell) ? 1 : 0;
    out << "unset label 1\n";
  }
  place();
  append_legend(out, report);
  out << "unset multiplot\n";
  return out.str();
}

}  // namespace
}  // namespace bench_internal

Result<std::vector<std::string>> plot_bench(const BenchReport& report,
                                            const std::string& folder) {
  using namespace bench_internal;  // NOLINT: this file's own helpers
  const BenchOptions& options = report.options;
  const bool many = options.head_dims.size() * options.threads.size() > 1;
  std::vector<std::string> paths;
  for (const int64_t dim : options.head_dims) {
    for (const int64_t threads : options.threads) {
      std::vector<BenchSeries> panels;
      for (const BenchSeries& series : series_of(report)) {
        const bool any = std::any_of(
            options.kinds.begin(), options.kinds.end(), [&](const auto& kind) {
              return !curve_of(report, series, kind).empty();
            });
        if (any && series.head_dim == dim && series.threads == threads) {
          panels.push_back(series);
        }
      }
      if (panels.empty()) continue;
      // Rows of the picture: causal above, decoding at their end.
      std::stable_sort(panels.begin(), panels.end(),
                       [](const BenchSeries& a, const BenchSeries& b) {
                         return std::pair(!a.is_causal, a.pass) <
                                std::pair(!b.is_causal, b.pass);
                       });
      for (const Quantity& quantity : kQuantities) {
        const std::string path = str_cat(
            folder, "/", quantity.file,
            many ? str_cat("-d", dim, "-t", threads) : std::string(), ".png");
        COSFORMER_RETURN_IF_ERROR(plot::draw_with_gnuplot(
            path, "the same again", [&](const std::string& output) {
              return script_of(report, panels, quantity, output);
            }));
        paths.push_back(path);
      }
    }
  }
  return paths;
}

}  // namespace cosformer
