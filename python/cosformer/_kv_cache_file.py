"""A KV cache on disk: one safetensors file."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from cosformer import _tensor_file

_FORMAT = {"format": "cosformer.kv_cache", "format_version": "1"}
_INTS = ("size", "kept_last", "kept_first", "max_start")
_TENSORS = ("keys", "values", "start", "position")
_OPTIONAL = ("key_mask", "dropped", "first_keys", "first_values")


def save(path: str | os.PathLike[str], fields: dict[str, Any]) -> None:
    """fields: those of a KvCache."""
    size = fields["size"]
    tensors = {
        name: tensor[:, :size] if name in ("keys", "values", "key_mask") else tensor
        for name, tensor in fields.items()
        if isinstance(tensor, Tensor)
    }
    metadata = {name: str(fields[name]) for name in (*_INTS, "is_ring")}
    _tensor_file.write(path, tensors, {**_FORMAT, **metadata})


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What ``save`` wrote, fully checked; a file that is anything else is a RuntimeError."""
    where = "KvCache.load"
    tensors, metadata = _tensor_file.read(path, where)

    def check(holds: bool, text: str) -> None:
        if not holds:
            raise RuntimeError(f"{where}: {os.fspath(path)}: {text}")

    found = {name: metadata.get(name) for name in _FORMAT}
    check(found == _FORMAT, f"format is {found}, expected {_FORMAT} (a KvCache)")
    expected = {*_INTS, "is_ring", *_FORMAT}
    check(set(metadata) == expected, f"metadata is {sorted(metadata)}, expected {sorted(expected)}")
    names, required = set(tensors), set(_TENSORS)
    check(
        required <= names <= required | set(_OPTIONAL),
        f"tensors are {sorted(names)}, expected {sorted(required)} and some of {_OPTIONAL}",
    )
    fields: dict[str, Any] = dict(tensors)
    for name in _INTS:
        text = metadata[name]
        check(text.isdecimal() and len(text) < 19, f"{name} is {text!r}, expected a number")
        fields[name] = int(text)
    ring = metadata["is_ring"]
    check(ring in ("True", "False"), f"is_ring is {ring!r}, expected True or False")
    fields["is_ring"] = ring == "True"
    _check_tensors(fields, check)
    return fields


def _check_tensors(fields: dict[str, Any], check: Any) -> None:
    keys, values, size = fields["keys"], fields["values"], fields["size"]
    check(
        keys.dim() == 4 and values.dim() == 4 and keys.shape[:3] == values.shape[:3],
        f"keys are {list(keys.shape)}, values {list(values.shape)}, expected [batch, slots, "
        f"kv_heads, dim]",
    )
    check(keys.is_floating_point() and keys.dtype == values.dtype, f"keys are {keys.dtype}")
    check(keys.shape[1] == size, f"size is {size}, keys have {keys.shape[1]} slots")
    batch = keys.shape[0]

    def check_one(name: str, shape: list[int], dtype: torch.dtype) -> None:
        x = fields.get(name)
        check(
            x is None or (list(x.shape) == shape and x.dtype == dtype),
            f"{name} is {None if x is None else (x.dtype, list(x.shape))}, expected "
            f"{(dtype, shape)}",
        )

    for name in ("start", "position", "dropped"):
        check_one(name, [batch], torch.int64)
    check_one("key_mask", [batch, size], torch.bool)
    last, first = fields["kept_last"], fields["kept_first"]
    check(last > 0 or first == 0, f"kept_first is {first} with kept_last {last}")
    ring_is_right = first == 0 and size == last > 0 and fields.get("dropped") is None
    check(not fields["is_ring"] or ring_is_right, f"a ring of {size} slots keeps {last}")
    seen = fields["position"] - fields["start"]
    check(bool((seen >= 0).all()), "a row's position lies before its start")
    gone = fields.get("dropped")
    within = seen if gone is None else seen - gone
    check(
        fields["is_ring"] or bool(((within >= 0) & (within <= size)).all()),
        f"a row has more tokens than {size} slots",
    )
    firsts = [fields.get(name) for name in ("first_keys", "first_values")]
    check((firsts[0] is None) == (firsts[1] is None), "first_keys and first_values go together")
    if firsts[0] is not None:
        for name, like in zip(("first_keys", "first_values"), (keys, values), strict=True):
            count = firsts[0].shape[1] if firsts[0].dim() == 4 else -1
            check(count <= first, f"first_keys holds {count} tokens, kept_first is {first}")
            check_one(name, [batch, count, *like.shape[2:]], like.dtype)
