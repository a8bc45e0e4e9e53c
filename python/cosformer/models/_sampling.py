"""From logits to tokens, as the C++ library draws them."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def philox(key: int, counter_high: int, counter_low: int) -> tuple[int, int, int, int]:
    """Four random 32-bit words (Philox-4x32-10, Salmon et al. 2011) from a 64-bit key and counter.

    >>> philox(0, 0, 0)[0] == 0x6627E8D5
    True
    """
    k0, k1 = key & _MASK, key >> 32 & _MASK
    c = (
        counter_low & _MASK,
        counter_low >> 32 & _MASK,
        counter_high & _MASK,
        counter_high >> 32 & _MASK,
    )
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = ((p1 >> 32) ^ c[1] ^ k0, p1 & _MASK, (p0 >> 32) ^ c[3] ^ k1, p0 & _MASK)
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c


def uniform(seed: int, row: int, step: int) -> float:
    """53 bits in [0, 1) from (seed, row, step): the same on every machine."""
    high, low, _, _ = philox(seed, row, step)
    return ((high << 32 | low) >> 11) * 2.0**-53


def sample(
    logits: Tensor, draws: list[float], *, temperature: float, top_k: int, top_p: float
) -> Tensor:
    """A token a row: logits [batch, vocab], draws in [0, 1) one a row -> int64 [batch], on the CPU.

    temperature 0 takes the likeliest; top_k 0 keeps all; top_p keeps the fewest tokens that reach
    that probability, at least one (Holtzman et al. 2020). Ties go to the lower id. NaN is never
    chosen, unless all are NaN (then 0).

    >>> sample(torch.tensor([[0.0, 2.0, 2.0]]), [0.5], temperature=0.0, top_k=0, top_p=1.0)
    tensor([1])
    """
    scores = logits.detach().to("cpu", torch.float32).double()
    is_nan = scores.isnan()
    scores = scores.masked_fill(is_nan, -torch.inf)
    if temperature == 0.0:
        best = scores.amax(-1, keepdim=True)
        return ((scores == best) & ~is_nan).to(torch.int8).argmax(-1)
    order = None
    if 0 < top_k < scores.shape[-1] or top_p < 1.0:
        order = scores.argsort(dim=-1, descending=True, stable=True)
        if 0 < top_k < scores.shape[-1]:
            order = order[:, :top_k]
        scores, is_nan = scores.gather(-1, order), is_nan.gather(-1, order)
    greatest = scores.amax(-1, keepdim=True)
    # Equal infinities would give NaN.
    below = torch.where(scores == greatest, torch.zeros_like(scores), scores - greatest)
    weights = (below / temperature).exp().masked_fill(is_nan, 0.0)
    sums = weights.cumsum(-1)
    if top_p < 1.0:
        before = torch.nn.functional.pad(sums[:, :-1], (1, 0))
        kept = before < top_p * sums[:, -1:]
        kept[:, 0] = True
        weights = weights * kept
        sums = weights.cumsum(-1)
    wanted = torch.tensor(draws, dtype=torch.float64).unsqueeze(-1) * sums[:, -1:]
    chosen = torch.searchsorted(sums, wanted, right=True).squeeze(-1)
    # Rounding may carry past the end: then the last that has any weight.
    places = torch.arange(weights.shape[-1])
    last = torch.where(weights > 0, places, 0).amax(-1)
    chosen = torch.minimum(chosen, last)
    return chosen if order is None else order.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
