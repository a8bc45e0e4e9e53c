"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """``write`` fills a temporary neighbour, which is synced and renamed to ``path``.

    After an error the old file is as it was and no temporary is left.
    """
    writer = f"{os.getpid()}.{threading.get_ident()}"  # two threads may save to one place
    temporary = path.with_name(f".{path.name}.{writer}.tmp")
    try:
        write(temporary)
        _sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """The text as UTF-8, whole or not at all."""
    write_atomically(path, lambda temporary: temporary.write_bytes(text.encode()))
