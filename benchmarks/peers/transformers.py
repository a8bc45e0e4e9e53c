"""The Longformer and BigBird layers of Hugging Face transformers, with the same weights.

The projections to queries, keys and values are the same products on both sides and most of our
layers' time, so the attention alone is measured too: the peer's projections then hand it tensors
that exist already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import cosformer
import torch
from torch import Tensor, nn

from benchmarks.peers import Options
from benchmarks.peers.measure import BOTH, FORWARD, Comparison, Side

NAME = "transformers"
PIP = "pip install transformers==5.24.0"

LENGTH, HEADS, HEAD_DIM = 4096, 12, 64
WIDTH = HEADS * HEAD_DIM
WINDOW = 512  # transformers counts both sides
GLOBAL_TOKENS = 1
BLOCK, RANDOM_BLOCKS = 64, 3
_REQUIRED = {FORWARD: 6.0, BOTH: 6.0}


def _copy_projections(ours: nn.Module, theirs: nn.Module, ending: str = "") -> None:
    for letter, name in (("q", "query"), ("k", "key"), ("v", "value")):
        source = getattr(theirs, name + ending)
        getattr(ours, f"{letter}{ending}_proj").load_state_dict(source.state_dict())


class _Given(nn.Module):
    """In place of a projection: gives what it is told to, whatever goes in.

    ``rows``: the first rows alone, of the queries of global tokens; ``copied``: of queries, which
    Longformer divides in place.
    """

    def __init__(self, rows: int | None = None, copied: bool = False) -> None:
        super().__init__()
        self.rows, self.copied = rows, copied
        self.given = torch.empty(0)

    def forward(self, _: Tensor) -> Tensor:
        given = self.given if self.rows is None else self.given[: self.rows]
        return given.clone() if self.copied else given


def _without_projections(layer: nn.Module, seq_first: bool) -> Callable[..., Tensor]:
    """Makes all of a layer's projections ``_Given``; returns how to hand it q, k and v."""
    places = {}
    for name in ("query", "key", "value"):
        places[name] = [_Given(copied=name == "query")]
        setattr(layer, name, places[name][0])
        if hasattr(layer, f"{name}_global"):
            places[name].append(_Given(GLOBAL_TOKENS if name == "query" else None, name == "query"))
            setattr(layer, f"{name}_global", places[name][1])

    def give(*qkv: Tensor) -> None:
        for x, name in zip(qkv, places, strict=True):
            flat = x.flatten(2)
            for place in places[name]:
                place.given = flat.transpose(0, 1) if seq_first else flat

    return give


def _random_qkv() -> tuple[Tensor, ...]:
    return tuple(torch.randn(1, LENGTH, HEADS, HEAD_DIM) for _ in range(3))


def _longformer(is_layer: bool) -> tuple[Side, Side]:
    """One global token, the first, as a classifier has it."""
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    config = LongformerConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        attention_window=[WINDOW],
        attention_probs_dropout_prob=0.0,
    )
    theirs = LongformerSelfAttention(config, 0)
    is_global = torch.arange(LENGTH)[None] < GLOBAL_TOKENS
    # As the model around it makes them: 0 = local, the greatest number = global.
    mask = torch.zeros(1, LENGTH).masked_fill_(is_global, torch.finfo(torch.float32).max)
    is_masked = torch.zeros(1, LENGTH, dtype=torch.bool)

    x = torch.randn(1, LENGTH, WIDTH)

    def peer_layer(x: Tensor) -> Tensor:
        return theirs(x, mask, is_masked, is_global, True)[0]

    if is_layer:
        ours = cosformer.nn.LongformerAttention(
            WIDTH, HEADS, window=WINDOW // 2, global_tokens=GLOBAL_TOKENS, out_proj=False
        )
        _copy_projections(ours, theirs)
        _copy_projections(ours, theirs, "_global")
        return Side(ours, (x,), module=ours), Side(peer_layer, (x,), module=theirs)

    give = _without_projections(theirs, seq_first=True)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        window = (WINDOW // 2, WINDOW // 2)
        return cosformer.longformer_attention(
            q, k, v, q, k, v, window=window, global_mask=is_global
        )

    def peer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        give(q, k, v)
        return peer_layer(x).view_as(v)

    qkv = _random_qkv()
    return Side(attention, qkv), Side(peer, qkv)


def _bigbird(is_layer: bool) -> tuple[Side, Side]:
    from transformers import BigBirdConfig
    from transformers.models.big_bird.modeling_big_bird import (
        BigBirdBlockSparseAttention,
        BigBirdModel,
    )

    config = BigBirdConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        max_position_embeddings=LENGTH,
        block_size=BLOCK,
        num_random_blocks=RANDOM_BLOCKS,
        attention_probs_dropout_prob=0.0,
    )
    # In evaluation its random blocks are all block 0: as many blocks, and no time to draw them.
    theirs = BigBirdBlockSparseAttention(config).eval()
    names = ("from_blocked_mask", "band_mask", "from_mask", "to_mask")
    made = BigBirdModel.create_masks_for_block_sparse_attn(torch.ones(1, LENGTH), BLOCK)
    masks = dict(zip(names, made, strict=True))
    masks["to_blocked_mask"] = masks["from_blocked_mask"]

    x = torch.randn(1, LENGTH, WIDTH)

    def peer_layer(x: Tensor) -> Tensor:
        return theirs(x, **masks)[0]

    if is_layer:
        ours = cosformer.nn.BigBirdAttention(
            WIDTH, HEADS, block_size=BLOCK, num_random_blocks=RANDOM_BLOCKS, out_proj=False
        )
        _copy_projections(ours, theirs)
        return Side(ours, (x,), module=ours), Side(peer_layer, (x,), module=theirs)

    give = _without_projections(theirs, seq_first=False)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cosformer.bigbird_attention(
            q, k, v, block_size=BLOCK, num_random_blocks=RANDOM_BLOCKS
        )

    def peer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        give(q, k, v)
        return peer_layer(x).view_as(v)

    qkv = _random_qkv()
    return Side(attention, qkv), Side(peer, qkv)


def comparisons(options: Options) -> Iterator[Comparison]:
    import transformers  # noqa: F401

    if max(options.lengths) < LENGTH:
        return
    shape = (LENGTH, HEADS, HEAD_DIM)
    for part in ("layer", "attention alone"):
        is_layer = part == "layer"
        yield Comparison(
            f"longformer {part}, window {WINDOW}",
            "transformers' LongformerSelfAttention",
            *shape,
            lambda is_layer=is_layer: _longformer(is_layer),
            required=_REQUIRED,
        )
        yield Comparison(
            f"bigbird {part}, blocks of {BLOCK}",
            "transformers' BigBirdBlockSparseAttention",
            *shape,
            lambda is_layer=is_layer: _bigbird(is_layer),
            required=_REQUIRED,
            is_equal=False,
        )
