"""Causal cosFormer under torch.compile: the quadratic form whole, the chunked program by its steps.

A whole chunked loop would be unrolled, 64 chunks at 4,096 tokens, and take minutes to compile; one
step of it is compiled once for all lengths, and the loop over chunks stays in Python. The first
time on a machine the C++ compiler takes a minute or more; torch keeps what it made on disk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from benchmarks.peers import Options
from benchmarks.peers.inputs import cosformer_causal, qkv_sides
from benchmarks.peers.measure import BOTH, FORWARD, Comparison
from benchmarks.peers.torch_chunked import EPS, Tables, chunk_of
from benchmarks.peers.torch_eager import quadratic

NAME = "compile"
PIP = None

_LONGEST_QUADRATIC = 1024
_REQUIRED = {FORWARD: 6.0, BOTH: 5.0}


def _phases(x: Tensor, last: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat((x * cos, last * cos, x * sin, last * sin), -1)


def _forward_step(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, triangle: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A chunk's output and denominators, and the state after it; see torch_chunked."""
    wide = v.shape[-1] + 1
    fq, fk = q.relu(), k.relu()
    scores = torch.bmm(fq, fk.mT) * triangle
    read = torch.bmm(fq, state)
    sums = read[..., :wide] * cos + read[..., wide:] * sin
    values = torch.bmm(scores, v) + sums[..., :-1]
    denominator = scores.sum(-1, keepdim=True) + sums[..., -1:]
    phases = _phases(v, torch.ones_like(v[..., :1]), cos, sin)
    out = values / denominator.clamp_min(EPS)
    return out, denominator, torch.baddbmm(state, fk.mT, phases)


def _backward_step(
    d_out: Tensor,
    out: Tensor,
    denominator: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    triangle: Tensor,
    state: Tensor,
    after: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = v.shape[-1] + 1
    fq, fk = q.relu(), k.relu()
    g = d_out / denominator.clamp_min(EPS)
    r = -(g * out).sum(-1, keepdim=True) * (denominator >= EPS)
    scores = torch.bmm(fq, fk.mT) * triangle
    d_scores = (torch.bmm(g, v.mT) + r) * triangle
    v_phases = _phases(v, torch.ones_like(r), cos, sin)
    g_phases = _phases(g, r, cos, sin)
    dq = (torch.bmm(d_scores, fk) + torch.bmm(g_phases, state.mT)) * (q > 0)
    dk = (torch.bmm(d_scores.mT, fq) + torch.bmm(v_phases, after.mT)) * (k > 0)
    read = torch.bmm(fk, after)
    dv = torch.bmm(scores.mT, g) + read[..., : wide - 1] * cos + read[..., wide:-1] * sin
    return dq, dk, dv, torch.baddbmm(after, fq.mT, g_phases)


# Fixed shapes: those of a chunk are the same at every length.
@functools.cache
def _compiled(step: Callable[..., object]) -> Callable[..., object]:
    return torch.compile(step, dynamic=False)


class CompiledCosformer(torch.autograd.Function):
    """q, k, v: [heads, seq, dim]."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, tables: Tables, keep: bool
    ) -> Tensor:
        chunk = tables.triangle.shape[0]
        step = _compiled(_forward_step)
        state = q.new_zeros(q.shape[0], q.shape[2], 2 * q.shape[2] + 2)
        states, outs, denominators = [], [], []
        for start in range(0, q.shape[1], chunk):
            rows = slice(start, start + chunk)
            states.append(state)
            out, denominator, state = step(
                *(x[:, rows] for x in (q, k, v)),
                tables.cos[rows],
                tables.sin[rows],
                tables.triangle,
                state,
            )
            outs.append(out)
            denominators.append(denominator)
        out = torch.cat(outs, 1)
        if keep:
            ctx.save_for_backward(q, k, v, out, torch.cat(denominators, 1), torch.stack(states))
            ctx.tables = tables
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, denominators, states = ctx.saved_tensors
        tables = ctx.tables
        chunk = tables.triangle.shape[0]
        step = _compiled(_backward_step)
        after = torch.zeros_like(states[0])
        found = []
        for c in reversed(range(q.shape[1] // chunk)):
            rows = slice(c * chunk, (c + 1) * chunk)
            *gradients, after = step(
                *(x[:, rows] for x in (d_out, out, denominators, q, k, v)),
                tables.cos[rows],
                tables.sin[rows],
                tables.triangle,
                states[c],
                after,
            )
            found.append(gradients)
        dq, dk, dv = (torch.cat(each[::-1], 1) for each in zip(*found, strict=True))
        return dq, dk, dv, None, None


def chunked(q: Tensor, k: Tensor, v: Tensor, tables: Tables) -> Tensor:
    """[batch, heads, seq, dim]; lengths as in torch_chunked."""
    keep = torch.is_grad_enabled() and q.requires_grad
    flat = (x.flatten(0, 1) for x in (q, k, v))
    return CompiledCosformer.apply(*flat, tables, keep).view_as(v)


def comparisons(options: Options) -> Iterator[Comparison]:
    for dim in options.head_dims:
        for length in options.lengths:
            shape = (length, options.heads, dim)
            if length <= _LONGEST_QUADRATIC:
                yield Comparison(
                    "cosformer causal",
                    "torch.compile, quadratic",
                    *shape,
                    lambda shape=shape: qkv_sides(
                        cosformer_causal(shape[0]), _compiled(quadratic), *shape
                    ),
                )
            if length % chunk_of(length) != 0:
                continue
            tables = Tables(length, length)
            yield Comparison(
                "cosformer causal",
                "torch.compile, chunked",
                *shape,
                lambda shape=shape, tables=tables: qkv_sides(
                    cosformer_causal(shape[0]),
                    lambda q, k, v: chunked(q, k, v, tables),
                    *shape,
                ),
                required=_REQUIRED if options.heads == 16 and dim == 64 else {},
            )
