"""Small models of every kind, as tests/models has them in C++."""

from cosformer.models import AttentionConfig, ModelConfig


def small_config(attention="cosformer", **changes):
    """2 layers of 2 heads, 16 wide, 11 tokens, 32 positions; logits that differ well."""
    sizes = dict(vocab_size=11, embed_dim=16, num_layers=2, num_heads=2, ffn_dim=24, max_len=32)
    return ModelConfig(**{**sizes, "init_std": 0.3, "attention": attention, **changes})


def _every_kind():
    softmax, window = AttentionConfig(kind="softmax"), AttentionConfig(kind="softmax", window=5)
    longformer = AttentionConfig(kind="longformer", window=4, global_tokens=2)
    bigbird = AttentionConfig(kind="bigbird", block_size=4)
    return [softmax, "linear", "cosformer", "performer", longformer, bigbird, window]


#: Every option of a causal model's config at least once.
CAUSAL = {
    "cosformer": small_config(),
    "linear": small_config("linear"),
    "softmax": small_config("softmax"),
    "no_biases_untied": small_config(
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        norm_bias=False,
        tie_embeddings=False,
        logit_scale=0.5,
    ),
    "post_norm_embed_norm": small_config(
        norm_placement="post", embed_norm=True, embed_scale=4.0, activation="relu"
    ),
    "sinusoidal_offset": small_config(
        "linear", position="sinusoidal", position_offset=2, activation="gelu_tanh"
    ),
    "learned_offset": small_config("softmax", position_offset=2),
    "llama": small_config(
        "softmax",
        position="rope",
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        norm="rmsnorm",
        activation="silu",
        gated=True,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
    ),
    "part_rope": small_config(
        AttentionConfig(kind="softmax", scale=0.4),
        position="rope",
        rope_dim=4,
        rope_base=500.0,
        rope_interleaved=True,
    ),
    "linear_rope_grouped": small_config("linear", position="rope", num_kv_heads=1),
    "cosformer_rope_head_norm": small_config(
        AttentionConfig(normalizer="none", reweight_len=50), position="rope"
    ),
    "relu_linear": small_config(
        # eps holds the smallest sums: dq is a difference of nearly equal terms over them, which
        # would make 1e-5 of a rounding upstream (float32 against float64: the same on both sides).
        AttentionConfig(kind="linear", feature_map="relu", eps=0.05),
        position="none",
    ),
    "performer": small_config("performer"),
    "performer_rope_trainable": small_config(
        AttentionConfig(
            kind="performer",
            num_features=20,
            orthogonal=False,
            trainable_projection=True,
            projection_seed=4,
        ),
        position="rope",
        rope_dim=4,
    ),
    "softmax_window": small_config(
        AttentionConfig(kind="softmax", window=2, dilation=2), position="none"
    ),
    "softmax_t5": small_config("softmax", position="t5", relative_buckets=8, max_distance=10),
    "longformer": small_config(AttentionConfig(kind="longformer", window=3, global_tokens=2)),
    "longformer_t5": small_config(
        AttentionConfig(kind="longformer", window=2, global_tokens=3),
        position="t5",
        relative_buckets=6,
        max_distance=8,
        num_kv_heads=1,
    ),
    "bigbird": small_config(
        AttentionConfig(
            kind="bigbird", block_size=3, num_random_blocks=1, window_blocks=1, block_seed=2
        )
    ),
    "bigbird_t5": small_config(
        AttentionConfig(kind="bigbird", block_size=4, num_random_blocks=0),
        position="t5",
        relative_buckets=8,
        max_distance=9,
    ),
    "every_kind_a_layer": small_config(_every_kind(), position="rope", num_layers=7),
    "no_positions_mixed_kinds": small_config(
        [AttentionConfig(kind="linear", feature_map="relu"), AttentionConfig(feature_map="elu1")],
        position="none",
    ),
}


def _encoder(config):
    values = config.to_dict()
    values["is_causal"] = False
    return ModelConfig.from_dict(values)


#: The same models as encoders, and those of the kind that has no causal form.
ENCODERS = {
    "linformer": small_config("linformer", is_causal=False),
    "linformer_shared": small_config(
        AttentionConfig(kind="linformer", projected_len=5, share_kv=True),
        is_causal=False,
        position="sinusoidal",
    ),
    "linformer_one_kv_head_and_softmax": small_config(
        [AttentionConfig(kind="linformer", one_kv_head=True), "softmax"],
        is_causal=False,
        position="none",
    ),
    **{f"{name}_encoder": _encoder(config) for name, config in CAUSAL.items()},
}
ALL = {**CAUSAL, **ENCODERS}
