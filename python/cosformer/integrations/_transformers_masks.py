"""What a mask of transformers says, read without forming its [q_len, kv_len] matrix.

transformers describes a mask as a function of (batch, head, query, key) together with lengths and
offsets, and lets every attention implementation make of it what it needs. A linear kind needs a key
mask and positions, so that is what is read here; a function that says more is an error by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

_ATTRIBUTE = "_cosformer_visible"


@dataclass(frozen=True)
class Visible:
    """Which keys a query sees: those that are real, within causality, window and sequence."""

    is_causal: bool
    window: tuple[int, int] | None = None  #: (left, right), ends included, -1 = no bound
    q_start: int | Tensor | None = None
    kv_start: int | Tensor | None = None
    key_mask: Tensor | None = None  #: bool [batch, kv_len], None = all are real
    sequence_ids: Tensor | None = None  #: [batch, len] of packed sequences, which end at rows


def visible_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor:
    """For ``transformers.AttentionMaskInterface``: the key mask, which carries a :class:`Visible`.

    Returns:
        bool [batch, kv_offset + kv_len] from position 0 on. transformers makes masks ahead for
        compiled decoding and then makes them again: it must read this as a padding mask.

    Raises:
        ValueError: a mask that is not made of padding, causality, windows and packed sequences.
    """
    is_causal, window, sequence_ids = _read(mask_function)
    if attention_mask is None:
        shape = batch_size, kv_offset + kv_length
        carrier, key_mask = torch.ones(shape, dtype=torch.bool, device=device), None
    else:
        padded = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        carrier = padded.expand(batch_size, -1).view(batch_size, -1)  # not the caller's own object
        key_mask = carrier[:, kv_offset : kv_offset + kv_length]
        # A compiled step must not depend on what the mask holds.
        if not torch.compiler.is_compiling() and bool(key_mask.all()):
            key_mask = None
    if isinstance(q_offset, Tensor):  # a static cache's own counter, which it advances in place
        q_offset = q_offset.clone()
    visible = Visible(is_causal, window, q_offset, kv_offset, key_mask, sequence_ids)
    setattr(carrier, _ATTRIBUTE, visible)
    return carrier


def visible_of(attention_mask: Tensor | None, where: str) -> Visible | None:
    """What :func:`visible_mask` put on a mask; None for no mask."""
    if attention_mask is None:
        return None
    visible = getattr(attention_mask, _ATTRIBUTE, None)
    if visible is None:
        raise ValueError(
            f"{where}: attention_mask is {list(attention_mask.shape)} {attention_mask.dtype}, a "
            f"mask of the caller's own; expected the padding mask [batch, seq] given to the model: "
            f"no weight can be masked by itself where no matrix of weights is formed"
        )
    return visible


def _read(function: Callable) -> tuple[bool, tuple[int, int] | None, Tensor | None]:
    """(is_causal, window, sequence_ids) of a function of transformers.masking_utils."""
    if function is masking_utils.causal_mask_function:
        return True, None, None
    if function is masking_utils.bidirectional_mask_function:
        return False, None, None
    if function.__module__ == masking_utils.__name__ and function.__closure__ is not None:
        names = function.__code__.co_freevars
        held = dict(zip(names, (cell.cell_contents for cell in function.__closure__), strict=True))
        match function.__qualname__.split(".")[0]:
            case "and_masks":
                return _intersection([_read(part) for part in held["mask_functions"]])
            case "sliding_window_overlay":  # kv > q - window
                return False, (held["sliding_window"] - 1, -1), None
            case "sliding_window_bidirectional_overlay":  # |kv - q| <= window
                return False, (held["sliding_window"], held["sliding_window"]), None
            case "remap_positions_for_packed_sequence":
                # In a sequence positions are consecutive: differences stay as they are.
                return _read(held["mask_function"])
            case "packed_sequence_mask_function":
                return False, None, held["packed_sequence_mask"]
    name = getattr(function, "__qualname__", repr(function))
    raise ValueError(
        f"cosformer: the model masks its attention by {name}, expected padding, causal, sliding "
        f"window or packed sequences: use attn_implementation='sdpa' for this model"
    )


def _intersection(
    parts: list[tuple[bool, tuple[int, int] | None, Tensor | None]],
) -> tuple[bool, tuple[int, int] | None, Tensor | None]:
    windows = [window for _, window, _ in parts if window is not None]
    ids = [sequence for _, _, sequence in parts if sequence is not None]
    if len(windows) > 1 or len(ids) > 1:
        raise ValueError(
            f"cosformer: the model's mask has {len(windows)} windows and {len(ids)} packings, "
            f"expected at most one of each"
        )
    return (
        any(causal for causal, _, _ in parts),
        windows[0] if windows else None,
        ids[0] if ids else None,
    )
