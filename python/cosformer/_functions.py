"""The operators as Python functions: shapes, defaults and documentation; the operators check."""

from __future__ import annotations

import torch
from torch import Tensor

from cosformer._arguments import int_tensor, refuse_key_padding_mask
from cosformer._state import LinearState

_ops = torch.ops.cosformer
_linear_attention = _ops.linear_attention.default
_decode_step_ = _ops.linear_attention_decode_step_.default
_apply_rotary = _ops.apply_rotary.default

# Arguments of the operators in place of a state.
_NO_STATE = (None, None, None, None)
_NO_SPEC = ("linear", "relu", 0, 0.0, False)


def _linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    feature_map: str,
    reweight_len: int | None,
    is_causal: bool,
    q_start: int | Tensor | None,
    kv_start: int | Tensor | None,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    state: LinearState | None,
    return_state: bool,
    normalizer: str,
    rotary_base: float | None,
    rotary_interleaved: bool,
    eps: float,
    return_denominator: bool,
) -> tuple[Tensor, LinearState | None, Tensor]:
    out, denominator, *tensors = _linear_attention(
        q,
        k,
        v,
        int_tensor("q_start", q_start, q),
        int_tensor("kv_start", kv_start, q),
        key_mask,
        query_mask,
        cu_seqlens_q,
        cu_seqlens_k,
        *(_NO_STATE if state is None else state[:4]),
        feature_map,
        reweight_len,
        is_causal,
        normalizer,
        eps,
        rotary_base,
        rotary_interleaved,
        *(_NO_SPEC if state is None else state[4:9]),
        return_state,
        return_denominator,
    )
    new_state = None
    if return_state:
        new_state = LinearState(
            *tensors,
            "linear",
            feature_map,
            reweight_len or 0,
            rotary_base or 0.0,
            rotary_interleaved,
        )
    return out, new_state, denominator


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str = "relu",
    reweight_len: int | None = None,
    is_causal: bool = False,
    q_start: int | Tensor | None = None,
    kv_start: int | Tensor | None = None,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    state: LinearState | None = None,
    return_state: bool = False,
    normalizer: str = "sum",
    rotary_base: float | None = None,
    rotary_interleaved: bool = False,
    eps: float = 1e-6,
    key_padding_mask: Tensor | None = None,
) -> Tensor | tuple[Tensor, LinearState]:
    """Attention in time linear in the sequence (Katharopoulos et al., ICML 2020).

    ``out_i = sum_j w_ij v_j / max(sum_j w_ij, eps)`` over the keys j that query i sees, with
    ``w_ij = phi(q_i).phi(k_j)``, times ``cos(pi/2 (i - j) / M)`` when ``reweight_len`` M is given
    (cosFormer: Qin et al., ICLR 2022).

    Args:
        q: [batch, q_len, heads, head_dim], float32, float64, bfloat16 or float16.
        k: [batch, kv_len, kv_heads, head_dim]; heads is a multiple of kv_heads.
        v: [batch, kv_len, kv_heads, value_dim].
        feature_map: "relu", "elu1" (elu + 1), or "identity", which wants non-negative q and k.
        reweight_len: M of the cosine, a constant of the model; None = no cosine. A query that sees
            a key further than M away is an error.
        is_causal: query i sees the keys at its position and before.
        q_start, kv_start: position of the first query and key: an int, or int64 [batch] (packed:
            [sequences]). None = 0, or where the state stands.
        key_mask: bool [batch, kv_len], True = takes part. The opposite of nn.MultiheadAttention's
            key_padding_mask, which is refused by name.
        query_mask: bool [batch, q_len]; rows of False are exactly 0 and have no effect.
        cu_seqlens_q, cu_seqlens_k: int32 or int64 [sequences + 1], offsets of packed sequences
            (batch 1), from 0 to the length; keys' default: as the queries'.
        state: what an earlier call returned; its keys come before the call's.
        return_state: return ``(out, LinearState)`` instead of ``out``.
        normalizer: "sum", or "none": no division.
        rotary_base: turn the numerator's features by rotary positions (Su et al. 2021); the
            denominator stays as it is, so rows need not sum to 1.
        rotary_interleaved: pairs (2c, 2c + 1) instead of (c, c + head_dim / 2).
        eps: the least denominator.

    Returns:
        [batch, q_len, heads, value_dim] in q's dtype. A row that sees no key is 0. Gradients of
        any order; torch.func transforms and forward mode are refused.

    Raises:
        RuntimeError: for shapes, dtypes, options or positions that do not fit: what was found and
            what was expected.

    Example:
        >>> import torch, cosformer
        >>> q, k, v = (torch.randn(2, 9, 4, 8) for _ in range(3))
        >>> out = cosformer.linear_attention(q, k, v, feature_map="elu1", is_causal=True)
        >>> out.shape
        torch.Size([2, 9, 4, 8])
        >>> torch.allclose(out[:, 0], v[:, 0], atol=1e-5)  # the first token sees itself alone
        True
    """
    refuse_key_padding_mask(key_padding_mask, "linear_attention")
    out, new_state, _ = _linear(
        q,
        k,
        v,
        feature_map,
        reweight_len,
        is_causal,
        q_start,
        kv_start,
        key_mask,
        query_mask,
        cu_seqlens_q,
        cu_seqlens_k,
        state,
        return_state,
        normalizer,
        rotary_base,
        rotary_interleaved,
        eps,
        False,
    )
    return out if new_state is None else (out, new_state)


