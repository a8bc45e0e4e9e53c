"""Keys of a config against each other, with the messages of the C++ library."""

from __future__ import annotations

from cosformer.models._attention_rules import attention_key, check_attention
from cosformer.models.config import ModelConfig


def _check_supported(c: ModelConfig) -> None:
    """Well-formed, but no model of this version can be built from it."""
    what = ""
    if c.cross_attention:
        what = "cross_attention: true"
    elif c.num_decoder_layers > 0:
        what = f"num_decoder_layers: {c.num_decoder_layers} (an encoder-decoder)"
    elif c.type_vocab_size > 0:
        what = f"type_vocab_size: {c.type_vocab_size} (token types)"
    if what:
        raise NotImplementedError(f"{what} is not supported by this version")


def _check_heads(c: ModelConfig) -> None:
    if c.head_dim == 0 and c.embed_dim % c.num_heads != 0:
        raise ValueError(
            f"num_heads: {c.num_heads} does not divide embed_dim {c.embed_dim}: choose a divisor "
            f"or give head_dim"
        )
    if c.num_heads % c.kv_heads != 0:
        raise ValueError(
            f"num_kv_heads: {c.num_kv_heads} does not divide num_heads {c.num_heads}: query heads "
            f"must be a multiple of key heads"
        )


def _check_buckets(c: ModelConfig) -> None:
    """Half of a direction's buckets hold one distance each, the rest reach up to max_distance."""
    least = 2 if c.is_causal else 4
    if c.relative_buckets < least or (not c.is_causal and c.relative_buckets % 2 != 0):
        expected = (
            "at least 2" if c.is_causal else "an even number of at least 4 (half for later keys)"
        )
        raise ValueError(f"relative_buckets: found {c.relative_buckets}, expected {expected}")
    exact = c.relative_buckets // least
    if c.max_distance <= exact:
        raise ValueError(
            f"max_distance: found {c.max_distance}, relative_buckets is {c.relative_buckets}: "
            f"expected more than the {exact} distances that have a bucket of their own"
        )


#: Keys that only these positions read.
_POSITION_KEYS: dict[str, tuple[str, ...]] = {
    "rope_base": ("rope",),
    "rope_dim": ("rope",),
    "rope_interleaved": ("rope",),
    "relative_buckets": ("t5",),
    "max_distance": ("t5",),
    "position_offset": ("learned", "sinusoidal"),
}


def _check_positions(c: ModelConfig) -> None:
    defaults = ModelConfig()
    for key, positions in _POSITION_KEYS.items():
        if c.position not in positions and getattr(c, key) != getattr(defaults, key):
            choices = " or ".join(f"'{each}'" for each in positions)
            raise ValueError(
                f"{key}: position '{c.position}' has no such option: remove it or choose {choices}"
            )
    if c.position == "t5":
        _check_buckets(c)
    if c.position != "rope":
        return
    if c.rope_dim == 0 and c.head_size % 2 != 0:
        raise ValueError(
            f"position: 'rope' turns pairs, head_dim is {c.head_size}: it must be even"
        )
    if c.rope_dim % 2 != 0 or c.rope_dim > c.head_size:
        raise ValueError(
            f"rope_dim: found {c.rope_dim}, expected an even number up to head_dim {c.head_size}"
        )
    if c.rope_dim in (0, c.head_size):
        return
    for i, entry in enumerate(c.attention_entries()):
        if entry.kind in ("cosformer", "linear"):
            raise NotImplementedError(
                f"rope_dim: {c.rope_dim} below head_dim {c.head_size} for "
                f"{attention_key(c, i)}.kind '{entry.kind}' is not supported by this version"
            )


def validate(c: ModelConfig) -> None:
    """Raises for the first contradiction; the order is that of the C++ library."""
    entries = c.attention_entries()
    if c.vocab_size < 1:
        raise ValueError("vocab_size: found 0, expected at least 1")
    if len(entries) not in (1, c.num_layers):
        raise ValueError(
            f"attention: found {len(entries)} entries, expected one for all layers or "
            f"{c.num_layers}, one a layer"
        )
    _check_supported(c)
    _check_heads(c)
    _check_positions(c)
    for i in range(len(entries)):
        check_attention(c, i)
