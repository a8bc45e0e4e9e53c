"""Two programs for one task: that they agree, and how many times the other's time ours takes.

Both are measured in one process, in rounds that alternate which goes first; a round's ratio is of
times taken next to each other, and the figure is the median of the rounds' ratios.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

FORWARD = "forward"
BOTH = "forward + backward"

# A side runs at least this long in a round, so that the clock and one interrupt do not count.
_LEAST_SECONDS = 0.02
# A comparison takes about this long at most, in at least _FEWEST rounds.
_BUDGET_SECONDS = 12.0
_FEWEST = 3


@dataclass(frozen=True)
class Side:
    """One program: ``run(*inputs)`` gives the output; gradients go to inputs and parameters.

    Each side gets its inputs in the layout that it likes best, made before the clock starts:
    ours [batch, seq, heads, dim]; ``heads_first``: [batch, heads, seq, dim].
    """

    run: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    heads_first: bool = False
    module: nn.Module | None = None


@dataclass(frozen=True)
class Comparison:
    """A row of the table. ``build`` makes (ours, the peer) when its turn comes."""

    ours: str
    peer: str
    length: int
    heads: int
    head_dim: int
    build: Callable[[], tuple[Side, Side]]
    # The least ratio with one thread, by pass.
    required: Mapping[str, float] = field(default_factory=dict)
    passes: tuple[str, ...] = (FORWARD, BOTH)
    is_equal: bool = True  # False: the same amount of work by another pattern, outputs differ
    tolerance: float = 1e-4  # of |difference| / |ours|


@dataclass(frozen=True)
class Result:
    ours: str
    peer: str
    length: int
    heads: int
    head_dim: int
    threads: int
    of: str  # the pass
    ours_ms: float
    peer_ms: float
    ratio: float
    ratio_least: float
    ratio_most: float
    rounds: int
    required: float | None
    differs_by: float | None
    ours_mb: float | None
    peer_mb: float | None


class Disagreement(Exception):
    """The two sides do not compute the same: no time is taken."""


def keep_freed_memory() -> None:
    """Freed memory stays with the program, for both sides.

    By default glibc takes every tensor above a moving threshold (at most 32 MB) from the system
    anew, and the first touch of each of its pages is a page fault: a cost of malloc that meets the
    side with the larger tensors, and is up to a third of our kernels' own time.
    """
    if not sys.platform.startswith("linux"):
        return
    mmap_max, trim_threshold = -4, -1  # M_MMAP_MAX, M_TRIM_THRESHOLD of malloc.h
    libc = ctypes.CDLL(None)
    libc.mallopt(mmap_max, 0)
    libc.mallopt(trim_threshold, 2**31 - 1)


def _as_ours(x: Tensor, side: Side) -> Tensor:
    return x.transpose(1, 2) if side.heads_first and x.dim() == 4 else x


def _difference(ours: Tensor, peer: Tensor) -> float:
    return ((ours - peer).norm() / ours.norm()).item()


def _call(side: Side, of: str, d_out: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """The pass as a function: the output (no graph), or the gradients of the inputs first."""
    if of == FORWARD:

        def forward() -> tuple[Tensor, ...]:
            with torch.no_grad():
                return (side.run(*side.inputs),)

        return forward

    leaves = tuple(x.detach().requires_grad_() for x in side.inputs)
    parameters = () if side.module is None else tuple(side.module.parameters())
    grad = _as_ours(d_out, side).contiguous()

    def both() -> tuple[Tensor, ...]:
        wanted = leaves + parameters
        found = torch.autograd.grad(side.run(*leaves), wanted, grad, allow_unused=True)
        return found[: len(leaves)]

    return both


def _peak_megabytes(run: Callable[[], object]) -> float:
    """Allocated beyond what was there, by torch's profiler: without our kernels' own scratch
    memory, which is of a chunk's size."""
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    now = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak / 2**20


def _seconds(run: Callable[[], object], repeats: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(repeats):
        run()
    return (clock() - start) / repeats


def _measure_pass(
    comparison: Comparison,
    of: str,
    sides: tuple[Side, Side],
    d_out: Tensor,
    most_rounds: int,
    with_memory: bool,
) -> Result:
    runs = [_call(side, of, d_out) for side in sides]
    firsts = [
        tuple(_as_ours(x, side) for x in run()) for run, side in zip(runs, sides, strict=True)
    ]
    differs_by = None
    if comparison.is_equal:
        differs_by = max(_difference(a, b) for a, b in zip(*firsts, strict=True))
        if not differs_by <= comparison.tolerance:
            raise Disagreement(f"{of}: the peer's result differs from ours by {differs_by:.1e}")
    del firsts

    # One thread: the processor's time, which other programs do not lengthen; their caches do.
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    once = [_seconds(run, 1, clock) for run in runs]
    repeats = [max(1, round(_LEAST_SECONDS / max(each, 1e-6))) for each in once]
    a_round = sum(each * n for each, n in zip(once, repeats, strict=True))
    rounds = max(_FEWEST, min(most_rounds, int(_BUDGET_SECONDS / a_round)))
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            times[side].append(_seconds(runs[side], repeats[side], clock))
    ratios = [peer / ours for ours, peer in zip(*times, strict=True)]
    threads = torch.get_num_threads()
    ours_ms, peer_ms = (1e3 * statistics.median(each) for each in times)
    memory = [_peak_megabytes(run) if with_memory else None for run in runs]
    return Result(
        comparison.ours,
        comparison.peer,
        comparison.length,
        comparison.heads,
        comparison.head_dim,
        threads,
        of,
        ours_ms,
        peer_ms,
        statistics.median(ratios),
        min(ratios),
        max(ratios),
        rounds,
        comparison.required.get(of) if threads == 1 else None,
        differs_by,
        *memory,
    )


def measure(
    comparison: Comparison, *, most_rounds: int, with_memory: bool, only_required: bool
) -> list[Result]:
    """Every pass of a comparison, with torch's present number of threads."""
    torch.manual_seed(0)
    sides = comparison.build()
    with torch.no_grad():
        d_out = torch.randn_like(sides[0].run(*sides[0].inputs))
    return [
        _measure_pass(comparison, of, sides, d_out, most_rounds, with_memory)
        for of in comparison.passes
        if of in comparison.required or not only_required
    ]
