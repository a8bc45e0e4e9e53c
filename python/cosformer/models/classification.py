"""A classification head over the trunk of a ``Transformer``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from cosformer.models.config import ModelConfig
from cosformer.models.model_io import assign_tensors, load_tensors, save_tensors
from cosformer.models.transformer import Transformer

_HEAD_FILE = "classifier.safetensors"
_POOLINGS = ("mean", "first", "last")

Pooling = Literal["mean", "first", "last"]


class TransformerForClassification(nn.Module):
    """Logits of a class a sequence: the trunk's last hidden states, pooled, through a linear head.

    Pooling honours the mask, so that a padded batch gives what each sequence gives alone: "mean"
    over the real tokens, "first" and "last" of them. A row of padding alone is pooled to 0.

    ``transformer`` is the trunk, a ``Transformer`` of the config; ``classifier`` the head. C++ and
    the program read the trunk of a saved folder (as a language model), not this head, which lies
    beside it in classifier.safetensors.

    >>> import torch, cosformer
    >>> config = cosformer.ModelConfig(
    ...     vocab_size=11, embed_dim=16, num_layers=1, num_heads=2, is_causal=False
    ... )
    >>> model = cosformer.TransformerForClassification(config, num_classes=3)
    >>> ids = torch.tensor([[1, 2, 3], [4, 0, 0]])
    >>> model(ids, key_mask=ids > 0).shape
    torch.Size([2, 3])
    """

    def __init__(self, config: ModelConfig, num_classes: int, *, pooling: Pooling = "mean") -> None:
        super().__init__()
        if num_classes < 1:
            raise ValueError(f"classification: num_classes is {num_classes}, expected 1 or more")
        if pooling not in _POOLINGS:
            raise ValueError(
                f"classification: pooling is {pooling!r}, expected 'mean', 'first' or 'last'"
            )
        self.num_classes = num_classes
        self.pooling = pooling
        self.transformer = Transformer(config)
        self.classifier = nn.Linear(config.embed_dim, num_classes)
        nn.init.normal_(self.classifier.weight, 0.0, config.init_std)
        nn.init.zeros_(self.classifier.bias)

    @property
    def config(self) -> ModelConfig:
        """Of the trunk."""
        return self.transformer.config

    def forward(self, ids: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Logits [batch, num_classes] of ids, int64 [batch, seq]; key_mask: bool [batch, seq],
        True = a real token, None = all are."""
        hidden = self.transformer.hidden_states(ids, key_mask=key_mask)
        return self.classifier(self._pool(hidden, key_mask))

    def _pool(self, hidden: Tensor, key_mask: Tensor | None) -> Tensor:
        batch, count, _ = hidden.shape
        if key_mask is None:
            key_mask = torch.ones(batch, count, dtype=torch.bool, device=hidden.device)
        if self.pooling == "mean":
            weight = key_mask.to(hidden.dtype) / key_mask.sum(-1, keepdim=True).clamp_min(1)
        else:  # 1 at the first, or last, real token
            from_start = key_mask.to(torch.int64).cumsum(-1)
            wanted = 1 if self.pooling == "first" else from_start[:, -1:]
            weight = (key_mask & (from_start == wanted)).to(hidden.dtype)
        # Where the weight is 0, what padding holds must not count: 0 x NaN.
        held = torch.where(key_mask.unsqueeze(-1), hidden, torch.zeros_like(hidden))
        return (held * weight.to(hidden.dtype).unsqueeze(-1)).sum(1)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """The trunk's model folder, and the head as classifier.safetensors in it."""
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        metadata = {"num_classes": str(self.num_classes), "pooling": self.pooling}
        save_tensors(place / _HEAD_FILE, self.classifier.state_dict(), metadata)
        self.transformer.save_pretrained(place)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> TransformerForClassification:
        """What ``save_pretrained`` wrote, bit for bit; errors as ``Transformer.from_pretrained``.

        A folder of a language model alone has no head: FileNotFoundError.
        """
        path = Path(folder) / _HEAD_FILE
        if not path.is_file():
            raise FileNotFoundError(
                f"{path}: no such file: the folder has no classification head; for one to train, "
                f"make a TransformerForClassification and load its .transformer"
            )
        trunk = Transformer.from_pretrained(folder)
        num_classes, pooling = _head_options(path)
        with torch.device("meta"):
            model = cls(trunk.config, num_classes, pooling=pooling)
        tensors = load_tensors(path, model.classifier.state_dict(), "its metadata and config.json")
        assign_tensors(model.classifier, tensors)
        model.transformer = trunk
        return model.to(device=device, dtype=dtype)


def _head_options(path: Path) -> tuple[int, Pooling]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{path}: is not a safetensors file: {error}") from error
    count, pooling = metadata.get("num_classes", ""), metadata.get("pooling", "")
    if not count.isascii() or not count.isdigit() or pooling not in _POOLINGS:
        raise ValueError(
            f"{path}: metadata has num_classes {count!r} and pooling {pooling!r}, expected a "
            f"number and 'mean', 'first' or 'last'"
        )
    return int(count), pooling
