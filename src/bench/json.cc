// bench.json, written and read.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "bench/kinds.h"
#include "cosformer/bench.h"

namespace cosformer {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kFormatVersion = 1;
// Whole numbers below this are exact in every reader of JSON.
constexpr double kMost = 9007199254740992;  // 2^53
// bench.json has four levels; a tree is freed and copied level by level on the
// stack.
constexpr int kDeepest = 64;

// A crossover for programs: null where there is none.
Json json_of(const Crossover& crossover) {
  switch (crossover.where) {
    case Crossover::Where::kAlwaysAhead:
      return {{"where", "always ahead"}, {"from", crossover.length}};
    case Crossover::Where::kAt:
      return {{"where", "at"}, {"length", crossover.length}};
    case Crossover::Where::kAlwaysBehind:
      return {{"where", "always behind"}, {"up_to", crossover.length}};
    case Crossover::Where::kUnknown:
      break;
  }
  return nullptr;
}

Json json_of(const BenchOptions& options) {
  Json passes = Json::array();
  for (const BenchPass pass : options.passes) passes.push_back(name(pass));
  return {{"kinds", options.kinds},
          {"passes", passes},
          {"causal", options.causal},
          {"lengths", options.lengths},
          {"head_dims", options.head_dims},
          {"threads", options.threads},
          {"heads", options.heads},
          {"batch", options.batch},
          {"dtype", name(options.dtype)},
          {"window", options.window},
          {"num_features", options.num_features},
          {"projected_len", options.projected_len},
          {"repeats", options.repeats},
          {"seconds", options.seconds}};
}

Json json_of(const BenchPoint& p, const BenchReport& report) {
  Json out = {{"kind", p.kind},         {"pass", name(p.pass)},
              {"causal", p.is_causal},  {"length", p.length},
              {"head_dim", p.head_dim}, {"threads", p.threads}};
  if (!p.measured()) {
    out["left_out"] = p.left_out;
    if (p.predicted > 0) out["predicted_seconds"] = p.predicted;
    return out;
  }
  out["rounds"] = p.rounds;
  out["seconds"] = p.seconds;
  out["fastest_seconds"] = p.fastest_seconds;
  out["share"] = p.share;
  out["extra_bytes"] = p.extra_bytes;
  if (const auto times = times_as_fast(report, p)) out["times_sdpa"] = *times;
  return out;
}

Json crossovers_of(const BenchReport& report) {
  Json all = Json::array();
  for (const BenchSeries& series : series_of(report)) {
    for (const std::string& kind : report.options.kinds) {
      for (const char* reference : {"sdpa", "softmax"}) {
        if (kind == "sdpa" || kind == reference) continue;
        const Json found =
            json_of(find_crossover(curve_of(report, series, kind),
                                   curve_of(report, series, reference)));
        if (found.is_null()) continue;
        all.push_back({{"kind", kind},
                       {"against", reference},
                       {"pass", name(series.pass)},
                       {"causal", series.is_causal},
                       {"head_dim", series.head_dim},
                       {"threads", series.threads},
                       {"crossover", found}});
      }
    }
  }
  return all;
}

// Reads keys of an object, each named in full where it is wrong. The first
// error is kept, and nothing is read after it.
class Reader {
 public:
  Reader(const Json& json, std::string path, Status* status)
      : json_(json), path_(std::move(path)), status_(status) {
    if (!json_.is_object()) expected(path_, json_, "an object");
  }

