"""The module of cosFormer's authors (OpenNLPLab/cosFormer), replaced by ours, weights and all.

It is no package: ``--public-cosformer`` names its file. Ours takes M = the length, which is what
theirs does in each call. ``--memory`` shows what its forward over all pairs keeps.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import cosformer
import torch
from torch import Tensor

from benchmarks.peers import Options
from benchmarks.peers.measure import Comparison, Side

NAME = "public-cosformer"
PIP = "Give its file: --public-cosformer PATH/cosformer.py (OpenNLPLab/cosFormer)"

HEADS, HEAD_DIM = 4, 64


def _public_class(path: Path) -> type[torch.nn.Module]:
    spec = importlib.util.spec_from_file_location("public_cosformer", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.CosformerAttention


def _sides(path: Path, length: int, is_causal: bool) -> tuple[Side, Side]:
    width = HEADS * HEAD_DIM
    theirs = _public_class(path)(width, HEADS, causal=is_causal)
    ours = cosformer.nn.CosformerAttention(width, HEADS, is_causal=is_causal, reweight_len=length)
    ours.load_state_dict(theirs.state_dict())

    def peer(x: Tensor) -> Tensor:
        return theirs(x.transpose(0, 1)).transpose(0, 1)  # [seq, batch, embed], a view

    x = torch.randn(1, length, width)
    return Side(ours, (x,), module=ours), Side(peer, (x,), module=theirs)


def comparisons(options: Options) -> Iterator[Comparison]:
    path = options.public_cosformer
    if path is None:
        raise ImportError("no file given")
    for is_causal in (False, True):
        for length in options.lengths:
            yield Comparison(
                f"cosformer layer, {'causal' if is_causal else 'non-causal'}",
                "the authors' module",
                length,
                HEADS,
                HEAD_DIM,
                lambda length=length, is_causal=is_causal: _sides(path, length, is_causal),
            )
