"""local-attention: a sliding window in buckets, the window attention of many models in torch."""

from __future__ import annotations

from collections.abc import Iterator

import cosformer
from torch import Tensor

from benchmarks.peers import Options
from benchmarks.peers.inputs import qkv_sides
from benchmarks.peers.measure import Comparison, Side

NAME = "local-attention"
PIP = "pip install --no-deps local-attention==1.11.2 einops hyper-connections torch-einops-utils"

WINDOW = 512


def _sides(length: int, heads: int, head_dim: int) -> tuple[Side, Side]:
    from local_attention import LocalAttention

    peer = LocalAttention(
        WINDOW, causal=True, look_backward=1, exact_windowsize=True, use_rotary_pos_emb=False
    )

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # It counts the keys before the token, without itself.
        return cosformer.softmax_attention(q, k, v, is_causal=True, window=(WINDOW, 0))

    return qkv_sides(ours, peer, length, heads, head_dim)


def comparisons(options: Options) -> Iterator[Comparison]:
    import local_attention  # noqa: F401

    for dim in options.head_dims:
        for length in options.lengths:
            if length <= WINDOW or length % WINDOW != 0:
                continue
            shape = (length, options.heads, dim)
            yield Comparison(
                f"softmax causal, window {WINDOW} + 1",
                "local-attention",
                *shape,
                lambda shape=shape: _sides(*shape),
            )
