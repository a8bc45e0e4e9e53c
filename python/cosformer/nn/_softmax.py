"""Softmax attention, over all keys or through a window."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from cosformer._matrix import attention_matrix
from cosformer.nn._cached import CachedAttention
from cosformer.nn._call import Call, Inputs
from cosformer.nn._options import SharedOptions, check_window

if TYPE_CHECKING:
    from typing_extensions import Unpack


class SoftmaxAttention(CachedAttention):
    """Exact softmax attention (Vaswani et al. 2017), with a KV cache.

    Args:
        window: tokens on each side (causal: to the left) that a token sees. None = all.
        dilation: positions between the window's tokens.
        scale: of the scores. None = 1 / sqrt(head_dim).
        dropout: of a weight, in training mode.
        options: those of :class:`Attention`.

    Example:
        >>> import torch, cosformer
        >>> layer = cosformer.nn.SoftmaxAttention(16, 2, num_kv_heads=1, is_causal=True, window=3)
        >>> x = torch.randn(1, 9, 16)
        >>> out, state = layer(x[:, :8], return_state=True)
        >>> step, state = layer.decode_step(x[:, 8:], state)
        >>> torch.allclose(step, layer(x)[:, 8:], atol=1e-5)
        True
    """

    kind = "softmax"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        window: int | None = None,
        dilation: int = 1,
        scale: float | None = None,
        dropout: float = 0.0,
        **options: Unpack[SharedOptions],
    ) -> None:
        check_window(window, dilation)
        super().__init__(embed_dim, num_heads, scale=scale, dropout=dropout, **options)
        self.window = window
        self.dilation = dilation

    def extra_repr(self) -> str:
        window = "" if self.window is None else f", window={self.window}"
        return super().extra_repr() + window

    def _matrix(self, inputs: Inputs, call: Call) -> Tensor:
        heads = self._rotate_heads(self._project(inputs), call)
        options = self._options_of_call(call.relative_bias)
        return attention_matrix("softmax", heads.q, heads.k, is_causal=self.is_causal, **options)
