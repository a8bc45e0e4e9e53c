"""Norms over the last dimension."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Norm(nn.Module):
    """Layer norm (Ba et al. 2016) or RMS norm (Zhang and Sennrich 2019).

    Args:
        kind: "layernorm" or "rmsnorm".
        dim: of the last dimension.
        eps: added to the variance or mean square.
        bias: of a layer norm; an RMS norm has none.

    Example:
        >>> import torch, cosformer
        >>> cosformer.nn.Norm("rmsnorm", 8)(torch.ones(2, 8)).round().sum().item()
        16.0
    """

    def __init__(
        self,
        kind: str,
        dim: int,
        *,
        eps: float = 1e-5,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if kind not in ("layernorm", "rmsnorm"):
            raise ValueError(f'norm: found "{kind}", expected "layernorm" or "rmsnorm"')
        self.kind = kind
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.bias = None
        if bias and kind == "layernorm":
            self.bias = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Ones, and zeros for the bias."""
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., dim] -> the same shape."""
        if self.kind == "rmsnorm":
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.kind!r}, {self.weight.shape[0]}, eps={self.eps}"
