"""What a call of an attention layer may say beside its inputs, and what it gives."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from cosformer._kv_cache import KvCache
from cosformer._state import LinearState

#: What an attention layer carries between calls; None = nothing yet.
AttentionState = LinearState | KvCache | None


class Call(NamedTuple):
    """Checked arguments of ``forward``."""

    key_mask: Tensor | None = None
    query_mask: Tensor | None = None
    state: AttentionState = None
    return_state: bool = False
    q_start: int | Tensor | None = None
    kv_start: int | Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    return_denominator: bool = False
    global_mask: Tensor | None = None
    relative_bias: Tensor | None = None

    def placement(self) -> dict[str, Any]:
        """Positions, masks and packing, by the names that the functions of every kind take."""
        return {
            "q_start": self.q_start,
            "kv_start": self.kv_start,
            "key_mask": self.key_mask,
            "query_mask": self.query_mask,
            "cu_seqlens_q": self.cu_seqlens_q,
            "cu_seqlens_k": self.cu_seqlens_k,
        }


class Inputs(NamedTuple):
    """What is projected: [batch, seq, width] each, what masks hide zeroed."""

    query: Tensor
    key: Tensor
    value: Tensor


class Heads(NamedTuple):
    """[batch, seq, heads, dim] each."""

    q: Tensor
    k: Tensor
    v: Tensor


class Result(NamedTuple):
    """Of a kind: out [batch, q_len, heads, value_dim], and what was asked for beside it."""

    out: Tensor
    state: AttentionState = None
    denominator: Tensor | None = None