def linear_attention_with_denominator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str = "relu",
    reweight_len: int | None = None,
    is_causal: bool = False,
    q_start: int | Tensor | None = None,
    kv_start: int | Tensor | None = None,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    state: LinearState | None = None,
    return_state: bool = False,
    normalizer: str = "sum",
    rotary_base: float | None = None,
    rotary_interleaved: bool = False,
    eps: float = 1e-6,
) -> tuple[Tensor, LinearState | None, Tensor]:
    """As :func:`linear_attention`, and each row's sum of weights, for monitoring.

    Returns:
        ``(out, state or None, denominator)``; denominator: [batch, q_len, heads], the sums before
        eps is applied, without gradient; empty for normalizer "none".

    Example:
        >>> import torch, cosformer
        >>> q = torch.ones(1, 3, 1, 2)
        >>> _, _, denominator = cosformer.linear_attention_with_denominator(
        ...     q, q, q, is_causal=True
        ... )
        >>> denominator.flatten().tolist()
        [2.0, 4.0, 6.0]
    """
    return _linear(
        q,
        k,
        v,
        feature_map,
        reweight_len,
        is_causal,
        q_start,
        kv_start,
        key_mask,
        query_mask,
        cu_seqlens_q,
        cu_seqlens_k,
        state,
        return_state,
        normalizer,
        rotary_base,
        rotary_interleaved,
        eps,
        True,
    )


def cosformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    reweight_len: int,
    is_causal: bool = False,
    q_start: int | Tensor | None = None,
    kv_start: int | Tensor | None = None,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    state: LinearState | None = None,
    return_state: bool = False,
    normalizer: str = "sum",
    rotary_base: float | None = None,
    rotary_interleaved: bool = False,
    eps: float = 1e-6,
    key_padding_mask: Tensor | None = None,
) -> Tensor | tuple[Tensor, LinearState]:
    """:func:`linear_attention` with relu and the cosine (Qin et al., ICLR 2022).

    ``reweight_len`` is the model's M, by default its max_len: never the length of a call, or
    padding and step-by-step decoding would change results.

    Example:
        >>> import torch, cosformer
        >>> q, k, v = (torch.rand(1, 9, 2, 8) for _ in range(3))
        >>> options = {"reweight_len": 64, "is_causal": True}
        >>> whole = cosformer.cosformer_attention(q, k, v, **options)
        >>> _, state = cosformer.cosformer_attention(
        ...     q[:, :6], k[:, :6], v[:, :6], return_state=True, **options
        ... )
        >>> rest = cosformer.cosformer_attention(
        ...     q[:, 6:], k[:, 6:], v[:, 6:], state=state, **options
        ... )
        >>> torch.allclose(rest, whole[:, 6:], atol=1e-5)
        True
    """
    if reweight_len is None:
        raise ValueError(
            "cosformer_attention: reweight_len is None: give the model's M (by default its "
            "max_len), a constant that no call changes"
        )
    refuse_key_padding_mask(key_padding_mask, "cosformer_attention")
    return linear_attention(
        q,
        k,
        v,
        reweight_len=reweight_len,
        is_causal=is_causal,
        q_start=q_start,
        kv_start=kv_start,
        key_mask=key_mask,
        query_mask=query_mask,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        state=state,
        return_state=return_state,
        normalizer=normalizer,
        rotary_base=rotary_base,
        rotary_interleaved=rotary_interleaved,
        eps=eps,
    )