  void read(const char* key, std::string* out) {
    if (const Json* value = find(key)) {
      if (!value->is_string()) return expected(full(key), *value, "a string");
      *out = value->get<std::string>();
    }
  }
  void read(const char* key, bool* out) {
    if (const Json* value = find(key)) {
      if (!value->is_boolean()) {
        return expected(full(key), *value, "true or false");
      }
      *out = value->get<bool>();
    }
  }
  void read(const char* key, double* out) {
    if (const Json* value = find(key)) {
      if (!value->is_number() || !(value->get<double>() >= 0)) {
        return expected(full(key), *value, "a number, 0 or more");
      }
      if (value->get<double>() >= kMost) {
        return expected(full(key), *value, "a number below 2^53");
      }
      *out = value->get<double>();
    }
  }
  void read(const char* key, int64_t* out) {
    if (const Json* value = find(key)) {
      if (!value->is_number_integer() || value->get<double>() < 0) {
        return expected(full(key), *value, "a whole number, 0 or more");
      }
      if (value->get<double>() >= kMost) {
        return expected(full(key), *value, "a whole number below 2^53");
      }
      *out = value->get<int64_t>();
    }
  }
  void read(const char* key, BenchPass* out) {
    std::string text;
    read(key, &text);
    if (!status_->ok()) return;
    for (const BenchPass pass :
         {BenchPass::kForward, BenchPass::kBackward, BenchPass::kDecode}) {
      *out = pass;
      if (name(pass) == text) return;
    }
    expected(full(key), text, "forward, backward or decode");
  }
  void read(const char* key, DType* out) {
    std::string text;
    read(key, &text);
    if (!status_->ok()) return;
    for (const DType dtype : {DType::kFloat32, DType::kFloat64,
                              DType::kBFloat16, DType::kFloat16}) {
      *out = dtype;
      if (name(dtype) == text) return;
    }
    expected(full(key), text, "float32, float64, bfloat16 or float16");
  }
  // An array whose every element is read by read_one(element, path).
  template <typename ReadOne>
  void each(const char* key, const ReadOne& read_one) {
    const Json* value = find(key);
    if (value == nullptr) return;
    if (!value->is_array()) return expected(full(key), *value, "an array");
    for (size_t i = 0; i < value->size() && status_->ok(); ++i) {
      read_one((*value)[i], str_cat(full(key), "[", i, "]"));
    }
  }
  template <typename T>
  void read(const char* key, std::vector<T>* out) {
    out->clear();
    each(key, [&](const Json& element, const std::string& path) {
      const Json boxed = {{"value", element}};
      T one{};
      Reader(boxed, "", status_, path).read("value", &one);
      out->push_back(std::move(one));
    });
  }
  bool has(const char* key) const {
    return json_.is_object() && json_.contains(key);
  }
  const Json* find(const char* key) {
    if (!status_->ok()) return nullptr;
    if (has(key)) return &json_.at(key);
    *status_ = data_loss(full(key), ": missing");
    return nullptr;
  }
  std::string full(const char* key) const {
    if (!instead_.empty()) return instead_;
    return path_.empty() ? key : str_cat(path_, ".", key);
  }

 private:
  Reader(const Json& json, std::string path, Status* status,
         std::string instead)
      : json_(json),
        path_(std::move(path)),
        instead_(std::move(instead)),
        status_(status) {}
  void expected(const std::string& key, const Json& found, const char* what) {
    if (!status_->ok()) return;
    std::string text =
        found.is_array() ? "an array"
        : found.is_object()
            ? "an object"
            : found.dump(-1, ' ', false, Json::error_handler_t::replace);
    if (text.size() > 40) text = text.substr(0, 40) + "...";
    *status_ = data_loss(key.empty() ? "the file" : key, ": found ", text,
                         ", expected ", what);
  }

