"""The Longformer and BigBird layers of Hugging Face transformers, with the same weights."""

from __future__ import annotations

from collections.abc import Iterator

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
BLOCK, RANDOM_BLOCKS = 64, 3
_REQUIRED = {FORWARD: 6.0, BOTH: 6.0}


def _copy_projections(ours: nn.Module, theirs: nn.Module, ending: str = "") -> None:
    for letter, name in (("q", "query"), ("k", "key"), ("v", "value")):
        source = getattr(theirs, name + ending)
        getattr(ours, f"{letter}{ending}_proj").load_state_dict(source.state_dict())


def _longformer() -> tuple[Side, Side]:
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
    ours = cosformer.nn.LongformerAttention(
        WIDTH, HEADS, window=WINDOW // 2, global_tokens=1, out_proj=False
    )
    _copy_projections(ours, theirs)
    _copy_projections(ours, theirs, "_global")
    is_global = torch.arange(LENGTH)[None] < 1
    # As the model around it makes them: 0 = local, the greatest number = global.
    mask = torch.zeros(1, LENGTH).masked_fill_(is_global, torch.finfo(torch.float32).max)
    is_masked = torch.zeros(1, LENGTH, dtype=torch.bool)

    def peer(x: Tensor) -> Tensor:
        return theirs(x, mask, is_masked, is_global, True)[0]

    x = torch.randn(1, LENGTH, WIDTH)
    return Side(ours, (x,), module=ours), Side(peer, (x,), module=theirs)


def _bigbird() -> tuple[Side, Side]:
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
    ours = cosformer.nn.BigBirdAttention(
        WIDTH, HEADS, block_size=BLOCK, num_random_blocks=RANDOM_BLOCKS, out_proj=False
    )
    _copy_projections(ours, theirs)
    names = ("from_blocked_mask", "band_mask", "from_mask", "to_mask")
    made = BigBirdModel.create_masks_for_block_sparse_attn(torch.ones(1, LENGTH), BLOCK)
    masks = dict(zip(names, made, strict=True))
    masks["to_blocked_mask"] = masks["from_blocked_mask"]

    def peer(x: Tensor) -> Tensor:
        return theirs(x, **masks)[0]

    x = torch.randn(1, LENGTH, WIDTH)
    return Side(ours, (x,), module=ours), Side(peer, (x,), module=theirs)


def comparisons(options: Options) -> Iterator[Comparison]:
    import transformers  # noqa: F401

    if max(options.lengths) < LENGTH:
        return
    shape = (LENGTH, HEADS, HEAD_DIM)
    yield Comparison(
        f"longformer layer, window {WINDOW}",
        "transformers' LongformerSelfAttention",
        *shape,
        _longformer,
        required=_REQUIRED,
    )
    yield Comparison(
        f"bigbird layer, blocks of {BLOCK}",
        "transformers' BigBirdBlockSparseAttention",
        *shape,
        _bigbird,
        required=_REQUIRED,
        is_equal=False,
    )
