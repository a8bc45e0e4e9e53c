"""The command line; see the package, and benchmarks/README.md for how to read the table."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import cosformer
import torch

from benchmarks.peers import Options, comparisons, peers
from benchmarks.peers.measure import Comparison, Result, keep_freed_memory, measure

_COLUMNS = (
    "| ours | peer | tokens | heads x dim | threads | pass | ours, ms | peer, ms "
    "| ratio (least - most) | required | differs by |"
)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(","))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description="How many times the time of ours other programs take, on this machine.",
    )
    parser.add_argument("--peers", help=f"some of {','.join(peers())}; default: all")
    parser.add_argument("--lengths", type=_numbers, help="default 64,256,1024,4096")
    parser.add_argument("--head-dims", type=_numbers, default=(64,))
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--threads", type=_numbers, help="default 1,2")
    parser.add_argument("--only", help="of what is named so: a part of ours or of the peer")
    parser.add_argument("--rounds", type=int, default=7, help="at most, for each pass")
    parser.add_argument(
        "--quick", action="store_true", help="up to 1,024 tokens, 3 rounds, 1 thread"
    )
    parser.add_argument(
        "--required",
        action="store_true",
        help="only what the project has set a figure for: 1 thread",
    )
    parser.add_argument("--memory", action="store_true", help="peak memory of both sides too")
    parser.add_argument(
        "--system-malloc",
        action="store_true",
        help="give freed memory back as glibc does by default: page faults of large tensors count",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="the same figures, unrounded")
    parser.add_argument(
        "--public-cosformer", type=Path, metavar="FILE", help="cosformer.py of the authors"
    )
    args = parser.parse_args()
    if args.quick:
        args.rounds = 3
        args.lengths = args.lengths or (64, 256, 1024)
    args.lengths = args.lengths or (64, 256, 1024, 4096)
    args.threads = args.threads or ((1,) if args.quick or args.required else (1, 2))
    return args


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _chosen(args: argparse.Namespace) -> Iterator[Comparison]:
    options = Options(args.lengths, args.head_dims, args.heads, args.public_cosformer)
    known = peers()
    names = args.peers.split(",") if args.peers else list(known)
    for name in names:
        if name not in known:
            raise SystemExit(f"no peer is named {name!r}: there are {', '.join(known)}")
        try:
            for comparison in comparisons(name, options):
                text = f"{comparison.ours} {comparison.peer}"
                if args.required and not comparison.required:
                    continue
                if args.only is None or args.only in text:
                    yield comparison
        except ImportError as error:
            _say(f"{name}: skipped ({error}). {known[name].PIP}")


def _row(result: Result) -> str:
    required = "" if result.required is None else f"{result.required:g}"
    if result.required is not None and result.ratio < result.required:
        required += " (missed)"
    differs = "another pattern" if result.differs_by is None else f"{result.differs_by:.1e}"
    row = (
        f"| {result.ours} | {result.peer} | {result.length} | {result.heads} x {result.head_dim} "
        f"| {result.threads} | {result.of} | {result.ours_ms:.3g} | {result.peer_ms:.3g} "
        f"| {result.ratio:.2f} ({result.ratio_least:.2f} - {result.ratio_most:.2f}) "
        f"| {required} | {differs} |"
    )
    if result.ours_mb is not None:
        row += f" {result.ours_mb:.0f} | {result.peer_mb:.0f} |"
    return row


def _write(path: Path, args: argparse.Namespace, results: list[Result]) -> None:
    record = {
        "torch": torch.__version__,
        "cosformer": cosformer.__version__,
        "isa": cosformer.isa(),
        "malloc": "system" if args.system_malloc else "freed memory kept",
        "results": [dataclasses.asdict(result) for result in results],
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


def main() -> int:
    args = _arguments()
    if not args.system_malloc:
        keep_freed_memory()
    todo = list(_chosen(args))
    columns = _COLUMNS + (" ours, MB | peer, MB |" if args.memory else "")
    print(f"torch {torch.__version__}, cosformer {cosformer.__version__} ({cosformer.isa()})\n")
    print(columns, "|" + "---|" * (columns.count("|") - 1), sep="\n", flush=True)
    results: list[Result] = []
    failed = 0
    start = time.monotonic()
    for threads in args.threads:
        torch.set_num_threads(threads)
        for number, comparison in enumerate(todo, 1):
            _say(
                f"[{time.monotonic() - start:.0f} s, {threads} threads, {number} of {len(todo)}] "
                f"{comparison.ours} / {comparison.peer}, {comparison.length} tokens"
            )
            try:
                found = measure(
                    comparison,
                    most_rounds=args.rounds,
                    with_memory=args.memory,
                    only_required=args.required,
                )
            except Exception as error:  # one peer's failure must not lose the others' figures
                failed += 1
                _say(f"  failed: {type(error).__name__}: {error}")
                continue
            results += found
            print(*map(_row, found), sep="\n", flush=True)
            gc.collect()
            if args.json:
                _write(args.json, args, results)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
