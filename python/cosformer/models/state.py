"""What a causal model carries from token to token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class ModelState(NamedTuple):
    """One state a layer. Linear kinds and performer have constant size, a window a ring of it,
    softmax and bigbird a KV cache. Rows of the batch may stand at different positions.

    Made by ``Transformer.forward(..., return_state=True)``, which leaves the one it was given as
    it is. A NamedTuple, so that torch.compile and torch.utils see the tensors.

    >>> import torch, cosformer
    >>> config = cosformer.ModelConfig(vocab_size=11, embed_dim=16, num_layers=1, num_heads=2)
    >>> model = cosformer.Transformer(config)
    >>> _, state = model(torch.tensor([[1, 2, 3], [4, 5, 6]]), return_state=True)
    >>> state.select([1, 1, 0]).position
    tensor([3, 3, 3])
    """

    layers: tuple[Any, ...]  #: a LinearState or a KvCache each
    position: Tensor  #: int64 [batch], of each row's next token

    def clone(self) -> ModelState:
        """A copy that shares no memory."""
        return self._map(lambda part: part.clone())

    def detach(self) -> ModelState:
        """The same memory, cut from the graph: for truncated back-propagation."""
        return self._map(lambda part: part.detach())

    def select(self, rows: Tensor | Sequence[int]) -> ModelState:
        """Rows of the batch by index (int64 [new rows], repeats allowed): beam search, batching."""
        index = torch.as_tensor(rows, dtype=torch.int64, device=self.position.device)
        return ModelState(
            tuple(layer.select(index) for layer in self.layers),
            self.position.index_select(0, index),
        )

    def to(self, *args: Any, **kwargs: Any) -> ModelState:
        """Device and/or dtype of the float tensors, as ``Tensor.to`` takes."""
        device, _, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        return ModelState(
            tuple(layer.to(*args, **kwargs) for layer in self.layers),
            self.position.to(device, non_blocking=non_blocking),
        )

    def _map(self, function: Callable[[Any], Any]) -> ModelState:
        return ModelState(tuple(function(layer) for layer in self.layers), function(self.position))
