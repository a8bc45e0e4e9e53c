"""Exact softmax attention and the kinds over it; the operators check."""

from __future__ import annotations

import torch
from torch import Tensor

from cosformer._arguments import int_tensor, refuse_key_padding_mask

_ops = torch.ops.cosformer
_softmax_attention = _ops.softmax_attention.default
_decode_step_ = _ops.softmax_attention_decode_step_.default
_linformer_attention = _ops.linformer_attention.default
_longformer_attention = _ops.longformer_attention.default
_bigbird_attention = _ops.bigbird_attention.default


def _window(where: str, window: tuple[int, int] | None) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    if isinstance(window, int) or len(window) != 2:
        raise ValueError(
            f"{where}: window is {window}, expected (left, right): how many keys to the left and "
            f"to the right of a query it reaches, -1 = all"
        )
    left, right = window
    return left, right


def _arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    dilation: int = 1,
    global_mask: Tensor | None = None,
    block_mask: Tensor | None = None,
    block_size: int | None = None,
    relative_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    q_start: int | Tensor | None = None,
    kv_start: int | Tensor | None = None,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    where: str = "softmax_attention",
) -> tuple:
    """In the order of the operators' schema."""
    return (
        q,
        k,
        v,
        int_tensor("q_start", q_start, q),
        int_tensor("kv_start", kv_start, q),
        key_mask,
        query_mask,
        cu_seqlens_q,
        cu_seqlens_k,
        global_mask,
        block_mask,
        relative_bias,
        int_tensor("dropout_seed", dropout_seed, q),
        is_causal,
        scale,
        *_window(where, window),
        dilation,
        block_size,
        dropout_p,
    )


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    dilation: int = 1,
    global_mask: Tensor | None = None,
    block_mask: Tensor | None = None,
    block_size: int | None = None,
    relative_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    q_start: int | Tensor | None = None,
    kv_start: int | Tensor | None = None,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    """Exact softmax attention (Vaswani et al. 2017), tiled (Dao et al. 2022).

    ``out_i = sum_j w_ij v_j / sum_j w_ij`` over the keys j that query i sees, with ``w_ij =
    exp(scale q_i.k_j + bias_ij)``. No matrix of queries x keys is stored, and the work is
    proportional to what is visible. A key is visible when it is real (``key_mask``), in the same
    sequence, not later (``is_causal``) and, where ``window``, ``global_mask`` or ``block_mask`` is
    given, allowed by one of them.

    Args:
        q: [batch, q_len, heads, head_dim], float32, float64, bfloat16 or float16.
        k: [batch, kv_len, kv_heads, head_dim]; heads is a multiple of kv_heads.
        v: [batch, kv_len, kv_heads, value_dim].
        is_causal: query i sees the keys at its position and before.
        scale: None = 1 / sqrt(head_dim).
        window: (left, right): keys at ``p_j = p_i + t dilation`` with -left <= t <= right; -1 = no
            bound on that side.
        dilation: the distance of the window's keys from each other.
        global_mask: bool [batch, kv_len]: tokens that every query sees and, as queries, see all.
        block_mask: bool [heads or 1, q_blocks, kv_blocks], a block being position // block_size.
        block_size: positions in a block.
        relative_bias: [heads, 2 R + 1], added to the scores: entry ``clamp(p_j - p_i, -R, R) + R``.
        dropout_p: a weight is dropped with this probability, the others grow by 1 / (1 - p).
        dropout_seed: int, or int64 []: which weights are dropped follows from it, the batch row,
            the head and the two positions alone.
        q_start, kv_start: position of the first query and key: an int, or int64 [batch] (packed:
            [sequences]). None = 0.
        key_mask: bool [batch, kv_len], True = takes part. The opposite of nn.MultiheadAttention's
            key_padding_mask, which is refused by name.
        query_mask: bool [batch, q_len]; rows of False are exactly 0 and have no effect.
        cu_seqlens_q, cu_seqlens_k: int32 or int64 [sequences + 1], offsets of packed sequences
            (batch 1), from 0 to the length; keys' default: as the queries'.

    Returns:
        [batch, q_len, heads, value_dim] in q's dtype. A row that sees no key is 0. Gradients of
        any order by q, k, v and relative_bias (the second forms every weight); torch.func
        transforms and forward mode are refused.

    Raises:
        RuntimeError: for shapes, dtypes or options that do not fit: what was found and expected.

    Example:
        >>> import torch, cosformer
        >>> q, k, v = torch.randn(1, 9, 4, 8), torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 8)
        >>> out = cosformer.softmax_attention(q, k, v, is_causal=True, window=(3, 0))
        >>> other = v.clone()
        >>> other[:, 4] = torch.nan  # whatever it holds, tokens that do not see it stay the same
        >>> again = cosformer.softmax_attention(q, k, other, is_causal=True, window=(3, 0))
        >>> torch.equal(again[:, :4], out[:, :4]), torch.equal(again[:, 8:], out[:, 8:])
        (True, True)
    """
    refuse_key_padding_mask(key_padding_mask, "softmax_attention")
    out, _ = _softmax_attention(
        *_arguments(
            q,
            k,
            v,
            is_causal=is_causal,
            scale=scale,
            window=window,
            dilation=dilation,
            global_mask=global_mask,
            block_mask=block_mask,
            block_size=block_size,
            relative_bias=relative_bias,
            dropout_p=dropout_p,
            dropout_seed=dropout_seed,
            q_start=q_start,
            kv_start=kv_start,
            key_mask=key_mask,
            query_mask=query_mask,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
        ),
        False,
    )
    return out


