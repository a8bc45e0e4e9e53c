#!/usr/bin/env python3
"""Trains the recipe runs one after another and holds each to its band.

    configs/shakespeare/reproduce.py tinyshakespeare.txt [NAME...] [--record]

A run passes when its loss on the whole validation part, in nats a character at the last
step, is at most TOLERANCE above REFERENCE: what a plain PyTorch program of the same
recipe reached with one seed (between seeds it spreads by about 0.01), or, where there is no
such program (OWN), what this project reached first. --record writes the run's curve, thinned,
to curves/NAME.jsonl. A run that is there already is gone on with.
"""

import argparse
import json
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TOLERANCE = 0.03
REFERENCE = {
    "softmax-64": 1.922,
    "softmax-rope-64": 1.783,
    "cosformer-64": 2.010,
    "linear-64": 1.963,
    "relu-64": 1.998,
    "softmax-256": 1.805,
    "softmax-rope-256": 1.602,
    "cosformer-256": 2.059,
    "linear-256": 1.938,
}
OWN = {
    "relu-256": 2.043,
    "cosformer-norm-256": 2.158,
    "performer-256": 1.776,
    "longformer-256": 1.754,
    "bigbird-256": 1.733,
    "softmax-t5-256": 1.768,
}
REFERENCE |= OWN
THIN = 50  # steps between the training lines of a recorded curve
VOLATILE = ("seconds", "tokens_per_second")  # they say more of the machine than of the run


def thinned(lines):
    """The lines of a curve: the start, every evaluation, every THIN-th training step."""
    for line in lines:
        if line["type"] != "train" or line["step"] % THIN == 0:
            yield {key: value for key, value in line.items() if key not in VOLATILE}


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def final_loss(lines):
    return [line["loss"] for line in lines if line["type"] == "eval"][-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", help="the text file")
    parser.add_argument("names", nargs="*", default=[], help="runs to make; none = all")
    parser.add_argument("--program", default=ROOT / "build" / "release" / "cli" / "cosformer")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "runs" / "shakespeare")
    parser.add_argument("--record", action="store_true", help="write curves/NAME.jsonl")
    options = parser.parse_args()
    unknown = set(options.names) - set(REFERENCE)
    if unknown:
        parser.error(
            f"unknown {', '.join(sorted(unknown))}, expected some of {', '.join(REFERENCE)}"
        )

    failed = 0
    for name in options.names or REFERENCE:
        run = options.out / name
        command = [
            options.program,
            "train",
            HERE / f"{name}.toml",
            "--out",
            run,
            "--data",
            options.data,
        ]
        if (run / "config.toml").exists():
            command.append("--resume")
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = metrics(run)
        if options.record:
            (HERE / "curves").mkdir(exist_ok=True)
            with open(HERE / "curves" / f"{name}.jsonl", "w") as file:
                file.writelines(json.dumps(line) + "\n" for line in thinned(lines))
        loss, bound = final_loss(lines), REFERENCE[name] + TOLERANCE
        failed += loss > bound
        verdict = "ok" if loss <= bound else "ABOVE ITS BAND"
        print(f"{name:18} {loss:.4f}  reference {REFERENCE[name]:.3f}  {verdict}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
