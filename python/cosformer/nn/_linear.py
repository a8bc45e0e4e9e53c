"""cosFormer and the linear transformer: a feature map, a state of constant size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cosformer._functions import (
    linear_attention,
    linear_attention_decode_step_,
    linear_attention_with_denominator,
)
from cosformer._kv_cache import KvCache
from cosformer._matrix import attention_matrix
from cosformer._state import LinearState
from cosformer.nn._attention import Attention
from cosformer.nn._call import AttentionState, Call, Inputs, Result
from cosformer.nn._options import SharedOptions, at_least

if TYPE_CHECKING:
    from typing_extensions import Unpack


def linear_state_of(state: AttentionState, kind: str) -> LinearState | None:
    """The state of a kind of constant size; None = nothing seen."""
    if isinstance(state, KvCache):
        raise ValueError(f'attention: state is a KvCache, expected a LinearState: kind is "{kind}"')
    return state


class _LinearBase(Attention):
    _has_denominator = True
    _turns_whole_heads = True

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        feature_map: str,
        reweight_len: int | None,
        normalizer: str,
        eps: float,
        **options: Unpack[SharedOptions],
    ) -> None:
        if normalizer not in ("sum", "none"):
            raise ValueError(f'attention: normalizer is "{normalizer}", expected "sum" or "none"')
        if reweight_len is not None:
            at_least(1, reweight_len, "reweight_len")
        super().__init__(embed_dim, num_heads, **options)
        self.feature_map = feature_map
        self.reweight_len = reweight_len
        self.normalizer = normalizer
        self.eps = eps

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, feature_map={self.feature_map!r}, "
            f"reweight_len={self.reweight_len}"
        )

    def _options_of_call(self) -> dict:
        return {
            "feature_map": self.feature_map,
            "reweight_len": self.reweight_len,
            "is_causal": self.is_causal,
            "normalizer": self.normalizer,
            "rotary_base": self.rotary_base,
            "rotary_interleaved": self.rotary_interleaved,
            "eps": self.eps,
        }

    def _normed(self, out: Tensor) -> Tensor:
        """Instead of the denominator: the scale of a head's output is divided out."""
        if self.normalizer == "sum":
            return out
        return torch.rms_norm(out, (out.shape[3],), None, self.eps)

    def _attend(self, inputs: Inputs, call: Call) -> Result:
        heads = self._project(inputs)
        options = {
            **self._options_of_call(),
            **call.placement(),
            "state": linear_state_of(call.state, self.kind),
            "return_state": call.return_state,
        }
        if call.return_denominator and self.normalizer == "sum":
            return Result(*linear_attention_with_denominator(*heads, **options))
        result = linear_attention(*heads, **options)
        out, state = result if call.return_state else (result, None)
        return Result(self._normed(out), state)

    def _can_step(self, state: AttentionState) -> bool:
        return isinstance(state, LinearState)

    def _step(
        self, query: Tensor, state: AttentionState, relative_bias: Tensor | None
    ) -> tuple[Tensor, AttentionState]:
        heads = self._project(Inputs(query, query, query))
        expected = (
            "linear",
            self.feature_map,
            self.reweight_len or 0,
            self.rotary_base or 0.0,
            self.rotary_interleaved,
        )
        if tuple(state[4:9]) != expected:
            raise ValueError(
                f"attention: the state is of (kind, feature_map, reweight_len, rotary_base, "
                f"rotary_interleaved) = {tuple(state[4:9])}, expected {expected}"
            )
        out = linear_attention_decode_step_(*heads, state, normalizer=self.normalizer, eps=self.eps)
        return self._normed(out), state

    def _matrix(self, inputs: Inputs, call: Call) -> Tensor:
        heads = self._project(inputs)
        return attention_matrix("linear", heads.q, heads.k, **self._options_of_call())


class LinearAttention(_LinearBase):
    """The linear transformer (Katharopoulos et al., ICML 2020): phi(q).phi(k), phi = elu + 1.

    Args:
        feature_map: "elu1", "relu", or "identity", which wants non-negative q and k.
        reweight_len: M of a cosine (cosFormer's). None = none.
        normalizer: "sum", or "none": an RMS norm a head follows instead (TransNormer, Qin et al.
            2022).
        eps: the least denominator, and that norm's.
        options: those of :class:`Attention`.

    Example:
        >>> import torch, cosformer
        >>> layer = cosformer.nn.LinearAttention(16, 2, is_causal=True)
        >>> x = torch.randn(1, 5, 16)
        >>> out, state = layer(x[:, :4], return_state=True)
        >>> torch.allclose(layer(x[:, 4:], state=state), layer(x)[:, 4:], atol=1e-5)
        True
    """

    kind = "linear"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        feature_map: str = "elu1",
        reweight_len: int | None = None,
        normalizer: str = "sum",
        eps: float = 1e-6,
        **options: Unpack[SharedOptions],
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            feature_map=feature_map,
            reweight_len=reweight_len,
            normalizer=normalizer,
            eps=eps,
            **options,
        )


class CosformerAttention(_LinearBase):
    """cosFormer (Qin et al., ICLR 2022): relu features, a cosine of the distance.

    Args:
        reweight_len: M, a constant of the model, usually its greatest length; a query that sees a
            key further than M away is an error.
        feature_map, normalizer, eps: as in :class:`LinearAttention`, but "relu".
        options: those of :class:`Attention`.

    Example:
        >>> import torch, cosformer
        >>> layer = cosformer.nn.CosformerAttention(16, 2, reweight_len=64)
        >>> layer(torch.randn(3, 10, 16)).shape
        torch.Size([3, 10, 16])
    """

    kind = "cosformer"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        reweight_len: int,
        feature_map: str = "relu",
        normalizer: str = "sum",
        eps: float = 1e-6,
        **options: Unpack[SharedOptions],
    ) -> None:
        if reweight_len is None or reweight_len < 1:
            raise ValueError(
                f"attention: reweight_len is {reweight_len}, expected M > 0 for kind "
                f'"cosformer" (usually the greatest length)'
            )
        super().__init__(
            embed_dim,
            num_heads,
            feature_map=feature_map,
            reweight_len=reweight_len,
            normalizer=normalizer,
            eps=eps,
            **options,
        )
