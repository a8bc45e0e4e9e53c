"""The attention matrix of every kind, for inspection."""

from __future__ import annotations

import torch
from torch import Tensor

from cosformer._functions import cosformer_attention, linear_attention
from cosformer._performer import performer_attention
from cosformer._softmax import (
    bigbird_attention,
    linformer_attention,
    longformer_attention,
    softmax_attention,
)

# A kind's function takes (q, k, v, ..., the options of its call by name).
_KINDS = {
    "linear": linear_attention,
    "cosformer": cosformer_attention,
    "performer": performer_attention,
    "softmax": softmax_attention,
    "linformer": linformer_attention,
    "longformer": longformer_attention,
    "bigbird": bigbird_attention,
}
_MOST = 2**26


def attention_matrix(kind: str, q: Tensor, k: Tensor, **options) -> Tensor:
    """The weights w_ij / norm_i that a kind gives its values.

    For inspection of small inputs (at most 2^26 weights): quadratic in memory.

    Args:
        kind: "linear", "cosformer", "performer", "softmax", "linformer", "longformer" or "bigbird".
        q: [batch, q_len, heads, head_dim].
        k: [batch, kv_len, kv_heads, head_dim].
        options: those of the kind's function, its tensors beside the values included
            (``projection``, ``key_len_proj`` and ``value_len_proj``, ``q_global`` and
            ``k_global``). No dropout and no state.

    Returns:
        [batch, heads, q_len, kv_len] in q's dtype. Times the values it is the output; rows sum to 1
        where the sum of weights is at least eps, but not with rotary positions, nor for Linformer,
        whose values are mixed by ``value_len_proj``.

    Example:
        >>> import torch, cosformer
        >>> q, k = torch.randn(1, 4, 2, 8), torch.randn(1, 4, 2, 8)
        >>> weights = cosformer.attention_matrix("softmax", q, k, is_causal=True)
        >>> weights.shape, bool((weights.triu(1) == 0).all())
        (torch.Size([1, 2, 4, 4]), True)
    """
    if kind not in _KINDS:
        known = ", ".join(repr(name) for name in _KINDS)
        raise ValueError(f"attention_matrix: unknown kind {kind!r}: expected one of {known}")
    for name in ("dropout_p", "state", "return_state"):
        if options.get(name):
            raise ValueError(
                f"attention_matrix: {name} is given, expected none: the matrix is that of one "
                f"whole call"
            )
    if kind == "cosformer" and options.get("reweight_len") is None:
        raise ValueError(
            "attention_matrix: kind 'cosformer' has no reweight_len, expected the model's M"
        )
    kv_len = k.shape[1]
    weights = q.shape[0] * q.shape[1] * q.shape[2] * kv_len
    if weights > _MOST:
        raise ValueError(
            f"attention_matrix: [batch, heads, q_len, kv_len] = [{q.shape[0]}, {q.shape[2]}, "
            f"{q.shape[1]}, {kv_len}] has more than {_MOST} weights: look at fewer rows, heads or "
            f"positions at a time"
        )
    if kv_len == 0:
        return q.new_zeros(q.shape[0], q.shape[2], q.shape[1], 0)
    # Attention to unit vectors tells what each key contributes.
    unit = torch.eye(kv_len, dtype=k.dtype, device=k.device)[None, :, None, :]
    unit = unit.expand(k.shape[0], kv_len, k.shape[2], kv_len)
    if kind == "longformer":
        options["v_global"] = unit
    return _KINDS[kind](q, k, unit, **options).permute(0, 2, 1, 3)
