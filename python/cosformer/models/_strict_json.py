"""JSON as the C++ library reads it: nothing is repaired, nothing is dropped in silence."""

from __future__ import annotations

import json
import math
from typing import Any

# Larger than any config by far; keeps what a hostile file can ask for small.
_MAX_BYTES = 16 << 20
_MAX_DEPTH = 64


def _unique(what: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{what}: has the key '{key[:80]}' twice")
        found[key] = value
    return found


def _deeper_than(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        level = [
            child
            for node in level
            if isinstance(node, (dict, list))
            for child in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            return False
    return any(isinstance(node, (dict, list)) for node in level)


def parse_json(text: str | bytes, what: str) -> Any:
    """The document, or a ValueError that begins with ``what`` ("config.json").

    Two values under one key, NaN, numbers out of range, nesting beyond 64 levels and text that
    is not UTF-8 are errors.
    """

    def real(digits: str) -> float:
        value = float(digits)
        if math.isinf(value):
            raise ValueError(f"{what}: has a number out of range: {digits[:80]}")
        return value

    def constant(name: str) -> Any:
        raise ValueError(f"{what}: is not JSON: {name} is no number of the format")

    if len(text) > _MAX_BYTES:
        raise ValueError(f"{what}: has {len(text)} bytes, expected at most {_MAX_BYTES}")
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        if not decoded.strip():
            raise ValueError(f"{what}: is empty, expected JSON")
        document = json.loads(
            decoded,
            object_pairs_hook=lambda pairs: _unique(what, pairs),
            parse_float=real,
            parse_constant=constant,
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"{what}: is not JSON: byte {error.start} is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{what}: is not JSON: stopped at character {error.pos}") from error
    except RecursionError as error:
        raise ValueError(f"{what}: nests deeper than {_MAX_DEPTH} levels") from error
    if _deeper_than(document, _MAX_DEPTH):
        raise ValueError(f"{what}: nests deeper than {_MAX_DEPTH} levels")
    return document
