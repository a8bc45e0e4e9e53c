"""What a causal linear attention carries between calls."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class LinearState(NamedTuple):
    """The state of a linear attention: of constant size, however long the sequence.

    A row is a batch row, or a packed sequence. float32, or float64 for float64 inputs. Made by
    ``linear_attention(..., return_state=True)`` or ``performer_attention``; a call whose options
    differ from those that made it is an error. Gradients flow through it both ways.

    Example:
        >>> import torch, cosformer
        >>> q, k, v = (torch.rand(2, 9, 4, 8) for _ in range(3))
        >>> _, state = cosformer.linear_attention(q, k, v, is_causal=True, return_state=True)
        >>> state.kv_state.shape, state.position.tolist()
        (torch.Size([2, 4, 8, 8]), [9, 9])
        >>> state.select([1, 1, 0]).kv_state.shape
        torch.Size([3, 4, 8, 8])
    """

    kv_state: Tensor  #: [rows, kv_heads, features, value_dim]
    k_sum: Tensor  #: [rows, kv_heads, features]
    start: Tensor  #: int64 [rows], position of the first key
    position: Tensor  #: int64 [rows], 1 + the position of the last real key
    kind: str = "linear"
    feature_map: str = "relu"
    reweight_len: int = 0  #: 0 = no cosine
    rotary_base: float = 0.0  #: 0 = no rotary positions
    rotary_interleaved: bool = False
    #: Performer's: [rows, kv_heads, features], the logarithm that each feature's sums are scaled
    #: by; -inf where no key was seen. A constant for gradients. None for other kinds.
    log_scale: Tensor | None = None

    def clone(self) -> LinearState:
        """A contiguous copy that later in-place steps do not touch."""
        return self._map(lambda tensor: tensor.clone(memory_format=torch.contiguous_format))

    def detach(self) -> LinearState:
        """The same memory, cut from the graph: for truncated back-propagation."""
        return self._map(torch.Tensor.detach)

    def select(self, rows: Tensor | Sequence[int]) -> LinearState:
        """Rows by index (int64 [new rows], repeats allowed): beam search, batching."""
        rows = torch.as_tensor(rows, dtype=torch.int64, device=self.kv_state.device)
        return self._map(lambda tensor: tensor.index_select(0, rows))

    def to(self, *args, **kwargs) -> LinearState:
        """Device and/or dtype (float32, float64) of the float tensors, as ``Tensor.to`` takes."""
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype not in (None, torch.float32, torch.float64):
            raise ValueError(
                f"LinearState.to: dtype is {dtype}, expected torch.float32 or torch.float64: "
                f"a state accumulates"
            )

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype if tensor.is_floating_point() else None, non_blocking)

        moved = self._map(move)
        if self.log_scale is None or moved.log_scale.dtype == self.log_scale.dtype:
            return moved
        # What the logarithms lose to rounding the sums take over.
        wide = moved.log_scale.double()
        lost = (self.log_scale.to(wide.device).double() - wide).nan_to_num(0)
        factor = lost.exp().to(moved.k_sum.dtype)
        return moved._replace(
            kv_state=moved.kv_state * factor.unsqueeze(-1), k_sum=moved.k_sum * factor
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """One safetensors file, options included; it appears whole or not at all."""
        torch.ops.cosformer.linear_state_save(*self, os.fspath(path))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LinearState:
        """What ``save`` wrote, fully checked; a file that is anything else is a RuntimeError."""
        *fields, log_scale = torch.ops.cosformer.linear_state_load(os.fspath(path))
        state = cls(*fields)
        return state._replace(log_scale=log_scale) if state.kind == "performer" else state

    def _map(self, function) -> LinearState:
        return self._replace(
            kv_state=function(self.kv_state),
            k_sum=function(self.k_sum),
            start=function(self.start),
            position=function(self.position),
            log_scale=None if self.log_scale is None else function(self.log_scale),
        )
