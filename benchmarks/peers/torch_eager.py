"""cosFormer as a first program in torch writes it, in both ways."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.peers import Options
from benchmarks.peers.inputs import cosformer_causal, qkv_sides
from benchmarks.peers.measure import Comparison

NAME = "eager"
PIP = None

# The sums over the past are formed for every token: 8 head_dim times the size of q.
_CUMULATIVE_BYTES = 4 << 30
_QUADRATIC_BYTES = 4 << 30
EPS = 1e-6


def quadratic(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[batch, heads, seq, dim]; forms the matrix of weights. M = the length."""
    length = q.shape[-2]
    at = torch.arange(length)
    cosine = torch.cos((at[:, None] - at) * (math.pi / 2 / length)).tril_()
    weights = (q.relu() @ k.relu().mT) * cosine
    return (weights @ v) / weights.sum(-1, keepdim=True).clamp_min(EPS)


def cumulative(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[batch, heads, seq, dim]; doubled features and a cumulative sum of their products with v."""
    length = q.shape[-2]
    angle = (torch.arange(length) * (math.pi / 2 / length))[:, None]
    cos, sin = angle.cos(), angle.sin()
    q, k = q.relu(), k.relu()
    q = torch.cat((q * cos, q * sin), -1)
    k = torch.cat((k * cos, k * sin), -1)
    sums = torch.einsum("bhnd,bhne->bhnde", k, v).cumsum(2)
    out = torch.einsum("bhnd,bhnde->bhne", q, sums)
    denominators = (q * k.cumsum(2)).sum(-1, keepdim=True)
    return out / denominators.clamp_min(EPS)


def comparisons(options: Options) -> Iterator[Comparison]:
    for dim in options.head_dims:
        for length in options.lengths:
            shape = (length, options.heads, dim)
            # Both ways hold about three such tensors at once.
            if 4 * options.heads * length * length <= _QUADRATIC_BYTES // 3:
                yield Comparison(
                    "cosformer causal",
                    "torch eager, quadratic",
                    *shape,
                    lambda shape=shape: qkv_sides(cosformer_causal(shape[0]), quadratic, *shape),
                )
            if 8 * options.heads * length * dim * dim <= _CUMULATIVE_BYTES // 3:
                yield Comparison(
                    "cosformer causal",
                    "torch eager, cumulative",
                    *shape,
                    lambda shape=shape: qkv_sides(cosformer_causal(shape[0]), cumulative, *shape),
                )
