"""BigBird: a window, global and seeded random blocks."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cosformer._kv_cache import KvCache
from cosformer._matrix import attention_matrix
from cosformer._softmax import bigbird_attention, bigbird_block_mask, softmax_attention
from cosformer.nn._cached import CachedAttention
from cosformer.nn._call import Call, Heads, Inputs
from cosformer.nn._options import SharedOptions, at_least

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Masks beyond these are made anew: lengths vary without end, memory does not.
_MOST_MASKS = 64


@functools.lru_cache(maxsize=_MOST_MASKS)
def _cached_mask(
    heads: int,
    blocks: int,
    random: int,
    window: int,
    global_blocks: tuple[int, int],
    is_causal: bool,
    seed: int,
    device: torch.device,
) -> Tensor:
    # An inference tensor would be refused by autograd later.
    with torch.inference_mode(False):
        return bigbird_block_mask(
            heads,
            blocks,
            num_random_blocks=random,
            window_blocks=window,
            global_blocks=global_blocks,
            is_causal=is_causal,
            seed=seed,
            device=device,
        )


def _end_of(start: int | Tensor | None, count: int) -> int:
    if isinstance(start, Tensor):
        return count + (int(start.max()) if start.numel() > 0 else 0)
    return count + (start or 0)


def _longest_of(x: Tensor, cu_seqlens: Tensor | None) -> int:
    """Tokens of the longest sequence, or more where a compiled step cannot look."""
    if cu_seqlens is None or torch.compiler.is_compiling():
        return x.shape[1]
    return int(cu_seqlens.diff().max()) if cu_seqlens.numel() > 1 else 0


class BigBirdAttention(CachedAttention):
    """BigBird (Zaheer et al. 2020), over blocks of tokens chosen per head.

    Not causal, the last global blocks and the random ones depend on the length, so a padded call
    differs from one of the sequence alone. Causal, a row of blocks does not change as a sequence
    grows, and there are no last global blocks.

    Args:
        block_size: tokens in a block.
        num_random_blocks: that a row of blocks draws, from (block_seed, head, row) alone.
        window_blocks: an odd number: a block and as many on each side.
        first_global_blocks, last_global_blocks: see all and are seen by all.
        block_seed: of the random blocks.
        scale: of the scores. None = 1 / sqrt(head_dim).
        dropout: of a weight, in training mode.
        options: those of :class:`Attention`.

    Example:
        >>> import torch, cosformer
        >>> layer = cosformer.nn.BigBirdAttention(16, 2, block_size=4, num_random_blocks=1)
        >>> layer(torch.randn(3, 30, 16)).shape, layer.block_mask(8).shape
        (torch.Size([3, 30, 16]), torch.Size([2, 8, 8]))
    """

    kind = "bigbird"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        block_size: int = 64,
        num_random_blocks: int = 3,
        window_blocks: int = 3,
        first_global_blocks: int = 1,
        last_global_blocks: int = 1,
        block_seed: int = 0,
        scale: float | None = None,
        dropout: float = 0.0,
        **options: Unpack[SharedOptions],
    ) -> None:
        at_least(1, block_size, "block_size")
        at_least(0, num_random_blocks, "num_random_blocks")
        at_least(0, first_global_blocks, "first_global_blocks")
        at_least(0, last_global_blocks, "last_global_blocks")
        at_least(0, block_seed, "block_seed")
        if window_blocks < 1 or window_blocks % 2 == 0:
            raise ValueError(
                f"attention: window_blocks is {window_blocks}, expected an odd number: the "
                f"diagonal and as many on each side"
            )
        super().__init__(embed_dim, num_heads, scale=scale, dropout=dropout, **options)
        self.block_size = block_size
        self.num_random_blocks = num_random_blocks
        self.window_blocks = window_blocks
        self.global_blocks = (first_global_blocks, last_global_blocks)
        self.block_seed = block_seed

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, block_size={self.block_size}"

    def block_mask(self, blocks: int, device: torch.device | str | None = None) -> Tensor:
        """Which block sees which in a sequence of that many: bool [heads, blocks, blocks].

        Not to be changed: calls share it.
        """
        # A compiled step makes it anew: it cannot look into a cache.
        make = _cached_mask.__wrapped__ if torch.compiler.is_compiling() else _cached_mask
        return make(
            self.num_heads,
            blocks,
            self.num_random_blocks,
            self.window_blocks,
            self.global_blocks,
            self.is_causal,
            self.block_seed,
            torch.device("cpu") if device is None else torch.device(device),
        )

    def _mask_for(self, positions: int, device: torch.device) -> Tensor:
        """A mask of exactly (causal: at least) the blocks of that many positions."""
        blocks = max((positions + self.block_size - 1) // self.block_size, 1)
        if self.is_causal:
            # A row of blocks does not change as a sequence grows.
            enough = 1
            while enough < blocks:
                enough *= 2
            blocks = enough
        return self.block_mask(blocks, device)

    def _whole(self, inputs: Inputs, heads: Heads, call: Call, options: dict[str, Any]) -> Tensor:
        # The pattern belongs to a sequence of its length (the last blocks are global, random ones
        # are drawn among all): packed sequences have one each, unless causal, where it grows
        # without change.
        if call.cu_seqlens_q is not None and not self.is_causal:
            return bigbird_attention(
                *heads,
                block_size=self.block_size,
                num_random_blocks=self.num_random_blocks,
                window_blocks=self.window_blocks,
                global_blocks=self.global_blocks,
                seed=self.block_seed,
                **options,
            )
        packing = call.cu_seqlens_q if call.cu_seqlens_k is None else call.cu_seqlens_k
        positions = max(
            _end_of(call.q_start, _longest_of(heads.q, call.cu_seqlens_q)),
            _end_of(call.kv_start, _longest_of(heads.k, packing)),
        )
        mask = self._mask_for(positions, heads.q.device)
        return softmax_attention(*heads, block_mask=mask, block_size=self.block_size, **options)

    def _over_cache(
        self, inputs: Inputs, q: Tensor, before: KvCache | None, grown: KvCache, options: dict
    ) -> tuple[Tensor, KvCache]:
        # Right padding of the call stands beyond what the cache keeps.
        seen = 0 if before is None else before.size
        positions = grown.max_start + max(grown.size, seen + q.shape[1])
        if before is None:
            positions = max(positions, _end_of(options["q_start"], q.shape[1]))
        mask = self._mask_for(positions, q.device)
        out = softmax_attention(
            q, grown.keys, grown.values, block_mask=mask, block_size=self.block_size, **options
        )
        return out, grown

    def _max_start(self, start: int | Tensor | None) -> int:
        return _end_of(start, 0)

    def _step_options(self, state: KvCache, relative_bias: Tensor | None) -> dict[str, Any]:
        return {
            **self._options_of_call(relative_bias),
            "block_mask": self._mask_for(state.max_start + state.size + 1, state.keys.device),
            "block_size": self.block_size,
        }

    def _matrix(self, inputs: Inputs, call: Call) -> Tensor:
        heads = self._rotate_heads(self._project(inputs), call)
        return attention_matrix(
            "softmax",
            heads.q,
            heads.k,
            is_causal=self.is_causal,
            block_mask=self._mask_for(inputs.query.shape[1], heads.q.device),
            block_size=self.block_size,
            **self._options_of_call(call.relative_bias),
        )
