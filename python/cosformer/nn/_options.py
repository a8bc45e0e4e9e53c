"""The options that all kinds share, and which kinds read the others."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict

if TYPE_CHECKING:
    import torch


class SharedOptions(TypedDict, total=False):
    """Keyword options of every attention layer; see :class:`cosformer.nn.Attention`."""

    kdim: int | None
    vdim: int | None
    head_dim: int | None
    value_dim: int | None
    num_kv_heads: int | None
    is_causal: bool
    qkv_bias: bool
    out_bias: bool
    out_proj: bool
    rotary_base: float | None
    rotary_dim: int | None
    rotary_interleaved: bool
    device: torch.device | str | None
    dtype: torch.dtype | None


_FORMS_WEIGHTS = "kinds that form each weight (softmax, linformer, longformer, bigbird)"

# An option that not every kind has: whose it is, and the values that ask for nothing.
_OWNERS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "feature_map": ("the linear kinds", (None,)),
    "reweight_len": ("the linear kinds", (None,)),
    "normalizer": ("the linear kinds", ("sum",)),
    "eps": ("the linear kinds", (1e-6,)),
    "scale": (_FORMS_WEIGHTS, (None,)),
    "dropout": (_FORMS_WEIGHTS, (0.0,)),
    "window": ('kind "softmax" and "longformer"', (None,)),
    "dilation": ('kind "softmax" and "longformer"', (1,)),
    "global_tokens": ('kind "longformer"', (0,)),
    "num_features": ('kind "performer"', (None,)),
    "orthogonal": ('kind "performer"', (True,)),
    "trainable_projection": ('kind "performer"', (False,)),
    "projection_seed": ('kind "performer"', (0,)),
    "max_len": ('kind "linformer"', (None,)),
    "projected_len": ('kind "linformer"', (None,)),
    "share_kv": ('kind "linformer"', (False,)),
    "one_kv_head": ('kind "linformer"', (False,)),
    "block_size": ('kind "bigbird"', (64,)),
    "num_random_blocks": ('kind "bigbird"', (3,)),
    "window_blocks": ('kind "bigbird"', (3,)),
    "first_global_blocks": ('kind "bigbird"', (1,)),
    "last_global_blocks": ('kind "bigbird"', (1,)),
    "block_seed": ('kind "bigbird"', (0,)),
}


def refuse_options(kind: str, options: dict[str, Any]) -> None:
    """Options that a kind does not read: those of other kinds at their defaults pass."""
    for name, value in options.items():
        if name not in _OWNERS:
            known = [*SharedOptions.__annotations__, *_OWNERS]
            near = difflib.get_close_matches(name, known, n=1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"attention: unknown option {name!r}{hint}")
        owner, defaults = _OWNERS[name]
        if value not in defaults:
            raise ValueError(
                f'attention: {name} belongs to {owner}, found with kind "{kind}"'
                + (": a linear kind never forms the weights to drop" if name == "dropout" else "")
            )


def at_least(least: int, value: int, name: str) -> None:
    if value < least:
        wanted = "a positive number" if least == 1 else "0 or more"
        raise ValueError(f"attention: {name} is {value}, expected {wanted}")


def check_dropout(dropout: float) -> None:
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"attention: dropout is {dropout}, expected 0 or more, below 1")


def check_window(window: int | None, dilation: int) -> None:
    at_least(1, dilation, "dilation")
    if window is not None:
        at_least(1, window, "window")
    elif dilation != 1:
        raise ValueError(f"attention: dilation is {dilation} without a window")


def refuse(kind: str, given: bool, what: str, why: str = "") -> None:
    """What a call asks for and the kind lacks."""
    if given:
        raise ValueError(f'attention: kind "{kind}" {what}{why}')


def never(kind: str) -> NoReturn:
    raise NotImplementedError(f"attention: {kind} is a base of layers, not a kind")
