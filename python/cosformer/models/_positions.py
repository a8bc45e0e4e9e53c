"""How far a model's sequences may reach, and the table of sinusoidal positions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from cosformer._functions import sinusoidal_positions
from cosformer.models.config import ModelConfig


class Limit(NamedTuple):
    """Tokens that a sequence may have, and the config key that says so."""

    positions: int
    key: str


def cosine_reach(config: ModelConfig, layer: int) -> int:
    """M of a layer, 0 where it has no cosine."""
    entry = config.layer_attention(layer)
    if entry.kind == "cosformer" and entry.reweight_len == 0:
        return config.max_len
    return entry.reweight_len


def limit_of(config: ModelConfig) -> Limit | None:
    """None where every position is relative and no layer has the cosine."""
    limits = []
    if config.position in ("learned", "sinusoidal"):
        limits.append(Limit(config.max_len, "max_len"))
    for i in range(config.num_layers):
        if config.layer_attention(i).kind == "linformer":
            limits.append(Limit(config.max_len, "max_len"))
        reach = cosine_reach(config, i)
        if reach > 0:  # the first and the last token may be `reach` apart
            limits.append(Limit(reach + 1, "reweight_len + 1"))
    return min(limits, key=lambda limit: limit.positions, default=None)


class SinusoidalTable(nn.Module):
    """Rows of the table of Vaswani et al. 2017, made when they are needed first.

    No buffer: it is not saved, it stays float32 when the model changes its type, and a model that
    was built without memory (meta) has it all the same.
    """

    def __init__(self, dim: int, most: int) -> None:
        super().__init__()
        self.dim = dim
        self.most = most  #: rows that it never exceeds
        self._rows: Tensor | None = None

    def forward(self, count: int, like: Tensor) -> Tensor:
        """The first rows, at least ``count`` of them: [rows, dim], of like's type and device."""
        have = 0 if self._rows is None else self._rows.shape[0]
        if self._rows is None or have < count or self._rows.device != like.device:
            rows = sinusoidal_positions(min(self.most, max(count, 2 * have)), self.dim)
            self._rows = rows.to(like.device)
        return self._rows.to(like.dtype)


def check_ids(ids: Tensor, vocab_size: int) -> None:
    """int64 [batch, seq]; where they can be read without waiting, each in the vocabulary."""
    if ids.dim() != 2 or ids.dtype != torch.int64:
        raise ValueError(
            f"transformer: ids are {ids.dtype} {list(ids.shape)}, expected int64 [batch, seq]"
        )
    if torch.compiler.is_compiling() or ids.device.type != "cpu" or ids.numel() == 0:
        return
    low, high = (int(bound) for bound in ids.aminmax())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"transformer: id {low if low < 0 else high} is outside the vocabulary, expected 0 to "
            f"{vocab_size - 1}"
        )
