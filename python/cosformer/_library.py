"""Finds and loads the operator library, or says in one message what to do."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

_NAME = "libcosformer_torch.so"
_PACKAGE = Path(__file__).resolve().parent
_TREE = _PACKAGE.parent.parent


def _build_folders() -> list[Path]:
    """Where a source tree's builds put the library: release first, then the newest."""
    found = list(_TREE.glob(f"build/*/python/{_NAME}"))
    return sorted(found, key=lambda p: (p.parts[-3] != "release", -p.stat().st_mtime))


def _in_source_tree() -> bool:
    return (_TREE / "CMakeLists.txt").is_file()


def _build_again() -> str:
    """The command that makes the library, here or where pip installed it from."""
    if _in_source_tree():
        return "build it in the source tree with `make build`"
    return (
        "install it again from its source folder with "
        "`pip install --no-build-isolation --force-reinstall --no-deps .`"
    )


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
    looked = [str(_PACKAGE)] + ([str(_TREE / "build/*/python")] if _in_source_tree() else [])
    raise ImportError(
        f"cosformer: its operator library {_NAME} is missing (looked in {' and '.join(looked)}): "
        f"{_build_again()}, or set COSFORMER_LIBRARY to its path"
    )


def read_record(library: Path) -> dict[str, str]:
    """What lies beside a library: its version and the torch that it was built for."""
    record = library.with_suffix(".json")
    try:
        found = json.loads(record.read_text())
        if not isinstance(found["torch"], str):
            raise TypeError(f"torch is {found['torch']!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ImportError(
            f"cosformer: {record}, which records the torch that {library} was built for, "
            f"cannot be read ({error}): {_build_again()}"
        ) from error
    return found


def _minor(version: str) -> str:
    """ "2.13.0+cpu" -> "2.13"."""
    return ".".join(version.split("+")[0].split(".")[:2])


def check_torch_version(library: Path, found: str) -> None:
    """Compares with the record beside the library, before loading.

    The C++ interface of torch changes from one minor release to the next, and within one it stays.
    """
    expected = read_record(library)["torch"]
    if _minor(found) != _minor(expected):
        raise ImportError(
            f"cosformer: {library} was built for torch {expected}, this is torch {found}. "
            f'Install that one with `pip install "torch=={_minor(expected)}.*"`, or against this '
            f"one {_build_again()}"
        )


def load() -> Path:
    """Loads the operators into torch.ops.cosformer; ImportError says what helps."""
    try:
        import torch
    except ModuleNotFoundError as error:
        wanted = "torch"
        try:
            wanted = f'"torch=={_minor(read_record(find_library())["torch"])}.*"'
        except ImportError:
            pass  # nothing is built yet: any torch that it will be built for
        raise ImportError(
            f"cosformer needs PyTorch, which {sys.executable} does not have: `pip install {wanted}`"
        ) from error
    library = find_library()
    check_torch_version(library, str(torch.__version__))
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise ImportError(
            f"cosformer: {library} does not load ({error}): {_build_again()}"
        ) from error
    return library
