"""The feed-forward part of a block, gated or not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


class FeedForward(nn.Module):
    """down_proj(act(up_proj x)), or gated down_proj(act(gate_proj x) * up_proj x).

    Args:
        embed_dim: width of input and output.
        ffn_dim: width between.
        activation: "gelu" (exact), "gelu_tanh", "relu" or "silu".
        gated: a gated unit (Shazeer 2020).
        bias: of the projections.

    Example:
        >>> import torch, cosformer
        >>> ffn = cosformer.nn.FeedForward(16, 40, activation="silu", gated=True)
        >>> ffn(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        embed_dim: int,
        ffn_dim: int,
        *,
        activation: str = "gelu",
        gated: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise ValueError(
                f'feed_forward: activation is "{activation}", expected "gelu", "gelu_tanh", '
                f'"relu" or "silu"'
            )
        self.activation = activation
        factory = {"device": device, "dtype": dtype}
        self.gate_proj = nn.Linear(embed_dim, ffn_dim, bias, **factory) if gated else None
        self.up_proj = nn.Linear(embed_dim, ffn_dim, bias, **factory)
        self.down_proj = nn.Linear(ffn_dim, embed_dim, bias, **factory)

    def reset_parameters(self) -> None:
        """Draws every parameter anew."""
        for child in self.children():
            child.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., embed_dim] -> the same shape."""
        activate = _ACTIVATIONS[self.activation]
        if self.gate_proj is None:
            return self.down_proj(activate(self.up_proj(x)))
        return self.down_proj(activate(self.gate_proj(x)) * self.up_proj(x))
