"""performer-pytorch, the Performer that most programs in torch import.

Without CUDA its causal form takes a cumulative sum of every token's outer product; where
fast-transformers is installed the package's own faster form is compared instead.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
from collections.abc import Iterator

import cosformer
import torch
from torch import Tensor

from benchmarks.peers import Options
from benchmarks.peers.inputs import qkv_sides
from benchmarks.peers.measure import Comparison, Side

NAME = "performer-pytorch"
PIP = (
    "pip install --no-deps performer-pytorch==1.1.4 einops axial-positional-embedding "
    "local-attention==1.11.2 hyper-connections torch-einops-utils"
)

FEATURES = 256


def _sides(length: int, heads: int, head_dim: int, is_causal: bool) -> tuple[Side, Side]:
    import performer_pytorch
    from performer_pytorch.performer_pytorch import causal_linear_attention

    with contextlib.redirect_stdout(io.StringIO()):  # it says there that it found no CUDA
        peer = performer_pytorch.FastAttention(head_dim, FEATURES, causal=is_causal)
    if is_causal and importlib.util.find_spec("fast_transformers") is not None:
        peer.causal_linear_fn = functools.partial(causal_linear_attention)
    projection = cosformer.performer_projection(FEATURES, head_dim, seed=0)
    peer.projection_matrix.copy_(projection)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cosformer.performer_attention(q, k, v, projection, is_causal=is_causal)

    ours_side, peer_side = qkv_sides(ours, peer, length, heads, head_dim)
    # It adds 1e-4 to every feature after taking off the greatest exponent: nearly the same only
    # where features are not far below the greatest.
    for x in (*ours_side.inputs[:2], *peer_side.inputs[:2]):
        x.mul_(0.25)
    return ours_side, peer_side


def comparisons(options: Options) -> Iterator[Comparison]:
    import performer_pytorch  # noqa: F401

    torch.manual_seed(0)
    for dim in options.head_dims:
        for length in options.lengths:
            shape = (length, options.heads, dim)
            for is_causal in (True, False):
                yield Comparison(
                    f"performer {'causal' if is_causal else 'full'}, {FEATURES} features",
                    "performer-pytorch",
                    *shape,
                    lambda shape=shape, is_causal=is_causal: _sides(*shape, is_causal),
                    tolerance=0.02,
                )
