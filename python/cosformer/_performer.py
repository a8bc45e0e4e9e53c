"""Performer: positive orthogonal random features (Choromanski et al., ICLR 2021)."""

from __future__ import annotations

import torch
from torch import Tensor

from cosformer._arguments import int_tensor, refuse_key_padding_mask
from cosformer._state import LinearState

_ops = torch.ops.cosformer
_performer_attention = _ops.performer_attention.default
_decode_step_ = _ops.performer_attention_decode_step_.default

# Arguments of the operator in place of a state, and of what it says of itself.
_NO_STATE = (None, None, None, None, None)
_SPEC = ("performer", "performer")


def _widened(projection: Tensor, q: Tensor) -> Tensor:
    """Projections are held as states are: of a model in a half type, widened."""
    return projection.to(torch.float64 if q.dtype == torch.float64 else torch.float32)


def performer_projection(
    num_features: int, head_dim: int, *, orthogonal: bool = True, seed: int
) -> Tensor:
    """Random directions for :func:`performer_attention`: float32 [num_features, head_dim].

    Rows are Gaussian; orthogonal ones are so within blocks of head_dim rows, which lowers the
    variance. From the seed alone, the same on every machine.

    Example:
        >>> import torch, cosformer
        >>> rows = cosformer.performer_projection(8, 8, seed=3)
        >>> torch.allclose(rows @ rows.T, (rows @ rows.T).diag().diag(), atol=1e-4)
        True
    """
    return _ops.performer_projection(num_features, head_dim, orthogonal, seed)


def performer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    projection: Tensor,
    *,
    is_causal: bool = False,
    q_start: int | Tensor | None = None,
    kv_start: int | Tensor | None = None,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    state: LinearState | None = None,
    return_state: bool = False,
    key_padding_mask: Tensor | None = None,
) -> Tensor | tuple[Tensor, LinearState]:
    """Softmax attention in expectation, in time linear in the sequence.

    ``out_i = sum_j w_ij v_j / sum_j w_ij`` with ``w_ij = phi(q_i).phi(k_j)``, ``phi(x) = exp(W x' -
    |x'|^2 / 2) / sqrt(num_features)``, ``x' = x / head_dim^(1/4)``: over W with Gaussian rows the
    mean of ``w_ij`` is ``exp(q_i.k_j / sqrt(head_dim))``. Features are kept as logarithms over a
    running maximum, so any scale of q and k is as exact as another.

    Args:
        q, k, v: as in :func:`cosformer.linear_attention`.
        projection: W, [num_features, head_dim] (:func:`performer_projection`); a constant of the
            model, or trained: it has a gradient.
        is_causal, q_start, kv_start, key_mask, query_mask, cu_seqlens_q, cu_seqlens_k: likewise.
        state: what an earlier call returned, of kind "performer"; its keys come before the call's.
        return_state: return ``(out, LinearState)`` instead of ``out``. ``log_scale`` of the state
            is a constant for gradients.

    Returns:
        [batch, q_len, heads, value_dim] in q's dtype. A row that sees no key is 0. Gradients of any
        order; torch.func transforms and forward mode are refused.

    Raises:
        RuntimeError: for shapes, dtypes, options or positions that do not fit: what was found and
            what was expected.

    Example:
        >>> import torch, cosformer
        >>> q, k, v = (0.3 * torch.randn(1, 9, 2, 8) for _ in range(3))
        >>> projection = cosformer.performer_projection(4096, 8, seed=0)
        >>> out = cosformer.performer_attention(q, k, v, projection)
        >>> exact = cosformer.softmax_attention(q, k, v)
        >>> bool((out - exact).norm() < 0.1 * exact.norm())
        True
    """
    refuse_key_padding_mask(key_padding_mask, "performer_attention")
    tensors = _NO_STATE
    if state is not None:
        tensors = (state.kv_state, state.k_sum, state.log_scale, state.start, state.position)
    out, _, kv_state, k_sum, log_scale, start, position = _performer_attention(
        q,
        k,
        v,
        _widened(projection, q),
        int_tensor("q_start", q_start, q),
        int_tensor("kv_start", kv_start, q),
        key_mask,
        query_mask,
        cu_seqlens_q,
        cu_seqlens_k,
        *tensors,
        is_causal,
        *(_SPEC if state is None else (state.kind, state.feature_map)),
        return_state,
        False,
    )
    if not return_state:
        return out
    return out, LinearState(kv_state, k_sum, start, position, *_SPEC, log_scale=log_scale)


def performer_attention_decode_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    projection: Tensor,
    state: LinearState,
    *,
    key_mask: Tensor | None = None,
) -> Tensor:
    """One token a row: adds it to ``state`` in place and answers its query.

    Args:
        q: [rows, 1, heads, head_dim].
        k: [rows, 1, kv_heads, head_dim].
        v: [rows, 1, kv_heads, value_dim].
        projection: that of the calls which made the state.
        state: of kind "performer", changed in place; ``state.clone()`` keeps a copy.
        key_mask: bool [rows, 1], False = the row's key is skipped and its position stays.

    Returns:
        [rows, 1, heads, value_dim]. No gradients: inputs that require one are an error while
        gradients are recorded.

    Example:
        >>> import torch, cosformer
        >>> q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
        >>> projection = cosformer.performer_projection(32, 8, seed=0)
        >>> whole = cosformer.performer_attention(q, k, v, projection, is_causal=True)
        >>> _, state = cosformer.performer_attention(
        ...     q[:, :4], k[:, :4], v[:, :4], projection, is_causal=True, return_state=True
        ... )
        >>> token = q[:, 4:], k[:, 4:], v[:, 4:]
        >>> step = cosformer.performer_attention_decode_step_(*token, projection, state)
        >>> torch.allclose(step, whole[:, 4:], atol=1e-5)
        True
    """
    if state.log_scale is None:
        raise ValueError(
            f"performer_attention_decode_step_: the state is of kind {state.kind!r} and has no "
            f"log_scale, expected kind 'performer'"
        )
    return _decode_step_(
        q,
        k,
        v,
        _widened(projection, q),
        state.kv_state,
        state.k_sum,
        state.log_scale,
        state.position,
        state.start,
        key_mask,
        state.kind,
        state.feature_map,
    )
