// loss.png of a run.
#include <algorithm>
#include <cmath>
#include <iomanip>
#include <limits>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "plot/gnuplot.h"
#include "train/metrics.h"

namespace cosformer {
namespace train_internal {
namespace {

using Points = std::vector<std::pair<double, double>>;

struct Curves {
  Points train, validation;
  std::string kind;
  double unigram = 0, bigram = 0;  // 0 = not known
};

double number(const Json& line, const char* key) {
  const auto found = line.find(key);
  return found != line.end() && found->is_number() ? found->get<double>() : 0.0;
}

Curves curves_of(const std::vector<Json>& lines) {
  Curves curves;
  for (const Json& line : lines) {
    const std::string type = line.value("type", "");
    const std::pair<double, double> point = {number(line, "step"),
                                             number(line, "loss")};
    if (type == "train") curves.train.push_back(point);
    if (type == "eval") curves.validation.push_back(point);
    if (type == "start") {
      curves.kind = line.value("kind", "");
      curves.unigram = number(line, "unigram_loss");
      curves.bigram = number(line, "bigram_loss");
    }
  }
  return curves;
}

// Mean over a centred window that shrinks towards both ends, so that no end
// lags behind its points.
Points smoothed(const Points& points) {
  const auto n = static_cast<int64_t>(points.size());
  const int64_t half = std::max<int64_t>(1, n / 30);
  std::vector<long double> sums = {0};  // of the first 0, 1, ... points
  for (const auto& point : points) sums.push_back(sums.back() + point.second);
  Points out;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t reach = std::min({half, i, n - 1 - i});
    const long double sum = sums[static_cast<size_t>(i + reach + 1)] -
                            sums[static_cast<size_t>(i - reach)];
    out.emplace_back(
        points[static_cast<size_t>(i)].first,
        static_cast<double>(sum / static_cast<long double>(2 * reach + 1)));
  }
  return out;
}

void append_block(std::ostringstream& out, const char* name,
                  const Points& points) {
  out << "$" << name << " << END\n";
  for (const auto& [x, y] : points) out << x << " " << y << "\n";
  out << "END\n";
}

// A log axis of losses spans less than a decade: round values at even steps.
// Gnuplot chooses them for the huge losses of a run that diverged.
std::string tics_of(double low, double high) {
  const double span = high - low;
  if (!(span <= 20)) return "autofreq";
  double step = 1.0;
  if (span <= 6) step = 0.5;
  if (span <= 2.4) step = 0.2;
  if (span <= 1.2) step = 0.1;
  if (span <= 0.3) step = 0.05;
  std::ostringstream tics;
  for (double t = std::ceil(low / step) * step; t <= high; t += step) {
    tics << (tics.tellp() > 0 ? ", " : "") << t;
  }
  return str_cat("(", tics.str(), ")");
}

std::string script_of(const Curves& curves, const std::string& png) {
  double first = 0, last = 0;
  double low = std::numeric_limits<double>::infinity(), high = 0;
  for (const Points* points : {&curves.train, &curves.validation}) {
    for (const auto& [x, y] : *points) {
      last = std::max(last, x);
      low = std::min(low, y);
      high = std::max(high, y);
    }
  }
  for (const double baseline : {curves.unigram, curves.bigram}) {
    if (baseline <= 0) continue;
    low = std::min(low, baseline);
    high = std::max(high, baseline);
  }
  low *= 0.95;
  high *= 1.02;
  std::ostringstream out;
  out << std::setprecision(10);
  append_block(out, "train", curves.train);
  append_block(out, "smooth", smoothed(curves.train));
  append_block(out, "validation", curves.validation);
  out << plot::gnuplot_header(1400, 900, 18, png)
      << "set grid ytics lc rgb '#e4e4e4' lw 1 lt 1\n"
      << "set lmargin 10\nset rmargin 4\n"
      << "set xlabel 'step' tc rgb '#333333'\n"
      << "set ylabel 'loss (nats a token)' tc rgb '#333333' offset 0.5\n"
      << "set key top right spacing 1.3 samplen 2.5 tc rgb '#333333'\n"
      << "set xrange [" << first << ":" << std::max(last, 1.0) << "]\n"
      << "set logscale y\nset yrange [" << low << ":" << high << "]\n"
      << "unset mytics\nset format y '%g'\nset ytics " << tics_of(low, high)
      << "\n";
  std::ostringstream title;
  title << std::fixed << std::setprecision(3);
  title << curves.kind;
  if (!curves.validation.empty()) {
    const auto best = std::min_element(
        curves.validation.begin(), curves.validation.end(),
        [](const auto& a, const auto& b) { return a.second < b.second; });
    title << ": validation loss " << curves.validation.back().second
          << " at step "
          << static_cast<int64_t>(curves.validation.back().first);
    if (best->first != curves.validation.back().first) {
      title << " (best " << best->second << " at step "
            << static_cast<int64_t>(best->first) << ")";
    }
  }
  out << "set title " << plot::quoted(title.str())
      << " noenhanced font ',20' tc rgb '#222222'\n";
  int label = 0;
  const std::pair<const char*, double> baselines[] = {
      {"unigram", curves.unigram}, {"bigram", curves.bigram}};
  for (const auto& [name, value] : baselines) {
    if (value <= 0) continue;
    ++label;
    out << "set arrow " << label << " from graph 0, first " << value
        << " to graph 1, first " << value
        << " nohead dt (12,8) lw 1.8 lc rgb '#8a8a8a'\n"
        << "set label " << label << " \"" << name << " " << std::fixed
        << std::setprecision(3) << value << std::defaultfloat
        << std::setprecision(10) << "\" at graph 0.985, first " << value
        << " offset 0,0.6 right font ',15' tc rgb '#6a6a6a'\n";
  }
  out << "plot $train with lines lw 1.2 lc rgb '#904c8ed9' notitle, "
         "$smooth with lines lw 3 lc rgb '#1f6fc4' title 'training', "
         "$validation with linespoints lw 3 pt 7 ps 1.3 lc rgb '#d9541e' "
         "title 'validation'\n";
  return out.str();
}

}  // namespace
}  // namespace train_internal

Status plot_run(const std::string& run_dir, const std::string& png_path) {
  using namespace train_internal;  // NOLINT: this file's own helpers
  auto lines = read_metrics(run_dir + "/metrics.jsonl");
  if (!lines.ok()) return lines.status();
  const Curves curves = curves_of(*lines);
  if (curves.train.empty() && curves.validation.empty()) {
    return invalid_argument(run_dir,
                            "/metrics.jsonl: no losses in it, expected lines "
                            "of type train or eval: train longer than "
                            "train.log_every steps");
  }
  return plot::draw_with_gnuplot(
      png_path, str_cat("`cosformer plot ", run_dir, "`"),
      [&](const std::string& output) { return script_of(curves, output); });
}

}  // namespace cosformer
