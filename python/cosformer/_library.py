"""Finds and loads the operator library, or says in one message what to do."""

from __future__ import annotations

import json
import os
from pathlib import Path

_NAME = "libcosformer_torch.so"
_PACKAGE = Path(__file__).resolve().parent
_TREE = _PACKAGE.parent.parent


def _build_folders() -> list[Path]:
    """Where a source tree's builds put the library: release first, then the newest."""
    found = list(_TREE.glob(f"build/*/python/{_NAME}"))
    return sorted(found, key=lambda p: (p.parts[-3] != "release", -p.stat().st_mtime))


def find_library() -> Path:
    """COSFORMER_LIBRARY, else beside the package, else in the source tree's builds."""
    chosen = os.environ.get("COSFORMER_LIBRARY")
    if chosen:
        if not Path(chosen).is_file():
            raise ImportError(
                f"cosformer: COSFORMER_LIBRARY names {chosen}, which is no file: "
                f"give the path of {_NAME}, or unset it"
            )
        return Path(chosen)
    for path in (_PACKAGE / _NAME, *_build_folders()):
        if path.is_file():
            return path
    raise ImportError(
        f"cosformer: its operator library {_NAME} is not built (looked in {_PACKAGE} and "
        f"{_TREE / 'build' / '*' / 'python'}). Build it in the source tree with `make build`, "
        f"or set COSFORMER_LIBRARY to its path"
    )


def _release(version: str) -> str:
    """ "2.13.0+cpu" -> "2.13.0"."""
    return version.split("+")[0]


def check_torch_version(library: Path, found: str) -> None:
    """Compares with the record beside the library, before loading: C++ has no stable ABI here."""
    record = library.with_suffix(".json")
    try:
        expected = json.loads(record.read_text())["torch"]
        if not isinstance(expected, str):
            raise TypeError(f"torch is {expected!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ImportError(
            f"cosformer: {record}, which records the torch that {library} was built for, "
            f"cannot be read ({error}). Build again with `make build`"
        ) from error
    if _release(found) != _release(expected):
        raise ImportError(
            f"cosformer: {library} was built for torch {expected}, this is torch {found}. "
            f"Install that one with `pip install torch=={_release(expected)}`, or build again "
            f"against this one with `make clean build`"
        )


def load() -> Path:
    """Loads the operators into torch.ops.cosformer; ImportError says what helps."""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise ImportError(
            "cosformer needs PyTorch, which is not installed: `pip install torch`"
        ) from error
    library = find_library()
    check_torch_version(library, str(torch.__version__))
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise ImportError(
            f"cosformer: {library} does not load ({error}). Build again with `make build`"
        ) from error
    return library
