"""Ours against what else computes the same on a CPU, measured in the same process.

    PYTHONPATH=python build/venv/bin/python3 -m benchmarks.peers --help

One peer a file: it names itself (``NAME``), how pip installs what it needs (``PIP``, None for
torch alone), and yields comparisons; an ImportError from it means that it is not installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from benchmarks.peers.measure import Comparison


@dataclass(frozen=True)
class Options:
    """What the command line leaves to the peers."""

    lengths: tuple[int, ...]
    head_dims: tuple[int, ...]
    heads: int
    public_cosformer: Path | None = None


def peers() -> dict[str, ModuleType]:
    """By name, in the order of the table."""
    from benchmarks.peers import (
        fast_transformers,
        flex_attention,
        linformer,
        local_attention,
        performer_pytorch,
        public_cosformer,
        torch_chunked,
        torch_compile,
        torch_eager,
        torch_sdpa,
        transformers,
    )

    modules = (
        torch_sdpa,
        torch_eager,
        torch_chunked,
        torch_compile,
        flex_attention,
        fast_transformers,
        transformers,
        performer_pytorch,
        linformer,
        local_attention,
        public_cosformer,
    )
    return {module.NAME: module for module in modules}


def comparisons(name: str, options: Options) -> Iterator[Comparison]:
    """Of one peer."""
    return peers()[name].comparisons(options)