def softmax_attention_decode_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    *,
    start: Tensor | None = None,
    cache_mask: Tensor | None = None,
    is_ring: bool = False,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    dilation: int = 1,
    global_mask: Tensor | None = None,
    block_mask: Tensor | None = None,
    block_size: int | None = None,
    relative_bias: Tensor | None = None,
    query_mask: Tensor | None = None,
) -> Tensor:
    """One token a row: writes it into a cache in place and answers its query.

    The token of position p lies in slot ``p - start``, in a ring in ``(p - start) % capacity``.

    Args:
        q: [rows, 1, heads, head_dim].
        k: [rows, 1, kv_heads, head_dim].
        v: [rows, 1, kv_heads, value_dim].
        keys, values: [rows, capacity, kv_heads, dim] in the token's dtype; changed in place.
        position: int64 [rows], of the token; advanced in place.
        start: int64 [rows], position of slot 0; None = 0.
        cache_mask: bool [rows, capacity], by slot: False = never seen.
        is_ring: the oldest token makes room for a new one; otherwise a full cache is an error.
        global_mask: bool [rows, capacity], by slot.
        scale, window, dilation, block_mask, block_size, relative_bias, query_mask: as in
            :func:`softmax_attention`.

    Returns:
        [rows, 1, heads, value_dim]. No gradients: inputs that require one are an error while
        gradients are recorded.

    Example:
        >>> import torch, cosformer
        >>> q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
        >>> keys, values = torch.zeros(2, 1, 8, 2, 8)  # room for 8 tokens
        >>> position = torch.zeros(1, dtype=torch.int64)
        >>> steps = [
        ...     cosformer.softmax_attention_decode_step_(
        ...         *(x[:, t : t + 1] for x in (q, k, v)), keys, values, position
        ...     )
        ...     for t in range(5)
        ... ]
        >>> whole = cosformer.softmax_attention(q, k, v, is_causal=True)
        >>> torch.allclose(torch.cat(steps, 1), whole, atol=1e-5), position.item()
        (True, 5)
    """
    return _decode_step_(
        q,
        k,
        v,
        keys,
        values,
        position,
        start,
        cache_mask,
        query_mask,
        global_mask,
        block_mask,
        relative_bias,
        is_ring,
        scale,
        *_window("softmax_attention_decode_step_", window),
        dilation,
        block_size,
    )


def linformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_len_proj: Tensor,
    value_len_proj: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    """Softmax attention over keys and values shortened by learned projections (Wang et al. 2020).

    ``k' = key_len_proj[:kv_len]^T k`` and ``v' = value_len_proj[:kv_len]^T v`` along the sequence;
    masked keys and values are zeroed before.

    Args:
        key_len_proj, value_len_proj: [max_len, projected_len]; kv_len is at most max_len.
        is_causal: an error if True: each projected key mixes all positions.
        q, k, v, scale, dropout_p, dropout_seed, key_mask, query_mask: as in
            :func:`softmax_attention`; dropout is that of the projected keys.

    Returns:
        [batch, q_len, heads, value_dim] in q's dtype.

    Example:
        >>> import torch, cosformer
        >>> q, k, v = (torch.randn(1, 9, 2, 8) for _ in range(3))
        >>> projections = torch.randn(2, 64, 4)  # of up to 64 keys to 4
        >>> cosformer.linformer_attention(q, k, v, *projections).shape
        torch.Size([1, 9, 2, 8])
    """
    refuse_key_padding_mask(key_padding_mask, "linformer_attention")
    return _linformer_attention(
        *_arguments(
            q,
            k,
            v,
            is_causal=is_causal,
            scale=scale,
            dropout_p=dropout_p,
            dropout_seed=dropout_seed,
            key_mask=key_mask,
            query_mask=query_mask,
        ),
        key_len_proj,
        value_len_proj,
    )


def longformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_global: Tensor,
    k_global: Tensor,
    v_global: Tensor,
    *,
    window: tuple[int, int],
    global_mask: Tensor,
    key_padding_mask: Tensor | None = None,
    **options,
) -> Tensor:
    """A window and global tokens with projections of their own (Beltagy et al. 2020).

    The row of a global token is attention of ``q_global`` over all ``k_global``, ``v_global``
    (within ``is_causal``); every other row is :func:`softmax_attention` of q, k, v with the window
    and the global keys.

    Args:
        q_global, k_global, v_global: as q, k, v.
        window, global_mask: as in :func:`softmax_attention`.
        options: its other options but blocks; scale, relative_bias and dropout hold for both
            parts.

    Returns:
        [batch, q_len, heads, value_dim] in q's dtype.

    Example:
        >>> import torch, cosformer
        >>> q, k, v = (torch.randn(1, 9, 2, 8) for _ in range(3))
        >>> first = torch.arange(9)[None] < 1
        >>> cosformer.longformer_attention(
        ...     q, k, v, q, k, v, window=(2, 2), global_mask=first
        ... ).shape
        torch.Size([1, 9, 2, 8])
    """
    refuse_key_padding_mask(key_padding_mask, "longformer_attention")
    arguments = _arguments(
        q,
        k,
        v,
        window=window,
        global_mask=global_mask,
        where="longformer_attention",
        **options,
    )
    return _longformer_attention(*arguments, q_global, k_global, v_global)


def bigbird_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_size: int = 64,
    num_random_blocks: int = 3,
    window_blocks: int = 3,
    global_blocks: tuple[int, int] = (1, 1),
    seed: int = 0,
    key_padding_mask: Tensor | None = None,
    **options,
) -> Tensor:
    """Window, global and random blocks (Zaheer et al. 2020).

    :func:`softmax_attention` with the mask that :func:`bigbird_block_mask` makes for the call's
    length: any length, the last block may be short. Not causal, the last global blocks and the
    random ones depend on the length, so a padded call differs from one of the sequence alone.

    Args:
        block_size: positions in a block.
        num_random_blocks, window_blocks, global_blocks, seed: of the mask.
        options: those of :func:`softmax_attention` but its patterns.

    Returns:
        [batch, q_len, heads, value_dim] in q's dtype.

    Example:
        >>> import torch, cosformer
        >>> q, k, v = (torch.randn(1, 30, 2, 8) for _ in range(3))
        >>> cosformer.bigbird_attention(q, k, v, block_size=4, num_random_blocks=1).shape
        torch.Size([1, 30, 2, 8])
    """
    refuse_key_padding_mask(key_padding_mask, "bigbird_attention")
    arguments = _arguments(q, k, v, block_size=block_size, where="bigbird_attention", **options)
    return _bigbird_attention(
        *arguments, num_random_blocks, window_blocks, *_pair(global_blocks), seed
    )


def bigbird_block_mask(
    num_heads: int,
    num_blocks: int,
    *,
    num_random_blocks: int,
    window_blocks: int = 3,
    global_blocks: tuple[int, int] = (1, 1),
    is_causal: bool = False,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> Tensor:
    """Which key blocks each query block sees in BigBird: bool [heads, blocks, blocks].

    Args:
        num_random_blocks: blocks beyond the window and the global ones that a row draws (fewer
            where fewer are left), from (seed, head, row) alone.
        window_blocks: an odd number: a block and as many on each side.
        global_blocks: how many of the first and of the last blocks see all and are seen by all.
        is_causal: only blocks up to the row's own, and no last global blocks: a row does not change
            as the sequence grows.

    Example:
        >>> import cosformer
        >>> mask = cosformer.bigbird_block_mask(1, 9, num_random_blocks=2, seed=0)
        >>> mask[0, 4].sum().item()  # three of the window, two global, two random
        7
    """
    return _ops.bigbird_block_mask(
        num_heads,
        num_blocks,
        num_random_blocks,
        window_blocks,
        *_pair(global_blocks),
        is_causal,
        seed,
        device=None if device is None else torch.device(device),
    )


def _pair(global_blocks: tuple[int, int]) -> tuple[int, int]:
    if isinstance(global_blocks, int) or len(global_blocks) != 2:
        raise ValueError(
            f"global_blocks is {global_blocks}, expected (first, last): how many of the first and "
            f"of the last blocks are global"
        )
    first, last = global_blocks
    return first, last


def t5_relative_bias(weight: Tensor, *, bidirectional: bool, max_distance: int = 128) -> Tensor:
    """T5's bias by distance (Raffel et al. 2020), for ``relative_bias``.

    Args:
        weight: [buckets, heads]; half of the buckets are exact distances, the others grow like a
            logarithm up to max_distance.
        bidirectional: half of the buckets are for later keys.

    Returns:
        [heads, 2 max_distance + 1], differentiable by weight.

    Example:
        >>> import torch, cosformer
        >>> weight = torch.randn(32, 4)
        >>> cosformer.t5_relative_bias(weight, bidirectional=True).shape
        torch.Size([4, 257])
    """
    return _ops.t5_relative_bias(weight, bidirectional, max_distance)