  const Json& json_;
  std::string path_;
  std::string instead_;  // the whole name of an element of an array
  Status* status_;
};

void read_options(Reader in, BenchOptions* out) {
  in.read("kinds", &out->kinds);
  in.read("passes", &out->passes);
  in.read("causal", &out->causal);
  in.read("lengths", &out->lengths);
  in.read("head_dims", &out->head_dims);
  in.read("threads", &out->threads);
  in.read("heads", &out->heads);
  in.read("batch", &out->batch);
  in.read("dtype", &out->dtype);
  in.read("window", &out->window);
  in.read("num_features", &out->num_features);
  in.read("projected_len", &out->projected_len);
  in.read("repeats", &out->repeats);
  in.read("seconds", &out->seconds);
}

BenchPoint read_point(Reader in) {
  BenchPoint p;
  in.read("kind", &p.kind);
  in.read("pass", &p.pass);
  in.read("causal", &p.is_causal);
  in.read("length", &p.length);
  in.read("head_dim", &p.head_dim);
  in.read("threads", &p.threads);
  if (in.has("left_out")) {
    in.read("left_out", &p.left_out);
    if (in.has("predicted_seconds")) {
      in.read("predicted_seconds", &p.predicted);
    }
    return p;
  }
  in.read("rounds", &p.rounds);
  in.read("seconds", &p.seconds);
  in.read("fastest_seconds", &p.fastest_seconds);
  in.read("share", &p.share);
  in.read("extra_bytes", &p.extra_bytes);
  return p;
}

// Ascending lengths, as everything that draws or interpolates expects, and each
// point once.
Status put_in_order(BenchReport* report) {
  std::sort(report->options.lengths.begin(), report->options.lengths.end());
  std::stable_sort(report->points.begin(), report->points.end(),
                   [](const BenchPoint& a, const BenchPoint& b) {
                     return a.length < b.length;
                   });
  std::set<std::tuple<std::string, BenchPass, bool, int64_t, int64_t, int64_t>>
      seen;
  for (const BenchPoint& p : report->points) {
    if (!seen.emplace(p.kind, p.pass, p.is_causal, p.length, p.head_dim,
                      p.threads)
             .second) {
      return data_loss("points: found ", p.kind, ", ", name(p.pass),
                       ", length ", p.length,
                       " twice, expected each point once");
    }
  }
  return {};
}

// A bench writes each of them with something in it.
Status check_lists(const BenchReport& report) {
  const std::pair<const char*, size_t> lists[] = {
      {"options.kinds", report.options.kinds.size()},
      {"options.threads", report.options.threads.size()},
      {"peaks", report.peaks.size()},
      {"points", report.points.size()}};
  for (const auto& [key, size] : lists) {
    if (size == 0) {
      return data_loss(key, ": found an empty array, expected at least one");
    }
  }
  for (const int64_t threads : report.options.threads) {
    const bool any = std::any_of(
        report.peaks.begin(), report.peaks.end(),
        [&](const BenchPeak& peak) { return peak.threads == threads; });
    if (!any) {
      return data_loss("peaks: found none of threads ", threads,
                       ", expected one of each in options.threads");
    }
  }
  return {};
}

Status read_report(const Json& json, BenchReport* report) {
  Status status;
  Reader in(json, "", &status);
  int64_t format = 0;
  in.read("format_version", &format);
  if (status.ok() && format != kFormatVersion) {
    return data_loss("format_version: found ", format, ", expected ",
                     kFormatVersion);
  }
  if (const Json* machine = in.find("machine")) {
    Reader of(*machine, "machine", &status);
    of.read("cpu", &report->machine.cpu);
    of.read("cores", &report->machine.cores);
    of.read("isa", &report->machine.isa);
    of.read("torch", &report->machine.torch_version);
    of.read("cosformer", &report->machine.version);
  }
  if (const Json* options = in.find("options")) {
    read_options(Reader(*options, "options", &status), &report->options);
  }
  in.read("complete", &report->is_complete);
  in.read("seconds", &report->seconds);
  in.each("peaks", [&](const Json& element, const std::string& path) {
    BenchPeak peak;
    Reader of(element, path, &status);
    of.read("threads", &peak.threads);
    of.read("flops", &peak.flops);
    of.read("read_bytes", &peak.read_bytes);
    report->peaks.push_back(peak);
  });
  in.each("points", [&](const Json& element, const std::string& path) {
    report->points.push_back(read_point(Reader(element, path, &status)));
    const BenchPoint& p = report->points.back();
    if (!status.ok()) return;
    if (find_bench_kind(p.kind) == nullptr) {
      status = data_loss(path, ".kind: unknown kind \"", p.kind, "\"");
    } else if (p.length < 1) {
      status =
          data_loss(path, ".length: found ", p.length, ", expected 1 or more");
    } else if (p.measured() && !(p.seconds > 0)) {
      status = data_loss(path, ".seconds: found ", p.seconds,
                         ", expected more than 0");
    }
  });
  COSFORMER_RETURN_IF_ERROR(status);
  COSFORMER_RETURN_IF_ERROR(put_in_order(report));
  status = validate(report->options);
  if (!status.ok()) return data_loss("options: ", status.message());
  return check_lists(*report);
}

}  // namespace

std::string to_json(const BenchReport& report) {
  Json json = {{"format_version", kFormatVersion},
               {"machine",
                {{"cpu", report.machine.cpu},
                 {"cores", report.machine.cores},
                 {"isa", report.machine.isa},
                 {"torch", report.machine.torch_version},
                 {"cosformer", report.machine.version}}},
               {"options", json_of(report.options)},
               {"complete", report.is_complete},
               {"seconds", report.seconds},
               {"peaks", Json::array()},
               {"points", Json::array()},
               {"crossovers", crossovers_of(report)}};
  for (const BenchPeak& peak : report.peaks) {
    json["peaks"].push_back({{"threads", peak.threads},
                             {"flops", peak.flops},
                             {"read_bytes", peak.read_bytes}});
  }
  for (const BenchPoint& p : report.points) {
    json["points"].push_back(json_of(p, report));
  }
  return json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

Result<BenchReport> bench_report_from_json(std::string_view text,
                                           const std::string& where) {
  // Deeper values are dropped as they are read, by a parser that does not
  // recurse.
  bool is_deeper = false;
  const auto keep = [&](int depth, Json::parse_event_t, const Json&) {
    is_deeper |= depth > kDeepest;
    return depth <= kDeepest;
  };
  const Json json = Json::parse(text, keep, /*allow_exceptions=*/false);
  if (is_deeper) {
    return data_loss(where, ": found arrays or objects more than ", kDeepest,
                     " deep, expected what `cosformer bench --out` writes");
  }
  if (json.is_discarded()) {
    return data_loss(
        where,
        ": not JSON of finite numbers, expected what `cosformer bench --out` "
        "writes as bench.json");
  }
  BenchReport report;
  const Status status = read_report(json, &report);
  if (!status.ok()) {
    return Status(status.code(), str_cat(where, ": ", status.message()));
  }
  return report;
}

}  // namespace cosformer
