#!/usr/bin/env python3
"""Refuses an #include against the arrows of the architecture (CONTRIBUTING.md).

A folder may include its own files and those of the folders below it. Exit status 1 and
one line a finding when something points the wrong way.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

# folder -> the folders it may include from (besides itself), as the design draws them.
BASE = {"base"}
KERNELS = BASE | {"kernels"}
TEXT = BASE | {"text"}
FORMAT = TEXT | {"format"}
PLOT = BASE | {"plot"}
OPS = KERNELS | {"ops"}
NN = OPS | {"nn"}
MODELS = NN | FORMAT | {"models"}
DATA = TEXT | {"format", "data"}
RUNTIME = KERNELS | FORMAT | {"runtime"}
TRAIN = MODELS | DATA | PLOT | {"train"}
BENCH = OPS | FORMAT | PLOT | {"bench"}
ALLOWED = {
    "base": BASE,
    "kernels": KERNELS,
    "text": TEXT,
    "format": FORMAT,
    "plot": PLOT,
    "runtime": RUNTIME,
    "ops": OPS,
    "nn": NN,
    "models": MODELS,
    "data": DATA,
    "train": TRAIN,
    "bench": BENCH,
    "cli": TRAIN | BENCH | RUNTIME,
    "python": OPS,
}
# Folders that must not see torch.
TORCH_FREE = {"base", "kernels", "text", "format", "plot", "runtime"}
TORCH = re.compile(r"^(torch|ATen|c10|caffe2)/")
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]')


def folder_of(path: pathlib.Path) -> str | None:
    parts = path.relative_to(ROOT).parts
    if parts[0] == "src":
        return parts[1]
    if parts[0] in ("cli", "python"):
        return parts[0]
    if parts[:2] == ("include", "cosformer"):
        return path.stem
    return None


def target_of(include: str) -> str | None:
    """The folder that an include names, None when it is not ours."""
    parts = include.split("/")
    if parts[0] == "cosformer" and len(parts) == 2:
        return pathlib.Path(parts[1]).stem
    return parts[0] if parts[0] in ALLOWED and len(parts) > 1 else None


def main() -> int:
    findings = []
    for top in ("include", "src", "cli", "python"):
        for path in sorted((ROOT / top).rglob("*")):
            if path.suffix not in (".h", ".cc"):
                continue
            folder = folder_of(path)
            if folder not in ALLOWED:
                findings.append(f"{path.relative_to(ROOT)}: in no known folder")
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                match = INCLUDE.match(line)
                if not match:
                    continue
                where = f"{path.relative_to(ROOT)}:{number}"
                if folder in TORCH_FREE and TORCH.match(match[1]):
                    findings.append(f"{where}: {folder} is torch-free but includes {match[1]}")
                target = target_of(match[1])
                if target not in ALLOWED[folder] | {folder, None}:
                    findings.append(
                        f"{where}: {folder} may include {', '.join(sorted(ALLOWED[folder]))}, "
                        f"not {target} ({match[1]})"
                    )
    print("\n".join(findings) if findings else "check_includes: every include follows the arrows")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
