"""Tensors and text in one safetensors file: what a state needs of the format, nothing beyond."""

from __future__ import annotations

import ctypes
import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cosformer._files import write_atomically

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MOST_HEADER = 2**20


def write(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """The file appears under its name whole or not at all; OSError where it cannot."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    parts, offset = [], 0
    for name, tensor in tensors.items():
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + data.numel()],
        }
        parts.append(data)
        offset += data.numel()
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def fill(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for data in parts:
                file.write(ctypes.string_at(data.data_ptr(), data.numel()))

    write_atomically(Path(path), fill)


def read(path: str | os.PathLike[str], where: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata; a file that is anything else is a RuntimeError that names it."""

    def bad(text: str) -> RuntimeError:
        return RuntimeError(f"{where}: {os.fspath(path)} {text}")

    content = bytearray(Path(path).read_bytes())
    if len(content) < 8:
        raise bad(f"has {len(content)} bytes: no safetensors file")
    (length,) = struct.unpack_from("<Q", content)
    if length > min(_MOST_HEADER, len(content) - 8):
        raise bad(f"announces a header of {length} bytes, has {len(content) - 8} left")
    try:
        header = json.loads(content[8 : 8 + length], object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise bad(f"has a header that is no JSON object: {error}") from error
    metadata = header.pop("__metadata__", None) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(x, str) for x in metadata.values()):
        raise bad("has a header without metadata")
    data = memoryview(content)[8 + length :]
    tensors, end = {}, 0
    for name, entry in header.items():
        try:
            dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
            begin, stop = entry["data_offsets"]
            if not all(type(n) is int and n >= 0 for n in (*shape, begin, stop)):
                raise ValueError("a size or an offset is no natural number")
        except (KeyError, TypeError, ValueError) as error:
            raise bad(f"has a malformed entry of tensor {name!r}: {error!r}") from error
        size = math.prod(shape) * dtype.itemsize
        if begin != end or stop - begin != size or stop > len(data):
            raise bad(
                f"has tensor {name!r} at [{begin}, {stop}) of {len(data)} bytes, expected {size} "
                f"bytes from {end} on"
            )
        end = stop
        # A copy: of its own alignment, and writable.
        tensors[name] = (
            torch.frombuffer(data[begin:stop], dtype=torch.uint8).clone().view(dtype)
            if size > 0
            else torch.empty(0, dtype=dtype)
        ).view(shape)
    if end != len(data):
        raise bad(f"has {len(data)} bytes of data, its tensors take {end}")
    return tensors, metadata


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        raise ValueError("a key is there twice")
    return out
