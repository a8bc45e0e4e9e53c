"""ModelConfig: what it refuses and how it says so. (C++ says the same: test_models_parity.py.)"""

import dataclasses
import itertools
import json
import math

import pytest
from cosformer.models import AttentionConfig, ModelConfig
from model_helpers import ALL

KINDS = ("cosformer", "linear", "softmax", "performer", "linformer", "longformer", "bigbird")


@pytest.mark.parametrize("name", ALL)
def test_round_trip_through_json(name):
    config = ALL[name]
    config.validate()
    assert ModelConfig.from_json(config.to_json()) == config
    assert ModelConfig.from_json(config.to_json().encode()) == config


def test_every_key_is_written():
    """A value of each key that is not its default comes back: none is forgotten."""

    def changed(field):
        default = field.default
        if isinstance(default, bool):
            return not default
        if isinstance(default, str):
            return next(v for v in field.metadata["rule"].values if v != default)
        if isinstance(default, int):
            return default + 1
        return 500.0 / 3 if default >= 1 else 1 / 3

    values = {
        field.name: changed(field)
        for field in dataclasses.fields(ModelConfig)
        if field.name not in ("attention", "format_version")
    }
    entry = AttentionConfig(
        **{field.name: changed(field) for field in dataclasses.fields(AttentionConfig)}
    )
    config = ModelConfig(**values, attention=(entry, AttentionConfig()))
    back = ModelConfig.from_json(config.to_json())
    assert back == config
    assert dataclasses.asdict(back.attention[0]) == dataclasses.asdict(entry)
    assert {key: getattr(back, key) for key in values} == values


def test_defaults_and_what_zeros_stand_for():
    config = ModelConfig.from_json("{}")
    assert config == ModelConfig()
    assert (config.kv_heads, config.head_size, config.ffn_size) == (4, 32, 512)
    assert config.attention == (AttentionConfig(kind="cosformer"),)
    mixed = ModelConfig(num_layers=2, attention=["softmax", AttentionConfig(eps=1e-3)])
    assert mixed.layer_attention(0).kind == "softmax"
    assert mixed.layer_attention(1).eps == 1e-3
    assert config.layer_attention(3).kind == "cosformer"


@pytest.mark.parametrize(
    "text, parts",
    [
        ("", ["config.json", "empty"]),
        ("[]", ["found an array of 0", "expected an object"]),
        ('{"embed_dim": 128', ["not JSON"]),
        ('{"embed_dim": 128} x', ["not JSON"]),
        ('{"embed_dim": 128, "embed_dim": 64}', ["'embed_dim' twice"]),
        ('{"embed_dim": 18446744073709551615}', ["embed_dim", "an integer of 64 bits"]),
        ('{"embed_dim": 1e400}', ["out of range"]),
        ('{"norm_eps": NaN}', ["not JSON"]),
        ('{"norm": "\udcff"}'.encode("utf-8", "surrogateescape"), ["not JSON", "UTF-8"]),
        ("[" * 100_000, ["nests deeper"]),
        ("[" * 100 + "]" * 100, ["nests deeper"]),
        ('{"format_version": "1"}', ["format_version", "an integer"]),
        ('{"attention": 3}', ["attention: found the number 3"]),
    ],
)
def test_what_is_no_config(text, parts):
    with pytest.raises(ValueError) as caught:
        ModelConfig.from_json(text)
    for part in parts:
        assert part in str(caught.value)


def test_a_newer_format_is_named_before_its_keys():
    with pytest.raises(NotImplementedError, match="format_version: found 2.*newer cosformer"):
        ModelConfig.from_json('{"format_version": 2, "new_key": 1}')


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"embed_dim": 128.0}, "embed_dim: found the number 128.0, expected an integer"),
        ({"embed_dim": True}, "embed_dim: found true, expected an integer"),
        ({"gated": 1}, "gated: found the number 1, expected true or false"),
        ({"norm_eps": math.nan}, "norm_eps: found nan"),
        ({"embed_scale": math.inf}, "embed_scale: found inf"),
        ({"attention": 3}, "attention: found the number 3, expected a kind"),
        ({"attention": [3]}, "attention: found the number 3"),
        ({"attention": "sofmax"}, "attention.kind: found 'sofmax'.*did you mean 'softmax'"),
    ],
)
def test_values_are_checked_where_they_are_given(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**changes)


def test_numbers_for_reals_are_kept_as_reals():
    config = ModelConfig(embed_scale=4)
    assert json.loads(config.to_json())["embed_scale"] == 4.0
    assert '"embed_scale": 4.0' in config.to_json()


def test_kinds_and_positions_that_go_together():
    positions = ("none", "learned", "sinusoidal", "rope", "t5")
    for kind, position, is_causal in itertools.product(KINDS, positions, (False, True)):
        entry = AttentionConfig(kind=kind, window=32 if kind == "longformer" else 0)
        config = ModelConfig(vocab_size=65, position=position, is_causal=is_causal, attention=entry)
        good = position != "t5" or kind in ("softmax", "longformer", "bigbird")
        if kind == "linformer":
            good = not is_causal and position not in ("rope", "t5")
        if good:
            config.validate()
        else:
            with pytest.raises(ValueError, match=f"attention.kind: '{kind}'"):
                config.validate()


def test_configs_hash_and_do_not_change():
    config = ModelConfig(vocab_size=3)
    assert hash(config) == hash(ModelConfig(vocab_size=3))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.vocab_size = 4
