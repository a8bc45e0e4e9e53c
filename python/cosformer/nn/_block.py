"""Attention and feed-forward with norms and residuals."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosformer.nn._attention import Attention
from cosformer.nn._call import AttentionState
from cosformer.nn._feed_forward import FeedForward
from cosformer.nn._norm import Norm


class Block(nn.Module):
    """One layer of a Transformer: ``x + f(norm(x))``, or ``norm(x + f(x))``, for both parts.

    Args:
        attention: a layer of any kind; its embed_dim is the block's.
        ffn_dim: width of the feed-forward part.
        activation, gated, ffn_bias: of :class:`FeedForward`.
        norm, norm_eps, norm_bias: of :class:`Norm`.
        pre_norm: which of the two forms.
        dropout: on what is added to the residual stream, in training mode.

    Children: ``attention_norm``, ``attention``, ``ffn_norm``, ``ffn``.

    Example:
        >>> import torch, cosformer
        >>> attention = cosformer.nn.attention("cosformer", 16, 2, reweight_len=64)
        >>> block = cosformer.nn.Block(attention, ffn_dim=40)
        >>> block(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        attention: Attention,
        ffn_dim: int,
        *,
        activation: str = "gelu",
        gated: bool = False,
        ffn_bias: bool = True,
        norm: str = "layernorm",
        norm_eps: float = 1e-5,
        norm_bias: bool = True,
        pre_norm: bool = True,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dim = attention.embed_dim
        factory = {"device": device, "dtype": dtype}
        self.attention_norm = Norm(norm, dim, eps=norm_eps, bias=norm_bias, **factory)
        self.attention = attention
        self.ffn_norm = Norm(norm, dim, eps=norm_eps, bias=norm_bias, **factory)
        self.ffn = FeedForward(
            dim, ffn_dim, activation=activation, gated=gated, bias=ffn_bias, **factory
        )
        self.pre_norm = pre_norm
        self.dropout = dropout

    def reset_parameters(self) -> None:
        """Draws every parameter anew."""
        for child in self.children():
            child.reset_parameters()

    def _added(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout > 0.0 else x

    def _feed_forward(self, x: Tensor) -> Tensor:
        if self.pre_norm:
            return x + self._added(self.ffn(self.ffn_norm(x)))
        return self.ffn_norm(x + self._added(self.ffn(x)))

    def forward(self, x: Tensor, **call: Any) -> Tensor | tuple:
        """Self attention and feed-forward.

        Args:
            x: [batch, seq, embed_dim].
            call: what :meth:`Attention.forward` takes by name.

        Returns:
            out [batch, seq, embed_dim], or ``(out, state)``, as :meth:`Attention.forward`.
        """
        result = self.attention(self.attention_norm(x) if self.pre_norm else x, **call)
        out, *rest = result if isinstance(result, tuple) else (result,)
        y = x + self._added(out)
        if not self.pre_norm:
            y = self.attention_norm(y)
        y = self._feed_forward(y)
        return (y, *rest) if rest else y

    def attention_matrix(self, x: Tensor, *, relative_bias: Tensor | None = None) -> Tensor:
        """As :meth:`Attention.attention_matrix`, of the input x of the block."""
        x = self.attention_norm(x) if self.pre_norm else x
        return self.attention.attention_matrix(x, relative_bias=relative_bias)

    def decode_step(
        self, x: Tensor, state: AttentionState = None, *, relative_bias: Tensor | None = None
    ) -> tuple[Tensor, AttentionState]:
        """As :meth:`Attention.decode_step`: ``(out [batch, 1, embed_dim], state)``."""
        with torch.no_grad():
            out, state = self.attention.decode_step(
                self.attention_norm(x) if self.pre_norm else x, state, relative_bias=relative_bias
            )
            y = x + out
            if not self.pre_norm:
                y = self.attention_norm(y)
            return self._feed_forward(y), state
