// Tables for people: on a terminal one a series, in markdown every figure.
#include "bench/report.h"

#include <algorithm>
#include <functional>
#include <map>
#include <utility>

#include "base/format_text.h"
#include "bench/kinds.h"

namespace cosformer {
namespace bench_internal {

std::string_view title_of(BenchPass pass) {
  return pass == BenchPass::kBackward ? "forward + backward" : name(pass);
}

std::string title_of(const BenchSeries& series) {
  const char* causal = series.pass == BenchPass::kDecode ? ""
                       : series.is_causal                ? ", causal"
                                                         : ", not causal";
  return str_cat(title_of(series.pass), causal, ", head_dim ", series.head_dim,
                 ", ", counted(series.threads, "thread"));
}

std::string machine_line(const BenchReport& report) {
  const BenchMachine& machine = report.machine;
  const BenchOptions& options = report.options;
  return str_cat("cosformer ", machine.version, " on ", machine.cpu, " (",
                 machine.isa, ", ", counted(machine.cores, "core"), "), torch ",
                 machine.torch_version, "; ", name(options.dtype), ", batch ",
                 options.batch, ", ", counted(options.heads, "head"));
}

std::string counted(int64_t count, std::string_view thing) {
  return str_cat(with_commas(count), " ", thing, count == 1 ? "" : "s");
}

const BenchPoint* find_point(const BenchReport& report,
                             const BenchSeries& series, std::string_view kind,
                             int64_t length) {
  for (const BenchPoint& p : report.points) {
    if (p.length == length && p.kind == kind && series_of(p) == series) {
      return &p;
    }
  }
  return nullptr;
}

const BenchPeak* find_peak(const BenchReport& report, int64_t threads) {
  for (const BenchPeak& peak : report.peaks) {
    if (peak.threads == threads) return &peak;
  }
  return nullptr;
}

namespace {

constexpr const char* kNone = "-";

// What a run is, before any figure.
std::vector<std::string> preface(const BenchReport& report) {
  const BenchOptions& options = report.options;
  std::vector<std::string> lines = {machine_line(report)};
  std::string peaks;
  for (const BenchPeak& peak : report.peaks) {
    peaks += str_cat(peaks.empty() ? "" : "; ", three_digits(peak.flops * 1e-9),
                     " GF/s of multiply-adds, ",
                     three_digits(peak.read_bytes * 1e-9),
                     " GB/s of memory on ", counted(peak.threads, "thread"));
  }
  lines.push_back("floor: " + peaks);
  lines.push_back(
      "share: what the multiply-adds of the kind take at that peak (decode: a "
      "plain loop over the state or cache), measured beside every run, over "
      "its time");
  lines.push_back(str_cat(
      "time: the median of up to ", counted(options.repeats, "round"),
      " in which all kinds take turns (one thread: its processor time); "
      "memory: peak beyond inputs, outputs and gradients (decode: with the "
      "state "
      "or cache)"));
  lines.push_back(str_cat("window ", options.window, " a side, ",
                          counted(options.num_features, "random feature"), ", ",
                          counted(options.projected_len, "projected key")));
  return lines;
}

// Which points have no figure, the same reason said once.
std::vector<std::string> left_out(const BenchReport& report) {
  std::vector<std::string> reasons;  // in the order of the points
  std::map<std::string, std::map<std::string, int64_t>> kinds;
  for (const BenchPoint& p : report.points) {
    if (p.measured()) continue;
    if (kinds.find(p.left_out) == kinds.end()) reasons.push_back(p.left_out);
    ++kinds[p.left_out][p.kind];
  }
  std::vector<std::string> lines;
  for (const std::string& reason : reasons) {
    std::string list;
    for (const auto& [kind, count] : kinds[reason]) {
      list += str_cat(list.empty() ? "" : ", ", kind, " (",
                      counted(count, "point"), ")");
    }
    lines.push_back(reason + ": " + list);
  }
  return lines;
}

using Cell = std::function<std::string(const BenchPoint&)>;

// kinds x lengths. more: columns after them, a heading and what it says of a
// kind.
TextTable table_of(
    const BenchReport& report, const BenchSeries& series, const Cell& cell,
    const std::vector<
        std::pair<std::string, std::function<std::string(const std::string&)>>>&
        more = {}) {
  TextTable table(1);
  table[0].push_back("kind");
  for (const int64_t length : report.options.lengths) {
    table[0].push_back(with_commas(length));
  }
  for (const auto& column : more) table[0].push_back(column.first);
  for (const std::string& kind : report.options.kinds) {
    std::vector<std::string> row = {kind};
    bool any = false;
    for (const int64_t length : report.options.lengths) {
      const BenchPoint* p = find_point(report, series, kind, length);
      const bool measured = p != nullptr && p->measured();
      any |= measured;
      row.push_back(measured ? cell(*p) : kNone);
    }
    if (!any) continue;
    for (const auto& column : more) row.push_back(column.second(kind));
    table.push_back(std::move(row));
  }
  return table;
}

// Milliseconds, or microseconds of a step.
double unit_of(const BenchSeries& series) {
  return series.pass == BenchPass::kDecode ? 1e6 : 1e3;
}
const char* unit_name(const BenchSeries& series) {
  return series.pass == BenchPass::kDecode ? "microseconds a token"
                                           : "milliseconds a call";
}

Cell time_cell(const BenchSeries& series) {
  return [unit = unit_of(series)](const BenchPoint& p) {
    return three_digits(p.seconds * unit);
  };
}

std::string times_text(const BenchReport& report, const BenchPoint& p) {
  const auto times = times_as_fast(report, p);
  return times ? three_digits(*times) : kNone;
}

std::string crossover_text(const BenchReport& report, const BenchSeries& series,
                           const std::string& kind,
                           const std::string& reference) {
  if (kind == kReference || kind == reference) return kNone;
  return to_text(find_crossover(curve_of(report, series, kind),
                                curve_of(report, series, reference)));
}

// Of the longest length at which pick() says something.
std::string at_longest(const BenchReport& report, const BenchSeries& series,
                       const std::string& kind, const Cell& pick) {
  for (auto length = report.options.lengths.rbegin();
       length != report.options.lengths.rend(); ++length) {
    const BenchPoint* p = find_point(report, series, kind, *length);
    if (p == nullptr || !p->measured()) continue;
    const std::string text = pick(*p);
    if (text != kNone) return text;
  }
  return kNone;
}

TextTable terminal_table(const BenchReport& report, const BenchSeries& series) {
  const auto longest = [&](const Cell& pick) {
    return [&, pick](const std::string& kind) {
      return at_longest(report, series, kind, pick);
    };
  };
  const auto passes = [&](const char* reference) {
    return [&, reference](const std::string& kind) {
      return crossover_text(report, series, kind, reference);
    };
  };
  return table_of(
      report, series, time_cell(series),
      {{"share %",
        longest([](const BenchPoint& p) { return fixed(100 * p.share, 0); })},
       {"x SDPA",
        longest([&](const BenchPoint& p) { return times_text(report, p); })},
       {"memory",
        longest([](const BenchPoint& p) { return byte_size(p.extra_bytes); })},
       {"passes SDPA at", passes("sdpa")},
       {"softmax at", passes("softmax")}});
}

std::string markdown_table(const TextTable& table) {
  std::string out;
  for (size_t r = 0; r < table.size(); ++r) {
    out += "|";
    for (const std::string& cell : table[r]) out += " " + cell + " |";
    out += "\n";
    if (r > 0) continue;
    out += "|---|";
    for (size_t c = 1; c < table[r].size(); ++c) out += "---:|";
    out += "\n";
  }
  return out;
}

bool has_figures(const BenchReport& report, const BenchSeries& series) {
  return std::any_of(report.options.kinds.begin(), report.options.kinds.end(),
                     [&](const std::string& kind) {
                       return !curve_of(report, series, kind).empty();
                     });
}

}  // namespace
}  // namespace bench_internal

std::optional<double> times_as_fast(const BenchReport& report,
                                    const BenchPoint& point) {
  const BenchPoint* reference = bench_internal::find_point(
      report, series_of(point), bench_internal::kReference, point.length);
  if (!point.measured() || reference == nullptr || !reference->measured()) {
    return std::nullopt;
  }
  return reference->seconds / point.seconds;
}

std::string bench_text(const BenchReport& report) {
  using namespace bench_internal;  // NOLINT: this file's own helpers
  std::string out;
  for (const std::string& line : preface(report)) out += line + "\n";
  for (const BenchSeries& series : series_of(report)) {
    if (!has_figures(report, series)) continue;
    out += str_cat("\n", title_of(series), ": ", unit_name(series),
                   "; share, ratio and memory at the longest length\n",
                   format_table(terminal_table(report, series)));
  }
  const auto missing = left_out(report);
  if (!missing.empty()) out += "\nleft out:\n";
  for (const std::string& line : missing) out += "  " + line + "\n";
  return out;
}

std::string bench_markdown(const BenchReport& report) {
  using namespace bench_internal;  // NOLINT: this file's own helpers
  std::string out = "# cosformer bench\n\n";
  for (const std::string& line : preface(report)) out += "- " + line + "\n";
  const Cell times = [&](const BenchPoint& p) { return times_text(report, p); };
  const Cell share = [](const BenchPoint& p) {
    return fixed(100 * p.share, 0);
  };
  const Cell memory = [](const BenchPoint& p) {
    return three_digits(static_cast<double>(p.extra_bytes) / (1 << 20));
  };
  for (const BenchSeries& series : series_of(report)) {
    if (!has_figures(report, series)) continue;
    const auto section = [&](const std::string& what, const TextTable& table) {
      out += what + "\n\n" + markdown_table(table) + "\n";
    };
    out += "\n## " + title_of(series) + "\n\n";
    section(str_cat("Time, ", unit_name(series), ":"),
            table_of(report, series, time_cell(series)));
    section("How many times as fast as torch's SDPA:",
            table_of(report, series, times));
    section("Share of the floor, %:", table_of(report, series, share));
    section("Extra memory, MiB:", table_of(report, series, memory));
    TextTable crossovers = {{"kind", "passes torch's SDPA at", "softmax at"}};
    for (const std::string& kind : report.options.kinds) {
      if (curve_of(report, series, kind).empty() || kind == kReference)
        continue;
      crossovers.push_back({kind, crossover_text(report, series, kind, "sdpa"),
                            crossover_text(report, series, kind, "softmax")});
    }
    section("Tokens from which on it is faster (log-log between the lengths):",
            crossovers);
  }
  const auto missing = left_out(report);
  if (!missing.empty()) out += "## Left out\n\n";
  for (const std::string& line : missing) out += "- " + line + "\n";
  return out;
}

}  // namespace cosformer
