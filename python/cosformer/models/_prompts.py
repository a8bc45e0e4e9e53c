"""Prompts of unequal length as one batch, and the model fed with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import TypeAlias

import torch
from torch import Tensor

from cosformer.models.state import ModelState
from cosformer.models.transformer import Transformer

#: One prompt (ints, or int64 [seq]), or several (lists of ints, or int64 [batch, seq]).
Prompts: TypeAlias = Tensor | Sequence[int] | Sequence[Sequence[int]] | Sequence[Tensor]


def prompt_rows(
    ids: Prompts, lengths: Tensor | Sequence[int] | None, model: Transformer, where: str
) -> list[list[int]]:
    """The prompts as lists, checked: each holds a token, each token is in the vocabulary."""
    if not model.config.is_causal:
        raise ValueError(
            f"{where}: the model is not causal (is_causal: false): it cannot write text token by "
            f"token"
        )
    if isinstance(ids, Tensor):
        if ids.is_floating_point() or ids.dtype == torch.bool or ids.dim() not in (1, 2):
            raise ValueError(
                f"{where}: ids are {ids.dtype} {list(ids.shape)}, expected int64 [seq] or [batch, "
                f"seq]"
            )
        given = ids.tolist()
    else:
        given = [row.tolist() if isinstance(row, Tensor) else row for row in ids]
    rows = [given] if all(isinstance(row, Integral) for row in given) else given
    for row in rows:
        if not isinstance(row, Sequence) or isinstance(row, str):
            raise ValueError(f"{where}: a prompt is {row!r}, expected ints")
    if lengths is not None:
        counts = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
        if len(counts) != len(rows):
            raise ValueError(f"{where}: lengths has {len(counts)} entries, ids {len(rows)} rows")
        for count, row in zip(counts, rows):  # noqa: B905 (checked above)
            if not 0 <= count <= len(row):
                raise ValueError(f"{where}: a length is {count}, expected 0 to {len(row)}")
        rows = [row[:count] for count, row in zip(counts, rows)]  # noqa: B905
    vocab = model.config.vocab_size
    for row in rows:
        if not row:
            raise ValueError(
                f"{where}: the prompt is empty, expected at least one token to continue from"
            )
        for token in row:
            if not isinstance(token, int) or not 0 <= token < vocab:
                raise ValueError(f"{where}: the prompt holds id {token}, expected 0 to {vocab - 1}")
    return rows


@contextmanager
def evaluation(model: Transformer) -> Iterator[None]:
    """Evaluation mode without gradients, for one step: between steps the model is the caller's."""
    # One by one: a caller may train some parts and not others.
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def prefill(model: Transformer, rows: list[list[int]]) -> tuple[Tensor, ModelState]:
    """All prompts in one call: logits [batch, vocab] of each one's last token, and the state."""
    device = model.embed.weight.device
    lengths = torch.tensor([len(row) for row in rows], device=device)
    longest = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    mask = None  # equal lengths need none
    if any(len(row) != longest for row in rows):
        mask = torch.arange(longest, device=device) < lengths.unsqueeze(-1)
    with evaluation(model):
        hidden, state = model.hidden_states(ids.to(device), key_mask=mask, return_state=True)
        last = hidden[torch.arange(len(rows), device=device), lengths - 1]
        return model.logits(last), state


def step(model: Transformer, tokens: list[int], state: ModelState) -> tuple[Tensor, ModelState]:
    """A token a row: logits [batch, vocab]; the state given is used up."""
    ids = torch.tensor(tokens, device=model.embed.weight.device).unsqueeze(-1)
    with evaluation(model):
        logits, state = model.decode_step(ids, state)
    return logits[:, 0], state