def linear_attention_decode_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearState,
    *,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    normalizer: str = "sum",
    eps: float = 1e-6,
) -> Tensor:
    """One token a row: adds it to ``state`` in place and answers its query.

    The feature map, M and rotary positions are those of the state.

    Args:
        q: [rows, 1, heads, head_dim].
        k: [rows, 1, kv_heads, head_dim].
        v: [rows, 1, kv_heads, value_dim].
        state: changed in place; ``state.clone()`` keeps a copy.
        key_mask: bool [rows, 1], False = the row's key is skipped and its position stays.
        query_mask: bool [rows, 1], False = the row's output is exactly 0.

    Returns:
        [rows, 1, heads, value_dim]. No gradients: inputs that require one are an error while
        gradients are recorded.

    Example:
        >>> import torch, cosformer
        >>> q, k, v = (torch.rand(1, 5, 2, 8) for _ in range(3))
        >>> whole, _ = cosformer.linear_attention(q, k, v, is_causal=True, return_state=True)
        >>> _, state = cosformer.linear_attention(
        ...     q[:, :4], k[:, :4], v[:, :4], is_causal=True, return_state=True
        ... )
        >>> step = cosformer.linear_attention_decode_step_(q[:, 4:], k[:, 4:], v[:, 4:], state)
        >>> torch.allclose(step, whole[:, 4:], atol=1e-5), state.position.item()
        (True, 5)
    """
    return _decode_step_(
        q,
        k,
        v,
        state.kv_state,
        state.k_sum,
        state.position,
        state.start,
        key_mask,
        query_mask,
        state.feature_map,
        state.reweight_len or None,
        normalizer,
        eps,
        state.rotary_base or None,
        state.rotary_interleaved,
        *state[4:9],
    )


def apply_rotary(
    x: Tensor,
    *,
    start: int = 0,
    positions: Tensor | None = None,
    base: float = 10000.0,
    interleaved: bool = False,
) -> Tensor:
    """Rotary positions (Su et al. 2021): pair c of dim / 2 turns by position x base^(-2c / dim).

    Args:
        x: [batch, seq, heads, dim], dim even.
        start: position of the first token.
        positions: int64 [batch, seq] instead.
        interleaved: pairs (2c, 2c + 1) instead of (c, c + dim / 2).

    Returns:
        Shape and dtype of x; angles are computed in double.

    Example:
        >>> import torch, cosformer
        >>> q, k = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 2, 8)
        >>> def score(i, j):  # depends on the distance alone
        ...     turned = [cosformer.apply_rotary(x, start=at) for x, at in ((q, i), (k, j))]
        ...     return (turned[0] * turned[1]).sum()
        >>> torch.allclose(score(9, 4), score(105, 100), atol=1e-4)
        True
    """
    return _apply_rotary(x, positions, start, base, interleaved, False)


def sinusoidal_positions(max_len: int, dim: int) -> Tensor:
    """The table of Vaswani et al. 2017: float32 [max_len, dim], sin on even, cos on odd dims.

    Example:
        >>> import cosformer
        >>> cosformer.sinusoidal_positions(3, 4)[0].tolist()
        [0.0, 1.0, 0.0, 1.0]
    """
    return _ops.sinusoidal_positions(max_len, dim)
