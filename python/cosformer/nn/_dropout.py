"""The seed of a call's dropout of weights."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_dropout_seed(dropout: float, training: bool, like: Tensor) -> Tensor | None:
    """int64 [], from torch's generator, so that runs repeat and resume; None: nothing is dropped.

    A tensor, so that a compiled step serves every seed.
    """
    if dropout == 0.0 or not training:
        return None
    seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=like.device)
    return seed.reshape(())
