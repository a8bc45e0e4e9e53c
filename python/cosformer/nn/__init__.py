"""Layers as ordinary modules: attention kinds behind one call, norms, feed-forward, blocks."""

from __future__ import annotations

from typing import Any

from cosformer.nn._attention import Attention
from cosformer.nn._bigbird import BigBirdAttention
from cosformer.nn._block import Block
from cosformer.nn._call import AttentionState
from cosformer.nn._feed_forward import FeedForward
from cosformer.nn._linear import CosformerAttention, LinearAttention
from cosformer.nn._linformer import LinformerAttention
from cosformer.nn._longformer import LongformerAttention
from cosformer.nn._norm import Norm
from cosformer.nn._performer import PerformerAttention
from cosformer.nn._softmax import SoftmaxAttention

_KINDS: dict[str, type[Attention]] = {
    each.kind: each
    for each in (
        SoftmaxAttention,
        LinearAttention,
        CosformerAttention,
        PerformerAttention,
        LinformerAttention,
        LongformerAttention,
        BigBirdAttention,
    )
}


def attention(kind: str, embed_dim: int, num_heads: int, **options: Any) -> Attention:
    """A layer by the name of its kind.

    Args:
        kind: "softmax", "linear", "cosformer", "performer", "linformer", "longformer" or
            "bigbird".
        options: those of the kind's class. An option that belongs to other kinds is an error
            unless it stands at its default.

    Example:
        >>> import cosformer
        >>> cosformer.nn.attention("longformer", 16, 2, window=4)
        LongformerAttention(
          16, 2, head_dim=8, is_causal=False, window=4, global_tokens=0
          (q_proj): Linear(in_features=16, out_features=16, bias=True)
          (k_proj): Linear(in_features=16, out_features=16, bias=True)
          (v_proj): Linear(in_features=16, out_features=16, bias=True)
          (out_proj): Linear(in_features=16, out_features=16, bias=True)
          (q_global_proj): Linear(in_features=16, out_features=16, bias=True)
          (k_global_proj): Linear(in_features=16, out_features=16, bias=True)
          (v_global_proj): Linear(in_features=16, out_features=16, bias=True)
        )
    """
    if kind not in _KINDS:
        *most, last = (f'"{name}"' for name in _KINDS)
        raise ValueError(f'attention: kind is "{kind}", expected {", ".join(most)} or {last}')
    return _KINDS[kind](embed_dim, num_heads, **options)


__all__ = [
    "Attention",
    "AttentionState",
    "BigBirdAttention",
    "Block",
    "CosformerAttention",
    "FeedForward",
    "LinearAttention",
    "LinformerAttention",
    "LongformerAttention",
    "Norm",
    "PerformerAttention",
    "SoftmaxAttention",
    "attention",
]
