"""What the kinds that form scores share (softmax, longformer, bigbird): options, KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cosformer._kv_cache import KvCache
from cosformer._softmax import softmax_attention
from cosformer._state import LinearState
from cosformer.nn._attention import Attention
from cosformer.nn._call import AttentionState, Call, Heads, Inputs, Result
from cosformer.nn._dropout import draw_dropout_seed
from cosformer.nn._options import SharedOptions, check_dropout, refuse
from cosformer.nn._positions import start_of_rows

if TYPE_CHECKING:
    from typing_extensions import Unpack


def _kept_text(last: int, first: int) -> str:
    if last == 0:
        return "all tokens"
    return f"the last {last} tokens" + (f" and the first {first}" if first > 0 else "")


class CachedAttention(Attention):
    """The base of the kinds that form scores; not a kind."""

    _takes_relative_bias = True
    window: int | None = None
    dilation: int = 1
    global_tokens: int = 0

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        scale: float | None,
        dropout: float,
        **options: Unpack[SharedOptions],
    ) -> None:
        check_dropout(dropout)
        super().__init__(embed_dim, num_heads, **options)
        self.scale = scale
        self.dropout = dropout

    def _options_of_call(self, relative_bias: Tensor | None) -> dict[str, Any]:
        options: dict[str, Any] = {"scale": self.scale, "relative_bias": relative_bias}
        if self.window is not None:
            options["window"] = (self.window, 0 if self.is_causal else self.window)
            options["dilation"] = self.dilation
        return options

    def _dropout_options(self, like: Tensor) -> dict[str, Any]:
        seed = draw_dropout_seed(self.dropout, self.training, like)
        return {} if seed is None else {"dropout_p": self.dropout, "dropout_seed": seed}

    def _attend(self, inputs: Inputs, call: Call) -> Result:
        if isinstance(call.state, LinearState):
            raise ValueError(
                f'attention: state is a LinearState, expected a KvCache: kind is "{self.kind}"'
            )
        heads = self._project(inputs)
        if call.return_state or call.state is not None:
            return self._cached_attend(inputs, heads, call)
        heads = self._rotate_heads(heads, call)
        options = {
            **self._options_of_call(call.relative_bias),
            **self._dropout_options(heads.q),
            "is_causal": self.is_causal,
            **call.placement(),
        }
        return Result(self._whole(inputs, heads, call, options))

    def _whole(self, inputs: Inputs, heads: Heads, call: Call, options: dict[str, Any]) -> Tensor:
        """Of a call without a state."""
        return softmax_attention(*heads, **options)

    def _over_cache(
        self, inputs: Inputs, q: Tensor, before: KvCache | None, grown: KvCache, options: dict
    ) -> tuple[Tensor, KvCache]:
        """Of queries over a cache that holds their own keys."""
        return softmax_attention(q, grown.keys, grown.values, **options), grown

    def _kept_tokens(self, relative_bias: Tensor | None) -> tuple[int, int]:
        """How many of the last and the first tokens a cache must keep; 0 = all.

        A window reaches back window x dilation tokens. With first tokens kept ahead of the last
        ones, those that are gone between them shorten the distances that a bias sees: never below
        its reach, beyond which it is constant.
        """
        if self.window is None:
            return 0, 0
        last = self.window * self.dilation + 1
        if self.global_tokens > 0 and relative_bias is not None:
            last = max(last, relative_bias.shape[1] // 2 + 1)
        return last, self.global_tokens

    def _check_cache(self, cache: KvCache, rows: int, relative_bias: Tensor | None) -> None:
        if cache.size == 0:
            return
        last, first = self._kept_tokens(relative_bias)
        if (cache.kept_last, cache.kept_first) != (last, first):
            raise ValueError(
                f"attention: the state keeps {_kept_text(cache.kept_last, cache.kept_first)}, "
                f'kind "{self.kind}" of these options needs {_kept_text(last, first)}'
            )
        kv, dim, value_dim = self.num_kv_heads, self.head_dim, self.value_dim
        k, v = cache.keys.shape, cache.values.shape
        if k[0] != rows or k[2] != kv or k[3] != dim or v[3] != value_dim:
            raise ValueError(
                f"attention: the state holds keys {[k[0], cache.size, *k[2:]]} and values "
                f"{[v[0], cache.size, *v[2:]]}, expected [{rows}, slots, {kv}, {dim}] and "
                f"[{rows}, slots, {kv}, {value_dim}]"
            )

    def _check_stateful_call(self, call: Call) -> None:
        refuse(
            self.kind,
            call.cu_seqlens_q is not None,
            "keeps no state of packed sequences: give one row a sequence, with key_mask",
        )
        if call.global_mask is not None:
            raise ValueError(
                "attention: global_mask with a state, which keeps the first global_tokens only: "
                "give that option instead"
            )
        refuse(
            self.kind,
            not self.is_causal and self.kind != "softmax",
            "keeps a state only when causal",
        )
        if not self.is_causal and self.window is not None:
            raise ValueError("attention: a window keeps a state only when causal")

    def _cached_attend(self, inputs: Inputs, heads: Heads, call: Call) -> Result:
        self._check_stateful_call(call)
        rows, device = heads.q.shape[0], heads.q.device
        before = call.state
        q_start, kv_start = call.q_start, call.kv_start
        if before is not None:
            self._check_cache(before, rows, call.relative_bias)
            before = before.in_order()
            _check_start(q_start, before.position, "q_start")
            _check_start(kv_start, before.position, "kv_start")
            q_start = kv_start = before.position
        placed = call._replace(q_start=q_start, kv_start=kv_start)
        heads = self._rotate_heads(heads, placed)
        if before is None:
            grown = KvCache.of(
                heads.k,
                heads.v,
                call.key_mask,
                start_of_rows(kv_start, rows, device),
                self._max_start(kv_start),
            )
        else:
            grown = before.append(heads.k, heads.v, call.key_mask)
        options = {
            **self._options_of_call(call.relative_bias),
            **self._dropout_options(heads.q),
            "is_causal": self.is_causal,
            "q_start": q_start,
            "kv_start": grown.slot_start,
            "key_mask": grown.real_slots(),
            "query_mask": call.query_mask,
        }
        out, grown = self._over_cache(inputs, heads.q, before, grown, options)
        if not call.return_state:
            return Result(out)
        return Result(out, grown.bounded(*self._kept_tokens(call.relative_bias)))

    def _max_start(self, start: int | Tensor | None) -> int:
        """What a cache notes of its rows' starts."""
        return 0

    def _can_step(self, state: AttentionState) -> bool:
        return isinstance(state, KvCache) and state.size > 0

    def _step(
        self, query: Tensor, state: AttentionState, relative_bias: Tensor | None
    ) -> tuple[Tensor, AttentionState]:
        self._check_cache(state, query.shape[0], relative_bias)
        heads = self._project(Inputs(query, query, query))
        if self.rotary_base is not None:
            positions = state.position[:, None]
            heads = heads._replace(
                q=self._rotate(heads.q, 0, positions), k=self._rotate(heads.k, 0, positions)
            )
        return state.decode_step(*heads, **self._step_options(state, relative_bias))

    def _step_options(self, state: KvCache, relative_bias: Tensor | None) -> dict[str, Any]:
        return self._options_of_call(relative_bias)


def _check_start(start: int | Tensor | None, position: Tensor, name: str) -> None:
    if start is None:
        return
    agrees = (position == start).all()
    if torch.compiler.is_compiling():
        torch._assert_async(agrees, f"attention: {name} contradicts the state")
    elif not agrees:
        low, high = int(position.min()), int(position.max())
        at = f"{low}" if low == high else f"{low} to {high}"
        raise ValueError(f"attention: {name} contradicts the state, which continues at {at}")
