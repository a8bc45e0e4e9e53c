"""torch's own fused softmax attention (``scaled_dot_product_attention``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import cosformer
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.peers import Options
from benchmarks.peers.inputs import cosformer_causal, heads_first, qkv_sides, random_qkv
from benchmarks.peers.measure import BOTH, FORWARD, Comparison, Side

NAME = "sdpa"
PIP = None

# How many times faster causal cosFormer shall be, 16 heads of 64, 1 thread.
_REQUIRED = {
    64: {FORWARD: 1.2},
    256: {FORWARD: 4.0, BOTH: 3.5},
    1024: {FORWARD: 12.0, BOTH: 12.0},
    4096: {FORWARD: 35.0, BOTH: 35.0},
}
_REQUIRED_SOFTMAX = {FORWARD: 2.3, BOTH: 2.5}
WINDOW = 512
# A dense mask of 16k x 16k, and the peer's time, are the same for each head: few heads do.
_WINDOW_LENGTH, _WINDOW_HEADS = 16384, 2


def _sdpa(is_causal: bool) -> Callable[..., Tensor]:
    def peer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    return peer


def _softmax(is_causal: bool) -> Callable[..., Tensor]:
    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cosformer.softmax_attention(q, k, v, is_causal=is_causal)

    return ours


def window_mask(length: int, window: int) -> Tensor:
    """[length, length], True where a causal query sees a key: itself and window - 1 before it."""
    return torch.ones(length, length, dtype=torch.bool).tril_().triu_(1 - window)


def _window_sides(length: int, heads: int, head_dim: int) -> tuple[Side, Side]:
    qkv = random_qkv(length, heads, head_dim)
    # A mask of bool is turned into one of numbers at every call. With few heads that would be a
    # larger share than with many, so the peer gets the numbers.
    mask = torch.zeros(length, length).masked_fill_(~window_mask(length, WINDOW), -torch.inf)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cosformer.softmax_attention(q, k, v, is_causal=True, window=(WINDOW - 1, 0))

    def peer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return Side(ours, qkv), Side(peer, heads_first(qkv), heads_first=True)


def comparisons(options: Options) -> Iterator[Comparison]:
    for dim in options.head_dims:
        for length in options.lengths:
            shape = (length, options.heads, dim)
            is_required = options.heads == 16 and dim == 64
            yield Comparison(
                "cosformer causal",
                "SDPA causal",
                *shape,
                lambda shape=shape: qkv_sides(cosformer_causal(shape[0]), _sdpa(True), *shape),
                required=_REQUIRED.get(length, {}) if is_required else {},
                is_equal=False,  # another attention
            )
            for is_causal in (True, False):
                form = "causal" if is_causal else "full"
                yield Comparison(
                    f"softmax {form}",
                    f"SDPA {form}",
                    *shape,
                    lambda shape=shape, is_causal=is_causal: qkv_sides(
                        _softmax(is_causal), _sdpa(is_causal), *shape
                    ),
                    required=_REQUIRED_SOFTMAX if 256 <= length <= 4096 else {},
                )
    if max(options.lengths) < 4096:
        return
    shape = (_WINDOW_LENGTH, _WINDOW_HEADS, 64)
    yield Comparison(
        f"softmax causal, window {WINDOW}",
        "SDPA, dense mask",
        *shape,
        lambda: _window_sides(*shape),
        required={FORWARD: 40.0, BOTH: 40.0},
    )
