"""What softmax attention and its patterns carry between calls: keys and values."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cosformer import _kv_cache_file
from cosformer._softmax import softmax_attention_decode_step_

_MIN_CAPACITY = 64


def _slots(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, device=like.device)[None]


def _take_slots(x: Tensor, index: Tensor) -> Tensor:
    """x [batch, slots, ...] -> [batch, n, ...]: slot index[b, i] of row b."""
    wide = index.view(*index.shape, *(1,) * (x.dim() - 2))
    return torch.gather(x, 1, wide.expand(*index.shape, *x.shape[2:]))


def _with_capacity(x: Tensor, seen: int, capacity: int, fill: Any = None) -> Tensor:
    """The first ``seen`` slots in a new buffer of ``capacity``."""
    shape = (x.shape[0], capacity, *x.shape[2:])
    out = x.new_empty(shape) if fill is None else x.new_full(shape, fill)
    out[:, :seen] = x[:, :seen].detach()
    return out


class KvCache(NamedTuple):
    """Keys and values seen so far: all of them, or the last few that a window reaches.

    Token number t of a row (its position is ``start + t``) lies in slot ``t - dropped``, in a ring
    in slot ``t`` modulo the slots; the first ``kept_first`` tokens stay in theirs. The layers make
    it; rows may stand at different positions. ``append`` and the layers' ``forward`` give another
    cache and leave this one as it is; ``decode_step`` writes into its memory.

    Example:
        >>> import torch, cosformer
        >>> layer = cosformer.nn.SoftmaxAttention(16, 2, is_causal=True)
        >>> _, state = layer(torch.randn(1, 5, 16), return_state=True)
        >>> state.size, state.position.tolist()
        (5, [5])
    """

    keys: Tensor  #: [batch, capacity, kv_heads, head_dim], ``size`` slots of it in use
    values: Tensor  #: [batch, capacity, kv_heads, value_dim]
    start: Tensor  #: int64 [batch], position of each row's first token
    position: Tensor  #: int64 [batch], of each row's next token
    size: int  #: slots in use by the longest row
    #: bool [batch, capacity], True = a real token, or free. None = every row has ``size`` real
    #: tokens.
    key_mask: Tensor | None = None
    dropped: Tensor | None = None  #: int64 [batch]; None = 0
    kept_last: int = 0  #: tokens that are kept; 0 = all
    kept_first: int = 0  #: and of a row's first ones; 0 unless kept_last
    is_ring: bool = False
    #: Keys and values of the first tokens for the queries of global tokens (Longformer),
    #: [batch, kept_first or fewer, kv_heads, dim].
    first_keys: Tensor | None = None
    first_values: Tensor | None = None
    max_start: int = 0  #: at least every ``start``; kept for BigBird alone

    def clone(self) -> KvCache:
        """A copy that later in-place steps do not touch."""
        return self._map(lambda tensor: tensor.clone(memory_format=torch.contiguous_format))

    def detach(self) -> KvCache:
        """The same memory, cut from the graph."""
        return self._map(torch.Tensor.detach)

    def select(self, rows: Tensor | Sequence[int]) -> KvCache:
        """Rows by index (int64 [new rows], repeats allowed): beam search, batching."""
        rows = torch.as_tensor(rows, dtype=torch.int64, device=self.keys.device)
        return self._map(lambda tensor: tensor.index_select(0, rows))

    def to(self, *args, **kwargs) -> KvCache:
        """Device and/or dtype of keys and values, as ``Tensor.to`` takes."""
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype if tensor.is_floating_point() else None, non_blocking)

        return self._map(move)

    def save(self, path: str | os.PathLike[str]) -> None:
        """One safetensors file, options included; it appears whole or not at all."""
        _kv_cache_file.save(path, self._asdict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> KvCache:
        """What ``save`` wrote, fully checked; a file that is anything else is a RuntimeError."""
        return cls(**_kv_cache_file.load(path))

    @property
    def slot_start(self) -> Tensor:
        """Position of what slot 0 would hold if no token were kept ahead of it, int64 [batch]."""
        return self.start if self.dropped is None else self.start + self.dropped

    def real_slots(self) -> Tensor | None:
        """Which slots hold a real token, bool [batch, size]; None = all. Not for a ring."""
        if self.key_mask is None:
            return None
        length = self.position - self.slot_start
        return (_slots(self.size, length) < length[:, None]) & self.key_mask[:, : self.size]

    def in_order(self) -> KvCache:
        """The same tokens with slots in the order of positions: no ring."""
        if not self.is_ring:
            return self
        slots = self.size
        dropped = (self.position - self.start - slots).clamp_min(0)
        index = (_slots(slots, dropped) + dropped[:, None]).remainder(slots)
        return self._take(index)._replace(dropped=dropped, is_ring=False)

    @classmethod
    def of(
        cls, keys: Tensor, values: Tensor, mask: Tensor | None, start: Tensor, max_start: int = 0
    ) -> KvCache:
        """A cache of tokens [batch, n, kv_heads, dim], the first of each row at ``start``.

        Args:
            mask: bool [batch, n]; what it hides at the end of a row does not move the row on.
            start: int64 [batch].
        """
        none = cls(keys[:, :0], values[:, :0], start, start, 0, max_start=max_start)
        return none.append(keys, values, mask)

    def append(
        self, more_keys: Tensor, more_values: Tensor, more_mask: Tensor | None = None
    ) -> KvCache:
        """This cache (no ring) followed by more tokens, each row's behind its own last one.

        Differentiable; this cache stays as it is.

        Args:
            more_keys, more_values: [batch, n, kv_heads, dim].
            more_mask: bool [batch, n]; what it hides at the end of a row does not move the row on.
        """
        if self.is_ring:
            raise ValueError("KvCache: a ring has no order to append to: in_order() first")
        if (
            self.keys.shape[0] != more_keys.shape[0]
            or self.keys.shape[2:] != more_keys.shape[2:]
            or self.values.shape[2:] != more_values.shape[2:]
            or self.keys.dtype != more_keys.dtype
        ):
            raise ValueError(
                f"KvCache: holds keys {list(self.keys.shape)} and values "
                f"{list(self.values.shape)} of {self.keys.dtype}, asked to append keys "
                f"{list(more_keys.shape)} and values {list(more_values.shape)} of "
                f"{more_keys.dtype}: batch, kv_heads, dims and type must agree"
            )
        seen, count = self.size, more_keys.shape[1]
        total = seen + count
        length = self.position - self.slot_start
        moved = torch.full_like(self.position, count)
        if more_mask is not None and count > 0:
            moved = (more_mask * (_slots(count, length) + 1)).amax(1)
        joined = [
            torch.cat([self.keys[:, :seen], more_keys], 1) if seen > 0 else more_keys,
            torch.cat([self.values[:, :seen], more_values], 1) if seen > 0 else more_values,
        ]
        mask = None
        if self.key_mask is not None or more_mask is not None:
            mask = torch.cat([self._mask_of(seen), _or_all(more_mask, more_keys)], 1)
        if self.key_mask is not None and seen > 0:
            # Slot s of a row: its own token, or the one of the call behind them.
            slot, own = _slots(total, length), length[:, None]
            index = torch.where(slot < own, slot, (slot - own + seen).clamp_max(total - 1))
            joined = [_take_slots(x, index) for x in joined]
            mask = _take_slots(mask, index)
        slots = total
        if mask is not None:
            reach = length + moved
            if not torch.compiler.is_compiling() and reach.numel() > 0:
                slots = min(total, int(reach.max()))
            # Slots behind a row's end are free: whatever comes there is real.
            mask = mask[:, :slots] | (_slots(slots, reach) >= reach[:, None])
        return self._replace(
            keys=joined[0][:, :slots],
            values=joined[1][:, :slots],
            position=self.position + moved,
            size=slots,
            key_mask=mask,
        )

    def bounded(self, last: int, first: int = 0) -> KvCache:
        """The last ``last`` tokens of each row, and the first ``first``; 0 = all.

        A cache that drops tokens without keeping first ones becomes a ring.
        """
        out = self._replace(kept_last=last, kept_first=first)
        if last == 0 or self.is_ring:
            return out
        # With first tokens to keep, room for as many again before tokens move.
        if self.size < first + 2 * last if first > 0 else self.size <= last:
            return out
        seen = self.position - self.start
        length = self.position - self.slot_start
        if first > 0:
            more = (length - (first + last)).clamp_min(0)
            slot = _slots(first + last, length)
            index = torch.where(slot < first, slot, slot + more[:, None])
            return out._take(index)._replace(
                dropped=more if self.dropped is None else self.dropped + more
            )
        # Slot s holds the last token whose number leaves s modulo `last`.
        slot = _slots(last, length)
        newest = (seen - 1)[:, None]
        number = newest - (newest - slot).remainder(last)
        if self.dropped is not None:
            number = number - self.dropped[:, None]
        out = out._take(number.clamp_min(0))._replace(dropped=None, is_ring=True)
        if out.key_mask is not None:
            # A short row's slots that hold nothing yet.
            out = out._replace(key_mask=out.key_mask | (slot >= seen[:, None]))
        return out

    def reserve(self, tokens: int) -> KvCache:
        """Room for that many tokens in all, so that decoding moves nothing before they are full."""
        capacity = self.kept_last if self.is_ring else tokens
        if self.keys.shape[1] >= capacity and not self.keys.requires_grad:
            return self
        capacity = max(capacity, self.size)
        mask = self.key_mask
        return self._replace(
            keys=_with_capacity(self.keys, self.size, capacity),
            values=_with_capacity(self.values, self.size, capacity),
            key_mask=None if mask is None else _with_capacity(mask, self.size, capacity, True),
        )

    def decode_step(
        self, q: Tensor, k: Tensor, v: Tensor, **options: Any
    ) -> tuple[Tensor, KvCache]:
        """Appends one token a row and answers its query, in place: no gradients.

        The cache that is returned goes on; this one shares its memory.

        Args:
            q, k, v: [batch, 1, heads or kv_heads, dim].
            options: scale, window, dilation, block_mask, block_size, relative_bias of
                :func:`cosformer.softmax_attention_decode_step_`.

        Returns:
            ``(out [batch, 1, heads, value_dim], cache)``.
        """
        cache = self
        if cache.kept_last > 0 and not cache.is_ring:
            if cache.kept_first > 0:
                cache = cache.bounded(cache.kept_last, cache.kept_first)
            elif cache.size == cache.kept_last:
                cache = cache._replace(is_ring=True)  # full: its slots are those of the ring
        size = cache.kept_last if cache.is_ring else cache.size + 1
        if cache.keys.shape[1] < size or cache.keys.requires_grad:
            room = size if cache.is_ring else max(_MIN_CAPACITY, size, 2 * cache.size)
            cache = cache.reserve(room)
        keys, values, mask = cache.keys, cache.values, cache.key_mask
        if cache.is_ring:
            keys, values = keys[:, :size], values[:, :size]
            if mask is not None:
                slot = (cache.position - cache.start).remainder(size)[:, None]
                mask = mask[:, :size].scatter(1, slot, torch.ones_like(slot, dtype=torch.bool))
        if cache.kept_first > 0:
            first = _slots(keys.shape[1], cache.position) < cache.kept_first
            options["global_mask"] = first.expand(keys.shape[:2]).contiguous()
        position = cache.position.clone()  # this cache keeps its own
        out = softmax_attention_decode_step_(
            q,
            k,
            v,
            keys,
            values,
            position,
            start=cache.slot_start,
            cache_mask=mask,
            is_ring=cache.is_ring,
            **options,
        )
        return out, cache._replace(
            keys=keys, values=values, position=position, size=size, key_mask=mask
        )

    def _mask_of(self, slots: int) -> Tensor:
        return _or_all(
            None if self.key_mask is None else self.key_mask[:, :slots], self.keys[:, :slots]
        )

    def _take(self, index: Tensor) -> KvCache:
        """Other slots of each row, int64 [batch, n]."""
        index = index.expand(self.keys.shape[0], index.shape[1])
        return self._replace(
            keys=_take_slots(self.keys, index),
            values=_take_slots(self.values, index),
            key_mask=None if self.key_mask is None else _take_slots(self.key_mask, index),
            size=index.shape[1],
        )

    def _map(self, function: Callable[[Tensor], Tensor]) -> KvCache:
        return KvCache(*(function(x) if isinstance(x, Tensor) else x for x in self))


def _or_all(mask: Tensor | None, x: Tensor) -> Tensor:
    if mask is not None:
        return mask
    return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
