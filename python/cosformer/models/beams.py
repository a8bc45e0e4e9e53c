"""Beam search: the likeliest continuations, through the states of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cosformer.models._prompts import Prompts, prefill, prompt_rows, step
from cosformer.models.transformer import Transformer


class Hypothesis(NamedTuple):
    """A continuation of a prompt, made by ``beam_search``.

    >>> Hypothesis([3, 1], log_prob=-1.0, score=-0.5).tokens
    [3, 1]
    """

    tokens: list[int]  #: new ones, eos_id included where it ends in one
    log_prob: float  #: of all its tokens
    score: float  #: log_prob / len(tokens) ** length_penalty


class _Search:
    """The hypotheses of one prompt: those that live, by row of the batch, and those that ended."""

    def __init__(self, num_beams: int, length_penalty: float, max_new_tokens: int) -> None:
        self.num_beams = num_beams
        self.length_penalty = length_penalty
        self.max_new_tokens = max_new_tokens
        self.live: list[tuple[list[int], float]] = [([], 0.0)]
        self.ended: list[Hypothesis] = []

    def _score(self, log_prob: float, count: int) -> float:
        return log_prob / count**self.length_penalty

    def _end(self, tokens: list[int], log_prob: float) -> None:
        score = self._score(log_prob, len(tokens))
        self.ended.append(Hypothesis(tokens, log_prob, score))
        self.ended.sort(key=lambda each: -each.score)
        del self.ended[self.num_beams :]

    def extend(self, log_probs: Tensor, eos_id: int | None) -> list[int]:
        """Log-probabilities [live, vocab] of the next token -> which live row each of the new ones
        goes on from."""
        vocab = log_probs.shape[-1]
        before = torch.tensor([log_prob for _, log_prob in self.live], dtype=torch.float64)
        total = (before.unsqueeze(-1) + log_probs).flatten()
        # Each live row may end at most once: as many again always leave num_beams that go on.
        best = total.topk(min(2 * self.num_beams, total.numel()))
        live, parents = [], []
        for log_prob, place in zip(best.values.tolist(), best.indices.tolist()):  # noqa: B905
            parent, token = divmod(place, vocab)
            tokens = [*self.live[parent][0], token]
            if token == eos_id:
                self._end(tokens, log_prob)
            elif len(live) < self.num_beams:
                live.append((tokens, log_prob))
                parents.append(parent)
        self.live = live
        count = len(live[0][0]) if live else 0
        if live and (count == self.max_new_tokens or self._is_settled(count)):
            if count == self.max_new_tokens:
                for tokens, log_prob in live:
                    self._end(tokens, log_prob)
            self.live, parents = [], []
        return parents

    def _is_settled(self, count: int) -> bool:
        """No way on can beat what ended: log-probabilities only fall, and the penalty is kindest
        at the greatest length (a negative one: at the next)."""
        if len(self.ended) < self.num_beams:
            return False
        kindest = self.max_new_tokens if self.length_penalty > 0 else count + 1
        return self._score(self.live[0][1], kindest) <= self.ended[-1].score


def beam_search(
    model: Transformer,
    ids: Prompts,
    *,
    num_beams: int = 4,
    max_new_tokens: int = 200,
    eos_id: int | None = None,
    length_penalty: float = 1.0,
    lengths: Tensor | Sequence[int] | None = None,
) -> list[list[Hypothesis]]:
    """Of each prompt the best continuations found, at most ``num_beams``, best first.

    A step keeps the ``num_beams`` likeliest of all ways on; the states follow by
    ``ModelState.select``. Hypotheses compare by log_prob / length ** length_penalty (Wu et al.
    2016 have a related form). The search of a prompt stops when no way on can beat what ended.

    Args:
        model: a causal ``Transformer``.
        ids, lengths: prompts, as in ``generate``.
        num_beams: how many are kept; 1 is greedy search.
        max_new_tokens: at most so many; hypotheses of that length end there.
        eos_id: ends a hypothesis.
        length_penalty: 0 compares log-probabilities; above, longer ones gain.

    Raises:
        ValueError: as ``generate``.

    >>> import torch, cosformer
    >>> config = cosformer.ModelConfig(vocab_size=11, embed_dim=16, num_layers=1, num_heads=2)
    >>> model = cosformer.Transformer(config)
    >>> [best, *others], = cosformer.beam_search(model, [1, 2], num_beams=3, max_new_tokens=4)
    >>> len(best.tokens), len(others), best.score >= others[0].score
    (4, 2, True)
    """
    rows = prompt_rows(ids, lengths, model, "beam_search")
    if num_beams < 1:
        raise ValueError(f"beam_search: num_beams is {num_beams}, expected 1 or more")
    if max_new_tokens < 1:
        raise ValueError(f"beam_search: max_new_tokens is {max_new_tokens}, expected 1 or more")
    limit = model.max_positions
    longest = max((len(row) for row in rows), default=0)
    # The last token is written, but not read.
    if limit is not None and longest + max_new_tokens - 1 > limit:
        raise ValueError(
            f"beam_search: a prompt of {longest} tokens and {max_new_tokens} new ones, the model "
            f"knows {limit} positions: ask for fewer tokens, or shorten the prompt"
        )
    searches = [_Search(num_beams, length_penalty, max_new_tokens) for _ in rows]
    if not rows:
        return []
    logits, state = prefill(model, rows)
    while True:
        log_probs = logits.detach().cpu().double().log_softmax(-1)
        parents: list[int] = []
        first = 0
        for search in searches:
            count = len(search.live)
            if count:
                found = search.extend(log_probs[first : first + count], eos_id)
                parents += [first + parent for parent in found]
            first += count
        if not parents:
            return [search.ended for search in searches]
        tokens = [tokens[-1] for search in searches for tokens, _ in search.live]
        logits, state = step(model, tokens, state.select(parents))
