"""What an attention entry of a config may say."""

from __future__ import annotations

from cosformer.models.config import AttentionConfig, ModelConfig

_LINEAR = ("cosformer", "linear")
_SOFTMAX = ("softmax", "linformer", "longformer", "bigbird")
_WINDOW = ("softmax", "longformer")
_SCORES = ("softmax", "longformer", "bigbird")

#: The kinds that read a key; ``kind`` itself is everybody's.
_READERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("feature_map", "reweight_len", "normalizer", "eps"), _LINEAR),
    **dict.fromkeys(("scale", "dropout"), _SOFTMAX),
    **dict.fromkeys(("window", "dilation"), _WINDOW),
    "global_tokens": ("longformer",),
    **dict.fromkeys(
        ("num_features", "orthogonal", "trainable_projection", "projection_seed"), ("performer",)
    ),
    **dict.fromkeys(("projected_len", "share_kv", "one_kv_head"), ("linformer",)),
    **dict.fromkeys(
        (
            *("block_size", "num_random_blocks", "window_blocks"),
            *("first_global_blocks", "last_global_blocks", "block_seed"),
        ),
        ("bigbird",),
    ),
}


def attention_key(config: ModelConfig, index: int) -> str:
    """ "attention", or "attention[3]" where there are several."""
    return "attention" if len(config.attention_entries()) == 1 else f"attention[{index}]"


def _listed(kinds: tuple[str, ...]) -> str:
    """ "'a'", "'a' and 'b'", "'a', 'b' and 'c'"."""
    words = [f"'{kind}'" for kind in kinds]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _check_options(a: AttentionConfig, where: str) -> None:
    """Options of other kinds must keep their defaults."""
    defaults = AttentionConfig()
    for key in sorted(_READERS):
        kinds = _READERS[key]
        if a.kind in kinds or getattr(a, key) == getattr(defaults, key):
            continue
        why = ": its weights are never formed one by one" if key == "dropout" else ""
        do = f"kinds {_listed(kinds)} do" if len(kinds) > 1 else f"kind {_listed(kinds)} does"
        raise ValueError(
            f"{where}.{key}: kind '{a.kind}' has no such option{why} ({do}): remove it"
        )


def _check_linear(c: ModelConfig, a: AttentionConfig, where: str) -> None:
    # Distances reach max_len - 1; beyond M the weight would turn negative.
    if 0 < a.reweight_len < c.max_len - 1:
        raise ValueError(
            f"{where}.reweight_len: found {a.reweight_len}, max_len is {c.max_len}: tokens "
            f"{c.max_len - 1} apart would get negative weights; expected at least {c.max_len - 1}"
        )
    if a.feature_map == "identity" and a.normalizer == "sum":
        raise ValueError(
            f"{where}.feature_map: 'identity' features may be negative, so their sum is no "
            f"denominator: use normalizer 'none', or 'relu' or 'elu1'"
        )


def _check_linformer(c: ModelConfig, a: AttentionConfig, where: str) -> None:
    if c.is_causal:
        raise ValueError(
            f"{where}.kind: 'linformer' has no causal form, is_causal is true: each projected key "
            f"mixes all positions, later ones too; set is_causal to false or choose another kind"
        )
    if a.projected_len > c.max_len:
        raise ValueError(
            f"{where}.projected_len: found {a.projected_len}, max_len is {c.max_len}: the "
            f"projection shortens max_len tokens"
        )
    if a.one_kv_head and c.num_kv_heads > 1:
        raise ValueError(
            f"{where}.one_kv_head: true, num_kv_heads is {c.num_kv_heads}: expected 1, or leave "
            f"it out"
        )


def _check_window(a: AttentionConfig, where: str) -> None:
    if a.kind == "longformer" and a.window == 0:
        raise ValueError(
            f"{where}.window: found 0, expected at least 1 for kind 'longformer': tokens on each "
            f"side"
        )
    if a.window == 0 and a.dilation != 1:
        raise ValueError(
            f"{where}.dilation: found {a.dilation} without a window: give .window too, or remove it"
        )


def check_attention(c: ModelConfig, index: int) -> None:
    """Contradictions of an entry, in itself and with the model: options that its kind lacks,
    forms that it does not have."""
    a = c.attention_entries()[index]
    where = attention_key(c, index)
    _check_options(a, where)
    if c.position == "t5" and a.kind not in _SCORES:
        why = (
            "a projected key has no position of its own"
            if a.kind == "linformer"
            else "a bias is added to scores, which it never forms"
        )
        raise ValueError(
            f"{where}.kind: '{a.kind}' cannot take position 't5': {why}; choose 'softmax', "
            f"'longformer' or 'bigbird', or another position"
        )
    if c.position == "rope" and a.kind == "linformer":
        raise ValueError(
            f"{where}.kind: 'linformer' cannot take position 'rope': a projected key has no "
            f"position of its own; choose 'none', 'learned' or 'sinusoidal'"
        )
    if a.kind in _LINEAR:
        _check_linear(c, a, where)
    elif a.kind == "linformer":
        _check_linformer(c, a, where)
    elif a.kind in _WINDOW:
        _check_window(a, where)
    elif a.kind == "bigbird" and a.window_blocks % 2 == 0:
        raise ValueError(
            f"{where}.window_blocks: found {a.window_blocks}, expected an odd number: the diagonal "
            f"and as many on each side"
        )
