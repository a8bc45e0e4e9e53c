"""What every attention layer does around its kind: projections, masks, starts, heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cosformer._arguments import refuse_key_padding_mask
from cosformer._functions import apply_rotary
from cosformer.nn._call import AttentionState, Call, Heads, Inputs, Result
from cosformer.nn._options import at_least, never, refuse, refuse_options
from cosformer.nn._positions import checked_start, packed_positions, positions_from


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[batch, seq, heads * dim] -> [batch, seq, heads, dim]."""
    return x.view(x.shape[0], x.shape[1], heads, x.shape[2] // heads)


def without_masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """What masked rows hold must not reach a weight's gradient (0 x NaN)."""
    return x if mask is None else torch.where(mask[..., None], x, x.new_zeros(()))


def _check_input(x: Tensor, name: str, width: int) -> None:
    if x.dim() != 3 or x.shape[2] != width:
        raise ValueError(f"attention: {name} is {list(x.shape)}, expected [batch, seq, {width}]")


def _check_mask(mask: Tensor | None, name: str, x: Tensor, of: str) -> None:
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise ValueError(
            f"attention: {name} is {mask.dtype}, expected torch.bool (True = takes part)"
        )
    if mask.shape != x.shape[:2]:
        raise ValueError(
            f"attention: {name} is {list(mask.shape)}, expected {list(x.shape[:2])} (batch and "
            f"length of {of})"
        )


class Attention(nn.Module):
    """The base of every multi-head attention layer; make one of its kinds, or :func:`attention`.

    Args:
        embed_dim: width of the query and of the output.
        num_heads: of queries.
        kdim: width of the key. None = embed_dim.
        vdim: width of the value. None = kdim.
        head_dim: of queries and keys. None = embed_dim / num_heads.
        value_dim: of a head's values. None = head_dim.
        num_kv_heads: grouped-query attention. None = num_heads.
        is_causal: a token sees itself and those before it.
        qkv_bias, out_bias: biases of the projections.
        out_proj: False: the heads, side by side, are the output.
        rotary_base: rotary positions (Su et al. 2021) on q and k, in the linear kinds on the
            numerator; None = none. Linformer has none.
        rotary_dim: the first dims of a head that turn. None = head_dim, as the linear kinds want.
        rotary_interleaved: pairs (2c, 2c + 1) instead of (c, c + rotary_dim / 2).
        device, dtype: of the parameters.

    Parameters are ``q_proj``, ``k_proj``, ``v_proj`` and ``out_proj`` (``weight``, ``bias``), and
    those that a kind names. Rows that a query mask excludes are exactly 0 and have no gradient,
    whatever they hold.
    """

    kind: str = ""
    _takes_relative_bias = False
    _takes_global_mask = False
    _has_denominator = False
    _turns_whole_heads = False
    _no_bias_because = "it never forms the scores to add it to"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kdim: int | None = None,
        vdim: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        num_kv_heads: int | None = None,
        is_causal: bool = False,
        qkv_bias: bool = True,
        out_bias: bool = True,
        out_proj: bool = True,
        rotary_base: float | None = None,
        rotary_dim: int | None = None,
        rotary_interleaved: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        if not self.kind:
            never(type(self).__name__)
        share_kv = others.pop("_share_kv", False)
        refuse_options(self.kind, others)
        at_least(1, embed_dim, "embed_dim")
        at_least(1, num_heads, "num_heads")
        if head_dim is None and embed_dim % num_heads != 0:
            raise ValueError(
                f"attention: embed_dim is {embed_dim}, expected a multiple of num_heads "
                f"({num_heads}), or head_dim given"
            )
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = self.kdim if vdim is None else vdim
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.value_dim = self.head_dim if value_dim is None else value_dim
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.is_causal = is_causal
        self.rotary_base = rotary_base
        self.rotary_dim = self.head_dim if rotary_dim is None else rotary_dim
        self.rotary_interleaved = rotary_interleaved
        self._check_options()

        factory = {"device": device, "dtype": dtype}
        kv = self.num_kv_heads
        self.q_proj = nn.Linear(embed_dim, num_heads * self.head_dim, qkv_bias, **factory)
        self.k_proj = nn.Linear(self.kdim, kv * self.head_dim, qkv_bias, **factory)
        self.v_proj = None
        if not share_kv:
            self.v_proj = nn.Linear(self.vdim, kv * self.value_dim, qkv_bias, **factory)
        self.out_proj = None
        if out_proj:
            self.out_proj = nn.Linear(num_heads * self.value_dim, embed_dim, out_bias, **factory)

    def _check_options(self) -> None:
        for name in ("num_kv_heads", "head_dim", "value_dim", "kdim", "vdim"):
            at_least(1, getattr(self, name), name)
        if self.num_heads % self.num_kv_heads != 0:
            raise ValueError(
                f"attention: num_heads is {self.num_heads}, expected a multiple of num_kv_heads "
                f"({self.num_kv_heads})"
            )
        if self.rotary_base is None:
            return
        if not self.rotary_base > 0:
            raise ValueError(
                f"attention: rotary_base is {self.rotary_base}, expected a positive number"
            )
        dim = self.rotary_dim
        if not 0 < dim <= self.head_dim or dim % 2 != 0:
            raise ValueError(
                f"attention: rotary_dim is {dim}, expected an even number up to head_dim "
                f"({self.head_dim})"
            )
        if self._turns_whole_heads and dim != self.head_dim:
            raise ValueError(
                f"attention: rotary_dim is {dim}, expected head_dim ({self.head_dim}): kind "
                f'"{self.kind}" rotates whole heads'
            )

    def reset_parameters(self) -> None:
        """Draws every parameter anew, from torch's generator and the kind's seed."""
        for child in self.children():
            if isinstance(child, nn.Linear):
                child.reset_parameters()
        self._reset_own_parameters()

    def _reset_own_parameters(self) -> None:
        """Of a kind, beside its projections."""

    def extra_repr(self) -> str:
        heads = f"{self.embed_dim}, {self.num_heads}"
        if self.num_kv_heads != self.num_heads:
            heads += f", num_kv_heads={self.num_kv_heads}"
        return f"{heads}, head_dim={self.head_dim}, is_causal={self.is_causal}"

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        state: AttentionState = None,
        return_state: bool = False,
        q_start: int | Tensor | None = None,
        kv_start: int | Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        return_denominator: bool = False,
        global_mask: Tensor | None = None,
        relative_bias: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor | tuple:
        """Attention of query over key and value, projected on both sides.

        Args:
            query: [batch, q_len, embed_dim].
            key: [batch, kv_len, kdim]. None = query.
            value: [batch, kv_len, vdim]. None = key.
            key_mask: bool [batch, kv_len], True = takes part. The opposite of
                nn.MultiheadAttention's key_padding_mask, which is refused by name.
            query_mask: bool [batch, q_len]; rows of False are exactly 0 and have no effect. None =
                key_mask in self attention.
            state: what an earlier call returned; not changed.
            return_state: return ``(out, state)``.
            q_start, kv_start: position of the first query and key: an int, or int64 [batch]
                (packed: [sequences]). None = 0, or where the state stands.
            cu_seqlens_q, cu_seqlens_k: int32 or int64 [sequences + 1], offsets of packed sequences
                (batch 1); keys' default: as the queries'.
            return_denominator: linear kinds: the result is followed by each row's sum of weights,
                [batch, q_len, heads], detached (None for normalizer "none").
            global_mask: Longformer: bool [batch, kv_len], True = a global token. Not with a state.
            relative_bias: softmax, longformer, bigbird: [heads, 2 R + 1], added to the scores by
                distance; see :func:`cosformer.softmax_attention`.

        Returns:
            out [batch, q_len, embed_dim], or ``(out, state)``.

        Raises:
            ValueError: for inputs or options that do not fit, RuntimeError from the operators:
                what was found and what was expected.
        """
        refuse_key_padding_mask(key_padding_mask, "attention")
        is_self = key is None or key is query
        if key is None:
            key = query
        if value is None:
            value = key
        call = Call(
            key_mask,
            key_mask if query_mask is None and is_self else query_mask,
            state,
            return_state,
            q_start,
            kv_start,
            cu_seqlens_q,
            cu_seqlens_k,
            return_denominator,
            global_mask,
            relative_bias,
        )
        self._check_call(query, key, value, call)
        rows = query.shape[0] if cu_seqlens_q is None else cu_seqlens_q.numel() - 1
        call = call._replace(
            q_start=checked_start(q_start, rows, "q_start"),
            kv_start=checked_start(kv_start, rows, "kv_start"),
        )
        q_in = without_masked(query, call.query_mask)
        same_mask = call.query_mask is call.key_mask
        k_in = q_in if is_self and same_mask else without_masked(key, key_mask)
        v_in = k_in if value is key else without_masked(value, key_mask)
        result = self._attend(Inputs(q_in, k_in, v_in), call)
        out = without_masked(self._merge_heads(result.out), call.query_mask)
        if not (return_state or return_denominator):
            return out
        given = (out,)
        if return_state:
            given += (result.state,)
        if return_denominator:
            given += (result.denominator,)
        return given

    def _check_call(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> None:
        _check_input(query, "query", self.embed_dim)
        _check_input(key, "key", self.kdim)
        _check_input(value, "value", self.vdim)
        batch, kv_len = key.shape[:2]
        if query.shape[0] != batch or value.shape[0] != batch or value.shape[1] != kv_len:
            raise ValueError(
                f"attention: query is {list(query.shape)}, key {list(key.shape)}, value "
                f"{list(value.shape)}: the batch of all, and the length of key and value, must "
                f"agree"
            )
        if self.v_proj is None and value is not key:
            raise ValueError(
                "attention: share_kv makes keys and values one, found a value beside the key: "
                "leave it out"
            )
        _check_mask(call.key_mask, "key_mask", key, "key")
        _check_mask(call.query_mask, "query_mask", query, "query")
        _check_mask(call.global_mask, "global_mask", key, "key")
        if call.cu_seqlens_q is not None:
            if call.key_mask is not None or call.query_mask is not None:
                raise ValueError(
                    "attention: masks and cu_seqlens together; packed sequences have no padding "
                    "to mask"
                )
        elif call.cu_seqlens_k is not None:
            raise ValueError("attention: cu_seqlens_k without cu_seqlens_q")
        self._check_kind_of_call(call)

    def _check_kind_of_call(self, call: Call) -> None:
        refuse(
            self.kind,
            call.relative_bias is not None and not self._takes_relative_bias,
            "takes no relative_bias: ",
            self._no_bias_because,
        )
        refuse(
            self.kind,
            call.global_mask is not None and not self._takes_global_mask,
            'takes no global_mask: global tokens belong to kind "longformer"',
        )
        refuse(
            self.kind,
            call.return_denominator and not self._has_denominator,
            "has no denominators to return",
        )

    def decode_step(
        self, query: Tensor, state: AttentionState = None, *, relative_bias: Tensor | None = None
    ) -> tuple[Tensor, AttentionState]:
        """The next token of each row in causal self attention, without autograd.

        Works in place: ``state`` is used up, go on with the one that is returned (of a
        ``LinearState`` it is the same). ``state.clone()`` first keeps it for another way on.

        Args:
            query: [batch, 1, embed_dim].
            state: of earlier calls; None starts one.
            relative_bias: as in :meth:`forward`.

        Returns:
            ``(out [batch, 1, embed_dim], state)``.
        """
        with torch.no_grad():
            if not self.is_causal:
                raise ValueError("attention: decode_step needs is_causal, found a layer without")
            if query.dim() != 3 or query.shape[1] != 1 or query.shape[2] != self.embed_dim:
                raise ValueError(
                    f"attention: decode_step: query is {list(query.shape)}, expected [batch, 1, "
                    f"{self.embed_dim}]"
                )
            self._check_kind_of_call(Call(relative_bias=relative_bias))
            if self._can_step(state):
                out, state = self._step(query, state, relative_bias)
                return self._merge_heads(out), state
            return self.forward(query, state=state, return_state=True, relative_bias=relative_bias)

    def attention_matrix(self, query: Tensor, *, relative_bias: Tensor | None = None) -> Tensor:
        """The weights w_ij / norm_i of self attention without state or mask, for inspection.

        Args:
            query: [batch, seq, embed_dim], a small one: the result is quadratic in memory.
            relative_bias: as in :meth:`forward`.

        Returns:
            [batch, heads, seq, seq]; Linformer: of the sequence's own values.
        """
        if query.dim() != 3 or query.shape[2] != self.embed_dim:
            raise ValueError(
                f"attention_matrix: query is {list(query.shape)}, expected [batch, seq, "
                f"{self.embed_dim}]"
            )
        call = Call(relative_bias=relative_bias)
        self._check_kind_of_call(call)
        return self._matrix(Inputs(query, query, query), call)

    # What a kind brings.

    def _attend(self, inputs: Inputs, call: Call) -> Result:
        never(type(self).__name__)

    def _can_step(self, state: AttentionState) -> bool:
        """Whether ``_step`` goes on from it; ``forward`` does in any case."""
        return False

    def _step(
        self, query: Tensor, state: AttentionState, relative_bias: Tensor | None
    ) -> tuple[Tensor, AttentionState]:
        never(type(self).__name__)

    def _matrix(self, inputs: Inputs, call: Call) -> Tensor:
        never(type(self).__name__)

    # What kinds use.

    def _project(self, inputs: Inputs) -> Heads:
        k = split_heads(self.k_proj(inputs.key), self.num_kv_heads)
        return Heads(
            split_heads(self.q_proj(inputs.query), self.num_heads),
            k,
            k if self.v_proj is None else split_heads(self.v_proj(inputs.value), self.num_kv_heads),
        )

    def _merge_heads(self, heads: Tensor) -> Tensor:
        x = heads.flatten(2)
        return x if self.out_proj is None else self.out_proj(x)

    def _rotate(self, x: Tensor, start: int, positions: Tensor | None) -> Tensor:
        options = {"base": self.rotary_base, "interleaved": self.rotary_interleaved}
        if self.rotary_dim == x.shape[3]:
            return apply_rotary(x, start=start, positions=positions, **options)
        turned = apply_rotary(
            x[..., : self.rotary_dim], start=start, positions=positions, **options
        )
        return torch.cat([turned, x[..., self.rotary_dim :]], 3)

    def _turn(self, x: Tensor, start: int | Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        if cu_seqlens is not None:
            return self._rotate(x, 0, packed_positions(cu_seqlens, start, x.shape[1]))
        if isinstance(start, Tensor):
            rows = start.to(x.device).expand(x.shape[0])
            return self._rotate(x, 0, positions_from(rows, x.shape[1]))
        return self._rotate(x, start or 0, None)

    def _rotate_heads(self, heads: Heads, call: Call) -> Heads:
        """Queries and keys turned to the positions of the call."""
        if self.rotary_base is None:
            return heads
        packing = call.cu_seqlens_q if call.cu_seqlens_k is None else call.cu_seqlens_k
        return heads._replace(
            q=self._turn(heads.q, call.q_start, call.cu_seqlens_q),
            k=self._turn(heads.k, call.kv_start, packing),
        )
