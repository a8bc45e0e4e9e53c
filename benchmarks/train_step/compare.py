#!/usr/bin/env python3
"""A training step of our program's model against a plain PyTorch module of the same model.

Alternates short processes of both, so that a change of the machine's speed meets both, and
prints a table of median milliseconds a step and the ratios.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def measure(command):
    return json.loads(subprocess.check_output(command, text=True))["milliseconds"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "release")
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 256, 1024, 4096, 16384])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    ours = args.build / "benchmarks" / "bench_train_step"
    peer = HERE / "plain_lm.py"
    print(
        "| context | batch | plain softmax, ms | our softmax, ms | our cosFormer, ms | "
        "plain / our softmax | plain softmax / our cosFormer |"
    )
    print("|---|---|---|---|---|---|---|")
    for context in args.contexts:
        batch = 12 if context <= 1024 else 2 if context <= 4096 else 1
        # The plain model takes most of a minute for a step of 16k tokens.
        steps, warmup = (max(3, min(30, 20000 // context)), 2) if context <= 4096 else (1, 1)
        common = [
            f"--context={context}",
            f"--batch={batch}",
            f"--threads={args.threads}",
            f"--steps={steps}",
            f"--warmup={warmup}",
        ]
        times = {"plain": [], "softmax": [], "cosformer": []}
        for _ in range(args.rounds):
            times["plain"] += measure([sys.executable, peer, "--kind=softmax", *common])
            for kind in ("softmax", "cosformer"):
                times[kind] += measure([ours, f"--kind={kind}", *common])
        plain, softmax, cosformer = (statistics.median(times[k]) for k in times)
        print(
            f"| {context} | {batch} | {plain:.1f} | {softmax:.1f} | {cosformer:.1f} | "
            f"{plain / softmax:.2f} | {plain / cosformer:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
