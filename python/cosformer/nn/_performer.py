"""Performer: softmax attention in expectation over random features."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from cosformer._matrix import attention_matrix
from cosformer._performer import (
    performer_attention,
    performer_attention_decode_step_,
    performer_projection,
)
from cosformer._state import LinearState
from cosformer.nn._attention import Attention
from cosformer.nn._call import AttentionState, Call, Inputs, Result
from cosformer.nn._linear import linear_state_of
from cosformer.nn._options import SharedOptions, at_least

if TYPE_CHECKING:
    from typing_extensions import Unpack


class PerformerAttention(Attention):
    """Performer (Choromanski et al., ICLR 2021), with a state of constant size.

    Args:
        num_features: rows of the projection. None = 4 head_dim.
        orthogonal: rows orthogonal in blocks of head_dim, which lowers the variance.
        trainable_projection: a parameter instead of a buffer.
        projection_seed: the projection follows from it alone.
        options: those of :class:`Attention`.

    ``projection`` [num_features, head_dim] is saved with the parameters.

    Example:
        >>> import torch, cosformer
        >>> layer = cosformer.nn.PerformerAttention(16, 2, num_features=32)
        >>> layer(torch.randn(3, 10, 16)).shape
        torch.Size([3, 10, 16])
    """

    kind = "performer"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_features: int | None = None,
        orthogonal: bool = True,
        trainable_projection: bool = False,
        projection_seed: int = 0,
        **options: Unpack[SharedOptions],
    ) -> None:
        at_least(0, projection_seed, "projection_seed")
        super().__init__(embed_dim, num_heads, **options)
        self.num_features = 4 * self.head_dim if num_features is None else num_features
        at_least(1, self.num_features, "num_features")
        self.orthogonal = orthogonal
        self.projection_seed = projection_seed
        projection = torch.empty(
            self.num_features,
            self.head_dim,
            device=options.get("device"),
            dtype=options.get("dtype"),
        )
        if trainable_projection:
            self.projection = nn.Parameter(projection)
        else:
            self.register_buffer("projection", projection)
        self._reset_own_parameters()

    def _reset_own_parameters(self) -> None:
        self.redraw_projection(self.projection_seed)

    def redraw_projection(self, seed: int) -> None:
        """Another projection, from seed alone, in place; states made with the former do not go
        with it."""
        if self.projection.is_meta:
            return
        drawn = performer_projection(
            self.num_features, self.head_dim, orthogonal=self.orthogonal, seed=seed
        )
        with torch.no_grad():
            self.projection.copy_(drawn)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, num_features={self.num_features}"

    def _attend(self, inputs: Inputs, call: Call) -> Result:
        state = linear_state_of(call.state, self.kind)
        placed = call
        if state is not None:
            placed = call._replace(
                q_start=state.position if call.q_start is None else call.q_start,
                kv_start=state.position if call.kv_start is None else call.kv_start,
            )
        heads = self._rotate_heads(self._project(inputs), placed)
        result = performer_attention(
            *heads,
            self.projection,
            is_causal=self.is_causal,
            **call.placement(),
            state=state,
            return_state=call.return_state,
        )
        return Result(*result) if call.return_state else Result(result)

    def _can_step(self, state: AttentionState) -> bool:
        return isinstance(state, LinearState)

    def _step(
        self, query: Tensor, state: AttentionState, relative_bias: Tensor | None
    ) -> tuple[Tensor, AttentionState]:
        heads = self._project(Inputs(query, query, query))
        if self.rotary_base is not None:
            positions = state.position[:, None]
            heads = heads._replace(
                q=self._rotate(heads.q, 0, positions), k=self._rotate(heads.k, 0, positions)
            )
        return performer_attention_decode_step_(*heads, self.projection, state), state

    def _matrix(self, inputs: Inputs, call: Call) -> Tensor:
        heads = self._rotate_heads(self._project(inputs), call)
        return attention_matrix(
            "performer", heads.q, heads.k, projection=self.projection, is_causal=self.is_causal
        )
