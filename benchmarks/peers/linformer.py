"""The linformer package: its layer and ours with the same weights."""

from __future__ import annotations

from collections.abc import Iterator

import cosformer
import torch

from benchmarks.peers import Options
from benchmarks.peers.measure import Comparison, Side

NAME = "linformer"
PIP = "pip install --no-deps linformer==0.2.3"

PROJECTED = 256


def _sides(length: int, heads: int, head_dim: int) -> tuple[Side, Side]:
    from linformer import LinformerSelfAttention

    width = heads * head_dim
    theirs = LinformerSelfAttention(width, length, k=PROJECTED, heads=heads)
    ours = cosformer.nn.LinformerAttention(
        width, heads, max_len=length, projected_len=PROJECTED, qkv_bias=False
    )
    names = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}
    for their_name, our_name in names.items():
        getattr(ours, our_name).load_state_dict(getattr(theirs, their_name).state_dict())
    with torch.no_grad():
        ours.key_len_proj.copy_(theirs.proj_k)
        ours.value_len_proj.copy_(theirs.proj_v)
    x = torch.randn(1, length, width)
    return Side(ours, (x,), module=ours), Side(theirs, (x,), module=theirs)


def comparisons(options: Options) -> Iterator[Comparison]:
    import linformer  # noqa: F401

    for dim in options.head_dims:
        for length in options.lengths:
            if length <= PROJECTED:
                continue  # nothing would be shortened
            shape = (length, options.heads, dim)
            yield Comparison(
                f"linformer layer, {PROJECTED} projected keys",
                "linformer's layer",
                *shape,
                lambda shape=shape: _sides(*shape),
            )
