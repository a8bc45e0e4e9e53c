"""torch's flex_attention, eager and compiled. On a CPU it has no backward (torch 2.13)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import cosformer
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from benchmarks.peers import Options
from benchmarks.peers.inputs import qkv_sides
from benchmarks.peers.measure import FORWARD, Comparison, Side

NAME = "flex"
PIP = None

WINDOW = 512
# Eager, it forms all scores in several copies.
_LONGEST_EAGER = 1024


def _block_mask(length: int, window: int | None) -> BlockMask:
    def causal(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    def windowed(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i - j < window)

    seen = causal if window is None else windowed
    return create_block_mask(seen, None, None, length, length, device="cpu")


def _sides(
    length: int, heads: int, head_dim: int, window: int | None, program: Callable[..., Tensor]
) -> tuple[Side, Side]:
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
    mask = _block_mask(length, window)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept = None if window is None else (window - 1, 0)
        return cosformer.softmax_attention(q, k, v, is_causal=True, window=kept)

    def peer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return program(q, k, v, block_mask=mask)

    return qkv_sides(ours, peer, length, heads, head_dim)


def comparisons(options: Options) -> Iterator[Comparison]:
    # Of fixed shapes: the fastest code, made anew (once; torch keeps it on disk) for each length.
    compiled = torch.compile(flex_attention, dynamic=False)
    for dim in options.head_dims:
        for length in options.lengths:
            shape = (length, options.heads, dim)
            for window in (None, WINDOW):
                if window is not None and length <= window:
                    continue
                for name, program in (("eager", flex_attention), ("compiled", compiled)):
                    if name == "eager" and length > _LONGEST_EAGER:
                        continue
                    yield Comparison(
                        "softmax causal" + ("" if window is None else f", window {window}"),
                        f"flex_attention, {name}",
                        *shape,
                        lambda shape=shape, window=window, program=program: _sides(
                            *shape, window, program
                        ),
                        passes=(FORWARD,),
                    )
