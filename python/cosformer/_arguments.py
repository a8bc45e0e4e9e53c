"""What the functions of every kind do with their arguments before an operator takes them."""

from __future__ import annotations

import torch
from torch import Tensor


def int_tensor(name: str, value: int | Tensor | None, q: Tensor) -> Tensor | None:
    """Starts and seeds travel as tensors, so that a compiled step serves every value."""
    if value is None or isinstance(value, Tensor):
        return value
    if isinstance(value, float):
        raise TypeError(f"{name} is {value}, expected an int or an int64 tensor")
    return torch.full((), value, dtype=torch.int64, device=q.device)


def refuse_key_padding_mask(key_padding_mask: Tensor | None, where: str) -> None:
    if key_padding_mask is not None:
        raise ValueError(
            f"{where}: key_padding_mask is nn.MultiheadAttention's, where True means ignore; here "
            f"key_mask is expected, where True means takes part: give key_mask=~key_padding_mask"
        )
