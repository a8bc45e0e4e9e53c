"""Positions of a call's tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def checked_start(start: int | Tensor | None, rows: int, name: str) -> int | Tensor | None:
    """A start as the operators take it: an int, or int64 [] or [rows]; None stays None."""
    if start is None:
        return None
    if not isinstance(start, Tensor):
        if isinstance(start, float):
            raise TypeError(f"attention: {name} is {start}, expected an int or an int64 tensor")
        return start
    fits = start.numel() == 1 or (start.dim() == 1 and start.shape[0] == rows)
    if start.dtype != torch.int64 or not fits:
        raise ValueError(
            f"attention: {name} is {start.dtype} {list(start.shape)}, expected int64, one number "
            f"or [{rows}]"
        )
    return start.reshape(()) if start.numel() == 1 else start


def start_of_rows(start: int | Tensor | None, rows: int, device: torch.device) -> Tensor:
    """int64 [rows]; None = 0."""
    if isinstance(start, Tensor):
        return start.to(device).expand(rows).clone()
    return torch.full((rows,), start or 0, dtype=torch.int64, device=device)


def positions_from(row_starts: Tensor, count: int) -> Tensor:
    """int64 [rows, count]: each row from its start (int64 [rows]) on."""
    return row_starts[:, None] + torch.arange(count, device=row_starts.device)


def packed_positions(cu_seqlens: Tensor, starts: int | Tensor | None, total: int) -> Tensor:
    """Positions of packed tokens, [1, total]: they restart in each sequence, at 0 or its start.

    Offsets that do not fit the tokens are left to the operator, which refuses them by name.
    """
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        return torch.zeros((1, total), dtype=torch.int64, device=cu_seqlens.device)
    offsets = cu_seqlens.to(torch.int64)
    token = torch.arange(total, device=offsets.device)
    sequence = torch.searchsorted(offsets[1:].contiguous(), token, right=True)
    sequence = sequence.clamp_max(offsets.shape[0] - 2)
    position = token - offsets[sequence]
    if isinstance(starts, Tensor) and starts.dim() == 1:
        position = position + starts[sequence]
    elif starts is not None:
        position = position + starts
    return position[None]
