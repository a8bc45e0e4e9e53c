// Advice for people, and as JSON.
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "base/format_text.h"
#include "bench/report.h"

namespace cosformer {
namespace {

using bench_internal::counted;
using Json = nlohmann::ordered_json;

constexpr const char* kLosses =
    "Speed is not quality: what the kinds lose is in docs/training.md (the "
    "Shakespeare recipes, every causal kind by one recipe).";
constexpr const char* kThumb =
    "up to about 1k tokens softmax with rotary positions, 1k to 8k window "
    "attention, beyond 8k linear kinds";

std::string seconds_text(double seconds) {
  if (seconds >= 1) return three_digits(seconds) + " s";
  if (seconds >= 1e-3) return three_digits(seconds * 1e3) + " ms";
  return three_digits(seconds * 1e6) + " us";
}

std::string cost_text(const std::optional<CostEstimate>& cost) {
  if (!cost) return "-";
  return str_cat(cost->is_extrapolated ? "~" : "", seconds_text(cost->seconds));
}

std::string family_title(const std::string& family) {
  if (family == "softmax") return "exact softmax";
  return family == "window" ? "window attention" : "a linear kind";
}

TextTable table_of(const Advice& advice, const AdviseOptions& options) {
  TextTable table = {{"kind", "forward", "training step", "training memory"}};
  if (options.is_causal) {
    table[0].insert(table[0].end(), {"decode a token", "state or cache"});
  }
  table[0].insert(table[0].end(), {"passes SDPA at", "softmax at"});
  for (const KindAdvice& each : advice.kinds) {
    if (!each.forward && !each.training && !each.decode) continue;
    std::vector<std::string> row = {
        (each.kind == advice.kind ? "* " : "  ") + each.kind,
        cost_text(each.forward), cost_text(each.training),
        each.training ? byte_size(each.training_bytes) : "-"};
    if (options.is_causal) {
      row.push_back(cost_text(each.decode));
      row.push_back(each.state_bytes > 0 ? byte_size(each.state_bytes) : "-");
    }
    const bool is_exact = each.kind == "sdpa" || each.kind == "softmax";
    row.push_back(each.kind == "sdpa" ? "-" : to_text(each.against_sdpa));
    row.push_back(is_exact ? "-" : to_text(each.against_softmax));
    table.push_back(std::move(row));
  }
  return table;
}

bool is_any_extrapolated(const Advice& advice) {
  for (const KindAdvice& each : advice.kinds) {
    for (const auto* cost : {&each.forward, &each.training, &each.decode}) {
      if (*cost && (*cost)->is_extrapolated) return true;
    }
  }
  return false;
}

std::string bearable_text(const Advice& advice, const AdviseOptions& options) {
  const std::string what = options.is_decoding
                               ? "decoding a token by exact softmax"
                               : "a training step's exact softmax";
  const std::string rest =
      " takes no longer than the rest of its layer (projections and "
      "feed-forward: " +
      seconds_text(advice.rest_of_layer) + " at this length) ";
  const Crossover& to = advice.softmax_bearable;
  switch (to.where) {
    case Crossover::Where::kAt:
      return what + rest + "up to about " + to_text(to) + " tokens here";
    case Crossover::Where::kAlwaysBehind:
      return what + rest + "at every length measured, up to " +
             counted(static_cast<int64_t>(to.length), "token");
    case Crossover::Where::kAlwaysAhead:
      return what + rest + "at no length measured here";
    case Crossover::Where::kUnknown:
      break;
  }
  return "exact softmax was not measured";
}

std::string thumb_text(const Advice& advice) {
  std::string text =
      str_cat("rule of thumb of the literature: ", kThumb,
              "; so at this length ", family_title(advice.rule_of_thumb));
  if (advice.kind.empty()) return text;
  return text + (advice.agrees
                     ? ": the same as measured here"
                     : ": differs from what was measured here, " + advice.kind);
}

}  // namespace

std::string advice_text(const Advice& advice, const AdviseOptions& options,
                        const BenchReport& report) {
  std::string out = bench_internal::machine_line(report) + "\n";
  out +=
      str_cat("\nfor ", counted(options.length, "token"), ", ",
              options.is_causal ? "causal" : "not causal", ", ",
              counted(options.heads, "head"), " of ", options.head_dim, ", ",
              counted(options.layers, "layer"), ", batch ", options.batch,
              options.is_decoding ? ", to decode" : ", to train", ":\n\n  use ",
              advice.kind.empty() ? "none of these" : advice.kind, ": ",
              advice.reason, "\n\n");
  out += format_table(table_of(advice, options));
  out += "\ntimes: attention of one layer, without its projections";
  if (is_any_extrapolated(advice)) out += "; ~: beyond the lengths measured";
  const BenchOptions& bench = report.options;
  if (bench.heads * bench.batch != options.heads * options.batch) {
    out += str_cat("; in proportion from the ", counted(bench.heads, "head"),
                   " and batch ", bench.batch, " measured");
  }
  out +=
      str_cat("; memory, state and cache: ",
              options.layers == 1 ? "the one layer"
                                  : "all " + counted(options.layers, "layer"),
              " (training: queries, keys, values and outputs kept "
              "for the backward, and one layer's peak)\n");
  out += "\nwhat each gives up against exact softmax:\n";
  for (const KindAdvice& each : advice.kinds) {
    if (each.kind == "sdpa") continue;
    out += "  " + each.kind + std::string(12 - each.kind.size(), ' ') +
           find_bench_kind(each.kind)->gives_up + "\n";
  }
  bool headed = false;
  for (const KindAdvice& each : advice.kinds) {
    if (each.excluded.empty()) continue;
    if (!headed) out += "\nnot to be chosen here:\n";
    headed = true;
    out += "  " + each.kind + std::string(12 - each.kind.size(), ' ') +
           each.excluded + "\n";
  }
  out += str_cat("\n", bearable_text(advice, options), "\n", thumb_text(advice),
                 "\n", kLosses, "\n");
  return out;
}

std::string advice_json(const Advice& advice, const AdviseOptions& options,
                        const BenchReport& report) {
  const auto cost = [](const std::optional<CostEstimate>& value) {
    if (!value) return Json();
    return Json{{"seconds", value->seconds},
                {"extrapolated", value->is_extrapolated}};
  };
  Json json = {{"kind", advice.kind.empty() ? Json() : Json(advice.kind)},
               {"reason", advice.reason},
               {"length", options.length},
               {"causal", options.is_causal},
               {"decode", options.is_decoding},
               {"head_dim", options.head_dim},
               {"heads", options.heads},
               {"layers", options.layers},
               {"batch", options.batch},
               {"rest_of_layer_seconds", advice.rest_of_layer},
               {"softmax_bearable_to", to_text(advice.softmax_bearable)},
               {"rule_of_thumb", advice.rule_of_thumb},
               {"agrees", advice.agrees},
               {"quality", kLosses},
               {"cpu", report.machine.cpu},
               {"isa", report.machine.isa},
               {"kinds", Json::array()}};
  for (const KindAdvice& each : advice.kinds) {
    json["kinds"].push_back(
        {{"kind", each.kind},
         {"forward", cost(each.forward)},
         {"training", cost(each.training)},
         {"decode", cost(each.decode)},
         {"training_bytes", each.training_bytes},
         {"state_bytes", each.state_bytes},
         {"passes_sdpa_at", to_text(each.against_sdpa)},
         {"passes_softmax_at", to_text(each.against_softmax)},
         {"excluded", each.excluded.empty() ? Json() : Json(each.excluded)},
         {"gives_up", find_bench_kind(each.kind)->gives_up}});
  }
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace cosformer
