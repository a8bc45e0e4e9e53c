"""What a model is: ``ModelConfig``, persisted as config.json, the same as in C++."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from cosformer.models._fields import (
    FORMAT_VERSION,
    HUGE,
    MAX_COUNT,
    MAX_DIM,
    MAX_LAYERS,
    MAX_SEED,
    IntRange,
    check_fields,
    check_keys,
    choice,
    describe,
    flag,
    integer,
    real,
    ruled_fields,
    wrong_type,
)
from cosformer.models._strict_json import parse_json


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Which attention a layer uses.

    Keys that a kind does not read must keep their defaults; the comments name the kinds that
    read them. A value out of its range is a ValueError that names key, found and expected.

    >>> AttentionConfig(kind="softmax", window=64).window
    64
    """

    #: "softmax", "linear", "cosformer", "performer", "linformer", "longformer" or "bigbird".
    kind: str = choice(
        "cosformer",
        *("softmax", "linear", "cosformer", "performer", "linformer", "longformer", "bigbird"),
    )
    # cosformer, linear.
    feature_map: str = choice("", "", "relu", "elu1", "identity")  #: "" = the kind's own
    reweight_len: int = integer(0, 0, MAX_COUNT)  #: M; 0 = max_len for cosformer, none for linear
    normalizer: str = choice("sum", "sum", "none")  #: "none": with an RMS norm a head
    eps: float = real(1e-6, 0, 1, open_low=True)  #: floor of the denominator
    # softmax, linformer, longformer, bigbird.
    scale: float = real(0.0, 0, HUGE)  #: 0 = 1 / sqrt(head_dim)
    dropout: float = real(0.0, 0, 0.999)  #: of a weight, in training
    # longformer; softmax, where 0 = no window.
    window: int = integer(0, 0, MAX_COUNT)  #: tokens on each side (causal: to the left), in steps
    dilation: int = integer(1, 1, MAX_COUNT)  #: of this many positions
    # longformer.
    global_tokens: int = integer(0, 0, MAX_COUNT)  #: first tokens that all see and that see all
    # performer.
    num_features: int = integer(0, 0, MAX_DIM)  #: 0 = 4 head_dim
    orthogonal: bool = flag(True)
    trainable_projection: bool = flag(False)
    projection_seed: int = integer(0, 0, MAX_SEED)  #: layer i draws with projection_seed + i
    # linformer.
    projected_len: int = integer(0, 0, MAX_COUNT)  #: 0 = max_len / 4, at least 1
    share_kv: bool = flag(False)  #: one projection for keys and values
    one_kv_head: bool = flag(False)  #: num_kv_heads 1
    # bigbird.
    block_size: int = integer(64, 1, MAX_COUNT)
    num_random_blocks: int = integer(3, 0, MAX_DIM)
    window_blocks: int = integer(3, 1, MAX_DIM)  #: odd
    first_global_blocks: int = integer(1, 0, MAX_DIM)
    last_global_blocks: int = integer(1, 0, MAX_DIM)  #: none when causal
    block_seed: int = integer(0, 0, MAX_SEED)  #: layer i draws with block_seed + i

    def __post_init__(self) -> None:
        check_fields(self, "attention.")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The generic Transformer: BERT-, GPT- or LLaMA-like by its config.

    ``attention`` is a kind ("softmax"), an ``AttentionConfig``, or a sequence of those, one for
    all layers or one a layer; it is kept as a tuple. Each value is checked here (ValueError: key,
    found, expected); keys against each other by ``validate``, which ``Transformer`` calls.

    >>> config = ModelConfig(vocab_size=256, num_layers=2, attention="cosformer")
    >>> config.attention[0].kind, config.ffn_size
    ('cosformer', 512)
    >>> ModelConfig.from_json(config.to_json()) == config
    True
    """

    format_version: int = integer(1, 1, FORMAT_VERSION)
    vocab_size: int = integer(0, 0, MAX_COUNT)
    type_vocab_size: int = integer(0, 0, MAX_COUNT)  #: token types (BERT); 0 = none
    embed_dim: int = integer(128, 1, MAX_DIM)
    embed_norm: bool = flag(False)  #: a norm after the embeddings
    embed_scale: float = real(1.0, 0, HUGE, open_low=True)
    num_layers: int = integer(4, 1, MAX_LAYERS)
    num_decoder_layers: int = integer(0, 0, MAX_LAYERS)
    cross_attention: bool = flag(False)
    num_heads: int = integer(4, 1, MAX_DIM)
    num_kv_heads: int = integer(0, 0, MAX_DIM)  #: 0 = num_heads
    head_dim: int = integer(0, 0, MAX_DIM)  #: 0 = embed_dim / num_heads
    ffn_dim: int = integer(0, 0, 8 * MAX_DIM)  #: 0 = 4 embed_dim
    max_len: int = integer(256, 1, MAX_COUNT)  #: tokens
    is_causal: bool = flag(True)
    norm: str = choice("layernorm", "layernorm", "rmsnorm")
    norm_eps: float = real(1e-5, 0, 1)
    norm_placement: str = choice("pre", "pre", "post")
    activation: str = choice("gelu", "gelu", "gelu_tanh", "relu", "silu")
    gated: bool = flag(False)  #: act(gate x) * up x
    position: str = choice("learned", "none", "learned", "sinusoidal", "rope", "t5")
    position_offset: int = integer(0, 0, MAX_COUNT)
    rope_base: float = real(10000.0, 1, HUGE, open_low=True)
    rope_dim: int = integer(0, 0, MAX_DIM)  #: 0 = head_dim
    rope_interleaved: bool = flag(False)
    relative_buckets: int = integer(32, 2, MAX_DIM)
    max_distance: int = integer(128, 1, MAX_COUNT)
    dropout: float = real(0.0, 0, 0.999)
    qkv_bias: bool = flag(True)
    out_bias: bool = flag(True)
    mlp_bias: bool = flag(True)
    norm_bias: bool = flag(True)  #: the bias of layernorm
    tie_embeddings: bool = flag(True)
    logit_scale: float = real(1.0, 0, HUGE, open_low=True)
    init_std: float = real(0.02, 0, HUGE)
    attention: AttentionConfig | str | Sequence[AttentionConfig | str] = (AttentionConfig(),)

    def __post_init__(self) -> None:
        check_fields(self, "")
        given = self.attention
        if not isinstance(given, (AttentionConfig, str, Sequence)):
            raise wrong_type(
                "attention", given, "a kind, an AttentionConfig or a sequence of those"
            )
        entries = (given,) if isinstance(given, (AttentionConfig, str)) else given
        object.__setattr__(self, "attention", tuple(_attention_entry(e) for e in entries))

    @property
    def kv_heads(self) -> int:
        """num_kv_heads, with what 0 stands for."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_size(self) -> int:
        """head_dim, with what 0 stands for."""
        return self.head_dim or self.embed_dim // self.num_heads

    @property
    def ffn_size(self) -> int:
        """ffn_dim, with what 0 stands for."""
        return self.ffn_dim or 4 * self.embed_dim

    def attention_entries(self) -> tuple[AttentionConfig, ...]:
        """``attention`` as it is kept: one for all layers, or one a layer."""
        return cast("tuple[AttentionConfig, ...]", self.attention)

    def layer_attention(self, layer: int) -> AttentionConfig:
        """The attention of a layer, from 0."""
        entries = self.attention_entries()
        return entries[0] if len(entries) == 1 else entries[layer]

    def validate(self) -> None:
        """Every contradiction is a ValueError that names the key; what is well-formed but that no
        model of this version can do is a NotImplementedError."""
        from cosformer.models._validate import validate

        validate(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values by key, in the order of config.json; one attention entry is an object,
        several are a list."""
        out: dict[str, Any] = {each.name: getattr(self, each.name) for each in ruled_fields(self)}
        entries = [dataclasses.asdict(entry) for entry in self.attention_entries()]
        out["attention"] = entries[0] if len(entries) == 1 else entries
        return out

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """The inverse of ``to_dict``. Missing keys keep their defaults; an unknown one is a
        ValueError that names the nearest known one."""
        found = dict(values)
        # Before the keys: a newer version may have keys that this one lacks.
        version_rule = IntRange(1, FORMAT_VERSION)
        version_rule.check("format_version", found.get("format_version", FORMAT_VERSION))
        check_keys(found, "", ["attention", *(each.name for each in ruled_fields(cls))])
        has_attention = "attention" in found
        attention = found.pop("attention", None)
        config = cls(**found)  # the other keys are checked first, as in C++
        if not has_attention:
            return config
        if not isinstance(attention, (list, tuple)):
            entries = [_attention_from_dict(attention, "attention")]
        elif 0 < len(attention) <= MAX_LAYERS:
            entries = [_attention_from_dict(e, f"attention[{i}]") for i, e in enumerate(attention)]
        else:
            raise wrong_type("attention", attention, "an object or one object a layer")
        return dataclasses.replace(config, attention=entries)

    def to_json(self) -> str:
        """The text of config.json, the same as C++ writes."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> ModelConfig:
        """Reads what ``to_json``, or C++, wrote. ValueError: what is no JSON object, has an unknown
        key, a wrong type or a value out of range; NotImplementedError: a newer format_version."""
        document = parse_json(text, "config.json")
        if not isinstance(document, dict):
            raise ValueError(f"config.json: found {describe(document)}, expected an object")
        return cls.from_dict(document)


def _attention_entry(entry: AttentionConfig | str) -> AttentionConfig:
    if isinstance(entry, AttentionConfig):
        return entry
    if isinstance(entry, str):
        return AttentionConfig(kind=entry)
    raise wrong_type("attention", entry, "a kind or an AttentionConfig")


def _attention_from_dict(values: Any, where: str) -> AttentionConfig:
    if not isinstance(values, Mapping):
        raise wrong_type(where, values, "an object")
    found = dict(values)
    known = ruled_fields(AttentionConfig)
    check_keys(found, where + ".", [each.name for each in known])
    for each in known:  # here, where the entry's place is known
        if each.name in found:
            each.metadata["rule"].check(f"{where}.{each.name}", found[each.name])
    return AttentionConfig(**found)
