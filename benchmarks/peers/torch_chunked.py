"""Causal cosFormer in chunks: the best that torch's own operators were made to do here.

Inside a chunk: scores, times the cosine, times the values. Before it: cos(a - b) = cos a cos b +
sin a sin b, so the past is kept in two states side by side, S = sum relu(k_j) (cos_j [v_j, 1],
sin_j [v_j, 1]), of width 2 (dim + 1): one product reads both, and the features need no doubling.
The backward is written by hand: one walk from the end, with the states that the forward saved.

What was tried and lost, forward at 4,096 tokens, 16 heads of 64, one thread of a Zen 4 server, this
being 54 ms: chunks of 32 / 128 / 256 tokens, 59 / 73 / 118 (64 is the best from 256 tokens on, with
the backward too); new tensors instead of ``out=``, 63; doubled features [q cos, q sin], 65; all
chunks in one batched product and a cumulative sum over their states, 98; sums of k apart from those
of v, 60; 8 heads at a time, 57; 4, 63. Its products alone take 40 ms at the speed of MKL's batched
product for such shapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from benchmarks.peers import Options
from benchmarks.peers.inputs import cosformer_causal, qkv_sides
from benchmarks.peers.measure import BOTH, FORWARD, Comparison

NAME = "chunked"
PIP = None

# Up to WHOLE tokens nothing is kept between chunks: there is one.
CHUNK, WHOLE = 64, 128
EPS = 1e-6
_REQUIRED = {FORWARD: 6.0, BOTH: 5.0}


def chunk_of(length: int) -> int:
    return length if length <= WHOLE else CHUNK


class Tables:
    """What depends on the length and M alone: a model makes it once."""

    def __init__(self, length: int, reweight_len: int) -> None:
        step = math.pi / 2 / reweight_len
        angle = (torch.arange(length, dtype=torch.float64) * step)[:, None]
        self.cos, self.sin = angle.cos().float(), angle.sin().float()
        at = torch.arange(chunk_of(length), dtype=torch.float64)
        self.triangle = torch.cos((at[:, None] - at) * step).tril_().float()


def two_phases(x: Tensor, last: Tensor | float, cos: Tensor, sin: Tensor, out: Tensor) -> Tensor:
    """[x, last] times cos and times sin, side by side."""
    dim = x.shape[-1]
    torch.mul(x, cos, out=out[..., :dim])
    torch.mul(x, sin, out=out[..., dim + 1 : -1])
    out[..., dim : dim + 1] = last * cos
    out[..., -1:] = last * sin
    return out


def forward_chunks(
    q: Tensor, k: Tensor, v: Tensor, tables: Tables, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v: [heads, seq, dim] (rows x heads in one). The output; where a backward will want
    them (``keep``), the denominators, and the states before each chunk."""
    heads, length, dim = q.shape
    chunk = chunk_of(length)
    chunks = length // chunk
    out = torch.empty_like(v)
    denominators = q.new_empty(heads, length, 1)
    states = q.new_empty(chunks if keep else 1, heads, dim, 2 * dim + 2)
    fq, fk, sums = (q.new_empty(heads, chunk, dim) for _ in range(3))
    phases, read = (q.new_empty(heads, chunk, 2 * dim + 2) for _ in range(2))
    scores = q.new_empty(heads, chunk, chunk)
    denominator = q.new_empty(heads, chunk, 1)
    for c in range(chunks):
        rows = slice(c * chunk, (c + 1) * chunk)
        cos, sin = tables.cos[rows], tables.sin[rows]
        torch.clamp_min(q[:, rows], 0, out=fq)
        torch.clamp_min(k[:, rows], 0, out=fk)
        torch.bmm(fq, fk.mT, out=scores).mul_(tables.triangle)
        torch.sum(scores, -1, keepdim=True, out=denominator)
        before = states[c if keep else 0]
        if c > 0:
            torch.bmm(fq, before, out=read)
            torch.mul(read[..., :dim], cos, out=sums)
            sums.addcmul_(read[..., dim + 1 : -1], sin).baddbmm_(scores, v[:, rows])
            denominator.addcmul_(read[..., dim : dim + 1], cos).addcmul_(read[..., -1:], sin)
        else:
            torch.bmm(scores, v[:, rows], out=sums)
        if keep:
            denominators[:, rows] = denominator
        torch.div(sums, denominator.clamp_min_(EPS), out=out[:, rows])
        if c + 1 < chunks:
            two_phases(v[:, rows], 1.0, cos, sin, phases)
            if c == 0:
                torch.bmm(fk.mT, phases, out=states[1 if keep else 0])
            elif keep:
                torch.baddbmm(before, fk.mT, phases, out=states[c + 1])
            else:
                before.baddbmm_(fk.mT, phases)
    return out, denominators, states


