"""``python -m cosformer.info``: what is installed, what it uses, and what is wrong with it.

    python -m cosformer.info            # for people
    python -m cosformer.info --json     # for programs: the same as one object

Exit status 0, or 1 where the package cannot be used; the report says why and what helps.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from cosformer import _library

# Where the operators run: of every function of the package.
_WHERE = {
    "cpu": "kernels: float32, float64, bfloat16, float16",
    "other devices": "portable: the same results in tensor operations, slower",
    "second derivatives": "portable on every device",
}


def report() -> dict[str, Any]:
    """What :func:`main` prints, as a dict: its keys are those of ``--json``.

    ``error`` is None, or the message with what helps; what is then unknown is None.

    Example:
        >>> import cosformer.info
        >>> cosformer.info.report()["error"] is None
        True
    """
    found: dict[str, Any] = dict.fromkeys(
        ("version", "library", "torch_built_for", "torch", "isa", "isa_forced", "threads", "error")
    )
    found["python"] = sys.executable
    found["isa_forced"] = os.environ.get("COSFORMER_ISA") or None
    try:
        import torch

        found["torch"] = str(torch.__version__)
        found["threads"] = torch.get_num_threads()
    except ImportError:  # _library.load says it better
        pass
    try:
        library = _library.find_library()
        found["library"] = str(library)
        record = _library.read_record(library)
        found["version"], found["torch_built_for"] = record.get("version"), record["torch"]
    except ImportError:
        pass
    try:
        _library.load()
    except ImportError as error:
        found["error"] = str(error)
        return found | {"runs": None}
    found["isa"] = torch.ops.cosformer.isa()
    if found["isa_forced"] not in (None, "amx", "avx512", "avx2", "generic"):
        found["error"] = (
            f"cosformer: COSFORMER_ISA is {found['isa_forced']!r}, expected amx, "
            f"avx512, avx2 or generic: every call on the CPU will be refused. Unset it with "
            f"`unset COSFORMER_ISA`"
        )
    return found | {"runs": _WHERE}


def lines(found: dict[str, Any]) -> list[str]:
    """A report as plain lines."""
    forced = f" (forced by COSFORMER_ISA={found['isa_forced']})" if found["isa_forced"] else ""
    said = {
        "cosformer": found["version"],
        "library": found["library"],
        "torch": f"{found['torch']}, built for {found['torch_built_for']}",
        "instruction set": found["isa"] and found["isa"] + forced,
        "threads": found["threads"] and f"{found['threads']} (torch.set_num_threads)",
        "python": found["python"],
    }
    out = [f"{name + ':':17}{value or 'unknown'}" for name, value in said.items()]
    out += [f"{'on ' + name + ':':24}{how}" for name, how in (found["runs"] or {}).items()]
    return out + ([f"error: {found['error']}"] if found["error"] else [])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m cosformer.info", description="What this installation is and uses."
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    as_json = parser.parse_args(arguments).json
    found = report()
    print(json.dumps(found, indent=2) if as_json else "\n".join(lines(found)))
    return 1 if found["error"] else 0


def exit_where_asked_for() -> None:
    """``python -m cosformer.info`` where the package does not import: reports and exits.

    Python imports a package before its modules, so that without this the report would be the one
    thing that a broken installation cannot print.
    """
    asked = sys.orig_argv[1:]
    if "-m" in asked and asked[asked.index("-m") + 1 :][:1] == ["cosformer.info"]:
        sys.exit(main(asked[asked.index("-m") + 2 :]))


if __name__ == "__main__":
    sys.exit(main())
