"""fast-transformers' causal kernel (Katharopoulos et al. 2020): one state, token by token.

Compared on given features and without denominators, which is all that the kernel does. The package
is compiled with OpenMP and -ffast-math by its own set-up; -O3 -march=native come from CFLAGS.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import cosformer
from torch import Tensor

from benchmarks.peers import Options
from benchmarks.peers.inputs import heads_first, random_qkv
from benchmarks.peers.measure import FORWARD, Comparison, Side

NAME = "fast-transformers"
PIP = (
    'CFLAGS="-O3 -march=native" pip install --no-deps --no-build-isolation '
    "pytorch-fast-transformers==0.4.0  # wheel and setuptools<81 must be there, nvcc not in PATH"
)

_REQUIRED = {FORWARD: 4.0}


def _sides(length: int, heads: int, head_dim: int) -> tuple[Side, Side]:
    from fast_transformers.causal_product import causal_dot_product

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cosformer.linear_attention(
            q, k, v, feature_map="identity", normalizer="none", is_causal=True
        )

    q, k, v = random_qkv(length, heads, head_dim)
    qkv = q.relu(), k.relu(), v
    return Side(ours, qkv), Side(causal_dot_product, heads_first(qkv), heads_first=True)


def comparisons(options: Options) -> Iterator[Comparison]:
    if importlib.util.find_spec("fast_transformers") is None:
        raise ImportError("no module fast_transformers")
    for dim in options.head_dims:
        for length in options.lengths:
            shape = (length, options.heads, dim)
            yield Comparison(
                "linear causal, features given",
                "fast-transformers' causal product",
                *shape,
                lambda shape=shape: _sides(*shape),
                required=_REQUIRED if options.heads == 16 and dim == 64 else {},
            )
