#include "cli/bench_flags.h"

#include <algorithm>

#include "cli/output.h"

namespace cosformer::cli {

std::vector<CLI::Option*> add_kind_flags(CLI::App* command,
                                         BenchOptions* bench) {
  return {
      command
          ->add_option("--window", bench->window,
                       "Tokens of a window on each side (causal: to the left)")
          ->capture_default_str(),
      command
          ->add_option("--num-features", bench->num_features,
                       "Random features of performer")
          ->capture_default_str(),
      command
          ->add_option("--projected-len", bench->projected_len,
                       "Projected keys of linformer")
          ->capture_default_str()};
}

Result<DType> dtype_of(const std::string& text) {
  for (const DType dtype :
       {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16}) {
    if (name(dtype) == text) return dtype;
  }
  return invalid_argument("dtype: found \"", text,
                          "\", expected float32, float64, bfloat16 or float16");
}

void BenchDisplay::on_progress(const BenchProgress& progress) {
  if (!begun_) {
    begun_ = true;
    shown_.message(str_cat(progress.total,
                           progress.total == 1 ? " point" : " points",
                           ", in at most about ", duration(seconds_),
                           "; Ctrl-C keeps what was measured"));
  }
  if (!shown_.due()) return;
  // Short lengths come first and are quick; a small run ends early.
  const double points =
      static_cast<double>(progress.done) /
      static_cast<double>(std::max<int64_t>(progress.total, 1));
  shown_.show({str_cat("point ", progress.done + 1, "/", progress.total),
               duration(progress.seconds) + " of about " + duration(seconds_),
               progress.now},
              std::min(1.0, std::max(progress.seconds / seconds_, points)));
}

}  // namespace cosformer::cli
