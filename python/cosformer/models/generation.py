"""Text generation: all prompts in one prefill, then a constant cost a token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cosformer.models._prompts import Prompts, prefill, prompt_rows, step
from cosformer.models._sampling import sample, uniform
from cosformer.models.transformer import Transformer


def _check(
    max_new_tokens: int, temperature: float, top_k: int, top_p: float, seeds: list[int]
) -> None:
    if max_new_tokens < 0:
        raise ValueError(f"generate: max_new_tokens is {max_new_tokens}, expected 0 or more")
    if not temperature >= 0.0:
        raise ValueError(f"generate: temperature is {temperature}, expected 0 (greedy) or more")
    if top_k < 0:
        raise ValueError(f"generate: top_k is {top_k}, expected 0 (all) or more")
    if not 0.0 < top_p <= 1.0:
        raise ValueError(f"generate: top_p is {top_p}, expected more than 0, at most 1")
    for seed in seeds:
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"generate: seed is {seed}, expected 0 to 2^64 - 1")


def generate_stream(
    model: Transformer,
    ids: Prompts,
    *,
    max_new_tokens: int = 200,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | Sequence[int] = 1,
    eos_id: int | None = None,
    lengths: Tensor | Sequence[int] | None = None,
    rolling: bool = False,
) -> Iterator[Tensor]:
    """Yields a token a row, int64 [batch] on the CPU, as they are written.

    Arguments are those of ``generate``. They are checked at once; past the positions that the
    model knows the iterator raises ValueError after what fits was yielded (unless ``rolling``).
    The model runs in evaluation mode, and is in its own between the tokens.

    >>> import torch, cosformer
    >>> config = cosformer.ModelConfig(vocab_size=11, embed_dim=16, num_layers=1, num_heads=2)
    >>> model = cosformer.Transformer(config)
    >>> for tokens in cosformer.generate_stream(model, [[1, 2], [3]], max_new_tokens=2):
    ...     print(tokens.shape)
    torch.Size([2])
    torch.Size([2])
    """
    rows = prompt_rows(ids, lengths, model, "generate")
    seeds = [seed] if isinstance(seed, int) else list(seed)
    _check(max_new_tokens, temperature, top_k, top_p, seeds)
    if not isinstance(seed, int) and len(seeds) != len(rows):
        raise ValueError(f"generate: seed has {len(seeds)} entries, ids {len(rows)} rows")
    limit = model.max_positions
    longest = max((len(row) for row in rows), default=0)
    if limit is not None and longest > limit and not rolling:
        raise ValueError(
            f"generate: the prompt has {longest} tokens, the model knows {limit} positions: "
            f"shorten the prompt, or use rolling=True to go on from its latter half"
        )
    if limit is not None and rolling and limit < 2:
        raise NotImplementedError(
            f"generate: rolling needs a model of at least 2 positions, found {limit}"
        )

    def draws(active: list[int], at: int) -> list[float]:
        if isinstance(seed, int):
            return [uniform(seed, row, at) for row in active]
        return [uniform(seeds[row], 0, at) for row in active]

    def choose(logits: Tensor, active: list[int], at: int) -> list[int]:
        numbers = draws(active, at) if temperature > 0.0 else []
        return sample(logits, numbers, temperature=temperature, top_k=top_k, top_p=top_p).tolist()

    def stream() -> Iterator[Tensor]:
        active = list(range(len(rows)))
        # Of each row, what the state holds or the next call brings: the text since it last rolled.
        context = [list(row) for row in rows]
        state = None
        for at in range(max_new_tokens if rows else 0):
            most = max(len(context[row]) for row in active)
            over = limit is not None and most > limit
            if over and not rolling:
                raise ValueError(
                    f"generate: stopped after {at} of {max_new_tokens} tokens: the model knows "
                    f"{limit} positions, the longest prompt took {longest}: ask for fewer tokens, "
                    f"shorten the prompt, or use rolling=True"
                )
            if over or state is None:
                for row in active if over else []:
                    if len(context[row]) > limit:
                        context[row] = context[row][-(limit // 2) :]
                logits, state = prefill(model, [context[row] for row in active])
            else:
                logits, state = step(model, [context[row][-1] for row in active], state)
            tokens = choose(logits, active, at)
            out = torch.full((len(rows),), 0 if eos_id is None else eos_id, dtype=torch.int64)
            out[active] = torch.tensor(tokens)
            for row, token in zip(active, tokens):  # noqa: B905 (a token a row)
                context[row].append(token)
            going = [i for i, token in enumerate(tokens) if token != eos_id]
            if len(going) < len(active):
                state = state.select(going)
                active = [active[i] for i in going]
            yield out
            if not active:
                return

    return stream()


def generate(
    model: Transformer,
    ids: Prompts,
    *,
    max_new_tokens: int = 200,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | Sequence[int] = 1,
    eos_id: int | None = None,
    lengths: Tensor | Sequence[int] | None = None,
    rolling: bool = False,
) -> Tensor:
    """The tokens that a causal model writes after each prompt: int64 [batch, new], on the CPU.

    Args:
        model: a causal ``Transformer``.
        ids: one prompt (ints, or int64 [seq]) or several of any lengths (lists of ints, or int64
            [batch, seq], padded on the right with ``lengths``).
        max_new_tokens: at most so many; fewer where every row has written ``eos_id``.
        temperature: of the sampling; 0 takes the likeliest token.
        top_k: sample from the k likeliest tokens; 0 = all.
        top_p: sample from the fewest tokens of this probability (Holtzman et al. 2020).
        seed: of the sampling, by Philox from (seed, row, step): the same on every machine, and
            for row 0 the tokens of C++'s ``generate``. A sequence gives a seed a row: each row
            then writes what it would write alone.
        eos_id: a row that has written it is done, and holds it from there on.
        lengths: int64 [batch], tokens of each row of ``ids``.
        rolling: past the positions that the model knows, go on from the latter half of the text.

    Raises:
        ValueError: an empty prompt, a token outside the vocabulary, an option out of its range, a
            model that is not causal, and going past the positions that the model knows.

    >>> import torch, cosformer
    >>> config = cosformer.ModelConfig(vocab_size=11, embed_dim=16, num_layers=1, num_heads=2)
    >>> model = cosformer.Transformer(config)
    >>> cosformer.generate(model, [[1, 2, 3], [4]], max_new_tokens=5, temperature=0.0).shape
    torch.Size([2, 5])
    """
    written = list(
        generate_stream(
            model,
            ids,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            eos_id=eos_id,
            lengths=lengths,
            rolling=rolling,
        )
    )
    if written:
        return torch.stack(written, 1)
    rows = prompt_rows(ids, lengths, model, "generate")
    return torch.empty(len(rows), 0, dtype=torch.int64)
