"""Longformer: a window, and global tokens with queries, keys and values of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cosformer._kv_cache import KvCache
from cosformer._matrix import attention_matrix
from cosformer._softmax import longformer_attention, softmax_attention
from cosformer.nn._attention import split_heads
from cosformer.nn._cached import CachedAttention
from cosformer.nn._call import AttentionState, Call, Heads, Inputs
from cosformer.nn._options import SharedOptions, at_least, check_window
from cosformer.nn._positions import packed_positions, positions_from

if TYPE_CHECKING:
    from typing_extensions import Unpack


class LongformerAttention(CachedAttention):
    """Longformer (Beltagy et al. 2020).

    Args:
        window: tokens on each side (causal: to the left) that a token sees.
        dilation: positions between the window's tokens.
        global_tokens: the first tokens of a sequence that see all and that all see, beside those
            of the call's ``global_mask``.
        scale: of the scores. None = 1 / sqrt(head_dim).
        dropout: of a weight, in training mode.
        options: those of :class:`Attention`.

    Parameters beside the projections: ``q_global_proj``, ``k_global_proj``, ``v_global_proj``;
    without any global token they take no part.

    Example:
        >>> import torch, cosformer
        >>> layer = cosformer.nn.LongformerAttention(16, 2, window=4, global_tokens=1)
        >>> layer(torch.randn(3, 30, 16)).shape
        torch.Size([3, 30, 16])
    """

    kind = "longformer"
    _takes_global_mask = True

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        window: int,
        dilation: int = 1,
        global_tokens: int = 0,
        scale: float | None = None,
        dropout: float = 0.0,
        **options: Unpack[SharedOptions],
    ) -> None:
        if window is None or window < 1:
            raise ValueError(
                f'attention: window is {window}, expected at least 1 for kind "longformer": '
                f"tokens on each side"
            )
        check_window(window, dilation)
        at_least(0, global_tokens, "global_tokens")
        super().__init__(embed_dim, num_heads, scale=scale, dropout=dropout, **options)
        self.window = window
        self.dilation = dilation
        self.global_tokens = global_tokens
        factory = {"device": options.get("device"), "dtype": options.get("dtype")}
        bias, kv = self.q_proj.bias is not None, self.num_kv_heads
        self.q_global_proj = nn.Linear(embed_dim, num_heads * self.head_dim, bias, **factory)
        self.k_global_proj = nn.Linear(self.kdim, kv * self.head_dim, bias, **factory)
        self.v_global_proj = nn.Linear(self.vdim, kv * self.value_dim, bias, **factory)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, window={self.window}, global_tokens={self.global_tokens}"

    def _project_global(self, inputs: Inputs) -> Heads:
        """The same inputs through the projections of global tokens."""
        return Heads(
            split_heads(self.q_global_proj(inputs.query), self.num_heads),
            split_heads(self.k_global_proj(inputs.key), self.num_kv_heads),
            split_heads(self.v_global_proj(inputs.value), self.num_kv_heads),
        )

    def _global_mask(self, k: Tensor, call: Call) -> Tensor | None:
        """Of a call without a state: the first global_tokens, and those of the call's own mask."""
        if self.global_tokens == 0:
            return call.global_mask
        batch, kv_len = k.shape[:2]
        if call.cu_seqlens_q is not None:
            packing = call.cu_seqlens_q if call.cu_seqlens_k is None else call.cu_seqlens_k
            number = packed_positions(packing, None, kv_len).to(k.device)
        else:
            number = torch.arange(kv_len, device=k.device).expand(batch, kv_len)
        first = number < self.global_tokens
        return first if call.global_mask is None else first | call.global_mask

    def _whole(self, inputs: Inputs, heads: Heads, call: Call, options: dict[str, Any]) -> Tensor:
        mask = self._global_mask(heads.k, call)
        if mask is None:
            return softmax_attention(*heads, **options)
        if self._may_contract(heads, call, options):
            rows = mask if call.query_mask is None else mask & call.query_mask
            count = max(int(rows.sum(1).max()), 1)
            # Then its two products are smaller than the projections of all keys and values.
            if count * 2 <= self.head_dim:
                return self._contracted(inputs, heads, rows, count, mask, options)
        own = self._rotate_heads(self._project_global(inputs), call)
        return longformer_attention(*heads, *own, global_mask=mask, **options)

    def _may_contract(self, heads: Heads, call: Call, options: dict[str, Any]) -> bool:
        """Whether a key's place does not matter to a global token, and values can be looked at."""
        return (
            not self.is_causal
            and self.rotary_base is None
            and call.relative_bias is None
            and call.cu_seqlens_q is None
            and call.q_start is None
            and call.kv_start is None
            and "dropout_p" not in options
            and heads.q.shape[1] == heads.k.shape[1] > 0
            and heads.q.device.type == "cpu"
            and not torch.compiler.is_compiling()
        )

    def _contracted(
        self,
        inputs: Inputs,
        heads: Heads,
        rows: Tensor,
        count: int,
        mask: Tensor,
        options: dict[str, Any],
    ) -> Tensor:
        """The same where global tokens are few, without projecting all keys and values for them.

        With W and U the global projections of keys and values, and x and y what they are applied
        to: q . (W x_j) = (W^T q) . x_j and sum_j w_j U y_j = U sum_j w_j y_j, so that a global
        token attends to x and y themselves. A bias of the keys adds the same to all scores of a
        row, and cancels; that of the values is added once, as weights sum to 1.
        """
        index = rows.byte().argsort(dim=1, descending=True, stable=True)[:, :count]
        real = rows.gather(1, index)  # where a sequence has fewer
        tokens = inputs.query.gather(1, index[..., None].expand(-1, -1, inputs.query.shape[2]))
        kv, group = self.num_kv_heads, self.num_heads // self.num_kv_heads
        q = self.q_global_proj(tokens).unflatten(-1, (kv, group, self.head_dim))
        key_weight = self.k_global_proj.weight.unflatten(0, (kv, self.head_dim))
        value_weight = self.v_global_proj.weight.unflatten(0, (kv, self.value_dim))
        # One head of (tokens x heads) rows: all heads see the same keys.
        summed = softmax_attention(
            torch.einsum("bgkrd,kde->bgkre", q, key_weight).flatten(1, 3).unsqueeze(2),
            inputs.key.unsqueeze(2),
            inputs.value.unsqueeze(2),
            scale=self.head_dim**-0.5 if self.scale is None else self.scale,
            key_mask=options["key_mask"],
            query_mask=real.repeat_interleave(self.num_heads, 1),
        )
        out = torch.einsum(
            "bgkre,kde->bgkrd", summed.squeeze(2).unflatten(1, (count, kv, group)), value_weight
        ).flatten(2, 3)
        if self.v_global_proj.bias is not None:
            bias = self.v_global_proj.bias.unflatten(0, (kv, 1, self.value_dim))
            sees = real
            if options["key_mask"] is not None:
                sees = real & options["key_mask"].any(1, keepdim=True)
            bias = bias.expand(-1, group, -1).flatten(0, 1)
            out = torch.where(sees[..., None, None], out + bias, out)
            # So that it has its gradient, which is 0.
            out = out + 0 * self.k_global_proj.bias.sum()
        others = {**options, "query_mask": ~mask}
        if options["query_mask"] is not None:
            others["query_mask"] = ~mask & options["query_mask"]
        local = softmax_attention(*heads, global_mask=mask, **others)
        # Rows of global tokens are 0 so far.
        return local.scatter_add(1, index[..., None, None].expand_as(out), out.to(local.dtype))

    def _over_cache(
        self, inputs: Inputs, q: Tensor, before: KvCache | None, grown: KvCache, options: dict
    ) -> tuple[Tensor, KvCache]:
        if self.global_tokens == 0:
            return super()._over_cache(inputs, q, before, grown, options)
        first = torch.arange(grown.size, device=q.device) < self.global_tokens
        mask = first.expand(q.shape[0], grown.size).contiguous()
        out = softmax_attention(q, grown.keys, grown.values, global_mask=mask, **options)
        return self._with_first_tokens(inputs, out, before, grown, options)

    def _with_first_tokens(
        self,
        inputs: Inputs,
        out: Tensor,
        before: KvCache | None,
        after: KvCache,
        options: dict[str, Any],
    ) -> tuple[Tensor, KvCache]:
        """The rows of the first global_tokens of each sequence by their own projections.

        Causal: they see only one another, so only their keys and values are kept, in ``after``.
        """
        first, count = self.global_tokens, out.shape[1]
        done = torch.zeros_like(after.position)
        least = 0  # tokens that every row has behind it
        if before is not None:
            done = before.position - before.start
            least = before.size if before.key_mask is None else 0
        queries = min(count, first - least)
        if queries <= 0:
            return out, after
        start = after.start + done
        own_heads = self._rotate_heads(
            self._project_global(inputs), Call(q_start=start, kv_start=start)
        )

        # Slot s: what was kept, or the token of this call that comes there.
        kept = 0
        if before is not None and before.first_keys is not None:
            kept = before.first_keys.shape[1]
        slots = min(first, after.size)
        slot, own = torch.arange(slots, device=out.device)[None], done[:, None]
        index = torch.where(
            slot < own,
            slot.clamp_max(max(kept - 1, 0)),
            (slot - own + kept).clamp_max(kept + count - 1),
        )[..., None, None]

        def joined(old: Tensor | None, more: Tensor) -> Tensor:
            every = torch.cat([old, more], 1) if kept > 0 else more
            return torch.gather(every, 1, index.expand(-1, -1, *every.shape[2:]))

        had = (None, None) if before is None else (before.first_keys, before.first_values)
        after = after._replace(
            first_keys=joined(had[0], own_heads.k), first_values=joined(had[1], own_heads.v)
        )

        own_options = {**options, "q_start": done, "kv_start": None}
        del own_options["window"], own_options["dilation"]
        if options["key_mask"] is not None:
            own_options["key_mask"] = options["key_mask"][:, :slots].contiguous()
        if options["query_mask"] is not None:
            own_options["query_mask"] = options["query_mask"][:, :queries].contiguous()
        rows = softmax_attention(
            own_heads.q[:, :queries], after.first_keys, after.first_values, **own_options
        )
        is_first = (positions_from(done, queries) < first)[..., None, None]
        head = torch.where(is_first, rows, out[:, :queries])
        if queries == count:
            return head, after
        return torch.cat([head, out[:, queries:]], 1), after

    def _can_step(self, state: AttentionState) -> bool:
        if not super()._can_step(state):
            return False
        # The queries of global tokens are others. Rows of different lengths go by forward, which
        # asks no number of the device.
        first = self.global_tokens
        return first == 0 or (state.key_mask is None and state.size >= first)

    def _matrix(self, inputs: Inputs, call: Call) -> Tensor:
        heads = self._rotate_heads(self._project(inputs), call)
        options = self._options_of_call(call.relative_bias)
        mask = self._global_mask(heads.k, call)
        local = attention_matrix(
            "softmax", heads.q, heads.k, is_causal=self.is_causal, global_mask=mask, **options
        )
        if mask is None:
            return local
        own = self._rotate_heads(self._project_global(inputs), call)
        full = attention_matrix(
            "softmax",
            own.q,
            own.k,
            is_causal=self.is_causal,
            scale=self.scale,
            relative_bias=call.relative_bias,
        )
        return torch.where(mask[:, None, :, None], full, local)