class ChunkedCosformer(torch.autograd.Function):
    """q, k, v: [heads, seq, dim]."""

    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, tables: Tables) -> Tensor:
        out, denominators, states = forward_chunks(q, k, v, tables, keep=True)
        ctx.save_for_backward(q, k, v, out, denominators, states)
        ctx.tables = tables
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, d_out: Tensor) -> tuple[Tensor | None, ...]:
        """With g = d_out / denominator, r = -g . out and dw_ij = g_i . v_j + r_i:
        dq_i = sum c_ij dw_ij k_j, dk_j = sum c_ij dw_ij q_i, dv_j = sum w_ij g_i."""
        q, k, v, out, denominators, states = ctx.saved_tensors
        tables = ctx.tables
        heads, length, dim = q.shape
        chunk = chunk_of(length)
        chunks = length // chunk
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        fq, fk, g, sums = (q.new_empty(heads, chunk, dim) for _ in range(4))
        v_phases, g_phases, read = (q.new_empty(heads, chunk, 2 * dim + 2) for _ in range(3))
        scores, d_scores = (q.new_empty(heads, chunk, chunk) for _ in range(2))
        after = q.new_empty(heads, dim, 2 * dim + 2)  # sum relu(q_i) (cos_i [g_i, r_i], sin_i ..)
        threshold = torch.ops.aten.threshold_backward.grad_input
        for c in reversed(range(chunks)):
            rows = slice(c * chunk, (c + 1) * chunk)
            cos, sin = tables.cos[rows], tables.sin[rows]
            torch.clamp_min(q[:, rows], 0, out=fq)
            torch.clamp_min(k[:, rows], 0, out=fk)
            denominator = denominators[:, rows]
            torch.div(d_out[:, rows], denominator.clamp_min(EPS), out=g)
            r = (g * out[:, rows]).sum(-1, keepdim=True).neg_()
            r.masked_fill_(denominator < EPS, 0.0)
            torch.bmm(fq, fk.mT, out=scores).mul_(tables.triangle)
            torch.baddbmm(r, g, v[:, rows].mT, out=d_scores).mul_(tables.triangle)
            if chunks > 1:
                two_phases(v[:, rows], 1.0, cos, sin, v_phases)
                two_phases(g, r, cos, sin, g_phases)
            is_last = c + 1 == chunks

            torch.bmm(d_scores, fk, out=sums)
            if c > 0:
                sums.baddbmm_(g_phases, states[c].mT)
            threshold(sums, q[:, rows], 0, grad_input=dq[:, rows])

            torch.bmm(d_scores.mT, fq, out=sums)
            if not is_last:
                sums.baddbmm_(v_phases, after.mT)
            threshold(sums, k[:, rows], 0, grad_input=dk[:, rows])

            if is_last:
                dv[:, rows] = torch.bmm(scores.mT, g, out=sums)
            else:
                torch.bmm(fk, after, out=read)
                torch.mul(read[..., :dim], cos, out=sums)
                sums.addcmul_(read[..., dim + 1 : -1], sin)
                dv[:, rows] = sums.baddbmm_(scores.mT, g)
            if is_last and c > 0:
                torch.bmm(fq.mT, g_phases, out=after)
            elif c > 0:
                after.baddbmm_(fq.mT, g_phases)
        return dq, dk, dv, None


def chunked(q: Tensor, k: Tensor, v: Tensor, tables: Tables) -> Tensor:
    """[batch, heads, seq, dim]; the length is a multiple of CHUNK, or at most WHOLE."""
    flat = (x.flatten(0, 1) for x in (q, k, v))
    if torch.is_grad_enabled() and q.requires_grad:
        return ChunkedCosformer.apply(*flat, tables).view_as(v)
    return forward_chunks(*flat, tables, keep=False)[0].view_as(v)


def comparisons(options: Options) -> Iterator[Comparison]:
    for dim in options.head_dims:
        for length in options.lengths:
            if length % chunk_of(length) != 0:
                continue
            shape = (length, options.heads, dim)
            tables = Tables(length, length)
            yield Comparison(
                "cosformer causal",
                "best chunked torch",
                *shape,
                lambda shape=shape, tables=tables: qkv_sides(
                    cosformer_causal(shape[0]),
                    lambda q, k, v: chunked(q, k, v, tables),
                    *shape,
                ),
                required=_REQUIRED if options.heads == 16 and dim == 64 else {},
            )
