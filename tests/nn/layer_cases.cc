#include "tests/nn/layer_cases.h"

namespace cosformer::testing {

AttentionOptions options_of(const std::string& kind, bool is_causal) {
  AttentionOptions options(24, 4);
  options.kind = kind;
  options.is_causal = is_causal;
  if (kind == "cosformer") options.reweight_len = 64;
  if (kind == "linformer") {
    options.max_len = 48;
    options.projected_len = 10;
  }
  if (kind == "longformer") {
    options.window = 3;
    options.global_tokens = 2;
  }
  if (kind == "bigbird") {
    options.block_size = 4;
    options.num_random_blocks = 1;
    options.window_blocks = 1;
  }
  return options;
}

torch::Tensor LayerCase::relative_bias() const {
  if (bias_reach == 0) return {};
  return torch::randn({options.num_heads, 2 * bias_reach + 1});
}

AttentionCall LayerCase::call(const torch::Tensor& bias) const {
  AttentionCall call;
  if (bias.defined()) call.relative_bias = bias;
  return call;
}

std::vector<LayerCase> layer_cases() {
  std::vector<LayerCase> out;
  for (const bool is_causal : {false, true}) {
    const std::string form = is_causal ? "_causal" : "_full";
    const auto add = [&](const std::string& kind, const char* name, auto change,
                         int64_t bias_reach = 0) {
      AttentionOptions options = options_of(kind, is_causal);
      change(options);
      out.push_back({kind + form + name, options, bias_reach});
    };
    for (const char* kind : kKinds) {
      const bool is_linformer = kind == std::string("linformer");
      if (is_linformer && is_causal) continue;
      add(kind, "", [](auto&) {});
      add(kind, "_grouped", [](auto& o) {
        o.num_kv_heads = 2;
        o.head_dim = 10;
        o.value_dim = 7;
        o.out_bias = false;
      });
      if (is_linformer) continue;
      add(kind, "_rotary", [&](auto& o) {
        o.head_dim = 8;
        o.rotary_base = 10000.0;
        o.rotary_interleaved = is_causal;
        o.qkv_bias = false;
      });
    }
    for (const char* kind : {"softmax", "longformer", "bigbird"}) {
      add(kind, "_bias", [](auto&) {}, 5);
    }
    for (const char* kind : {"softmax", "performer"}) {
      add(kind, "_part_rotary", [](auto& o) {
        o.head_dim = 8;
        o.rotary_base = 500.0;
        o.rotary_dim = 4;
        if (o.kind == "softmax") o.scale = 0.3;
      });
    }
    add("softmax", "_window", [](auto& o) {
      o.window = 2;
      o.dilation = 3;
    });
    add("longformer", "_dilated", [](auto& o) {
      o.dilation = 2;
      o.scale = 0.4;
    });
    add("bigbird", "_wide", [](auto& o) {
      o.block_size = 3;
      o.window_blocks = 3;
      o.num_random_blocks = 2;
      o.first_global_blocks = 2;
      o.last_global_blocks = 0;
      o.block_seed = 5;
    });
    add("performer", "_trainable", [](auto& o) {
      o.trainable_projection = true;
      o.orthogonal = false;
      o.num_features = 17;
      o.projection_seed = 3;
    });
    add("cosformer", "_head_norm", [](auto& o) { o.normalizer = "none"; });
    add("cosformer", "_elu1", [](auto& o) {
      o.feature_map = "elu1";
      o.out_proj = false;
    });
    add("linear", "_relu", [](auto& o) { o.feature_map = "relu"; });
    if (is_causal) continue;
    add("linformer", "_shared", [](auto& o) { o.share_kv = true; });
    add("linformer", "_one_kv_head", [](auto& o) { o.one_kv_head = true; });
  }
  return out;
}

std::vector<LayerCase> stateful_cases() {
  std::vector<LayerCase> out;
  for (const LayerCase& each : layer_cases()) {
    if (each.options.is_causal) out.push_back(each);
  }
  const auto add = [&](const char* name, const char* kind, int64_t reach,
                       auto change) {
    AttentionOptions options = options_of(kind, true);
    change(options);
    out.push_back({name, options, reach});
  };
  add("longformer_window_alone", "longformer", 0, [](auto& o) {
    o.global_tokens = 0;
    o.num_kv_heads = 2;
  });
  add("longformer_global_rotary_grouped", "longformer", 3, [](auto& o) {
    o.global_tokens = 5;
    o.window = 2;
    o.num_kv_heads = 1;
    o.head_dim = 8;
    o.value_dim = 5;
    o.rotary_base = 100.0;
  });
  add("softmax_window_rotary_bias", "softmax", 9, [](auto& o) {
    o.window = 4;
    o.head_dim = 8;
    o.rotary_base = 100.0;
  });
  return out;
}

}  // namespace cosformer::testing
