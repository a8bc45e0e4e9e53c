"""Inputs and sides that several peers share."""

from __future__ import annotations

from collections.abc import Callable

import cosformer
import torch
from torch import Tensor

from benchmarks.peers.measure import Side


def random_qkv(length: int, heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """[1, length, heads, head_dim], float32, normal."""
    q, k, v = (torch.randn(1, length, heads, head_dim) for _ in range(3))
    return q, k, v


def heads_first(qkv: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """[batch, heads, seq, dim], as most of torch wants it, contiguous."""
    return tuple(x.transpose(1, 2).contiguous() for x in qkv)


def qkv_sides(
    ours: Callable[..., Tensor],
    peer: Callable[..., Tensor],
    length: int,
    heads: int,
    head_dim: int,
) -> tuple[Side, Side]:
    """Ours and a peer that takes its heads first, over the same q, k and v."""
    qkv = random_qkv(length, heads, head_dim)
    return Side(ours, qkv), Side(peer, heads_first(qkv), heads_first=True)


def cosformer_causal(length: int) -> Callable[..., Tensor]:
    """Ours, M = the length."""

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cosformer.cosformer_attention(q, k, v, reweight_len=length, is_causal=True)

    return ours
